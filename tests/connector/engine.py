"""A real vLLM engine inside the test's process, stepped by the test."""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlane.connector.shared_pool import POOL
from kvlane.connector.weights_memo import YOUNG_NS

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# The CPU backend's smallest.
BLOCK = 32
RUN_SECONDS = 120
DRAIN_SECONDS = 60
Make = Callable[..., "InProcessEngine"]


def connector(address: str | None, keys: Mapping[str, object]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with kvlane."""
    return {
        "kv_connector": "KVLaneConnector",
        "kv_connector_module_path": "kvlane.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvlane.address": address, **keys},
    }


class InProcessEngine:
    """vLLM with the connector. Close it before the next one: vLLM's worker state is global to the process."""

    def __init__(
        self,
        model: Path,
        address: str | None,  # None: without kvlane
        blocks: int = 200,
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        max_model_len: int = 1024,
        dtype: str = "float32",
        transfer: dict[str, Any] | None = None,  # of another connector
        **arguments: Any,
    ) -> None:
        os.environ.update(ENVIRONMENT)
        wait_until_old(model)
        # Scripts that import this module's numbers do not find the helpers of the daemon's tests.
        from busy import stretched
        from vllm import LLM

        freeze_modules()
        # A lookup that is out of time is a miss, and most tests are of hits.
        keys = {"kvlane.lookup_timeout_ms": 1e3 * stretched(0.25), **(extra or {})}
        kvlane = {**connector(address, keys), "kv_load_failure_policy": policy}
        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            max_model_len=max_model_len,
            block_size=BLOCK,
            enforce_eager=True,
            num_gpu_blocks_override=blocks,
            disable_log_stats=False,
            kv_transfer_config=kvlane if address is not None else transfer,  # pyright: ignore
            **arguments,
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core  # pyright: ignore
        self.scheduler: Any = self.core.scheduler
        self.connector: Any = self.scheduler.connector
        self.counted: Counter[str] = Counter()
        """What the connector has counted since the start, both roles together."""
        self._count_stats()
        self._names = itertools.count()

    def _count_stats(self) -> None:
        make_stats = self.scheduler.make_stats

        def make_and_count(*arguments: Any, **named: Any) -> Any:
            stats = make_stats(*arguments, **named)
            told = getattr(stats, "kv_connector_stats", None) or {}
            self.counted.update({name: count for name, count in told.items() if name != POOL})
            return stats

        self.scheduler.make_stats = make_and_count

    def add(
        self, prompt: list[int], tokens: int = 16, params: Mapping[str, object] | None = None, **transfer: str
    ) -> str:
        """Queue a request; gives the name under which its answer comes. `params`, or the further arguments: its
        kv_transfer_params, which are for the connector."""
        from vllm import SamplingParams

        name = f"request-{next(self._names)}"
        said = dict(params or transfer)
        extra = {"kv_transfer_params": said} if said else None
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        return name

    def run(self, names: Iterable[str] = ()) -> dict[str, Any]:
        """Step until every request has ended; gives their last outputs."""
        outputs = {}
        # By time: an engine that waits for something makes ten thousand empty steps a second.
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            if not self.llm.llm_engine.has_unfinished_requests():
                return outputs
            for output in self.llm.llm_engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        raise AssertionError(f"requests did not end within {RUN_SECONDS} s")

    def generate(self, prompt: list[int], tokens: int = 16) -> tuple[list[int], int]:
        """A request's generated tokens, and how many of its prompt came from a cache."""
        name = self.add(prompt, tokens)
        output = self.run()[name]
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    def drain(self) -> None:
        """Step the idle engine until its saves and loads are over, as vLLM's own process does."""
        # By time: a save whose daemon does not answer is given up after 10 s, and an empty step takes about 0.5 ms.
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            if not self.connector.has_pending_push_work():
                return
            self.core.step_fn()
        raise AssertionError(f"saves or loads did not end within {DRAIN_SECONDS} s")

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only kvlane's is left."""
        if self.connector is not None:
            self.drain()
        assert self.llm.reset_prefix_cache(), "blocks of the engine are still pinned"

    def books(self) -> tuple[int, int]:
        """Free blocks of the engine, and all references on blocks."""
        pool = self.connector._scheduler.pins.pool
        counted = sum(block.ref_cnt for block in pool.blocks if not block.is_null)
        return pool.get_num_free_blocks(), counted

    def metric(self, name: str) -> float:
        """The sum of a Prometheus counter. Before 0.30, steps without an output are missing in it."""
        return sum(each.value for each in self.llm.get_metrics() if each.name == name)  # pyright: ignore

    def errors(self) -> int:
        """Errors that the connector survived; both roles live in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return self.connector.failures.count + get_kv_transfer_group().failures.count  # pyright: ignore

    def close(self) -> None:
        """End the engine and clear vLLM's global state."""
        from prometheus_client import REGISTRY
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm, self.core, self.scheduler, self.connector
        cleanup_dist_env_and_memory()
        freeze_modules()
        for collector in list(getattr(REGISTRY, "_collector_to_names", {})):
            if getattr(collector, "_name", "").startswith("vllm:"):
                REGISTRY.unregister(collector)


class Engines:
    """Starts engines on one address. At most one engine of this process runs: a start ends the one before."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._engine: InProcessEngine | None = None
        self._arguments: dict[str, Any] = {}

    def __call__(self, model: Path, **arguments: Any) -> InProcessEngine:
        """A new engine."""
        while _running:
            _running.pop().close()
        self._engine = InProcessEngine(model, self._address, **arguments)
        self._arguments = {"model": model, **arguments}
        _running.append(self._engine)
        if self._address is not None:
            wait_until_ready(self._engine)
        return self._engine

    def shared(self, model: Path, **arguments: Any) -> InProcessEngine:
        """The engine of these arguments if it still runs, with nothing cached and nothing counted; else a new one."""
        engine = self._engine
        if engine is None or engine not in _running or self._arguments != {"model": model, **arguments}:
            return self(model, **arguments)
        if engine.llm.llm_engine.has_unfinished_requests() or engine.errors():
            return self(model, **arguments)  # A test has failed and left it so.
        engine.forget()
        engine.counted.clear()
        return engine

    def close(self) -> None:
        """End the engine, unless another start has."""
        engine = self._engine
        if engine is not None and engine in _running:
            _running.remove(engine)
            engine.close()


_running: list[InProcessEngine] = []


@contextmanager
def engines(address: str | None) -> Iterator[Engines]:
    """Gives what starts them, and ends the last one."""
    made = Engines(address)
    try:
        yield made
    finally:
        made.close()


_freeze = gc.freeze


def freeze_modules() -> None:
    """Leaves all that there is now to no collection, and vLLM's own freezing out, which would end that.

    vLLM collects garbage eight times for each start and end of an engine. Over the 700,000 objects of its modules that
    took 3.6 of 3.9 s of CPU time.
    """
    gc.freeze = gc.unfreeze = lambda: None
    _freeze()


def wait_until_old(model: Path) -> None:
    """Until nobody can think that the model's files were changed after the engine's start."""
    newest = max(each.lstat().st_ctime_ns for each in (model, *model.rglob("*")))
    while time.time_ns() < newest + YOUNG_NS:
        time.sleep(0.05)


def wait_until_ready(engine: InProcessEngine) -> None:
    """A real daemon needs a moment for its handshake with the workers."""
    core = engine.connector._scheduler._core
    deadline = time.monotonic() + 10
    while not core.ready and time.monotonic() < deadline:
        engine.core.step_fn()
        core.tick()
    assert core.ready


def prompt(seed: int | str, tokens: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(tokens)]
