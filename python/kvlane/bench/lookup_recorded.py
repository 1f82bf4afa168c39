"""What a lookup costs while `kvlane record` records it, beside one of a daemon that nobody records."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvlane.bench import daemon, report
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.placement import pinned, placements
from kvlane.bench.processes import beside_python

NOTE = (
    "medians of six pairs of daemons, of which one is recorded by a `kvlane record` that reads four times a second; "
    "lookups alternate between both, and so do their order and which daemon is recorded; pinned as the others"
)
_BLOCK_BYTES = 4096
_POOL_BYTES = 64 << 20
_WARM_UP = 100
# Each has other memory, which moves its ratio by some percent.
PAIRS = 6
_STARTS_WITHIN_S = 30.0


def measure(blocks: int, rounds: int) -> tuple[list[Figure], dict[str, object]]:
    """The figures, and what they are made of. Each pair of daemons makes its part of the rounds."""
    hashes = block_hashes("recorded", blocks)
    pairs = [_pair(hashes, max(1, rounds // PAIRS), recorded=number % 2) for number in range(PAIRS)]
    figures = []
    for placement in placements():
        for part, at_most in (("p50", 1.03), ("p99", None)):
            ratios = [us[placement]["recorded"][part] / us[placement]["alone"][part] for us in pairs]
            what = f"{placement}: lookup of {blocks} hashes recorded / not recorded, {part}"
            figures.append(Figure(what, statistics.median(ratios), at_most=at_most))
    return figures, {"pairs_microseconds": pairs}


def _pair(hashes: list[bytes], rounds: int, recorded: int) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds by placement and kind, of two new daemons. `recorded`: which of them is."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        serving = [stack.enter_context(daemon.running(_POOL_BYTES)) for _ in range(2)]
        stack.enter_context(_recording(serving[recorded], Path(folder) / "trace.jsonl"))
        engines = []
        for serve in serving:
            memory = Memory(_BLOCK_BYTES * len(hashes))
            engine = Engine(serve.address, "lookup", block_bytes=_BLOCK_BYTES, memory=memory)
            engine.save(hashes, range(len(hashes)))
            serve.settle()
            engines.append(engine)
        for placement, (near, far) in placements().items():
            with ExitStack() as pins:
                pins.enter_context(pinned(os.getpid(), near))
                for serve in serving:
                    pins.enter_context(pinned(serve.pid, far))
                us = _alternate(engines, hashes, rounds)
            found[placement] = {
                "alone": report.summary(us[1 - recorded]),
                "recorded": report.summary(us[recorded]),
            }
        assert engines[recorded].scheduler.is_recorded and not engines[1 - recorded].scheduler.is_recorded
        for engine in engines:
            engine.close()
    return found


def _alternate(engines: list[Engine], hashes: list[bytes], rounds: int) -> tuple[list[float], list[float]]:
    """Microseconds of each lookup, by engine."""
    tokens = len(hashes) * TOKENS_PER_BLOCK
    us: tuple[list[float], list[float]] = ([], [])
    for number in range(-_WARM_UP, rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            hit = engines[index].scheduler.lookup([hashes], tokens)
            took = time.perf_counter() - start
            assert hit.tokens == tokens, f"{hit.tokens} tokens were found and not {tokens}"
            engines[index].release(hit)
            if number >= 0:
                us[index].append(1e6 * took)
    return us


@contextmanager
def _recording(serve: daemon.Daemon, file: Path) -> Iterator[None]:
    process = subprocess.Popen(
        [beside_python("kvlane"), "record", str(file), "--addr", serve.address], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        # The file is made when the daemon records.
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("kvlane record did not begin")
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait()
