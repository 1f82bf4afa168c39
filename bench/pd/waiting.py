"""The cost of a decode engine's step while prompts wait in it for their landing.

    python bench/pd/waiting.py                   # 64 prompts of 10,000 tokens, half landed; about a minute on two cores

A real vLLM on the CPU with a tiny model decodes some requests. Then prompts come that another engine is to hand over;
that engine is played by its agents alone, in a process of its own, and offers the first half of each. So they wait
while the others decode. Rounds with and without them have their turns. Our part is the time in the connector's own
callbacks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlane import _core
from kvlane.bench import report
from kvlane.bench.children import Child, serve_commands
from kvlane.bench.memory import Memory
from kvlane.bench.processes import connector_config
from kvlane.demo.model import ModelShape, build_model

BLOCK = 32
# Little memory a token, since there are many.
SHAPE = ModelShape(
    layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, max_tokens=16_384, vocab=1000
)
SOON_S = 60.0
HASH = bytes(16)


class Prefill:
    """The other engine: agents that offer whatever they are told."""

    def open(self, regions: list[list[Any]], shape: str, blocks: int) -> str:
        """As many blocks of this shape; where the engine is reached."""
        size = sum(piece * len(offsets) for _, _, _, piece, offsets in regions) * blocks
        self.memory = Memory(size)
        own, at = [], self.memory.address
        for _, _, _, piece, offsets in regions:
            stride = piece * len(offsets)
            own.append((at, stride, blocks, piece, [piece * number for number in range(len(offsets))]))
            at += stride * blocks
        key = secrets.token_bytes(16)
        areas = [(self.memory.address, self.memory.size)]
        self.rank = _core.HandoffRank("127.0.0.1:0", "", own, areas, key, "auto")
        ranks = [(self.rank.endpoint, key)]
        self.scheduler = _core.HandoffScheduler("127.0.0.1:0", "", ranks, bytes.fromhex(shape), [])
        self.blocks = blocks
        return self.scheduler.address

    def offer(self, names: list[str], content: str) -> None:
        """The first so many blocks of each prompt are computed."""
        for name in names:
            assert self.scheduler.begin_lending(bytes.fromhex(name), bytes.fromhex(content))
        filled = [(bytes.fromhex(name), 0, list(range(self.blocks)), HASH) for name in names]
        self.rank.step_begins(filled)
        self.rank.step_ends()
        for name in names:
            self.scheduler.lending_progress(bytes.fromhex(name), 0, self.blocks * BLOCK)


class Decode:
    """The real engine, in this process, stepped one by one."""

    def __init__(self, model: Path, arguments: argparse.Namespace) -> None:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        from vllm import LLM

        made: dict[str, tuple[Any, ...]] = {}
        for name in ("HandoffRank", "HandoffScheduler"):
            setattr(_core, name, _noted(getattr(_core, name), made, name))
        connector = connector_config("unix:/no-daemon")
        # Room for all of them at once, three times over.
        blocks = 3 * arguments.prompts * (arguments.tokens // BLOCK + 1)
        keys = {"kvlane.direct": "on", "kvlane.direct.peers": "127.0.0.1", "kv_buffer_size": 1e12}
        connector["kv_connector_extra_config"] |= keys
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=arguments.tokens + 64,
            block_size=BLOCK,
            enforce_eager=True,
            num_gpu_blocks_override=blocks,
            max_num_seqs=256,
            kv_transfer_config=connector,  # pyright: ignore
        )
        self.regions, self.shape = made["HandoffRank"][2], made["HandoffScheduler"][3]
        core: Any = self.llm.llm_engine.engine_core.engine_core  # pyright: ignore
        self.connector: Any = core.scheduler.connector
        self.side: Any = self.connector._scheduler
        self.callbacks_s = 0.0
        for name in ("get_num_new_matched_tokens", "build_connector_meta", "update_state_after_alloc"):
            setattr(self.connector, name, self._timed(getattr(self.connector, name)))
        self._names = 0

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.callbacks_s += time.perf_counter() - began

        return timed

    def add(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> str:
        from vllm import SamplingParams

        self._names += 1
        name = f"request-{self._names}"
        extra = {"kv_transfer_params": params} if params else None
        wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
        return name

    def landed(self) -> int:
        """Blocks that have landed, of all."""
        (kind,) = (kind for kind in self.side.kinds if kind.name == "land")
        standings = [self.side.direct.agent.standing(handoff) for handoff in kind._landings]
        return sum(standing[2] for standing in standings if standing is not None)

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and of our part of it."""
        self.callbacks_s = 0.0
        began = time.perf_counter()
        self.llm.llm_engine.step()
        return time.perf_counter() - began, self.callbacks_s


