"""Lookups of `kvlane bench remote`: what other hosts cost them if nothing is there, and how soon a block is found."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvlane.bench import daemon, report
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.remote_hosts import Cluster, Member, Settings

Measured = tuple[list[Figure], dict[str, Any]]
KEYS = 625
_POOL_BYTES = 256 << 20
_KEY_BYTES = 4096
# The breaker leaves a daemon out that has missed so many questions.
_FIRST = 3
# Lookups after a daemon was stopped or killed, at most.
_AFTER = 60
# SSD hits after it was stopped.
_SSD_AFTER = 10
# A prompt on an SSD.
_SSD_BLOCKS, _SSD_BLOCK_BYTES = 64, 64 << 10
# A difference that is none: lookups differ by more among themselves.
_NOTHING_MS = 0.05
_PATIENCE_S = 60.0

_prompts = map("lookups-{}".format, itertools.count())


def _engine(
    member: Member | daemon.Daemon, name: str, block_bytes: int = _KEY_BYTES, blocks: int = 1
) -> Engine:
    return Engine(member.address, name, block_bytes=block_bytes, memory=Memory(block_bytes * blocks))


def _timed(engine: Engine, hashes: list[bytes]) -> tuple[float, int]:
    """Milliseconds of a lookup, and the blocks that it found."""
    start = time.perf_counter()
    hit = engine.lookup(hashes)
    took = time.perf_counter() - start
    engine.release(hit)
    return took * 1e3, hit.tokens // TOKENS_PER_BLOCK


def _wait_until_asked(owner: Member, borrower: Engine) -> None:
    """Waits until the borrower asks the owner: it finds a block there. OSError after a minute."""
    deadline = time.monotonic() + _PATIENCE_S
    with closing(_engine(owner, "probe")) as probe:
        while True:
            hashes = block_hashes(next(_prompts), 1)
            probe.save(hashes, [0])
            owner.daemon.settle()
            if _timed(borrower, hashes)[1]:
                return
            if time.monotonic() > deadline:
                raise OSError("the borrower does not ask the owner again")
            time.sleep(0.05)


def _cold(engines: dict[str, Engine], count: int, took: dict[str, list[float]]) -> None:
    """Lookups in turns of prompts that nobody has."""
    for number in range(count):
        hashes = block_hashes(next(_prompts), KEYS)
        names = list(engines)
        for name in names if number % 2 else reversed(names):
            ms, found = _timed(engines[name], hashes)
            assert not found, "a cold prompt was found"
            took.setdefault(name, []).append(ms)


def cold(settings: Settings) -> Measured:
    """Lookups that find nothing, with a cluster and without, while its other daemon runs, is stopped, and is killed."""
    with ExitStack() as stack:
        off = stack.enter_context(daemon.running(_POOL_BYTES, own_session=True))
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners[:1], _POOL_BYTES, flags=settings.flags)
        )
        (owner,) = cluster.owners
        engines = {"off": _engine(off, "off"), "on": _engine(cluster.borrower, "on")}
        for engine in engines.values():
            stack.callback(engine.close)
        _wait_until_asked(owner, engines["on"])
        alive: dict[str, list[float]] = {}
        _cold(engines, settings.lookups, alive)

        def disturbed(disturb: Callable[[], None], mend: Callable[[], None]) -> list[dict[str, list[float]]]:
            rounds = []
            for _ in range(settings.rounds):
                disturb()
                took: dict[str, list[float]] = {}
                _cold(engines, min(_AFTER, settings.lookups), took)
                rounds.append(took)
                mend()
                cluster.wait_until_reached()
                _wait_until_asked(owner, engines["on"])
            return rounds

        stopped = disturbed(owner.stop, owner.go_on)
        killed = disturbed(owner.kill, owner.start)
    own = {name: report.summary(values) for name, values in alive.items()}
    figures = [
        Figure(f"cold lookup of {KEYS} keys, no cluster, p50", own["off"]["p50"], "ms"),
        Figure(
            "cold lookup, cluster on, p50: more than without",
            own["on"]["p50"] - own["off"]["p50"],
            "ms",
            at_most=1.0,
        ),
        Figure("cold lookup, cluster on, p99: more than without", own["on"]["p99"] - own["off"]["p99"], "ms"),
    ]
    for name, rounds in (("stopped", stopped), ("killed", killed)):
        first, later = zip(*map(_first_and_later, rounds), strict=True)
        figures += [
            Figure(f"cold lookup, peer {name}: more at first", statistics.median(first), "ms", at_most=2.0),
            Figure(
                f"cold lookup, peer {name}: more then, p50",
                statistics.median(later),
                "ms",
                at_most=_NOTHING_MS,
            ),
        ]
    return figures, {"alive": own, "stopped": stopped, "killed": killed}


def _first_and_later(took: dict[str, list[float]]) -> tuple[float, float]:
    """How much longer than without a cluster the slowest of the first lookups took, and the median of the others."""
    off = statistics.median(took["off"])
    return max(took["on"][:_FIRST]) - off, statistics.median(took["on"][_FIRST:]) - off


def seen(settings: Settings) -> Measured:
    """From when a block is visible at its owner until the borrower has it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners[:1], _POOL_BYTES, flags=settings.flags)
        )
        took, questions = _seen(stack, cluster, settings.lookups)
    times = report.summary(took)
    figures = [
        Figure("visible here, found from another host, p50", times["p50"], "ms"),
        Figure("visible here, found from another host, p99", times["p99"], "ms", at_most=5.0),
    ]
    return figures, {"ms": times, "lookups": questions, "blocks": len(took)}


