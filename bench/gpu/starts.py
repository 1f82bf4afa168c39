"""How long an engine takes to start, without a connector and with kvlane, in turns, and its first loads after that.

The daemon is up before, with `--cache-bytes` of pinned memory. A first start of each kind, which compiles and fills the
page cache, does not count; its prompts are what the later engines load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model
from measure import Engine, start
from provenance import add_arguments, head, public
from systems import SYSTEMS, running

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
KINDS = ("none", "kvlane")


async def loads(engine: Engine, prompts: list[list[int]], draw: Any) -> list[float]:
    """TTFT of prompts that the daemon has, the first load of this engine first."""
    own = draw(len(prompts[0]))
    # The second and third time of `own` are hits in GPU memory, of the same shape as the loads below. So compiling and
    # allocating for that shape does not count as the load's.
    for tokens in (own, draw(64), own, own):
        await engine.ttft(tokens)
    return [round(await engine.ttft(prompt), 2) for prompt in prompts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--cache-bytes", type=int, default=64 << 30)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--kv-cache-bytes", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/starts"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("gpu starts", settings)
    settings.new_tokens = 2_000
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    settings.out.mkdir(parents=True, exist_ok=True)
    source = random.Random(5)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    prompts = [draw(settings.tokens) for _ in range(settings.prompts)]
    ready: dict[str, list[float]] = {kind: [] for kind in KINDS}
    first: dict[str, float] = {}
    ttft: list[list[float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, settings.scratch = Path(scratch), scratch

        async def one(kind: str, counts: bool) -> None:
            connector = SYSTEMS[kind].connector(settings.cache_bytes, folder)
            engine, seconds = start(argparse.Namespace(**vars(settings) | {"connector": connector}))
            try:
                if counts:
                    ready[kind].append(round(seconds, 2))
                else:
                    first[kind] = round(seconds, 2)
                if kind == "kvlane":
                    times = await loads(engine, prompts, draw)
                    if counts:
                        ttft.append(times)
                    await asyncio.sleep(1)  # saves
            finally:
                engine.shutdown()
            report.say(f"    {kind}: {seconds:.2f} s" + (f", TTFT {times} ms" if kind == "kvlane" else ""))

        begun = time.monotonic()
        with running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "daemon.log"):
            pinned = round(time.monotonic() - begun, 2)
            report.say(f"    daemon: {pinned} s")
            for counts in [False] + [True] * settings.rounds:
                for kind in KINDS:
                    asyncio.run(one(kind, counts))
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts(),
        "found": {"daemon_s": pinned, "first_s": first, "ready_s": ready, "ttft_ms_after_start": ttft},
    }
    report.write_json(settings.out / "starts.json", result)
    print(result["found"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
