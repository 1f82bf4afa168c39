"""An engine's two ends of the fake daemon: what stands in for `kvlane._core.Scheduler` and `kvlane._core.Worker`."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING

from kvlane.testing.fake_records import (
    FakeFinished,
    FakeHit,
    LoadGroups,
    OpenEngine,
    SaveGroups,
    read_block,
    write_block,
)

if TYPE_CHECKING:
    from kvlane.connector.core_protocols import EndedRequest
    from kvlane.testing.fake_core import FakeCore


class FakeScheduler:
    """See `kvlane._core.Scheduler`."""

    engine_id: str
    run: bytes
    is_recorded = False

    def __init__(
        self,
        store: FakeCore,
        engine: OpenEngine,
        engine_id: str,
        address: str,
        follow_journal: bool = False,
    ) -> None:
        self._store = store
        self._engine = engine
        self._pending: dict[str, tuple[list[list[bytes]], int]] = {}
        self._handoffs: dict[str, tuple[str, bytes, int, int]] = {}
        self._stats: dict[str, float] = {}
        self.tokens_per_s = 0
        """As the last lookup said."""
        self.numbers: dict[str, int] = {}
        """The number of each request that was looked up."""
        self.again: dict[str, bool] = {}
        self.traceparents: dict[str, str] = {}
        """Whether its last lookup is to be left out of recordings."""
        self.ended: list[EndedRequest] = []
        """What was reported while `is_recorded`."""
        self._connected_to: bytes | None = None
        self._gone: list[bytes] = []
        self._follows_journal = follow_journal
        self._read: tuple[bytes, int] | None = None
        """The run whose journal was read, and how many of its entries."""
        self.address = address
        self.engine_id = engine_id
        self.run = engine.run = os.urandom(16)

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
    def pool_bytes(self) -> int:
        return 0 if self._store.down else self._store.pool_bytes

    @property
    def gone(self) -> list[bytes]:
        return [boot for boot in self._gone if boot != self.boot]

    @property
    def over(self) -> list[bytes]:
        return self.gone

    def lookup_start(
        self,
        request_id: str,
        hashes: list[list[bytes]],
        max_tokens: int,
        handoff: tuple[str, bytes, int, int] | None = None,
        tokens_per_s: int = 0,
        number: int = 0,
        again: bool = False,
        traceparent: str = "",
    ) -> None:
        self.tokens_per_s = tokens_per_s
        self.numbers[request_id] = number
        self.again[request_id] = again
        self.traceparents[request_id] = traceparent
        assert len(hashes) == len(self._engine.groups), "one list of hashes for each group"
        assert all(len(each) >= 16 for group in hashes for each in group), "hashes of 16 bytes or more"
        self._pending[request_id] = (hashes, max_tokens)
        self._handoffs.pop(request_id, None)
        if handoff is not None:
            assert len(handoff[1]) == 16, "a run has 16 bytes"
            self._handoffs[request_id] = handoff
        self._count("lookups")

    def requests_ended(self, requests: list[EndedRequest], /) -> None:
        self.ended += requests if self.is_recorded else []

    def lookup_poll(self, request_id: str, wait_us: int = 0) -> FakeHit | None:
        if self._store.hold_lookups and not self._store.down:
            return None
        if self._waits(request_id):
            return None
        asked = self._pending.pop(request_id, None)
        hit = self._store.find(self._engine, *asked) if asked is not None else FakeHit(boot=self._store.boot)
        self._count("hits" if hit.tokens else "misses")
        return hit

    def _waits(self, request_id: str) -> bool:
        """Whether blocks of the awaited save are still to come. The wait has no timeout here, as long as that engine
        saves."""
        asked, handoff = self._pending.get(request_id), self._handoffs.get(request_id)
        if asked is None or handoff is None or self._store.down:
            return False
        engine_id, run, tokens, _ = handoff
        other = self._store.engines.get(engine_id)
        if other is None or other.run != run or not other.saving:
            return False
        hashes, max_tokens = asked
        step = lcm(*(size for _, _, size, _ in self._engine.groups))
        hit = self._store.find(self._engine, hashes, max_tokens)
        if hit.tokens:
            self._store.leases.discard(hit.lease)
        return hit.tokens < min(tokens, max_tokens) // step * step

    def lookup(self, hashes: list[list[bytes]], max_tokens: int, timeout_ms: float = 1000.0) -> FakeHit:
        return self._store.find(self._engine, hashes, max_tokens)

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        self._handoffs.pop(request_id, None)

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

    def take_changes(self) -> tuple[bool, list[tuple[int, bytes, bool]]]:
        store = self._store
        if store.down or not self._engine.ready or not self._follows_journal:
            return False, []
        before, self._read = self._read, (store.boot, len(store.journal))
        if before is None or before[0] != store.boot or before[1] < store.journal_start:
            return True, []
        spaces = [(each[0], self._engine.space(group)) for group, each in enumerate(self._engine.groups)]
        return False, [
            (group, key[2][:16], visible)
            for key, visible in store.journal[before[1] :]
            for group, space in enumerate(spaces)
            if space == key[:2]
        ]

    def take_stats(self) -> dict[str, float]:
        stats, self._stats = self._stats, {}
        return stats

    def close(self) -> None:
        self._pending.clear()
        self._engine.run = b""

    def _count(self, name: str) -> None:
        self._stats[name] = self._stats.get(name, 0) + 1


class FakeWorker:
    """See `kvlane._core.Worker`. Copies happen inside `poll` and `wait`, so that nothing depends on timing."""

    method = "fake"
    reason = "no daemon"

    def __init__(self, store: FakeCore, engine: OpenEngine, rank: int) -> None:
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
        self._engine.saving += 1

    def outstanding_loads(self) -> Sequence[int]:
        """No load is released before its end."""
        return ()

    def load(
        self, job: int, boot: bytes, groups: LoadGroups, stream: int = 0, release: str = "at_end"
    ) -> None:
        # A load that came before its boot was reported gone is still carried out.
        self._loads.append((job, b"" if boot in self._gone else boot, groups))

    def wait_for_loads(self, stream: int, jobs: Sequence[int], region: tuple[int, int] | None = None) -> None:
        """No load is released before its end."""

    def step_begins(self, computes: bool, present: bytes | None = None, gone: Sequence[bytes] = ()) -> None:
        """Takes the boots that are gone. As in the core, no load from here on may be of one."""
        self._gone = set(gone)

    def poll(self) -> list[FakeFinished]:
        if not self._store.hold_saves:
            saves, self._saves = self._saves, []
            self._finished += [self._save(job, groups) for job, groups in saves]
            self._engine.saving -= len(saves)
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
        self._engine.saving -= len(self._saves)
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
                # As in the daemon, it is not stored: a block without its parent could never be found.
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