def _seen(stack: ExitStack, cluster: Cluster, blocks: int) -> tuple[list[float], int]:
    """Milliseconds for each block, and the lookups that took."""
    took: list[float] = []
    questions = 0
    at_owner, at_borrower = _engine(cluster.owners[0], "owner"), _engine(cluster.borrower, "borrower")
    stack.callback(at_owner.close)
    stack.callback(at_borrower.close)
    _wait_until_asked(cluster.owners[0], at_borrower)
    for _ in range(blocks):
        hashes = block_hashes(next(_prompts), 1)
        at_owner.save(hashes, [0])
        while not _timed(at_owner, hashes)[1]:
            pass
        visible = time.perf_counter()
        questions += 1
        while not _timed(at_borrower, hashes)[1]:
            questions += 1
        took.append((time.perf_counter() - visible) * 1e3)
    return took, questions


def index(settings: Settings) -> Measured:
    """The same by two replicas of an index: how soon a block is found; and lookups that find nothing, while they run
    and when both are killed."""
    with ExitStack() as stack:
        off = stack.enter_context(daemon.running(_POOL_BYTES))
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners[:1], _POOL_BYTES, flags=settings.flags, replicas=2)
        )
        took, questions = _seen(stack, cluster, settings.lookups)
        engines = {"off": _engine(off, "off"), "on": _engine(cluster.borrower, "on")}
        for engine in engines.values():
            stack.callback(engine.close)
        alive: dict[str, list[float]] = {}
        _cold(engines, settings.lookups, alive)
        killed = []
        for _ in range(settings.rounds):
            for replica in cluster.replicas:
                replica.kill()
            of_round: dict[str, list[float]] = {}
            _cold(engines, min(_AFTER, settings.lookups), of_round)
            killed.append(of_round)
            for replica in cluster.replicas:
                replica.start()
            cluster.wait_until_reached()
            _wait_until_asked(cluster.owners[0], engines["on"])
    times = report.summary(took)
    own = {name: report.summary(values) for name, values in alive.items()}
    first, later = zip(*map(_first_and_later, killed), strict=True)
    more = own["on"]["p50"] - own["off"]["p50"]
    figures = [
        Figure("index: visible here, found from another host, p50", times["p50"], "ms"),
        Figure("index: visible here, found from another host, p99", times["p99"], "ms", at_most=20.0),
        Figure("index: cold lookup, p50: more than without", more, "ms", at_most=1.0),
        Figure(
            "index: cold lookup, all replicas killed: more at first",
            statistics.median(first),
            "ms",
            at_most=2.0,
        ),
        Figure(
            "index: cold lookup, all replicas killed: more then, p50",
            statistics.median(later),
            "ms",
            at_most=_NOTHING_MS,
        ),
    ]
    return figures, {"ms": times, "lookups": questions, "alive": own, "killed": killed}


