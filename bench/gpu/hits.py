"""The cost of a connector for a hit in the engine's own GPU memory. Engines without one and with kvlane, several of
each, are asked in turns.

    python bench/gpu/hits.py --out out/hits             # CUDA graphs
    python bench/gpu/hits.py --eager --out out/hits

Two engines of the same kind differ, too: by how much is the control, and what kvlane adds cannot be told closer than
that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import model
from measure import Engine, start, summary
from provenance import add_arguments, head, public
from systems import SYSTEMS, running
from turns import in_turns

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
KINDS = ("none", "kvlane")


async def measure(engines: dict[str, Engine], settings: argparse.Namespace) -> list[dict[str, list[float]]]:
    """TTFT of hits, by round and engine."""
    source = random.Random(6)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    prompts = [
        [source.randrange(100, vocabulary) for _ in range(settings.tokens)] for _ in range(settings.prompts)
    ]
    # Computed, saved, and hit once before it counts.
    for _ in range(2):
        await in_turns(prompts, engines, 0.3)
    return [await in_turns(prompts, engines, 0) for _ in range(settings.rounds)]


def differences(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Milliseconds: of each engine, of the kinds, and between engines of one kind."""
    by_engine = {
        name: [value for times in rounds for value in times[name]] for name in (rounds[0] if rounds else {})
    }
    medians = {name: statistics.median(values) for name, values in by_engine.items()}
    of_kind = {kind: [value for name, value in medians.items() if name.startswith(kind)] for kind in KINDS}
    means = {kind: statistics.mean(values) for kind, values in of_kind.items()}
    return {
        "by_engine": {name: summary(values) for name, values in by_engine.items()},
        "kvlane_adds_ms": round(means["kvlane"] - means["none"], 3),
        "same_kind_differs_by_ms": {
            kind: round(max(values) - min(values), 3) for kind, values in of_kind.items()
        },
        "kvlane_adds_by_round_ms": [
            round(
                statistics.median([v for name, vs in times.items() if name.startswith("kvlane") for v in vs])
                - statistics.median([v for name, vs in times.items() if name.startswith("none") for v in vs]),
                3,
            )
            for times in rounds
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--engines", type=int, default=2, help="of each kind")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--cache-bytes", type=int, default=16_000_000_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=8_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument("--out", type=Path, default=Path("out/hits"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("gpu hits", settings)
    settings.tensor_parallel, settings.new_tokens = 1, 0
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    # Threads start them.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder, settings.scratch = Path(scratch), scratch
        model.write_config(settings.shape, folder)
        names = [f"{kind} {number}" for number in range(1, settings.engines + 1) for kind in KINDS]

        def engine(name: str) -> Engine:
            connector = SYSTEMS[name.split()[0]].connector(settings.cache_bytes, folder)
            return start(argparse.Namespace(**vars(settings) | {"connector": connector}))[0]

        with (
            running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "daemon.log"),
            ThreadPoolExecutor(len(names)) as pool,
        ):
            engines = dict(zip(names, pool.map(engine, names), strict=True))
            report.say(f"    {len(engines)} engines are up")
            try:
                with report.CpuWatch() as watch:
                    found = differences(asyncio.run(measure(engines, settings)))
            finally:
                list(pool.map(Engine.shutdown, engines.values()))
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
    }
    report.write_json(settings.out / "hits.json", result)
    for name, figures in found["by_engine"].items():
        print(f"{name}: p50 {figures['p50']:.2f}, mean {figures['mean']:.2f} ms")
    print(
        f"kvlane adds {found['kvlane_adds_ms']} ms; engines of one kind differ by {found['same_kind_differs_by_ms']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
