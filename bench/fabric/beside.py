"""A small WRITE to one peer while a large READ from another is under way: how long it takes, idle and beside it.

    python bench/fabric/beside.py                     # 2 rounds of 10 s each; --transport cma, tcp
    python bench/fabric/beside.py --json              # one line, for whoever compares builds

Three processes: this one, one that is written 64 bytes, and one whose 1 GiB another thread of this process reads
again and again. Both kinds of turn alternate; each WRITE is waited for before the next. The goal of one build: the
99th percentile beside the READ is at most twice the idle one.

Then a turn in which this process's engine measures how long its lock is held, in CPU time of the holder, each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvlane import fabric
from kvlane.bench import report

PEER = """
import mmap, sys
from kvlane import fabric
engine = fabric.Engine()
memory = mmap.mmap(-1, int(sys.argv[1]))
memory.write(b"x" * len(memory))
region = engine.register(memory)
print(engine.describe().hex(), region.number, flush=True)
sys.stdin.read()
"""
SMALL = 64
RUN = b"".join(number.to_bytes(8, "little") for number in (0, 0, SMALL))


class Other:
    """A process with so many bytes of memory."""

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-c", PEER, str(size)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        descriptor, number = self.process.stdout.readline().split()
        self.descriptor, self.region, self.size = bytes.fromhex(descriptor), int(number), size

    def end(self) -> None:
        """It goes when its input ends."""
        self.process.communicate(timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=("cma", "tcp"), default="cma", help="default %(default)s")
    parser.add_argument("--mib", type=int, default=1024, help="of one READ, default %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one turn, default %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="of both turns, default %(default)s")
    parser.add_argument("--json", action="store_true", help="the result as one line")
    settings = parser.parse_args()
    small, large = Other(4096), Other(settings.mib << 20)
    try:
        result = measure(settings, small, large)
    finally:
        small.end()
        large.end()
    print(json.dumps(result) if settings.json else text(result))
    return 0


def measure(settings: argparse.Namespace, small: Other, large: Other) -> dict[str, Any]:
    """Microseconds of WRITEs in turns, and GB/s of the READs beside them."""
    turns: dict[str, list[dict[str, float]]] = {"idle": [], "beside": []}
    rates: list[float] = []
    with fabric.Engine(transport=settings.transport) as engine, report.CpuWatch() as watch:
        mine, target = engine.register(bytearray(4096)), engine.register(bytearray(large.size))
        to_small, to_large = engine.connect(small.descriptor), engine.connect(large.descriptor)
        to_small.write(mine, small.region, RUN).wait(30)
        to_large.read(target, large.region, [(0, 0, large.size)]).wait(60)
        for _ in range(settings.rounds):
            turns["idle"].append(writes(to_small, mine, small.region, settings.seconds))
            turn, its_rates = both(to_small, mine, small, to_large, target, large, settings.seconds)
            turns["beside"].append(turn)
            rates += its_rates
        holds = holds_beside(
            engine, lambda: both(to_small, mine, small, to_large, target, large, settings.seconds)
        )
    medians = {
        name: {key: statistics.median(turn[key] for turn in of) for key in ("p50_us", "p99_us", "count")}
        for name, of in turns.items()
    }
    return {
        "benchmark": "fabric beside",
        "transport": settings.transport,
        "medians": medians,
        "p99_beside_by_idle": medians["beside"]["p99_us"] / medians["idle"]["p99_us"],
        "read_gb_per_s": statistics.median(rates),
        "holds": holds,
        "turns": turns,
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
    }


def both(
    to_small: fabric.Peer,
    mine: fabric.Region,
    small: Other,
    to_large: fabric.Peer,
    target: fabric.Region,
    large: Other,
    seconds: float,
) -> tuple[dict[str, float], list[float]]:
    """WRITEs for so long beside READs by another thread, and the GB/s of the latter."""
    stop, rates = threading.Event(), list[float]()

    def reads() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            to_large.read(target, large.region, [(0, 0, large.size)]).wait(60)
            rates.append(large.size / 1e9 / (time.perf_counter() - begun))

    reader = threading.Thread(target=reads)
    reader.start()
    turn = writes(to_small, mine, small.region, seconds)
    stop.set()
    reader.join()
    return turn, rates


def holds_beside(engine: fabric.Engine, does: Callable[[], object]) -> dict[str, float] | None:
    """How long holds of the engine's lock took meanwhile, in microseconds; None: a build that cannot tell."""
    core: Any = engine._core
    if not hasattr(core, "measure_holds"):
        return None
    core.measure_holds()
    does()
    cpu, wall = (sorted(times) for times in zip(*core.take_holds(), strict=True))
    at = len(cpu) * 999 // 1000
    return {
        "count": len(cpu),
        "cpu_p50_us": cpu[len(cpu) // 2] / 1e3,
        "cpu_p999_us": cpu[at] / 1e3,
        "cpu_longest_us": cpu[-1] / 1e3,
        "wall_p999_us": wall[at] / 1e3,
        "wall_longest_us": wall[-1] / 1e3,
    }


def writes(peer: fabric.Peer, mine: fabric.Region, region: int, seconds: float) -> dict[str, float]:
    """One after the other for so long."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        peer.write(mine, region, RUN).wait(30)
        took.append(1e6 * (time.perf_counter() - begun))
    took.sort()
    return {"p50_us": took[len(took) // 2], "p99_us": took[len(took) * 99 // 100], "count": len(took)}


def text(result: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [name, f"{each['p50_us']:.1f}", f"{each['p99_us']:.1f}", f"{each['count']:.0f}"]
        for name, each in result["medians"].items()
    ]
    table = report.table(["64 B WRITE", "p50, us", "p99, us", "in a turn"], rows)
    ratio, rate = result["p99_beside_by_idle"], result["read_gb_per_s"]
    said = f"{table}\np99 beside a READ of {rate:.2f} GB/s: {ratio:.2f} of the idle one (goal: at most 2)"
    if holds := result["holds"]:
        said += (
            f"\nthe lock was held {holds['count']} times: CPU p99.9 {holds['cpu_p999_us']:.1f} us (goal: at most 50), "
            f"longest {holds['cpu_longest_us']:.1f}; longest on the wall {holds['wall_longest_us']:.0f} us"
        )
    return said


if __name__ == "__main__":
    sys.exit(main())
