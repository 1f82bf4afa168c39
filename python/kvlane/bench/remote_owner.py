"""An owner that lends at its full rate: how long hits in its own pool take meanwhile."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from kvlane.bench import report
from kvlane.bench.children import Child
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.remote_fetch import PATIENT, PROMPT, Measured, Reads, save_at
from kvlane.bench.remote_hosts import Cluster, Settings

KEYS = 625
_BLOCK_BYTES = 4096
# Between two hits, in seconds.
_PAUSE = 0.001


def owner(settings: Settings) -> Measured:
    """Hits at the owner in three kinds of turns: alone, while it lends, and while other processes READ as much."""
    size = settings.blocks * settings.block_bytes
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners[:1], settings.pool_bytes, flags=PATIENT)
        )
        (member,) = cluster.owners
        save_at(member, settings)
        reads = stack.enter_context(closing(Reads(settings)))
        hashes = block_hashes("hits", KEYS)
        memory = Memory(_BLOCK_BYTES * KEYS)
        engine = Engine(member.address, "hits", block_bytes=_BLOCK_BYTES, memory=memory)
        stack.enter_context(closing(engine))
        engine.save(hashes, range(KEYS))
        member.daemon.settle()
        borrower = Child(["-m", "kvlane.bench.remote_sides", "borrower"], {}, inside=settings.here.inside)
        stack.callback(borrower.end)
        borrower.ask("begin", address=cluster.borrower.address, block_bytes=settings.block_bytes)
        borrowing = {"prompt": PROMPT, "blocks": settings.blocks}
        borrower.ask("borrow", **borrowing, seconds=0.01)

        def alone() -> dict[str, float]:
            return _hits(engine, hashes, settings.seconds)

        def lending() -> dict[str, float]:
            borrower.tell("borrow", **borrowing, seconds=settings.seconds)
            hits = _hits(engine, hashes, settings.seconds)
            done = borrower.answer("borrow")
            lent = done["tokens"] // TOKENS_PER_BLOCK * settings.block_bytes
            return hits | {"gb_per_s": lent / done["seconds"] / 1e9}

        def beside_reads() -> dict[str, float]:
            reads.begin(math.ceil(settings.seconds / reads.read()))
            hits = _hits(engine, hashes, settings.seconds)
            return hits | {"gb_per_s": size / reads.end() / 1e9}

        does: dict[str, Callable[[], dict[str, float]]] = {
            "alone": alone,
            "lending": lending,
            "beside READs": beside_reads,
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in does}
        for number in range(settings.rounds):
            first = number % len(does)
            for name in [*does, *does][first : first + len(does)]:
                rounds[name].append(does[name]())
    medians = {
        name: {what: statistics.median(each[what] for each in values) for what in values[0]}
        for name, values in rounds.items()
    }
    p99 = {name: values["p99"] for name, values in medians.items()}
    figures = [
        Figure("owner lends meanwhile", medians["lending"]["gb_per_s"], "GB/s"),
        Figure(f"hit of {KEYS} keys at the owner, alone, p99", p99["alone"], "ms"),
        Figure("hit at the owner while it lends, p99 / alone", p99["lending"] / p99["alone"], at_most=1.5),
        Figure("hit at the owner beside READs of others, p99 / alone", p99["beside READs"] / p99["alone"]),
        Figure(
            f"thread that sleeps {_PAUSE * 1e3:.0f} ms, how much longer, while the owner lends, p99",
            medians["lending"]["late_p99"],
            "ms",
        ),
    ]
    return figures, {"medians": medians, "rounds": rounds}


def _hits(engine: Engine, hashes: list[bytes], seconds: float) -> dict[str, float]:
    """Milliseconds of hits, one after the other with pauses, for so long. `late_p99` is how much longer than asked this
    thread slept: what the machine's processors add to whatever runs once."""
    took: list[float] = []
    late: list[float] = []
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        hit = engine.lookup(hashes)
        took.append((time.perf_counter() - start) * 1e3)
        assert hit.tokens == len(hashes) * TOKENS_PER_BLOCK, "a hit of the owner's own is not whole"
        engine.release(hit)
        slept = time.perf_counter()
        time.sleep(_PAUSE)
        late.append((time.perf_counter() - slept - _PAUSE) * 1e3)
    return report.summary(took) | {"late_p99": report.summary(late)["p99"]}
