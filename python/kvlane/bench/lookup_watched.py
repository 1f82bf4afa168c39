"""What a lookup costs while it is recorded or traced, beside one of a daemon that does neither."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
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

NOTES = {
    "recorded": "medians of six pairs of daemons, of which one is recorded by a `kvlane record` that reads four times "
    "a second; lookups alternate between both, and so do their order and which of them is recorded; pinned as above",
    "traced": "medians of six such pairs, of which one exports a span of each lookup and load to a collector",
}
GOALS = {"recorded": 1.03, "traced": 1.05}
_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_BLOCK_BYTES = 4096
_POOL_BYTES = 64 << 20
_WARM_UP = 100
# Each has other memory, which moves its ratio by some percent.
PAIRS = 6
_STARTS_WITHIN_S = 30.0
_PATIENCE_US = 5_000_000


def measure(how: str, blocks: int, rounds: int) -> tuple[list[Figure], dict[str, object]]:
    """The figures, and what they are made of. `how` is "recorded" or "traced". Each pair of daemons makes its part of
    the rounds."""
    hashes = block_hashes(how, blocks)
    pairs = [_pair(how, hashes, max(1, rounds // PAIRS), watched=number % 2) for number in range(PAIRS)]
    figures = []
    for placement in placements():
        for part, at_most in (("p50", GOALS[how]), ("p99", None)):
            ratios = [us[placement][how][part] / us[placement]["alone"][part] for us in pairs]
            what = f"{placement}: lookup of {blocks} hashes {how} / not {how}, {part}"
            figures.append(Figure(what, statistics.median(ratios), at_most=at_most))
    return figures, {"pairs_microseconds": pairs}


def _pair(how: str, hashes: list[bytes], rounds: int, watched: int) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds by placement and kind, of two new daemons. `watched`: which of them is recorded or traced."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        flags: list[list[str]] = [[], []]
        if how == "traced":
            flags[watched] = ["--otlp-endpoint", f"http://127.0.0.1:{stack.enter_context(_sink())}"]
        serving = [stack.enter_context(daemon.running(_POOL_BYTES, *each)) for each in flags]
        if how == "recorded":
            stack.enter_context(_recording(serving[watched], Path(folder) / "trace.jsonl"))
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
                us = _alternate(engines, hashes, rounds, _TRACEPARENT if how == "traced" else "")
            found[placement] = {
                "alone": report.summary(us[1 - watched]),
                how: report.summary(us[watched]),
            }
        if how == "recorded":
            assert engines[watched].scheduler.is_recorded and not engines[1 - watched].scheduler.is_recorded
        for engine in engines:
            engine.close()
    return found


def _alternate(
    engines: list[Engine], hashes: list[bytes], rounds: int, traceparent: str
) -> tuple[list[float], list[float]]:
    """Microseconds of each lookup, by engine. All requests come with the header; one daemon exports nothing."""
    tokens = len(hashes) * TOKENS_PER_BLOCK
    us: tuple[list[float], list[float]] = ([], [])
    for number in range(-_WARM_UP, rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            scheduler = engines[index].scheduler
            scheduler.lookup_start("lookup", [hashes], tokens, traceparent=traceparent)
            hit = scheduler.lookup_poll("lookup", _PATIENCE_US)
            took = time.perf_counter() - start
            assert hit is not None and hit.tokens == tokens, f"not the {tokens} tokens that were saved"
            engines[index].release(hit)
            if number >= 0:
                us[index].append(1e6 * took)
    return us


@contextmanager
def _sink() -> Iterator[int]:
    """The port of a collector in a process of its own."""
    command = [sys.executable, "-m", "kvlane.bench.otlp_sink"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


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
