"""An in-process stand-in for the daemon and `kvlane._core`: run the connector without a daemon.

`"kvlane.address": "fake:NAME"` in kv_connector_extra_config gives all engines of this process the store NAME. It
copies real bytes between the engines' memory and a dictionary, and its faults can be switched on while it runs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import ClassVar

Region = tuple[int, int, int, int, list[int]]
SaveGroups = list[tuple[int, bytes, list[bytes], list[int]]]
LoadGroups = list[tuple[int, list[int], bytes]]
# Namespace, layouts of all ranks, block hash: engines that cut blocks alike share them.
Key = tuple[bytes, tuple[bytes, ...], bytes]


@dataclass
class FakeHit:
    """See `kvlane._core.Hit`."""

    tokens: int = 0
    lease: int = 0
    boot: bytes = b""
    groups: list[tuple[int, int]] = field(default_factory=list)
    _pages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _stored: list[int] = field(default_factory=list)

    def stored_blocks(self, group: int) -> int:
        return self._stored[group]

    def pages(self, group: int, rank: int) -> bytes:
        return self._pages[group, rank]

    def pages_of(self, group: int, rank: int, blocks: list[int]) -> bytes:
        pages, first = self._pages[group, rank], dict(self.groups)[group]
        if not all(first <= block < first + len(pages) // 4 for block in blocks):
            raise ValueError("not all of these blocks are in the hit")
        return b"".join(pages[(block - first) * 4 :][:4] for block in blocks)


@dataclass
class FakeFinished:
    """See `kvlane._core.Finished`."""

    job: int
    kind: str
    ok: bool
    blocks: int = 0
    present: int = 0
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""


@dataclass
class _Engine:
    groups: list[tuple[bytes, str, int, int]] = field(default_factory=list)
    workers: int = 0
    ranks: dict[int, list[tuple[bytes, bytes, list[Region]]]] = field(default_factory=dict)
    cancelled: int = 0
    """Save jobs up to this one are refused."""
    replicas: list[int] = field(default_factory=list)
    """Of each group, how many consecutive ranks hold the same blocks."""

    @property
    def ready(self) -> bool:
        return 0 < self.workers == len(self.ranks)

    def space(self, group: int) -> tuple[bytes, ...]:
        return tuple(self.ranks[rank][group][1] for rank in range(self.workers))


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
        """The daemon does not answer: lookups miss, saves store nothing, loads go on."""
        self.silent = False
        """The daemon does not confirm that it has cancelled saves."""
        self.hold_lookups = False
        """Lookups stay pending."""
        self.hold_saves = False
        self.hold_loads = False
        self.fail_saves = False
        self.fail_loads = False
        self.boot = os.urandom(16)
        self.blocks: dict[Key, dict[int, int]] = {}
        """Pages of a block by rank; visible once all ranks are there."""
        self.pages: dict[bytes, dict[int, bytes]] = {self.boot: {}}
        """Shard bytes by boot and page."""
        self.leases: set[int] = set()
        """Leases not given back."""
        self.engines: dict[str, _Engine] = {}
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
    ) -> FakeScheduler:
        """See `kvlane._core.Scheduler`."""
        engine = self.engines.setdefault(engine_id, _Engine())
        engine.groups, engine.workers = groups, workers
        return FakeScheduler(self, engine, address or "fake:")

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
    ) -> FakeWorker:
        """See `kvlane._core.Worker`."""
        assert 0 <= rank < workers, f"rank {rank} of {workers} workers"
        replicas = replicas or [1] * len(groups)
        assert len(replicas) == len(groups) and all(workers % each == 0 for each in replicas)
        engine = self.engines.setdefault(engine_id, _Engine())
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

    def release_held(self) -> None:
        """Let everything go on that is held."""
        with self.changed:
            self.hold_lookups = self.hold_saves = self.hold_loads = False
            self.changed.notify_all()

    def corrupt(self) -> int:
        """Overwrite all that is stored with zeros; gives the number of shards."""
        pages = self.pages[self.boot]
        for page, data in pages.items():
            pages[page] = bytes(len(data))
        return len(pages)

    def block_count(self) -> int:
        """Blocks that can be found."""
        return sum(1 for key, pages in self.blocks.items() if len(pages) == len(key[1]))

    def find(self, engine: _Engine, hashes: list[list[bytes]], max_tokens: int) -> FakeHit:
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
        engine: _Engine,
        hashes: list[list[bytes]],
        tokens: int,
        starts: list[int],
        present: list[list[bool]],
    ) -> FakeHit:
        hit = FakeHit(tokens, next(self._numbers), self.boot, list(enumerate(starts)))
        for group, (namespace, _, size, window) in enumerate(engine.groups):
            end = tokens // size
            after = [] if window else list(itertools.takewhile(bool, present[group][end:]))
            hit._stored.append(end + len(after))
            space = engine.space(group)
            keys = [(namespace, space, each) for each in hashes[group][starts[group] : tokens // size]]
            for rank in range(engine.workers):
                hit._pages[group, rank] = b"".join(struct.pack("<I", self.blocks[key][rank]) for key in keys)
        self.leases.add(hit.lease)
        return hit

    def put(self, key: Key, rank: int, data: bytes) -> bool:
        """Store a shard; False if it is there."""
        ranks = self.blocks.setdefault(key, {})
        if rank in ranks:
            return False
        page = next(self._numbers)
        self.pages[self.boot][page] = data
        ranks[rank] = page
        return True


class FakeScheduler:
    """See `kvlane._core.Scheduler`."""

    def __init__(self, store: FakeCore, engine: _Engine, address: str) -> None:
        self._store = store
        self._engine = engine
        self._pending: dict[str, tuple[list[list[bytes]], int]] = {}
        self._stats: dict[str, float] = {}
        self._connected_to: bytes | None = None
        self._gone: list[bytes] = []
        self.address = address

    @property
    def connected(self) -> bool:
        return not self._store.down

    @property
    def ready(self) -> bool:
        return not self._store.down and self._engine.ready

    @property
    def boot(self) -> bytes | None:
        boot = None if self._store.down else self._store.boot
        if self._connected_to not in (None, boot):
            self._gone.append(self._connected_to)
        self._connected_to = boot
        return boot

    @property
    def gone(self) -> list[bytes]:
        return [boot for boot in self._gone if boot != self.boot]

    @property
    def over(self) -> list[bytes]:
        return self.gone

    def lookup_start(self, request_id: str, hashes: list[list[bytes]], max_tokens: int) -> None:
        assert len(hashes) == len(self._engine.groups), "one list of hashes for each group"
        assert all(len(each) >= 16 for group in hashes for each in group), "hashes of 16 bytes or more"
        self._pending[request_id] = (hashes, max_tokens)
        self._count("lookups")

    def lookup_poll(self, request_id: str, wait_us: int = 0) -> FakeHit | None:
        if self._store.hold_lookups and not self._store.down:
            return None
        asked = self._pending.pop(request_id, None)
        hit = self._store.find(self._engine, *asked) if asked is not None else FakeHit(boot=self._store.boot)
        self._count("hits" if hit.tokens else "misses")
        return hit

    def lookup(self, hashes: list[list[bytes]], max_tokens: int, timeout_ms: float = 1000.0) -> FakeHit:
        return self._store.find(self._engine, hashes, max_tokens)

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    def release(self, boot: bytes, lease: int) -> None:
        assert lease in self._store.leases, f"lease {lease} was given back twice or never given"
        self._store.leases.discard(lease)

    def tick(self) -> None:
        return

    def cancel_saves(self, up_to_job: int, timeout_ms: float = 1000.0) -> bool:
        if self._store.silent:
            return False
        self._engine.cancelled = up_to_job
        return True

    def take_stats(self) -> dict[str, float]:
        stats, self._stats = self._stats, {}
        return stats

    def close(self) -> None:
        self._pending.clear()

    def _count(self, name: str) -> None:
        self._stats[name] = self._stats.get(name, 0) + 1


class FakeWorker:
    """See `kvlane._core.Worker`. Copies happen inside `poll` and `wait`, so that nothing depends on timing."""

    method = "fake"
    reason = "no daemon"

    def __init__(self, store: FakeCore, engine: _Engine, rank: int) -> None:
        self._store = store
        self._engine = engine
        self._rank = rank
        self._saves: list[tuple[int, SaveGroups]] = []
        self._loads: list[tuple[int, bytes, LoadGroups]] = []
        self._finished: list[FakeFinished] = []
        self._gone: set[bytes] = set()

    @property
    def connected(self) -> bool:
        return not self._store.down

    def save(self, job: int, groups: SaveGroups, stream: int = 0) -> None:
        self._saves.append((job, groups))

    has_outstanding_loads = False

    def load(
        self, job: int, boot: bytes, groups: LoadGroups, stream: int = 0, release: str = "at_end"
    ) -> None:
        # A load that came before its boot was told to be gone is still carried out.
        self._loads.append((job, b"" if boot in self._gone else boot, groups))

    def wait_for_loads(self, stream: int, region: int | None = None) -> None:
        """No load is released before its end."""

    def step_begins(self, computes: bool, present: bytes | None = None, gone: Sequence[bytes] = ()) -> None:
        """As the core does it: from here on no load may be of a boot that is gone."""
        self._gone = set(gone)

    def poll(self) -> list[FakeFinished]:
        if not self._store.hold_saves:
            saves, self._saves = self._saves, []
            self._finished += [self._save(job, groups) for job, groups in saves]
        if not self._store.hold_loads:
            loads, self._loads = self._loads, []
            self._finished += [self._load(job, boot, groups) for job, boot, groups in loads]
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_ms: float) -> bool:
        with self._store.changed:
            if self._idle_or_ready():
                return True
            return self._store.changed.wait_for(self._idle_or_ready, timeout_ms / 1000)

    def _idle_or_ready(self) -> bool:
        queued = bool(self._saves) or bool(self._loads)
        can_run = (self._saves and not self._store.hold_saves) or (self._loads and not self._store.hold_loads)
        return bool(self._finished) or not queued or bool(can_run)

    def take_stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._finished += [FakeFinished(job, "save", False, detail="closed") for job, _ in self._saves]
        self._finished += [FakeFinished(job, "load", False, detail="closed") for job, _, _ in self._loads]
        self._saves, self._loads = [], []

    def _save(self, job: int, groups: SaveGroups) -> FakeFinished:
        done = FakeFinished(job, "save", ok=True)
        if (
            self._store.down
            or self._store.fail_saves
            or not self._engine.ready
            or job <= self._engine.cancelled
        ):
            return FakeFinished(job, "save", ok=False, detail="the store takes nothing")
        for group, parent, hashes, block_ids in groups:
            assert len(hashes) == len(block_ids), "one block for each hash"
            namespace, _, regions = self._engine.ranks[self._rank][group]
            space = self._engine.space(group)
            if parent and (namespace, space, parent) not in self._store.blocks:
                # As in the daemon: a block without its parent could never be found.
                continue
            for each, block_id in zip(hashes, block_ids, strict=True):
                data = self._slice(group, read_block(regions, block_id))
                if self._store.put((namespace, space, each), self._rank, data):
                    done.blocks += 1
                    done.bytes += len(data)
                else:
                    done.present += 1
        return done

    def _load(self, job: int, boot: bytes, groups: LoadGroups) -> FakeFinished:
        if self._store.fail_loads or boot not in self._store.pages:
            return FakeFinished(job, "load", ok=False, detail="the pool is not mapped")
        done = FakeFinished(job, "load", ok=True)
        stored = self._store.pages[boot]
        for group, block_ids, pages in groups:
            regions = self._engine.ranks[self._rank][group][2]
            numbers = struct.unpack(f"<{len(pages) // 4}I", pages)
            blocks = len(block_ids)
            assert len(numbers) == blocks * self._engine.replicas[group], (
                "a page for each slice of each block"
            )
            for index, block_id in enumerate(block_ids):
                data = b"".join(stored[page] for page in numbers[index::blocks])
                write_block(regions, block_id, data)
                done.blocks += 1
                done.bytes += len(data)
        return done

    def _slice(self, group: int, data: bytes) -> bytes:
        """This rank's part of a block that several ranks hold."""
        count = self._engine.replicas[group]
        index = self._rank % count
        return data[len(data) * index // count : len(data) * (index + 1) // count]


def read_block(regions: list[Region], block_id: int) -> bytes:
    """A block's bytes: the pieces of all regions in their order."""
    parts = []
    for base, stride, blocks, piece, offsets in regions:
        assert 0 <= block_id < blocks, f"block {block_id} of {blocks}"
        parts += [ctypes.string_at(base + block_id * stride + offset, piece) for offset in offsets]
    return b"".join(parts)


def write_block(regions: list[Region], block_id: int, data: bytes) -> None:
    """The inverse of `read_block`."""
    at = 0
    for base, stride, blocks, piece, offsets in regions:
        assert 0 <= block_id < blocks, f"block {block_id} of {blocks}"
        for offset in offsets:
            ctypes.memmove(base + block_id * stride + offset, data[at : at + piece], piece)
            at += piece
    assert at == len(data), f"a block of {at} bytes got {len(data)}"
