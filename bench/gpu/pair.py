"""Two engines at once on one GPU, one with kvlane and one without a connector, asked in turns.

The speed of a host changes within minutes by more than a connector may cost, so the two are measured within the same
seconds. `compare.py` runs this once for each mode. What is measured:

| name | what |
|---|---|
| ready | seconds until an engine is ready, kvlane's and the other in turns, with a warm page cache |
| cold | TTFT of prompts that nobody has |
| in_gpu | the same again: a hit in the engine's own prefix cache |
| decode | gaps between tokens of kvlane's engine, quiet and beside another client of the daemon, in turns |
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model
from measure import Engine, start, summary

HERE = Path(__file__).resolve().parent
SYSTEMS = ("kvlane", "none")


async def measure(engines: dict[str, Engine], settings: argparse.Namespace) -> dict[str, Any]:
    """TTFT of both engines, and the gaps of one."""
    source = random.Random(2)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    found: dict[str, Any] = {}
    order = itertools.cycle([SYSTEMS, SYSTEMS[::-1]])
    for engine in engines.values():
        await engine.ttft(draw(settings.tokens))
        await engine.ttft(draw(64))
    prompts = [draw(settings.tokens) for _ in range(settings.rounds * settings.prompts)]
    # Enough single ones that medians tell a percent of the first and a millisecond of the second.
    for what, asked in (("cold", prompts), ("in_gpu", 4 * prompts)):
        times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        for prompt in asked:
            for name in next(order):
                times[name].append(await engines[name].ttft(prompt))
        found[what] = {name: summary(values) for name, values in times.items()}

    with second_client(settings) as client:
        gaps: dict[str, list[float]] = {"quiet": [], "beside": []}
        rates: list[float] = []
        for _ in range(settings.decode_rounds):
            for what in gaps:
                if what == "beside":
                    client.begin()
                gaps[what] += await decode(engines["kvlane"], settings, draw)
                if what == "beside":
                    rates.append(client.end())
    found["decode"] = {what: summary(values) for what, values in gaps.items()}
    found["client_gb_per_s"] = [round(rate, 2) for rate in rates]
    return found


async def decode(engine: Engine, settings: argparse.Namespace, draw: Any) -> list[float]:
    """Gaps while nothing but these requests runs."""
    answers = [engine.answer(draw(512), settings.decode_tokens) for _ in range(settings.decodes)]
    between: list[float] = []
    for times, _ in await asyncio.gather(*answers):
        # The first ones still share steps with the others' prompts.
        between += [b - a for a, b in itertools.pairwise(times[10:])]
    return between


class Client:
    """The other client, a process that begins and ends when it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.heard()

    def begin(self) -> None:
        """Let it move bytes."""
        self._say("begin")

    def end(self) -> float:
        """Stop it; GB/s since it began."""
        self._say("end")
        return float(self.heard())

    def heard(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"the second client ended with {self._process.wait()}")
        return line

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()


@contextmanager
def second_client(settings: argparse.Namespace) -> Iterator[Client]:
    """`second_client.py` on the same GPU and daemon; its standard error is that of this process."""
    command = [sys.executable, str(HERE / "second_client.py"), "--address", settings.address]
    command += ["--gb-per-s", str(settings.client_rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Client(process)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", required=True, help="of the daemon")
    parser.add_argument("--connector", required=True, help="kvlane's kv_transfer_config, JSON")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--scratch", required=True, help="folder for the model's configuration")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), required=True)
    parser.add_argument("--eager", action="store_true")
    for name in ("prompts", "tokens", "new-tokens", "rounds", "decodes", "decode-tokens", "decode-rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--starts", type=int, required=True, help="of each engine")
    parser.add_argument("--client-rate", type=float, required=True, help="GB/s")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    settings = parser.parse_args()
    # Two engines share the memory that one has elsewhere.
    settings.gpu_memory *= 0.8
    here = str(HERE)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)
    connectors = {"kvlane": settings.connector, "none": ""}

    def started(name: str) -> tuple[Engine, float]:
        return start(argparse.Namespace(**vars(settings) | {"connector": connectors[name]}))

    async def run() -> dict[str, Any]:
        ready: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        # The engines read from disk and compile here what they do at first.
        started("none")[0].shutdown()
        engines: dict[str, Engine] = {}
        try:
            for _ in range(settings.starts):
                for engine in engines.values():
                    engine.shutdown()
                engines.clear()
                for name in SYSTEMS:
                    engines[name], seconds = started(name)
                    ready[name].append(round(seconds, 2))
            return {"ready": ready} | await measure(engines, settings)
        finally:
            for engine in engines.values():
                engine.shutdown()

    settings.result.write_text(json.dumps(asyncio.run(run())))


if __name__ == "__main__":
    main()
