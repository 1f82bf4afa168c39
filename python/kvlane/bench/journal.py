"""`kvlane bench journal`: what it costs saves and lookups that an engine follows which blocks come and go."""

from __future__ import annotations

import argparse
import random
import statistics
import time

from kvlane.bench import daemon, report
from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.overhead import interval
from kvlane.bench.sizes import count

NAME = "journal"
HELP = "saves that evict, and lookups, with a reader of the journal against without one, in interleaved pairs"
# The pool holds so many saves. A few rounds save more, so blocks are evicted.
_SAVES_IN_POOL = 3
_HEARS_WITHIN_S = 30.0
_LOOKUPS = 40
_KINDS = ("save", "lookup", "daemon")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench journal`."""
    parser.add_argument("--blocks", type=count, default=625, help="of a prompt (default %(default)s)")
    parser.add_argument("--block-kib", type=count, default=64, help="KiB a block (default %(default)s)")
    parser.add_argument("--rounds", type=count, default=200, help="pairs of rounds (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


class _Side:
    """A daemon and its engine, with or without following the journal."""

    def __init__(
        self, serve: daemon.Daemon, arguments: argparse.Namespace, memory: Memory, follows: bool
    ) -> None:
        self.serve = serve
        self._blocks = arguments.blocks
        self._engine = Engine(
            serve.address,
            "journal",
            block_bytes=arguments.block_kib << 10,
            memory=memory,
            follow_journal=follows,
        )
        self.heard = 0
        """Entries of the journal taken so far."""

    def round(self, number: int) -> dict[str, float]:
        """Seconds: wall time of a save until it is visible and of a lookup; CPU time of the daemon for all."""
        hashes = block_hashes(f"journal {number}", self._blocks)
        before = daemon.cpu_seconds(self.serve.pid)
        start = time.perf_counter()
        saved = self._engine.save(hashes, range(self._blocks))
        self.serve.settle()
        took = {"save": time.perf_counter() - start}
        assert saved.blocks == self._blocks, f"{saved.blocks} of {self._blocks} blocks were saved"
        self._step()
        lookups = []
        for _ in range(_LOOKUPS):
            start = time.perf_counter()
            hit = self._engine.lookup(hashes)
            lookups.append(time.perf_counter() - start)
            self._engine.release(hit)
            self._step()
        took["lookup"] = statistics.median(lookups)
        took["daemon"] = daemon.cpu_seconds(self.serve.pid) - before
        return took

    def _step(self) -> None:
        """Does the work of one step of an engine."""
        self._engine.scheduler.tick()
        self.heard += len(self._engine.scheduler.take_changes()[1])

    def hears(self, entries: int) -> bool:
        """Steps until so many entries of the journal were taken. False if that takes longer than some seconds."""
        deadline = time.monotonic() + _HEARS_WITHIN_S
        while self.heard < entries and time.monotonic() < deadline:
            self._step()
            # A step asks the daemon again after 100 ms, and only a step takes the answer.
            time.sleep(0.01)
        return self.heard >= entries

    def close(self) -> None:
        self._engine.close()


def measure(arguments: argparse.Namespace) -> Outcome:
    """Medians of the ratios over pairs of sides, and their intervals."""
    save_bytes = arguments.blocks * (arguments.block_kib << 10)
    memory = Memory(save_bytes)
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    with (
        daemon.running(_SAVES_IN_POOL * save_bytes + (16 << 20)) as with_reader,
        daemon.running(_SAVES_IN_POOL * save_bytes + (16 << 20)) as without,
    ):
        on = _Side(with_reader, arguments, memory, follows=True)
        off = _Side(without, arguments, memory, follows=False)
        # Pools fill up first.
        for number in range(-2 * _SAVES_IN_POOL, arguments.rounds):
            order = (on, off) if number % 2 else (off, on)
            took = {side: side.round(number) for side in order}
            if number >= 0:
                pairs.append((took[on], took[off]))
        # Entries of the last rounds may still be on their way.
        evicted_too = 2 * arguments.blocks * (arguments.rounds - 1)
        assert on.hears(evicted_too), f"the reader heard of {on.heard} blocks that came or went"
        on.close()
        off.close()
    assert off.heard == 0, "without a reader nothing is heard"
    figures, intervals = [], {}
    names = {"save": "save until visible", "lookup": "lookup", "daemon": "daemon CPU time"}
    for kind in _KINDS:
        ratios = [mine[kind] / plain[kind] for mine, plain in pairs]
        low, high = intervals[kind] = interval(ratios, random.Random(0))
        above = statistics.median(ratios) * 100 - 100
        figures += [
            Figure(f"{names[kind]}, above that without a reader", above, "%", at_most=2.0),
            Figure(f"{names[kind]}, its 95 % interval, from", low * 100 - 100, "%"),
            Figure(f"{names[kind]}, its 95 % interval, to", high * 100 - 100, "%"),
        ]
    note = (
        f"{arguments.rounds} interleaved pairs of rounds on two daemons with full pools: {arguments.blocks} blocks of "
        f"{arguments.block_kib} KiB are saved, which evicts as many, and looked up {_LOOKUPS} times; the reader asks "
        "every 100 ms and takes all that came and went. CPU time is the daemon's for the whole round, its answers to "
        "the reader included. Intervals of medians: bootstrap over pairs."
    )
    return Outcome(NAME, figures, {"pairs_seconds": pairs, "intervals": intervals}, note)
