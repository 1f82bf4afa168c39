"""Makes traces whose work is mostly prefill, mostly decode, or swings every five minutes, in Mooncake's format.

    python bench/replay/shapes.py FOLDER [--rate SHARE] [--seed N]

Half an hour each. Lengths are lognormal, arrivals a Poisson process, and no prompt shares anything with another one:
what a router gains from prefixes is measured elsewhere. Rates are those at which eight H100s with a model of
Llama-3.1-8B's shape are busy for 75 % of the time, if each could do whatever is there to be done.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 512
MINUTES = 30
SWING_MINUTES = 5


@dataclass(frozen=True)
class Shape:
    """A kind of work."""

    prompt: tuple[float, float, int]
    """Tokens: median, sigma of the logarithm, most."""
    answer: tuple[float, float, int]
    rate: float
    """Requests a second."""


PREFILL_HEAVY = Shape((4000, 0.5, 8192), (100, 0.5, 1000), 47.0)
DECODE_HEAVY = Shape((400, 0.5, 2048), (800, 0.5, 4000), 70.0)
TRACES = {
    "prefill-heavy": [PREFILL_HEAVY],
    "decode-heavy": [DECODE_HEAVY],
    "swinging": [PREFILL_HEAVY, DECODE_HEAVY],
}


def requests(shapes: list[Shape], share: float, seed: int) -> Iterator[dict[str, object]]:
    """One after the other."""
    chance = random.Random(seed)
    at, block = 0.0, 0

    def length(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * math.exp(chance.gauss(0.0, sigma)))))

    while at < MINUTES * 60:
        shape = shapes[int(at / 60 // SWING_MINUTES) % len(shapes)]
        prompt, answer = length(*shape.prompt), length(*shape.answer)
        blocks = list(range(block, block + math.ceil(prompt / BLOCK_TOKENS)))
        block += len(blocks)
        yield {
            "timestamp": round(at * 1e3),
            "input_length": prompt,
            "output_length": answer,
            "hash_ids": blocks,
        }
        at += chance.expovariate(shape.rate * share)


def write(folder: Path, share: float = 1.0, seed: int = 1) -> dict[str, Path]:
    """All traces, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: folder / f"{name}.jsonl" for name in TRACES}
    for name, path in written.items():
        with path.open("w") as file:
            for request in requests(TRACES[name], share, seed):
                file.write(json.dumps(request) + "\n")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=1.0, help="share of the rates (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    arguments = parser.parse_args()
    for path in write(arguments.folder, arguments.rate, arguments.seed).values():
        print(path)


if __name__ == "__main__":
    main()
