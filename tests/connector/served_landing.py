"""A vLLM with all its processes, as `vllm serve` runs them, in which another engine's blocks land while others run, and
through a reset and a pause; prints one JSON line. The connector is driven by files: it lives in the engine's process,
and the bytes are written in the workers'."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

from engine import BLOCK, ENVIRONMENT, wait_until_old
from peer_folder import PeerFolder

ANSWER = 16
PROMPT = 300
OTHERS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument(
        "--overlap", action="store_true", help="asynchronous scheduling, which vLLM turns off on CPUs"
    )
    os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    print("RESULT " + json.dumps(asyncio.run(run(parser.parse_args()))), flush=True)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    wait_until_old(Path(arguments.model))
    config = AsyncEngineArgs(
        model=arguments.model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        num_gpu_blocks_override=200,
        pipeline_parallel_size=arguments.pipeline,
        worker_cls="warmed_worker.WarmedWorker" if arguments.pipeline > 1 else "auto",
        async_scheduling=arguments.overlap,
        kv_transfer_config={
            "kv_connector": "LandingConnector",
            "kv_connector_module_path": "landing_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"folder": arguments.folder},
        },  # pyright: ignore
    ).create_engine_config()
    assert not config.scheduler_config.async_scheduling, "vLLM's CPU platform can do it by itself"
    config.scheduler_config.async_scheduling = arguments.overlap
    engine = AsyncLLM.from_vllm_config(config)
    try:
        return {
            "batches": config.max_concurrent_batches,
            **await Served(engine, PeerFolder(Path(arguments.folder))).run(),
        }
    finally:
        engine.shutdown()


class Served:
    def __init__(self, engine: Any, peer: PeerFolder) -> None:
        self.engine, self.peer = engine, peer
        self.asked = 0
        rng = random.Random(1)
        self.prompt = words(rng, PROMPT)
        self.others = [words(rng, 40 + number) for number in range(OTHERS)]

    async def run(self) -> dict[str, Any]:
        alone = await self.answer(self.prompt, keep="theirs")
        others = await self.ask_others()
        return {
            "alone": alone,
            "blocks": self.peer.blocks("theirs"),
            "landed": await self.land("landed", others),
            "flipped": await self.land("flipped", others, flip=True),
            "reset": await self.land("reset", others, amid=self.reset),
            "paused": await self.land("paused", others, amid=self.pause),
            "aborted": await self.abort(),
            "given_back": self.peer.noted("resets")["given_back"],
        }

    async def land(self, name: str, others: Any, flip: bool = False, amid: Any = None) -> dict[str, Any]:
        """A request that waits, lands half way while others run, and then the rest."""
        assert await self.engine.reset_prefix_cache()
        self.peer.copy("theirs", name)
        if flip:
            self.peer.flip(name, 0)
        landing = asyncio.create_task(self.answer(self.prompt, land=name))
        same = await self.ask_others() == others
        self.peer.offer(name, 5, ended=False)
        same &= await self.ask_others() == others
        waited = not landing.done()
        result = await amid() if amid else None
        self.peer.offer(name)
        (answer, again) = await asyncio.gather(landing, self.ask_others())
        return {**answer, "others_are_right": same and again == others, "waited": waited, "amid": result}

    async def reset(self) -> bool:
        return await self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    async def pause(self) -> bool:
        await self.engine.pause_generation(mode="keep")
        paused = await self.engine.is_paused()
        await self.engine.resume_generation()
        return paused

    async def abort(self) -> dict[str, Any]:
        """A request that is given up by its client half way; then one with the same prompt."""
        assert await self.engine.reset_prefix_cache()
        self.peer.copy("theirs", "aborted")
        landing = asyncio.create_task(self.answer(self.prompt, land="aborted"))
        self.peer.offer("aborted", 5, ended=False)
        await self.ask_others()
        landing.cancel()
        await asyncio.wait([landing])
        await self.ask_others()
        answer = await self.answer(self.prompt)
        assert await self.engine.reset_prefix_cache()
        return answer

    async def ask_others(self) -> list[list[int]]:
        return [each["tokens"] for each in await asyncio.gather(*map(self.answer, self.others))]

    async def answer(self, prompt: list[int], **transfer: str) -> dict[str, Any]:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": transfer} if transfer else None
        parameters = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, extra_args=extra)
        self.asked += 1
        last = None
        async for output in self.engine.generate(
            {"prompt_token_ids": prompt}, parameters, f"request-{self.asked}"
        ):
            last = output
        assert last is not None
        return {"tokens": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens}


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 2000) for _ in range(count)]


if __name__ == "__main__":
    main()
