"""Both ways of the SSD tier's transfers in turns on one device, and whether `--ssd-path auto` took the faster one.

    python bench/ssd/ways.py FOLDER --rounds 9

Each turn makes a file in FOLDER, and removes it after. bench/ssd/on_memory.sh makes a device in memory and runs this
on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import closing
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
    parser.add_argument("folder", type=Path, help="on the device; a file is made in it")
    parser.add_argument("--capacity", type=parse_size, default=512 << 20, help="of each file (default 512m)")
    parser.add_argument(
        "--blocks",
        type=lambda text: [parse_size(each) for each in text.split(",")],
        default=list(ssd.DEPTHS),
        help="sizes of blocks (default: 2m,256k)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="of all, in turns (default %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    shown = {key: value for key, value in vars(arguments).items() if key != "folder"}
    with report.CpuWatch() as watch:
        outcome = measure(arguments.folder, arguments.capacity, arguments.blocks, arguments.rounds)
    return publish(argparse.Namespace(**shown), outcome, watch)


def measure(folder: Path, capacity: int, blocks: list[int], rounds: int) -> Outcome:
    """Medians over the rounds, for each size of blocks."""
    figures: list[Figure] = []
    sizes: list[dict[str, Any]] = []
    for block in blocks:
        depth = ssd.DEPTHS.get(block, ssd.DEPTH)
        rates: dict[str, dict[str, list[float]]] = {way: {"read": [], "write": []} for way in WAYS}
        chosen: list[tuple[bool, str, tuple[int, int] | None]] = []
        count = capacity // block
        for number in range(rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                # A new file and new memory each time: where they happen to lie changes the rates, too.
                path = [str(folder / "kvlane-bench.data")]
                with closing(_bench.SsdBench(path, capacity, block, (depth + 1) * block, False, way)) as tier:
                    tier.write(count)
                    ssd.await_path(tier, capacity)
                    read, wrote = tier.read(count // 2, count, depth), tier.write(count)
                    rates[way]["read"].append(read[0] / read[1] / 1e9)
                    rates[way]["write"].append(wrote[0] / wrote[1] / 1e9)
                    if way == "auto":
                        chosen += tier.paths()
        medians = {way: {op: statistics.median(values) for op, values in rates[way].items()} for way in WAYS}
        name = ssd.name_of(block)
        for op in ("read", "write"):
            figures += [Figure(f"{op} {name}, {way}", medians[way][op], "GB/s") for way in WAYS]
        staged = sum(is_staged for is_staged, _, _ in chosen)
        taken = {0: "direct", rounds: "staged"}.get(staged, f"staged {staged} of {rounds} times")
        better = max(medians["direct"]["read"], medians["staged"]["read"])
        what = f"read {name}, auto ({taken}) / the better way"
        figures.append(Figure(what, medians["auto"]["read"] / better, at_least=AUTO_GOAL))
        sizes.append({"block_bytes": block, "chosen": chosen, "rates": rates, "medians": medians})
    note = (
        f"A file of {capacity >> 20} MiB, made anew for each way in each of {rounds} rounds. Checksums are verified in "
        "all. The better way is the one with the higher median."
    )
    return Outcome("ssd-ways", figures, {"sizes": sizes}, note)


if __name__ == "__main__":
    sys.exit(main())
