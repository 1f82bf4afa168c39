"""Two vLLMs with all their processes, as `vllm serve` runs them, of which one hands prompts over to the other directly;
prints one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
from pathlib import Path
from typing import Any

from engine import BLOCK, ENVIRONMENT, connector, wait_until_old

ANSWER = 16
PROMPT = 300
PROMPTS = 3
CHUNK = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    print("RESULT " + json.dumps(asyncio.run(run(parser.parse_args()))), flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    wait_until_old(Path(arguments.model))
    p = start(arguments)
    try:
        d = start(arguments)
        try:
            return await hand_over(p, d)
        finally:
            d.shutdown()
    finally:
        p.shutdown()


def start(arguments: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model,
            dtype="float32",
            max_model_len=1024,
            block_size=BLOCK,
            enforce_eager=True,
            num_gpu_blocks_override=200,
            max_num_batched_tokens=CHUNK,
            tensor_parallel_size=arguments.tensor,
            pipeline_parallel_size=arguments.pipeline,
            decode_context_parallel_size=arguments.context,
            worker_cls="warmed_worker.WarmedWorker" if arguments.pipeline > 1 else "auto",
            kv_transfer_config=connector(f"unix:{arguments.folder}/nobody.sock", {"kvlane.direct": "on"}),  # pyright: ignore
        )
    )


async def hand_over(p: Any, d: Any) -> dict[str, Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 2000) for _ in range(PROMPT)] for _ in range(PROMPTS)]
    alone = [(await answer(p, each))["tokens"] for each in prompts]
    assert await p.reset_prefix_cache()
    # One after the other, which also tells where P hands over.
    params = (await answer(p, prompts[0], 1, {"do_remote_decode": True}))["params"]
    landed = [await answer(d, prompts[0], params=params)]
    peer = params["kvlane"]["peer"]
    # Both at once, and all of them in flight.
    asked = []
    for each in prompts[1:]:
        handoff = secrets.token_hex(16)
        asked += [
            answer(p, each, 1, {"do_remote_decode": True, "kvlane": {"handoff": handoff}}),
            answer(d, each, params={"kvlane": {"handoff": handoff, "peer": peer}}),
        ]
    landed += (await asyncio.gather(*asked))[1::2]
    return {
        "alone": alone,
        "landed": [(each["tokens"], each["cached"]) for each in landed],
        "counted": {
            name: counted(name) for name in ("direct_landed", "direct_landed_tokens", "direct_fallbacks")
        },
        "resets": [await each.reset_prefix_cache(reset_connector=True) for each in (p, d)],
    }


def counted(name: str) -> float:
    """By the engine that was started last: vLLM forgets the metrics of the one before."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:kvlane_{name}_total"
    )


async def answer(
    engine: Any, prompt: list[int], tokens: int = ANSWER, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    last = None
    async for output in engine.generate({"prompt_token_ids": prompt}, parameters, secrets.token_hex(8)):
        last = output
    assert last is not None
    return {
        "tokens": list(last.outputs[0].token_ids),
        "cached": last.num_cached_tokens,
        "params": last.kv_transfer_params,
    }


if __name__ == "__main__":
    main()