def _noted(make: Callable[..., Any], made: dict[str, tuple[Any, ...]], name: str) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        made[name] = arguments
        return make(*arguments)

    return noted


def measure(decode: Decode, prefill: Child, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of each round."""
    source = random.Random(7)

    def draw(tokens: int) -> list[int]:
        return [source.randrange(10, 900) for _ in range(tokens)]

    half = arguments.tokens // BLOCK // 2
    facts = {"regions": decode.regions, "shape": decode.shape.hex(), "blocks": half}
    peer = prefill.ask("open", **facts)
    key = decode.side._shared.hashes.weights_key or b""
    content = decode.side.direct.content(key).hex()
    steps: dict[str, list[list[tuple[float, float]]]] = {"none waits": [], "they wait": []}
    for _ in range(arguments.rounds):
        running = [decode.add(draw(64), arguments.steps + 2000) for _ in range(arguments.decodes)]
        for _ in range(20):
            decode.step()
        steps["none waits"].append([decode.step() for _ in range(arguments.steps)])
        names = [secrets.token_hex(16) for _ in range(arguments.prompts)]
        prefill.ask("offer", names=[direct_id(name) for name in names], content=content)
        waiting = [
            decode.add(draw(arguments.tokens), 1, {"kvlane": {"handoff": name, "peer": peer}})
            for name in names
        ]
        deadline = time.monotonic() + SOON_S
        while decode.landed() < half * arguments.prompts:
            decode.step()
            if time.monotonic() > deadline:
                raise SystemExit(f"only {decode.landed()} of {half * arguments.prompts} blocks have landed")
        steps["they wait"].append([decode.step() for _ in range(arguments.steps)])
        if decode.landed() != half * arguments.prompts:
            raise SystemExit("they did not wait to the end: take fewer --steps")
        decode.llm.llm_engine.abort_request(waiting + running)
        for _ in range(20):
            decode.step()
    return {
        what: {
            "step_ms": [round(statistics.median(whole for whole, _ in one) * 1e3, 4) for one in rounds],
            "callbacks_ms": [round(statistics.median(part for _, part in one) * 1e3, 4) for one in rounds],
        }
        for what, rounds in steps.items()
    }


def direct_id(name: str) -> str:
    """Under which the agents know it."""
    from kvlane.connector.direct_request import Lending

    return Lending(name).id.hex()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64, help="that wait (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=10_000, help="of each (default %(default)s)")
    parser.add_argument("--decodes", type=int, default=4, help="requests that run (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of each round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the result (default out)")
    arguments = parser.parse_args()
    model = build_model(arguments.out / "models" / "pd-waiting", SHAPE)
    decode = Decode(Path(model), arguments)
    prefill = Child([str(Path(__file__).resolve()), "prefill"], {})
    try:
        with report.CpuWatch() as watch:
            found = measure(decode, prefill, arguments)
    finally:
        prefill.end()
    none, some = found["none waits"], found["they wait"]
    for part in ("step_ms", "callbacks_ms"):
        more = [b - a for a, b in zip(none[part], some[part], strict=True)]
        found[f"more_{part}"] = round(statistics.median(more), 4)
    result = {
        "benchmark": "steps while prompts that land wait",
        "date": datetime.date.today().isoformat(),
        "settings": {key: value for key, value in vars(arguments).items() if key != "out"},
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write_json(arguments.out / "pd-waiting.json", result)
    rows = [
        [what, *(f"{statistics.median(found[what][part]):.3f}" for part in ("step_ms", "callbacks_ms"))]
        for what in ("none waits", "they wait")
    ]
    rows.append(["more", f"{found['more_step_ms']:.3f}", f"{found['more_callbacks_ms']:.3f}"])
    print(report.table(["", "a step, ms", "our part, ms"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(serve_commands(Prefill()) if sys.argv[1:] == ["prefill"] else main())
