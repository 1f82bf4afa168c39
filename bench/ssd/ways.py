"""Both ways of the SSD tier's transfers in turns on one device, and whether `--ssd-path auto` took the faster one.

    python bench/ssd/ways.py FOLDER --rounds 9

Each way has a file of its own in FOLDER, which is removed after. bench/ssd/on_memory.sh makes a device in memory and
runs this on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvlane import _bench
from kvlane.bench import report, ssd
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import parse_size

WAYS = ("auto", "direct", "staged")
AUTO_GOAL = 0.98


def main() -> int:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the device; three files are made in it")
    parser.add_argument("--capacity", type=parse_size, default=512 << 20, help="of each file (default 512m)")
    parser.add_argument("--rounds", type=int, default=9, help="of all, in turns (default %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    shown = {key: value for key, value in vars(arguments).items() if key != "folder"}
    with report.CpuWatch() as watch:
        outcome = measure(arguments.folder, arguments.capacity, arguments.rounds)
    return publish(argparse.Namespace(**shown), outcome, watch)


def measure(folder: Path, capacity: int, rounds: int) -> Outcome:
    """Medians over the rounds, for each size of blocks."""
    figures: list[Figure] = []
    sizes: list[dict[str, Any]] = []
    for block, depth in ssd.DEPTHS.items():
        with ExitStack() as stack:
            tiers = {}
            for way in WAYS:
                path = [str(folder / f"kvlane-{way}.data")]
                tier = _bench.SsdBench(path, capacity, block, (depth + 1) * block, False, way)
                tiers[way] = stack.enter_context(closing(tier))
                tier.write(capacity // block)
                ssd.await_path(tier)
            rates: dict[str, dict[str, list[float]]] = {way: {"read": [], "write": []} for way in WAYS}
            for number in range(rounds):
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    tier, count = tiers[way], capacity // block
                    for op in ("read", "write"):
                        done = tier.write(count) if op == "write" else tier.read(count // 2, count, depth)
                        rates[way][op].append(done[0] / done[1] / 1e9)
            paths = {way: tier.paths()[0] for way, tier in tiers.items()}
        medians = {way: {op: statistics.median(values) for op, values in rates[way].items()} for way in WAYS}
        name = ssd.name_of(block)
        for op in ("read", "write"):
            figures += [Figure(f"{op} {name}, {way}", medians[way][op], "GB/s") for way in WAYS]
        taken = "staged" if paths["auto"][0] else "direct"
        better = max(medians["direct"]["read"], medians["staged"]["read"])
        what = f"read {name}, auto ({taken}) / the better way"
        figures.append(Figure(what, medians["auto"]["read"] / better, at_least=AUTO_GOAL))
        sizes.append({"block_bytes": block, "paths": paths, "rates": rates, "medians": medians})
    note = (
        f"Files of {capacity >> 20} MiB, {rounds} rounds in which all take turns. Checksums are verified in all. auto: "
        + "; ".join(f"{ssd.name_of(size['block_bytes'])}: {size['paths']['auto'][1]}" for size in sizes)
    )
    return Outcome("ssd-ways", figures, {"sizes": sizes}, note)


if __name__ == "__main__":
    sys.exit(main())
