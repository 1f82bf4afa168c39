"""`kvlane bench gpu-copy`: scattered pieces between host and GPU, and between GPUs, against one contiguous copy."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import NamedTuple

from kvlane import _bench
from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import count

NAME = "gpu-copy"
HELP = "shuffled pieces between host and GPU, over one link and several, and between GPUs; needs a GPU"
KIB, MIB = 1 << 10, 1 << 20
# The goal for pieces of each size, as a share of the contiguous copy's rate, by path.
GOALS = {
    "h2d": {16 * KIB: 0.88, 64 * KIB: 0.91, MIB: 0.97, 2 * MIB: 0.97},
    "d2h": {16 * KIB: 0.88, 64 * KIB: 0.93, MIB: 0.97, 2 * MIB: 0.97},
    "peer": {64 * KIB: 0.88},
}
# Loads through rings, on other GPUs and on the same one: the size of pieces, and the amount in multiples of --mib.
# RING_JOINED bytes of pieces lie together in the host's memory, as the layers of a block do.
RING_SHAPES = ((16 * KIB, 1), (64 * KIB, 1), (64 * KIB, 4))
RING_JOINED = 256 * KIB
# The goal for four links, as a multiple of one.
FOUR_LINKS_GOAL = 2.2
# The goal as a share of contiguous copies over all links at once, where every GPU loads its own part, as the ranks of
# an engine do.
TOGETHER_GOAL = 0.95
PIECES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
METHODS = ("auto", "kernel", "batch", "engine")


class Rings(NamedTuple):
    """A load from the host through rings."""

    piece: int
    size: int
    """Bytes in multiples of --mib."""
    rails: int
    """GPUs beside the loading one, whose links bring a part."""
    staged: bool
    """Whether the bytes on the GPU's own link go through a ring on that GPU, in long runs."""


class Together(NamedTuple):
    """Loads from the host to all GPUs at the same time."""

    piece: int
    """Bytes of a piece; 0 for one piece."""
    staged: bool


