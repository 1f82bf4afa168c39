"""`kvlane bench lookup`: what a lookup costs beside a bare round trip over a Unix socket, alone and among many."""

from __future__ import annotations

import argparse
import os
import time

from kvlane import _bench
from kvlane.bench import busy, daemon, lookup_watched, report, sessions
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.placement import pinned, placements
from kvlane.bench.roundtrip import echo_process, ping_pong
from kvlane.bench.sizes import count

NAME = "lookup"
HELP = (
    "625 block hashes from Python against a bare 20 kB ping-pong; with --sessions also many engines at once, with "
    "--busy also beside saves, evictions and threads that compute, with --recorded and --traced of such daemons too"
)
BLOCK_BYTES = 4096
# A pool so large that saves at full speed do not evict a prompt between two lookups of it.
_POOL_BYTES = 256 << 20
_WARM_UP = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench lookup`."""
    parser.add_argument("--blocks", type=count, default=625, help="hashes a lookup (default %(default)s)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3000,
        help="of each kind, interleaved; 0 leaves these out (default %(default)s)",
    )
    parser.add_argument("--sessions", type=int, default=0, help="engines that ask at once; 0 leaves this out")
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="lookups a second of all sessions together"
    )
    parser.add_argument("--processes", type=count, default=4, help="that the sessions are spread over")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase with sessions")
    parser.add_argument(
        "--recorded", action="store_true", help="also of a daemon that `kvlane record` records"
    )
    parser.add_argument(
        "--traced", action="store_true", help="also of a daemon that exports a span of each lookup"
    )
    parser.add_argument("--busy", action="store_true", help="also in a busy engine on a busy host")
    parser.add_argument(
        "--busy-rounds", type=count, default=300, help="of each kind in a phase (default %(default)s)"
    )
    parser.add_argument(
        "--busy-phases", type=count, default=5, help="quiet ones, and as many busy ones (default %(default)s)"
    )
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """The round trips; the sessions and the busy engine where they are asked for."""
    figures: list[Figure] = []
    details: dict[str, object] = {}
    notes: list[str] = []
    with daemon.running(_POOL_BYTES) as serve:
        if arguments.rounds:
            for placement, (near, far) in placements().items():
                with pinned(os.getpid(), near), pinned(serve.pid, far):
                    found, detail = _round_trips(serve, placement, far, arguments.blocks, arguments.rounds)
                figures += found
                details[placement] = detail
            notes.append(
                f"{arguments.blocks} hashes of 32 bytes from Python; the lease is released after each lookup, outside "
                "the timing; ping-pong: as many bytes there and back, blocking, between two processes, rounds "
                "interleaved. Where the kernel puts the two sides decides half of either figure, so both are pinned: "
                "on two cores, as an engine and a daemon at work are, and on one, where waking the other side is "
                "cheapest."
            )
        if arguments.sessions:
            load = sessions.Load(
                serve.address,
                arguments.blocks,
                arguments.sessions,
                arguments.rate,
                arguments.processes,
                arguments.seconds,
                _POOL_BYTES,
            )
            found, phases = sessions.measure(load)
            figures += found
            details |= {"sessions": phases}
            notes.append(f"Sessions: {sessions.NOTE}")
    for how, is_asked in (("recorded", arguments.recorded), ("traced", arguments.traced)):
        if is_asked:
            found, detail = lookup_watched.measure(how, arguments.blocks, arguments.rounds or 3000)
            figures += found
            details |= {how: detail}
            notes.append(f"{how.capitalize()}: {lookup_watched.NOTES[how]}.")
    if arguments.busy:
        found, phases = busy.measure(arguments.blocks, arguments.busy_rounds, arguments.busy_phases)
        figures += found
        details |= {"busy": phases}
        notes.append(f"Busy engine: {busy.NOTE}")
    return Outcome(NAME, figures, details, " ".join(notes))


def _round_trips(
    serve: daemon.Daemon, placement: str, far: set[int], blocks: int, rounds: int
) -> tuple[list[Figure], dict[str, object]]:
    hashes = block_hashes("lookup", blocks)
    ping_bytes = sum(map(len, hashes))
    tokens = blocks * TOKENS_PER_BLOCK
    seconds: dict[str, list[float]] = {"lookup": [], "python": [], "rust": []}
    # The other processes start first, because a process with threads should not fork.
    with (
        echo_process(ping_bytes, far, in_rust=False) as python,
        echo_process(ping_bytes, far, in_rust=True) as rust,
    ):
        engine = Engine(serve.address, "lookup", block_bytes=BLOCK_BYTES, memory=Memory(BLOCK_BYTES * blocks))
        engine.save(hashes, range(blocks))
        serve.settle()
        asked = [hashes]
        lookup = engine.scheduler.lookup
        for number in range(-_WARM_UP, rounds):
            start = time.perf_counter()
            hit = lookup(asked, tokens)
            looked_up = time.perf_counter() - start
            assert hit.tokens == tokens, f"{hit.tokens} tokens were found and not {tokens}"
            engine.release(hit)
            pinged = ping_pong(python, ping_bytes)
            pinged_in_rust = _bench.ping_pong(rust.fileno(), ping_bytes)
            if number >= 0:
                seconds["lookup"].append(looked_up)
                seconds["python"].append(pinged)
                seconds["rust"].append(pinged_in_rust)
        engine.close()
    us = {name: report.summary(each * 1e6 for each in values) for name, values in seconds.items()}
    figures = [
        Figure(f"{placement}: lookup of {blocks} hashes, p50", us["lookup"]["p50"], "us", at_most=100.0),
        Figure(f"{placement}: lookup of {blocks} hashes, p99", us["lookup"]["p99"], "us"),
        Figure(f"{placement}: ping-pong from Python, p50", us["python"]["p50"], "us"),
        Figure(f"{placement}: ping-pong in Rust, p50", us["rust"]["p50"], "us"),
        Figure(
            f"{placement}: lookup / ping-pong from Python, p50",
            us["lookup"]["p50"] / us["python"]["p50"],
            at_most=2.0,
        ),
        Figure(f"{placement}: lookup / ping-pong in Rust, p50", us["lookup"]["p50"] / us["rust"]["p50"]),
    ]
    return figures, {"microseconds": us}
