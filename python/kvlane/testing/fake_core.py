"""An in-process stand-in for the daemon and `kvlane._core`: run the connector without a daemon.

`"kvlane.address": "fake:NAME"` in kv_connector_extra_config gives all engines of this process the store NAME. It
copies real bytes between the engines' memory and a dictionary, and its faults can be switched on while it runs.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections.abc import Sequence
from math import lcm
from typing import ClassVar

from kvlane.connector.shard_layout import ShardLayout
from kvlane.testing.fake_ends import FakeScheduler, FakeWorker
from kvlane.testing.fake_records import FakeHit, OpenEngine, Region

# Namespace, layouts of all ranks, block hash: engines that cut blocks alike share them.
Key = tuple[bytes, tuple[bytes, ...], bytes]


class FakeCore:
    """A store, and the two classes of `kvlane._core` bound to it."""

    _named: ClassVar[dict[str, FakeCore]] = {}

    @classmethod
    def named(cls, name: str) -> FakeCore:
        """The store of that name in this process; made when first asked for."""
        return cls._named.setdefault(name, cls())

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.down = False
        """True: the daemon does not answer. Lookups miss, saves store nothing, loads go on."""
        self.silent = False
        """True: the daemon does not confirm that it has cancelled saves."""
        self.hold_lookups = False
        """True: lookups stay pending."""
        self.hold_saves = False
        self.hold_loads = False
        self.fail_saves = False
        self.fail_loads = False
        self.boot = os.urandom(16)
        self.pool_bytes = 1 << 30
        """What the engines are told. The store itself has no limit."""
        self.blocks: dict[Key, dict[int, int]] = {}
        """Pages of a block by rank; visible once all ranks are there."""
        self.pages: dict[bytes, dict[int, bytes]] = {self.boot: {}}
        """Shard bytes by boot and page."""
        self.leases: set[int] = set()
        """Leases that were not released."""
        self.journal: list[tuple[Key, bool]] = []
        """The journal: blocks that became visible (True) or went."""
        self.journal_start = 0
        """Entries before this one are lost. Engines that have not read them start again."""
        self.engines: dict[str, OpenEngine] = {}
        self._numbers = itertools.count(1)

    def Scheduler(
        self,
        address: str | None,
        engine_id: str,
        client: str,
        groups: list[tuple[bytes, str, int, int]],
        workers: int,
        lookup_timeout_ms: float = 50.0,
        daemon_user: str | None = None,
        follow_journal: bool = False,
        crosses_hosts: bool = False,
    ) -> FakeScheduler:
        """See `kvlane._core.Scheduler`."""
        engine = self.engines.setdefault(engine_id, OpenEngine())
        engine.groups, engine.workers, engine.crosses_hosts = groups, workers, crosses_hosts
        return FakeScheduler(self, engine, engine_id, address or "fake:", follow_journal)

    def Worker(
        self,
        address: str | None,
        engine_id: str,
        client: str,
        rank: int,
        workers: int,
        groups: list[tuple[bytes, bytes, list[Region]]],
        save_method: str = "auto",
        save_timeout_ms: float = 10000.0,
        replicas: list[int] | None = None,
        daemon_user: str | None = None,
        shards: Sequence[ShardLayout | None] | None = None,
        layers: list[list[int]] | None = None,
        steps_ahead: float = 0.5,
        load_stall_ms: float = 0.0,
    ) -> FakeWorker:
        """See `kvlane._core.Worker`."""
        assert 0 <= rank < workers, f"rank {rank} of {workers} workers"
        replicas = replicas or [1] * len(groups)
        assert shards is None or len(shards) == len(groups)
        assert layers is None or [len(each) for each in layers] == [len(regions) for _, _, regions in groups]
        assert len(replicas) == len(groups) and all(workers % each == 0 for each in replicas)
        engine = self.engines.setdefault(engine_id, OpenEngine())
        assert not engine.ranks or engine.replicas == replicas, "ranks that share blocks must agree"
        engine.ranks[rank] = groups
        engine.replicas = replicas
        return FakeWorker(self, engine, rank)

    def restart(self) -> None:
        """Another run of the daemon: nothing is stored. Pages that were promised stay mapped."""
        with self.changed:
            self.boot = os.urandom(16)
            self.pages[self.boot] = {}
            self.blocks = {}
            self.journal, self.journal_start = [], 0

    def release_held(self) -> None:
        """Lets all held calls go on."""
        with self.changed:
            self.hold_lookups = self.hold_saves = self.hold_loads = False
            self.changed.notify_all()

    def corrupt(self) -> int:
        """Overwrites all that is stored with zeros. Returns the number of shards."""
        pages = self.pages[self.boot]
        for page, data in pages.items():
            pages[page] = bytes(len(data))
        return len(pages)

    def evict(self, key: Key) -> None:
        """Evicts one block, even if other blocks continue it."""
        del self.blocks[key]
        self.journal.append((key, False))

    def lose_journal(self) -> None:
        """Loses the journal's entries. Engines that have not read all of them start again."""
        self.journal_start = len(self.journal)

    def block_count(self) -> int:
        """Blocks that can be found."""
        return sum(1 for key, pages in self.blocks.items() if len(pages) == len(key[1]))

    def find(self, engine: OpenEngine, hashes: list[list[bytes]], max_tokens: int) -> FakeHit:
        """The longest prefix that all groups have, with a lease on it."""
        if self.down or not engine.ready:
            return FakeHit(boot=self.boot)
        present: list[list[bool]] = []
        for group, (namespace, _, _, _) in enumerate(engine.groups):
            space = engine.space(group)
            present.append(
                [
                    len(self.blocks.get((namespace, space, each), ())) == engine.workers
                    for each in hashes[group]
                ]
            )
        step = lcm(*(size for _, _, size, _ in engine.groups))
        for tokens in range(max_tokens // step * step, 0, -step):
            starts = []
            for (_, _, size, window), have in zip(engine.groups, present, strict=True):
                end = tokens // size
                start = 0 if window == 0 else max(0, end - window)
                if end > len(have) or not all(have[start:end]):
                    break
                starts.append(start)
            else:
                return self._lease(engine, hashes, tokens, starts, present)
        return FakeHit(boot=self.boot)

    def _lease(
        self,
        engine: OpenEngine,
        hashes: list[list[bytes]],
        tokens: int,
        starts: list[int],
        present: list[list[bool]],
    ) -> FakeHit:
        hit = FakeHit(tokens, next(self._numbers), self.boot, list(enumerate(starts)))
        for group, (namespace, _, size, _) in enumerate(engine.groups):
            end = tokens // size
            after = list(itertools.takewhile(bool, present[group][end:]))
            hit._stored.append(end + len(after))
            space = engine.space(group)
            keys = [(namespace, space, each) for each in hashes[group][starts[group] : tokens // size]]
            for rank in range(engine.workers):
                hit._pages[group, rank] = b"".join(struct.pack("<I", self.blocks[key][rank]) for key in keys)
        self.leases.add(hit.lease)
        return hit

    def put(self, key: Key, rank: int, data: bytes) -> bool:
        """Stores a shard. False if it exists."""
        ranks = self.blocks.setdefault(key, {})
        if rank in ranks:
            return False
        page = next(self._numbers)
        self.pages[self.boot][page] = data
        ranks[rank] = page
        if len(ranks) == len(key[1]):
            self.journal.append((key, True))
        return True