CONTIGUOUS = Together(0, staged=False)
TOGETHER = (
    CONTIGUOUS,
    *(Together(piece, staged) for piece in (16 * KIB, 64 * KIB) for staged in (False, True)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench gpu-copy`."""
    parser.add_argument("--gpu", type=int, default=0, help="ordinal (default %(default)s)")
    parser.add_argument("--peer", type=int, help="the other GPU; by default the next one, where there is one")
    parser.add_argument("--mib", type=count, default=256, help="in all pieces together (default %(default)s)")
    parser.add_argument(
        "--rounds", type=count, default=3, help="of all ways, interleaved (default %(default)s)"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["auto"], help="ways to copy")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="only what `kvlane serve` measures at its start, and the thresholds that follow",
    )
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = calibrate(arguments) if arguments.calibrate else measure(arguments)
    return publish(arguments, outcome, watch)


def calibrate(arguments: argparse.Namespace) -> Outcome:
    """Runs the measurement that the daemon makes at its start."""
    try:
        rates, thresholds = _bench.gpu_calibrate(arguments.gpu)
    except OSError as error:
        sys.exit(f"kvlane bench gpu-copy needs a GPU: {error}")
    figures = [
        Figure(f"{path}: pieces of {piece >> 10} KiB, {way}", rate, "GB/s")
        for path, piece, way, rate in rates
    ]
    for path, batch_bytes, engine_bytes in thresholds:
        figures.append(Figure(f"{path}: copy engines from, batch calls", batch_bytes >> 10, "KiB"))
        figures.append(Figure(f"{path}: copy engines from, single copies", engine_bytes >> 10, "KiB"))
    details = {
        "gb_per_s": [
            {"path": path, "piece_bytes": piece, "method": way, "median": rate}
            for path, piece, way, rate in rates
        ],
        "thresholds": [
            {"path": path, "batch_bytes": batch_bytes, "engine_bytes": engine_bytes}
            for path, batch_bytes, engine_bytes in thresholds
        ],
    }
    note = f"256 MiB in pieces that are not adjacent, GPU {arguments.gpu}; medians over interleaved rounds."
    return Outcome(NAME, figures, details, note)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Medians over interleaved rounds; each of them is a median of seven copies whose bytes were checked."""
    try:
        gpus = _bench.gpus()
    except OSError as error:
        sys.exit(f"kvlane bench gpu-copy needs a GPU: {error}")
    others = [ordinal for ordinal, *_ in gpus if ordinal != arguments.gpu]
    peer = arguments.peer if arguments.peer is not None else next(iter(others), None)
    total = arguments.mib << 20
    rails = _bench.gpu_rails(arguments.gpu)
    through_rings = [
        Rings(piece, size, count, staged)
        for piece, size in RING_SHAPES
        for count in range(len(rails) + 1)
        for staged in (False, True)
        if count or staged
    ]
    ordinals = [ordinal for ordinal, *_ in gpus]
    together_rates: dict[Together, list[float]] = {}
    rates: dict[tuple[str, int, str], list[float]] = {}
    ring_rates: dict[Rings, list[float]] = {}
    for _ in range(arguments.rounds):
        for path in GOALS:
            if path == "peer" and peer is None:
                continue
            second = peer if path == "peer" else None
            ways = [(0, "contiguous"), *((piece, way) for piece in PIECES for way in arguments.methods)]
            for piece, way in ways:
                rate = _bench.gpu_copy(arguments.gpu, path, total, piece or total, way, peer=second)
                rates.setdefault((path, piece, way), []).append(rate)
        for way in through_rings:
            rate = _bench.gpu_load(
                arguments.gpu,
                rails[: way.rails],
                way.size * total,
                way.piece,
                RING_JOINED // way.piece,
                staged=way.staged,
            )
            ring_rates.setdefault(way, []).append(rate)
        for way in TOGETHER if len(ordinals) > 1 else ():
            method, piece = ("auto", way.piece) if way.piece else ("contiguous", total)
            joined = RING_JOINED // way.piece if way.staged else 1
            rate = _bench.gpu_together(ordinals, total, piece, method, joined, way.staged)
            together_rates.setdefault(way, []).append(rate)
    medians = {key: statistics.median(values) for key, values in rates.items()}
    figures = []
    for (path, piece, way), rate in medians.items():
        if way == "contiguous":
            figures.append(Figure(f"{path}: contiguous", rate, "GB/s"))
            continue
        goal = GOALS[path].get(piece) if way == "auto" else None
        share = rate / medians[path, 0, "contiguous"]
        figures.append(
            Figure(f"{path}: pieces of {piece >> 10} KiB, {way} / contiguous", share, at_least=goal)
        )
    for way, values in ring_rates.items():
        pieces = f"{way.size * arguments.mib} MiB in pieces of {way.piece >> 10} KiB"
        links = f"{way.rails + 1} link{'s' if way.rails else ''}" + (", staged" if way.staged else "")
        share = statistics.median(values) / medians["h2d", 0, "contiguous"]
        # As the daemon loads pieces of this length over rails.
        goal = FOUR_LINKS_GOAL if way.rails == 3 and way.staged else None
        figures.append(Figure(f"h2d: {pieces}, {links} / contiguous, 1 link", share, at_least=goal))
    for way, values in together_rates.items():
        if way.piece == 0:
            figures.append(
                Figure(f"h2d: contiguous, {len(ordinals)} GPUs at once", statistics.median(values), "GB/s")
            )
            continue
        pieces = f"pieces of {way.piece >> 10} KiB" + (", staged" if way.staged else "")
        share = statistics.median(values) / statistics.median(together_rates[CONTIGUOUS])
        figures.append(
            Figure(
                f"h2d: {pieces} / contiguous, {len(ordinals)} GPUs at once",
                share,
                # As the daemon loads pieces of this length without rails.
                at_least=TOGETHER_GOAL if way == Together(16 * KIB, staged=True) else None,
            )
        )
    details = {
        "gpus": [{"name": name, "pci": pci, "bytes": size} for _, name, pci, size in gpus],
        "gb_per_s": [
            {"path": path, "piece_bytes": piece, "method": way, "rounds": values}
            for (path, piece, way), values in rates.items()
        ],
        "rings_gb_per_s": [
            {
                "bytes": way.size * total,
                "piece_bytes": way.piece,
                "rails": rails[: way.rails],
                "staged": way.staged,
                "rounds": values,
            }
            for way, values in ring_rates.items()
        ],
        "together_gb_per_s": [
            {
                "gpus": ordinals,
                "bytes_each": total,
                "piece_bytes": way.piece,
                "staged": way.staged,
                "rounds": values,
            }
            for way, values in together_rates.items()
        ],
    }
    note = (
        f"{arguments.mib} MiB in shuffled pieces that are not adjacent, GPU {arguments.gpu}"
        + (f", peer GPU {peer}" if peer is not None else "")
        + "; from the first call until the stream is done; bytes checked after each; medians over interleaved rounds."
    )
    return Outcome(NAME, figures, details, note)
