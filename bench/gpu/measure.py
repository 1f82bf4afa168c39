"""One engine of the comparison: starts vLLM with a connector, measures, writes one JSON file.

`compare.py` runs this once for each system. What is measured, all of token ids and of one engine:

| name | what |
|---|---|
| cold | a prompt that nobody has |
| in_gpu | the same again: a hit in the engine's own prefix cache |
| warm | after the engine's prefix cache was reset: the KV cache comes from the system, one round after the other |
| longer | the prompt and as many new tokens as `--new-tokens`, with the prompt in GPU memory, and from the system |
| decode | gaps between tokens of running requests while prompts come in that hit in GPU memory, and from the system |
| open_loop | TTFT of prompts that come at a rate, from the system |

Controls, without which equal answers prove nothing: every prompt has its own answer, one changed block changes the
answer, and of each prompt that is to come from the system vLLM says that it was not computed. Before each check of
bytes the GPU's blocks are poisoned; what is loaded is compared with what was computed. Running requests have to last
until the prompts beside them have their first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import model

POISON = 0xA5
RESET_PATIENCE_S = 20.0
# Most tokens that a system may lack at a prompt's end; whole blocks of any size.
CHUNK = 128
# Tokens of a compared prompt behind its last whole block: an engine computes as many after a load as after a hit in GPU
# memory. Of a prompt of whole blocks it may compute one token or a block, and the last bits differ.
BEHIND = 8
# Facts that have to be true of each engine, where they were measured.
CONTROLS = (
    "same_tokens",
    "control_distinct",
    "control_block_matters",
    "control_loaded",
    "control_decodes_last",
)

# By this setting ranks with latent attention compute the same bytes: see `ranks.py`.
RANKS_ALIKE = {"inductor_compile_config": {"combo_kernels": False, "benchmark_combo_kernel": False}}

# Settings that only some scripts have, and vLLM's names of them.
OPTIONS = {
    "async_scheduling": "async_scheduling",
    "compilation": "compilation_config",
    "most_running": "max_num_seqs",
    "block_size": "block_size",
    "context_parallel": "decode_context_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "data_parallel": "data_parallel_size",
    "expert_parallel": "enable_expert_parallel",
    "all2all_backend": "all2all_backend",
    "gdn_prefill_backend": "gdn_prefill_backend",
    "hosts": "nnodes",
    "host": "node_rank",
    "meeting_port": "master_port",
    "meeting_s": "distributed_timeout_seconds",
}


def engine_arguments(settings: argparse.Namespace) -> Any:
    """vLLM's arguments of an engine."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    options: dict[str, Any] = {}
    if settings.connector:
        options["kv_transfer_config"] = KVTransferConfig(**json.loads(settings.connector))
    if settings.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    for ours, vllms in OPTIONS.items():
        if getattr(settings, ours, None) is not None:
            options[vllms] = getattr(settings, ours)
    return AsyncEngineArgs(
        model=str(model.write_config(settings.shape, Path(settings.scratch))),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=settings.eager,
        max_model_len=settings.tokens + settings.new_tokens + 1024,
        max_num_batched_tokens=getattr(settings, "chunk", 0) or max(16384, settings.tokens),
        gpu_memory_utilization=settings.gpu_memory,
        tensor_parallel_size=settings.tensor_parallel,
        enable_prefix_caching=True,
        seed=0,
        **options,
    )


