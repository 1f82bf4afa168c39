"""Lookups on a busy host and in a busy engine: beside saves, evictions and checks, and beside threads that compute."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from kvlane import _bench
from kvlane.bench import daemon, report, sessions
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.roundtrip import echo_process, ping_pong

NOTE = (
    "quiet and busy phases take turns; p99 is the median of the phases' own. Busy: another engine saves all the time "
    "into a full pool, the daemon seals and scrubs, and Python threads compute beside the one that asks. It asks as "
    "the connector does, first in its turn, as an engine's scheduler is after it has waited for the GPU. A thread that "
    "lets the interpreter go gets it back after those that compute, 5 ms each, whatever it asked for: the ping-pong "
    "from Python does so twice; the one in Rust is timed without that."
)
THREADS = 4
_BLOCK_BYTES = 4096
_POOL_BYTES = 64 << 20
_SCRUB = "256mb"
# The default of `kvlane.lookup_wait_us`.
_WAIT_US = 300
_WARM_UP = 20
_KINDS = ("lookup", "python", "rust")
_PHASES = ("quiet", "busy")


def measure(blocks: int, rounds: int, phases: int) -> tuple[list[Figure], dict[str, Any]]:
    """`phases` of each kind, each with `rounds` round trips of each kind."""
    hashes = block_hashes("busy", blocks)
    size = sum(map(len, hashes))
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        phase: {kind: [] for kind in _KINDS} for phase in _PHASES
    }
    saved_blocks = 0
    # The other processes first: a process with threads had better not fork.
    with (
        echo_process(size, None, in_rust=False) as python,
        echo_process(size, None, in_rust=True) as rust,
        daemon.running(_POOL_BYTES, "--scrub-rate", _SCRUB) as serve,
    ):
        engine = Engine(serve.address, "busy", block_bytes=_BLOCK_BYTES, memory=Memory(_BLOCK_BYTES * blocks))
        engine.save(hashes, range(blocks))
        serve.settle()
        # Its lease keeps the prompt from being evicted.
        kept = engine.lookup(hashes)
        ask = {
            "lookup": lambda: _lookup(engine, hashes),
            "python": lambda: ping_pong(python, size),
            "rust": lambda: _bench.ping_pong(rust.fileno(), size),
        }
        for kind in ask:
            _phase(ask[kind], _WARM_UP)
        for _ in range(phases):
            for phase in _PHASES:
                saving = sessions.saver(serve.address, _POOL_BYTES) if phase == "busy" else nullcontext()
                with saving as end_saving:
                    with _computing(THREADS if phase == "busy" else 0):
                        for kind in _KINDS:
                            seconds = _phase(ask[kind], rounds)
                            found[phase][kind].append(report.summary(each * 1e6 for each in seconds))
                    saved_blocks += end_saving() if end_saving is not None else 0
        engine.release(kept)
        engine.close()
    us = {
        phase: {
            kind: {part: statistics.median(each[part] for each in values) for part in ("p50", "p99")}
            for kind, values in kinds.items()
        }
        for phase, kinds in found.items()
    }
    details = {
        "microseconds": us,
        "phases": found,
        "threads": THREADS,
        "rounds": rounds,
        "blocks_saved_meanwhile": saved_blocks,
    }
    return _figures(us, blocks), details


def _figures(us: dict[str, dict[str, dict[str, float]]], blocks: int) -> list[Figure]:
    quiet, busy = us["quiet"], us["busy"]
    name = f"busy engine: lookup of {blocks} hashes"

    def ratio(kind: str, part: str) -> float:
        return busy[kind][part] / quiet[kind][part]

    return [
        Figure(f"{name}, p99, quiet", quiet["lookup"]["p99"], "us"),
        Figure(f"{name}, p99", busy["lookup"]["p99"], "us"),
        Figure(f"{name}, p99 / quiet", ratio("lookup", "p99"), at_most=2.0),
        Figure(f"{name}, p50 / quiet", ratio("lookup", "p50")),
        Figure("busy engine: ping-pong from Python, p99 / quiet", ratio("python", "p99")),
        Figure("busy engine: ping-pong in Rust, p99 / quiet", ratio("rust", "p99")),
        *(
            Figure(
                f"{phase} engine: lookup / ping-pong {words}, p99",
                us[phase]["lookup"]["p99"] / us[phase][kind]["p99"],
            )
            for phase in _PHASES
            for kind, words in (("python", "from Python"), ("rust", "in Rust"))
        ),
    ]


def _lookup(engine: Engine, hashes: list[bytes]) -> float:
    """Seconds of one lookup, made as the connector makes it. The lease is released outside the measured time."""
    scheduler, asked, tokens = engine.scheduler, [hashes], len(hashes) * TOKENS_PER_BLOCK
    start = time.perf_counter()
    scheduler.lookup_start("busy", asked, tokens)
    while (hit := scheduler.lookup_poll("busy", _WAIT_US)) is None:
        pass
    seconds = time.perf_counter() - start
    assert hit.tokens == tokens, f"{hit.tokens} tokens were found and not {tokens}"
    engine.release(hit)
    return seconds


def _phase(ask: Callable[[], float], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        # An engine waits for its next step here, so the next call begins a turn of the thread.
        time.sleep(1e-3)
        seconds.append(ask())
    return seconds


@contextmanager
def _computing(threads: int) -> Iterator[None]:
    """Python threads that compute, and always want the interpreter."""
    stopped = threading.Event()

    def compute() -> None:
        number = 1
        while not stopped.is_set():
            for _ in range(1000):
                number = (number * 1103515245 + 12345) & 0xFFFFFFFF

    running = [threading.Thread(target=compute) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in running:
            thread.join()
