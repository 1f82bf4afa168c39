"""A vLLM with all its processes, as `vllm serve` runs them: one prompt cold, then warm, then requests that
run through pauses; prints one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

from engine import BLOCK, ENVIRONMENT, connector, wait_until_old

ANSWER = 16
COLD_ATTEMPTS = 5
STORED_ATTEMPTS = 400
PAUSES = 2
PAUSED_ANSWER = 4
READY_ATTEMPTS = 100
LOOKUP_TIMEOUT_MS = 60_000
"""So long that only a lookup that is lost takes it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    print("RESULT " + json.dumps(asyncio.run(run(parser.parse_args()))), flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvlane import _core

    wait_until_old(Path(arguments.model))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype="float32",
            max_model_len=1024,
            block_size=BLOCK,
            enforce_eager=True,
            num_gpu_blocks_override=200,
            tensor_parallel_size=arguments.tensor,
            data_parallel_size=arguments.data,
            # With two ranks on two cores a lookup took more than the usual 250 ms, several times in a row.
            kv_transfer_config=connector(arguments.address, {"kvlane.lookup_timeout_ms": LOOKUP_TIMEOUT_MS}),  # pyright: ignore
        )
    )
    tool = _core.Tool(arguments.address, 60_000.0)
    ranks = list(range(arguments.data)) if arguments.data > 1 else [None]
    try:
        for rank in ranks:
            await wait_until_ready(engine, tool, rank)
        prompt, cold, stored, attempts = await asked_until_stored(engine, tool, ranks[0])
        assert await engine.reset_prefix_cache()
        warm = await answer(engine, "warm", prompt, ranks[-1])
        paused = await through_pauses(engine, ranks[0])
        status: Any = tool.status()
        sessions = status["sessions"]
        return {
            "cold": cold,
            "warm": warm,
            "stored": stored,
            "attempts": attempts,
            "paused": paused,
            # Sums over all prompts, for the reader of a failure.
            "blocks_hit_and_missed": [
                (each["hit_blocks"], each["missed_blocks"]) for each in status["namespaces"]
            ],
            "engines": sorted({each["engine"] for each in sessions if each["engine"]}),
            "workers": sum(1 for each in sessions if each["role"] == "worker"),
        }
    finally:
        tool.close()
        engine.shutdown()


async def wait_until_ready(engine: Any, tool: Any, rank: int | None) -> None:
    """Asks prompts until one is saved: nothing is while workers still map the pool, which a busy machine delays."""
    before = blocks(tool)
    for attempt in range(READY_ATTEMPTS):
        await answer(engine, f"first-{rank}-{attempt}", [10 + attempt, rank or 0] * BLOCK, rank)
        tool.settle(10_000)
        if blocks(tool) > before:
            return
    raise SystemExit("nothing is saved")


async def asked_until_stored(
    engine: Any, tool: Any, rank: int | None
) -> tuple[list[int], dict[str, Any], int, int]:
    """Asks new prompts until all of one is stored: the prompt, its answer, its stored blocks and the number of prompts.

    Spinning ranks have kept a daemon from answering a save for 10 s. The worker then gives the save up, and says so.
    """
    prompt, cold, stored, attempt = [], {}, 0, 0
    for attempt in range(1, COLD_ATTEMPTS + 1):
        rng = random.Random(attempt)
        prompt = [rng.randrange(3, 2000) for _ in range(300)]
        wanted = (len(prompt) + ANSWER - 1) // BLOCK
        before = blocks(tool)
        cold = await answer(engine, f"cold-{attempt}", prompt, rank)
        stored = await wait_until_stored(tool, before, wanted)
        if stored >= wanted:
            break
    return prompt, cold, stored, attempt


async def wait_until_stored(tool: Any, before: int, wanted: int) -> int:
    """Blocks that the daemon has got since, when it has all or no more come."""
    stored = 0
    for _ in range(STORED_ATTEMPTS):
        tool.settle(10_000)
        stored = blocks(tool) - before
        if stored >= wanted:
            break
        await asyncio.sleep(0.05)
    return stored


async def through_pauses(engine: Any, rank: int | None) -> list[bool]:
    """Requests that run through a pause which clears all caches, while they are being saved: whether each turn's
    answers are those of requests that nobody disturbs."""
    same = []
    for turn in range(PAUSES):
        rng = random.Random(100 + turn)
        prompts = [[rng.randrange(3, 2000) for _ in range(4 * BLOCK)] for _ in range(2)]
        started = asyncio.Event()
        names = [f"paused-{turn}-{number}" for number in range(len(prompts))]
        asked = [
            asyncio.create_task(answer(engine, name, prompt, rank, PAUSED_ANSWER, started))
            for name, prompt in zip(names, prompts, strict=True)
        ]
        await started.wait()
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        paused = [(await each)["tokens"] for each in asked]
        calm = [
            (await answer(engine, f"calm-{name}", prompt, rank, PAUSED_ANSWER))["tokens"]
            for name, prompt in zip(names, prompts, strict=True)
        ]
        same.append(paused == calm)
    return same


def blocks(tool: Any) -> int:
    """Blocks that the daemon has."""
    return tool.status()["blocks"]


async def answer(
    engine: Any,
    name: str,
    prompt: list[int],
    rank: int | None,
    tokens: int = ANSWER,
    started: asyncio.Event | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    last = None
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, parameters, name, data_parallel_rank=rank
    ):
        last = output
        if started is not None:
            started.set()
    assert last is not None
    return {"tokens": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens}


if __name__ == "__main__":
    main()
