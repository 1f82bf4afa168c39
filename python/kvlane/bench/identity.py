"""`kvlane bench identity`: how long an engine's start takes to tell a model's weights apart by their content."""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import count
from kvlane.connector.weights_memo import YOUNG_NS, WeightsMemo

NAME = "identity"
HELP = (
    "weights told apart by their content, read cold from the disk and remembered; writes files of that size"
)
_FILES = 8
_TENSORS = 300
_PIECE = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench identity`."""
    parser.add_argument(
        "--gigabytes", type=float, default=16.0, help="of weights, written and removed (default %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="on the disk to measure (default: the one for temporary files)",
    )
    parser.add_argument("--rounds", type=count, default=5, help="of both (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Milliseconds to the digest. A round begins with nothing of the files in memory."""
    milliseconds: dict[str, list[float]] = {"read": [], "remembered": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        files = _write_model(Path(folder), int(arguments.gigabytes * 1e9))
        newest = max(each.stat().st_ctime_ns for each in files)
        # A file that could still be written without a change of its times is not remembered.
        time.sleep(max(0, newest + YOUNG_NS - time.time_ns()) / 1e9)
        digests = set()
        for number in range(arguments.rounds):
            memo = Path(folder) / f"memo-{number}"
            # The second memo stands for the next process, which has only the entries on disk.
            for way in milliseconds:
                _drop_from_memory(files)
                start = time.perf_counter()
                digests.add(WeightsMemo(memo).content(files).digest)
                milliseconds[way].append((time.perf_counter() - start) * 1e3)
            if not any(memo.iterdir()):
                raise SystemExit(
                    "kvlane bench identity: nothing was remembered, so there is nothing to compare"
                )
        assert len(digests) == 1, "the same files have several digests"
    medians = {way: report.summary(values)["p50"] for way, values in milliseconds.items()}
    figures = [
        Figure("identity of the weights, read cold", medians["read"], "ms", at_most=500.0),
        Figure("identity of the weights, remembered", medians["remembered"], "ms", at_most=5.0),
    ]
    note = (
        f"{_FILES} safetensors files with {_TENSORS} tensors, {arguments.gigabytes:g} GB, dropped from memory before "
        f"each round; medians of {arguments.rounds}."
    )
    return Outcome(NAME, figures, {"milliseconds": milliseconds}, note)


def _write_model(folder: Path, size: int) -> list[Path]:
    """Weights of one size each, in files of one size each."""
    report.say(f"writing {size / 1e9:g} GB to {folder}")
    piece = os.urandom(_PIECE)
    files = []
    for number in range(_FILES):
        tensors = range(number, _TENSORS, _FILES)
        length = size // _TENSORS // 2 * 2
        header = json.dumps(
            {
                f"model.layers.{tensor}.weight": {
                    "dtype": "BF16",
                    "shape": [length // 2],
                    "data_offsets": [place * length, (place + 1) * length],
                }
                for place, tensor in enumerate(tensors)
            }
        ).encode()
        path = folder / f"model-{number + 1:05}-of-{_FILES:05}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            left = length * len(tensors)
            while left:
                left -= file.write(piece[: min(left, _PIECE)])
            file.flush()
            os.fsync(file.fileno())
        files.append(path)
    return files


def _drop_from_memory(files: Sequence[Path]) -> None:
    """Drops the files from memory, so that the next read comes from the disk."""
    for each in files:
        with each.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