def ssd(settings: Settings) -> Measured:
    """Hits that lie on an SSD, with a cluster whose owner of the same blocks is stopped, and without a cluster."""
    rounds = [
        [block_hashes(next(_prompts), _SSD_BLOCKS) for _ in range(_SSD_AFTER)] for _ in range(settings.rounds)
    ]
    hashes = [prompt for prompts in rounds for prompt in prompts]
    capacity = 2 * len(hashes) * _SSD_BLOCKS * _SSD_BLOCK_BYTES + (64 << 20)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))

        def on(name: str) -> list[str]:
            return ["--ssd", f"{folder}/{name}:{capacity}"]

        alone = Member(capacity, on("alone"), f"unix:{folder}/alone.sock", ())
        stack.callback(alone.close)
        cluster = stack.enter_context(
            Cluster(
                settings.here, settings.owners[:1], capacity, flags=settings.flags, of_borrower=on("borrower")
            )
        )
        (owner,) = cluster.owners
        members = {"off": alone, "on": cluster.borrower}
        for member in members.values():
            _save_all(member, hashes)
            # Only the SSD keeps blocks over a restart.
            member.restart()
        _save_all(owner, hashes)
        engines = {
            name: _engine(member, name, _SSD_BLOCK_BYTES, _SSD_BLOCKS) for name, member in members.items()
        }
        asking = _engine(cluster.borrower, "asking")
        for engine in (*engines.values(), asking):
            stack.callback(engine.close)
        took: list[dict[str, list[float]]] = []
        missing = 0
        for prompts in rounds:
            cluster.wait_until_reached()
            _wait_until_asked(owner, asking)
            owner.stop()
            of_round: dict[str, list[float]] = {name: [] for name in engines}
            for number, prompt in enumerate(prompts):
                names = list(engines)
                for name in names if number % 2 else reversed(names):
                    ms, found = _timed(engines[name], prompt)
                    of_round[name].append(ms)
                    missing += _SSD_BLOCKS - found
            took.append(of_round)
            owner.go_on()
    # A disk's times differ much more than what is looked for, so each hit is compared with the one beside it.
    more = [[on - off for on, off in zip(each["on"], each["off"], strict=True)] for each in took]
    off = statistics.median(ms for each in took for ms in each["off"])
    first = statistics.median(ms for each in more for ms in each[:_FIRST])
    all_of_them = statistics.median(ms for each in more for ms in each)
    figures = [
        Figure(f"hit of {_SSD_BLOCKS} blocks of 64 KiB on the SSD, no cluster, p50", off, "ms"),
        Figure("SSD hit, owner stopped: more, p50", all_of_them, "ms", at_most=1.0),
        Figure(f"SSD hit, owner stopped: more in the first {_FIRST}, p50", first, "ms"),
        Figure("SSD hits, owner stopped: blocks missing", missing, "blocks", at_most=0.0),
    ]
    return figures, {"rounds": took, "missing_blocks": missing}


def _save_all(member: Member, hashes: list[list[bytes]]) -> None:
    with closing(_engine(member, "saver", _SSD_BLOCK_BYTES, _SSD_BLOCKS)) as engine:
        for prompt in hashes:
            engine.save(prompt, range(_SSD_BLOCKS))
    member.daemon.settle()
