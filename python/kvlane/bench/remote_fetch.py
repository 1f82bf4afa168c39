"""Fetches of `kvlane bench remote`: all blocks of a long prompt, from one owner and from two."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvlane import _bench
from kvlane.bench import certificates, report
from kvlane.bench.children import Child
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.extra import numpy
from kvlane.bench.fabric_sides import Cell
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.remote_hosts import Cluster, Host, Member, Settings
from kvlane.fabric import Tls

Measured = tuple[list[Figure], dict[str, Any]]
PROMPT = "remote"
# A fetch is measured to its end, however busy the machine is.
PATIENT = ("--cluster-answer-ms", "200", "--fetch-wait-ms", "60000")
# The longer a fetch may take, the later another owner is asked for what one does not bring.
_PACED = ("--cluster-answer-ms", "200", "--fetch-wait-ms", "10000")
# Payload of the wires that pace two owners.
PACES = (300e6, 600e6)
# Bytes that are saved or compared at a time.
_PART_BYTES = 64 << 20
_SALT = 7
# A busy machine may keep an owner from answering in time.
_TRIES = 3


class Borrower:
    """An engine at the borrower, which fetches one prompt."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        member = cluster.borrower
        self._member, self._owners = member, len(cluster.owners)
        self.incomplete = 0
        """Fetches that were repeated, because they did not find all."""
        self._tool = member.daemon.tool
        self._part = max(_PART_BYTES // settings.block_bytes, 1)
        self._memory = Memory(self._part * settings.block_bytes)
        self.engine = Engine(
            member.address, "borrower", block_bytes=settings.block_bytes, memory=self._memory
        )
        self.hashes = block_hashes(PROMPT, settings.blocks)

    def fetch(self) -> float:
        """Seconds of a lookup that finds all blocks at the owners. OSError if three do not find all."""
        for _ in range(_TRIES):
            start = time.perf_counter()
            hit = self.engine.lookup(self.hashes)
            took = time.perf_counter() - start
            self.engine.release(hit)
            found = hit.tokens // TOKENS_PER_BLOCK
            if found == len(self.hashes):
                return took
            self.incomplete += 1
            self.forget()
            self._member.wait_until_reached(self._owners)
        raise OSError(f"{_TRIES} fetches brought {found} of {len(self.hashes)} blocks at last")

    def forget(self) -> None:
        """Drops the blocks here; the owners keep them."""
        self._tool.drop_namespaces([self.engine.namespace])

    def compare(self) -> None:
        """Compares the first blocks with what the owner saved. OSError if they differ."""
        hit = self.engine.lookup(self.hashes[: self._part])
        self.engine.load(hit, range(hit.tokens // TOKENS_PER_BLOCK))
        loaded = self._memory.words.copy()
        self._memory.fill(_SALT)
        size = min(self._part, len(self.hashes)) * self._memory.size // self._part // 8
        if not numpy.array_equal(loaded[:size], self._memory.words[:size]):
            raise OSError("a fetch brought wrong bytes")

    def close(self) -> None:
        """Closes the connections to the daemon."""
        self.engine.close()


def save_at(owner: Member, settings: Settings) -> None:
    """Saves the blocks of the prompt."""
    part = max(_PART_BYTES // settings.block_bytes, 1)
    memory = Memory(part * settings.block_bytes)
    hashes = block_hashes(PROMPT, settings.blocks)
    with closing(Engine(owner.address, "owner", block_bytes=settings.block_bytes, memory=memory)) as engine:
        parent = b""
        for first in range(0, len(hashes), part):
            memory.fill(_SALT + first)
            of_part = hashes[first : first + part]
            engine.save(of_part, range(len(of_part)), parent)
            parent = of_part[-1]
    owner.daemon.settle()


class Reads:
    """READs of the fabric between the same hosts, of as many bytes in blocks of the same size, without checksums of its
    own. A process at either."""

    def __init__(self, settings: Settings, tls: Tls | None = None) -> None:
        self._cell = Cell("paged", settings.blocks * settings.block_bytes, settings.blocks)
        self._children: list[Child] = []
        try:
            token = secrets.token_hex(32)
            options = {
                "token": token,
                "transport": "tcp",
                "tls": tls and list(map(str, tls)),
                "checksums": False,
            }
            far, self._near = (self._side(host, options) for host in (settings.owners[0], settings.here))
            self._near.ask("connect", address=far.ask("listen"))
            self.read()
        except BaseException:
            self.close()
            raise

    def _side(self, host: Host, options: dict[str, Any]) -> Child:
        child = Child(["-m", "kvlane.bench.remote_sides", "reads"], {}, inside=host.inside)
        self._children.append(child)
        child.ask("open", size=self._cell.bytes, listen=[f"{host.address}:0"], **options)
        return child

    def read(self) -> float:
        """Seconds of one READ."""
        self.begin(1)
        return self.end()

    def begin(self, count: int) -> None:
        """Begins READs, one after the other."""
        self._near.tell("measure", op="read", cell=self._cell, warm_up=0, count=count)

    def end(self) -> float:
        """Waits for them. Returns seconds of one, on average."""
        return self._cell.bytes / self._near.answer("measure")["gb_per_s"] / 1e9

    def close(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.end()


@contextmanager
def maybe_tls(wanted: bool) -> Iterator[Tls | None]:
    """Throw-away certificates, if they are wanted. OSError with a sentence if they cannot be made."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        yield certificates.make(Path(folder))


def fetch(settings: Settings, with_tls: bool) -> Measured:
    """Fetches in turns with READs of the same bytes and their checksums."""
    name = "TLS" if with_tls else "TCP"
    size = settings.blocks * settings.block_bytes
    rounds: list[dict[str, float]] = []
    with ExitStack() as stack:
        tls = stack.enter_context(maybe_tls(with_tls))
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners[:1], settings.pool_bytes, tls=tls, flags=PATIENT)
        )
        reads = stack.enter_context(closing(Reads(settings, tls)))
        save_at(cluster.owners[0], settings)
        borrower = stack.enter_context(closing(Borrower(cluster, settings)))
        borrower.fetch()
        borrower.compare()
        does: dict[str, Callable[[], float]] = {"fetch": borrower.fetch, "read": reads.read}
        for peer, opens in () if with_tls else settings.peers.items():
            try:
                does[peer] = stack.enter_context(opens.opens(settings))
            except OSError as error:
                report.say(f"{peer} is not measured: {error}")
        for number in range(settings.rounds):
            borrower.forget()
            # None always follows the same one.
            first = number % len(does)
            took = {what: does[what]() for what in [*does, *does][first : first + len(does)]}
            took["crc"] = size / _bench.crc32c(settings.block_bytes, size)
            took["ratio"] = (took["read"] + took["crc"]) / took["fetch"]
            rounds.append(took)
        pages = cluster.borrower.daemon.page_size
    medians = {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}
    peers = {peer: each for peer, each in settings.peers.items() if peer in medians}
    figures = [
        Figure(f"fetch of {size >> 20} MiB, {name}", size / medians["fetch"] / 1e9, "GB/s"),
        Figure(f"READ of the same, {name}", size / medians["read"] / 1e9, "GB/s"),
        *(Figure(f"{peer} of the same, {name}", size / medians[peer] / 1e9, "GB/s") for peer in peers),
        Figure(f"crc32c of the same, {name} turns", size / medians["crc"] / 1e9, "GB/s"),
        Figure(f"fetch, {name} / READ and crc32c in series", medians["ratio"], at_least=0.9),
        *(
            Figure(f"fetch, {name} / {peer}", medians[peer] / medians["fetch"], at_least=each.goal)
            for peer, each in peers.items()
        ),
    ]
    return figures, {
        "bytes": size,
        "pages": pages,
        "medians": medians,
        "rounds": rounds,
        "incomplete": borrower.incomplete,
    }


def paced(settings: Settings) -> Measured:
    """Fetches from two owners behind paced wires, and one during which the faster owner is killed."""
    others = [host.other for host in settings.owners]
    if any(other is None for other in others):
        raise OSError("wires can be paced between namespaces only")
    size = settings.blocks * settings.block_bytes
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(
            Cluster(settings.here, settings.owners, settings.pool_bytes, flags=_PACED)
        )
        for owner, other, pace in zip(cluster.owners, others, PACES, strict=True):
            assert other is not None
            other.pace(pace)
            stack.callback(other.unpace)
            save_at(owner, settings)
        borrower = stack.enter_context(closing(Borrower(cluster, settings)))
        lent = [owner.cluster["lent_bytes"] for owner in cluster.owners]
        # The first two teach the borrower the rates.
        for number in range(-2, settings.rounds):
            took = borrower.fetch()
            borrower.forget()
            before, lent = lent, [owner.cluster["lent_bytes"] for owner in cluster.owners]
            if number >= 0:
                each = [now - then for now, then in zip(lent, before, strict=True)]
                rounds.append({"seconds": took, "bytes": each})
        killed = _kill_half_way(cluster, borrower, size)
    seconds = statistics.median(each["seconds"] for each in rounds)
    figures = [
        Figure("two owners / sum of their paces", size / seconds / sum(PACES), at_least=0.9),
    ]
    for number, pace in enumerate(PACES):
        part = size * pace / sum(PACES)
        share = statistics.median(each["bytes"][number] for each in rounds) / part
        figures.append(
            Figure(
                f"share of the owner of {pace / 1e6:.0f} MB/s, off its part",
                100 * abs(share - 1),
                "%",
                at_most=15.0,
            )
        )
    figures.append(
        Figure(
            "one killed half-way: blocks found", 100 * killed["found"] / settings.blocks, "%", at_least=100.0
        )
    )
    figures.append(Figure("one killed half-way: time / undisturbed", killed["seconds"] / seconds))
    return figures, {
        "bytes": size,
        "paces": PACES,
        "rounds": rounds,
        "killed": killed,
        "incomplete": borrower.incomplete,
    }


def _kill_half_way(cluster: Cluster, borrower: Borrower, size: int) -> dict[str, Any]:
    """A fetch during which the second owner is killed, once half of the bytes are there."""
    scheduler, hashes = borrower.engine.scheduler, borrower.hashes
    before = cluster.borrower.cluster
    start = time.perf_counter()
    scheduler.lookup_start("half-way", [hashes], len(hashes) * TOKENS_PER_BLOCK)
    hit = None
    while hit is None and cluster.borrower.cluster["fetched_bytes"] - before["fetched_bytes"] < size // 2:
        hit = scheduler.lookup_poll("half-way")
    killed_at = time.perf_counter() - start
    cluster.owners[1].kill()
    while hit is None:
        hit = scheduler.lookup_poll("half-way", wait_us=1000)
    took = time.perf_counter() - start
    borrower.engine.release(hit)
    failed = cluster.borrower.cluster["failed_blocks"] - before["failed_blocks"]
    return {
        "seconds": took,
        "killed_at_s": killed_at,
        "found": hit.tokens // TOKENS_PER_BLOCK,
        "reads_that_failed": failed,
    }