class Engine:
    """vLLM in its usual processes, asked one request at a time or many at once."""

    def __init__(self, settings: argparse.Namespace) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self._sampling = SamplingParams
        self._kind = RequestOutputKind.DELTA
        self._names = 0
        self.cached_tokens = 0
        """Tokens of the last prompt that vLLM did not compute."""
        self.rank: int | None = None
        """Of data-parallel ranks, the one that is asked. None: vLLM chooses."""
        self.handed: dict[str, Any] = {}
        """The `kv_transfer_params` that came with the last answer."""
        self._llm = AsyncLLM.from_engine_args(engine_arguments(settings))

    async def answer(
        self, prompt: list[int], tokens: int = 1, params: dict[str, Any] | None = None
    ) -> tuple[list[float], tuple[int, ...]]:
        """When each token came, in ms after it was asked for, and the tokens. `params`: the request's
        `kv_transfer_params`."""
        times, answer, self.cached_tokens, self.handed = await self.ask(prompt, tokens, params)
        return times, answer

    async def answer_counted(
        self, prompt: list[int], tokens: int = 1, params: dict[str, Any] | None = None
    ) -> tuple[list[float], int]:
        """When each token came, and the prompt's tokens that vLLM did not compute."""
        times, _, cached, _ = await self.ask(prompt, tokens, params)
        return times, cached

    async def ask(
        self, prompt: list[int], tokens: int, params: dict[str, Any] | None
    ) -> tuple[list[float], tuple[int, ...], int, dict[str, Any]]:
        """When each token came, the tokens, the prompt's tokens that vLLM did not compute, and the
        `kv_transfer_params` that came with the answer."""
        self._names += 1
        wanted = self._sampling(
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kind,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        times: list[float] = []
        answer: list[int] = []
        cached, handed = 0, {}
        start = time.perf_counter()
        async for output in self._llm.generate(
            {"prompt_token_ids": prompt}, wanted, f"r{self._names}", data_parallel_rank=self.rank
        ):
            came = (time.perf_counter() - start) * 1e3
            cached, handed = output.num_cached_tokens or 0, output.kv_transfer_params or {}
            for token in output.outputs[0].token_ids:
                times.append(came)
                answer.append(token)
        return times, tuple(answer), cached, handed

    async def ttft(self, prompt: list[int]) -> float:
        """Milliseconds to the first token."""
        return (await self.answer(prompt))[0][0]

    async def forget(self) -> None:
        """Empties the prefix cache of the engine; blocks that are still being saved keep it from that for a moment."""
        deadline = time.monotonic() + RESET_PATIENCE_S
        while not await self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise SystemExit("the engine's prefix cache could not be reset")
            await asyncio.sleep(0.05)

    async def on_workers(self, function: Any, *arguments: Any) -> list[Any]:
        """Calls `function(worker, ...)` in every worker process."""
        return await self._llm.collective_rpc(function, args=arguments)

    def has_async_scheduling(self) -> bool:
        """Whether it plans a step while the one before is computed."""
        return bool(self._llm.vllm_config.scheduler_config.async_scheduling)

    def shutdown(self) -> None:
        """Ends its processes."""
        self._llm.shutdown()


def start(settings: argparse.Namespace) -> tuple[Engine, float]:
    """An engine, and the seconds until it was ready."""
    begun = time.perf_counter()
    engine = Engine(settings)
    return engine, time.perf_counter() - begun


async def measure(engine: Engine, settings: argparse.Namespace) -> dict[str, Any]:
    """All that the table above names."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    source = random.Random(1)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    prompts = [draw(settings.tokens) for _ in range(settings.prompts)]
    # Whatever the engine compiles or allocates at first.
    await engine.ttft(draw(settings.tokens))
    await engine.ttft(draw(64))

    found: dict[str, Any] = {}
    found["cold"] = summary([await engine.ttft(prompt) for prompt in prompts])
    if settings.system != "none":
        await loaded_bytes(engine, prompts, found)
    found["in_gpu"] = summary([await engine.ttft(prompt) for prompt in prompts for _ in range(3)])
    kept = [(await engine.answer(prompt, 16))[1] for prompt in prompts]

    longer = [prompt + draw(settings.new_tokens) for prompt in prompts]
    found["longer_in_gpu"] = summary([await engine.ttft(prompt) for prompt in longer])
    if settings.system == "none":
        return found

    found["warm"] = []
    for _ in range(settings.rounds):
        await engine.forget()
        found["warm"].append(summary([await engine.ttft(prompt) for prompt in prompts]))
    await engine.forget()
    back = [(await engine.answer(prompt, 16))[1] for prompt in prompts]
    longer = [prompt + draw(settings.new_tokens) for prompt in prompts]
    await engine.forget()
    found["longer_warm"] = summary([await engine.ttft(prompt) for prompt in longer])

    for _ in range(settings.decode_rounds):
        for name in ("in_gpu", "warm"):
            if name == "warm":
                await engine.forget()
            between, came = await gaps(engine, settings, prompts, draw, found)
            found.setdefault(f"decode_{name}", []).append(summary(between))
            found.setdefault(f"beside_decode_{name}", []).append(summary(came))
    await engine.forget()
    found["open_loop"] = summary(await arrivals(engine, prompts, settings.rate))

    changed = list(prompts[0])
    changed[64:96] = [(token + 1) % vocabulary for token in changed[64:96]]
    found["same_tokens"] = back == kept
    found["answers_differ_at"] = differ_at(kept, back)
    found["control_distinct"] = len(set(kept)) == len(kept)
    found["control_block_matters"] = (await engine.answer(changed, 16))[1] != kept[0]
    return found


def compared_tokens(tokens: int) -> int:
    """About as many, in whole blocks of up to `CHUNK` tokens and `BEHIND`."""
    return max(1, tokens // CHUNK) * CHUNK + BEHIND


def differ_at(kept: list[tuple[int, ...]], back: list[tuple[int, ...]]) -> list[int | None]:
    """By prompt, the first token in which its answers differ; None where they are equal."""
    return [
        next((place for place, (one, other) in enumerate(zip(*both, strict=True)) if one != other), None)
        for both in zip(kept, back, strict=True)
    ]


async def loaded_bytes(engine: Engine, prompts: list[list[int]], found: dict[str, Any]) -> list[Any]:
    """Whether blocks that are loaded into poisoned memory are, byte by byte, those that were computed before, in the
    rank where most differ. Returns the hashes of the computed ones by rank.

    The last block of each prompt, in each KV cache group, is computed again among fewer tokens, and may differ in its
    last bits: `differ_at_most`.
    """
    computed = await engine.on_workers(model.block_hashes, POISON)
    await engine.forget()
    await engine.on_workers(model.poison, POISON)
    cached = []
    for prompt in prompts:
        await engine.ttft(prompt)
        cached.append(engine.cached_tokens)
    # A block that is computed again has the same bytes. Only this count shows that it was loaded.
    found["loaded_tokens_of_a_prompt"] = min(cached)
    found["control_loaded"] = min(cached) > 0
    loaded = await engine.on_workers(model.block_hashes, POISON)
    found["kv_cache_groups"] = len(loaded[0][0]) if loaded[0] else 0
    found["loaded_blocks"] = len(loaded[0])
    found["loaded_blocks_that_differ"] = max(map(model.blocks_that_differ, loaded, computed))
    return computed


def differ_at_most(prompts: int, found: dict[str, Any]) -> int:
    """How many blocks may differ in what `loaded_bytes` found."""
    return prompts * int(found.get("kv_cache_groups", 1))


async def gaps(
    engine: Engine,
    settings: argparse.Namespace,
    prompts: list[list[int]],
    draw: Any,
    found: dict[str, Any],
) -> tuple[list[float], list[float]]:
    """Gaps between the tokens of running requests while the prompts come in, and TTFT of the prompts. Writes down in
    `found` whether all these requests ran until the prompts had their tokens."""
    begun = [asyncio.Event() for _ in range(settings.decodes)]

    async def decode(index: int) -> list[float]:
        task = asyncio.create_task(engine.answer(draw(512), settings.decode_tokens))
        begun[index].set()
        return (await task)[0]

    begun_at = time.perf_counter()
    running = [asyncio.create_task(decode(index)) for index in range(settings.decodes)]
    await asyncio.gather(*(event.wait() for event in begun))
    await asyncio.sleep(1.0)  # all of them decode by then
    first = (time.perf_counter() - begun_at) * 1e3
    came = await arrivals(engine, prompts, settings.rate)
    if not prompts:
        await asyncio.sleep(1.5)
    last = (time.perf_counter() - begun_at) * 1e3
    found.setdefault("control_decodes_last", True)
    between: list[float] = []
    for times in await asyncio.gather(*running):
        found["control_decodes_last"] &= times[-1] >= last
        between += [b - a for a, b in itertools.pairwise(times) if first <= b <= last]
    return between, came


async def arrivals(engine: Engine, prompts: list[list[int]], rate: float) -> list[float]:
    """TTFT of prompts that come `rate` a second, whatever became of those before."""

    async def later(index: int, prompt: list[int]) -> float:
        await asyncio.sleep(index / rate)
        return await engine.ttft(prompt)

    return list(await asyncio.gather(*(later(index, prompt) for index, prompt in enumerate(prompts))))


def summary(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    rank = max(0, -(-len(ordered) * 99 // 100) - 1)
    figures = {
        "mean": statistics.mean(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[rank],
        "min": ordered[0],
        "max": ordered[-1],
        "count": len(ordered),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--system", required=True)
    parser.add_argument("--connector", default="", help="kv_transfer_config, JSON")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--scratch", required=True, help="folder for the model's configuration")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), required=True)
    parser.add_argument("--eager", action="store_true")
    for name in ("prompts", "tokens", "new-tokens", "rounds", "decodes", "decode-tokens", "decode-rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--rate", type=float, required=True, help="prompts a second")
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    settings = parser.parse_args()
    # Worker processes unpickle functions of `model`.
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)

    async def run() -> dict[str, Any]:
        engine, ready = start(settings)
        try:
            return {"ready_s": round(ready, 2)} | await measure(engine, settings)
        finally:
            engine.shutdown()

    settings.result.write_text(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
