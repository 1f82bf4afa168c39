"""vLLM's NixlConnector between two engines on GPUs, one asked after the other, beside the decode engine alone.

    python bench/gpu/nixl_connector.py --gpus 2 --out out/nixl       # nixl and nixl-cu13 1.5.1

Prompts, kinds and engines are those of `handoff.py`, which ran before it on the same GPUs. Control: the
decode engine's own part takes less than half as long as computing the prompt. vLLM counts no tokens for this connector.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model
from handoff import HERE, on_own_gpu
from measure import Engine, summary
from provenance import add_arguments, head, public
from systems import ENVIRONMENT

from kvlane.bench import report

CONNECTOR = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
PORTS = (5600, 5700)
AT_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def measure(p: Engine, d: Engine, settings: argparse.Namespace) -> dict[str, Any]:
    """First tokens where D computes the prompt, and where P did before, in turns."""
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    source = random.Random(5)
    times: dict[str, list[float]] = {"alone": [], "one after the other": []}
    own_part: list[float] = []
    for index in range(settings.prompts + 2):
        for kind, each in times.items():
            prompt = [source.randrange(100, vocabulary) for _ in range(settings.tokens)]
            began, params = time.perf_counter(), None
            if kind != "alone":
                await p.answer(prompt, params=AT_P)
                params = p.handed
            before = (time.perf_counter() - began) * 1e3
            first, _ = await d.answer_counted(prompt, 1, params)
            if index >= 2:  # both meet and compile in the first two
                each.append(before + first[0])
                own_part += first if params else []
            await asyncio.sleep(0.3)
    found: dict[str, Any] = {"ttft": {kind: summary(each) for kind, each in times.items()}}
    return found | {"decode_engines_part": summary(own_part)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="one for both, or each its own")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=13_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument("--out", type=Path, default=Path("out/nixl"))
    add_arguments(parser)
    settings = parser.parse_args()
    settings.new_tokens = 0
    result = head("NixlConnector between engines on GPUs", settings)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    engines: list[Engine] = []
    with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
        settings.scratch = scratch
        try:
            for number, port in enumerate(PORTS):
                os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
                engines.append(on_own_gpu(settings, number, CONNECTOR))
            found = asyncio.run(measure(engines[0], engines[1], settings))
        finally:
            for each in engines:
                each.shutdown()
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
    }
    report.write_json(settings.out / "nixl.json", result)
    alone, after = (each["p50"] for each in found["ttft"].values())
    print(f"alone {alone:.1f} ms, one after the other {after:.1f} ms: {after - alone:+.1f}")
    part = found["decode_engines_part"]["p50"]
    print(f"the decode engine's part: {part:.1f} ms")
    return 0 if part < alone / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
