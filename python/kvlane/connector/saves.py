"""Decides which blocks are saved, and keeps them from being reused until every worker has copied them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvlane.connector import events
from kvlane.connector.announcements import Announcement, Announcements
from kvlane.connector.counters import Counters
from kvlane.connector.groups import STATE, CacheGroup
from kvlane.connector.jobs import SaveJob
from kvlane.connector.pins import Pins
from kvlane.connector.requests import NEVER, BlockRange, GroupHashes, RequestState
from kvlane.connector.settings import Settings
from kvlane.connector.vllm_protocols import Block, KVEvent, Tables

# While saves are younger than this the engine waits for their blocks rather than preempting a request.
WAIT_FOR_FREES_SECONDS = 2.0


@dataclass
class _Save:
    """A save in progress."""

    blocks: list[Block] = field(default_factory=list)
    """Pinned blocks, in the order of their prompts."""
    of_requests: list[tuple[list[BlockRange], BlockRange]] = field(default_factory=list)
    """Which blocks of which requests these are: a list of `RequestState.unsaved`, and what to add there if the save
    fails."""
    begun: list[Announcement] = field(default_factory=list)
    groups: list[tuple[int, bytes, list[bytes], list[int]]] = field(default_factory=list)
    """As in `SaveJob`."""
    on_end: Callable[[bool], None] | None = None
    """Called at the end, with whether the daemon has all blocks."""
    era: int = 0
    """The era of the announcements when the workers got the job."""
    ranks_left: int = 0
    ok: bool = True
    since: float = 0.0

    def fail(self) -> None:
        """Some of its blocks, or all, will not be in the daemon."""
        self.ok = False
        for unsaved, blocks in self.of_requests:
            unsaved.append(blocks)
        self.of_requests = []


class Saves:
    """All saves of an engine."""

    def __init__(
        self,
        groups: list[CacheGroup],
        hashes: GroupHashes,
        workers: int,
        settings: Settings,
        announcements: Announcements | None,
        counters: Counters,
        jobs: Iterator[int],
        pins: Pins,
    ) -> None:
        self._groups = groups
        self._hashes = hashes
        self._workers = workers
        self._settings = settings
        self._announcements = announcements
        self._counters = counters
        self._jobs = jobs
        self._pins = pins
        self._pinned = 0
        self._open = _Save()
        self._running: dict[int, _Save] = {}
        self.last_job = 0
        """The highest job that was sent to the workers."""

    @property
    def _max_pinned(self) -> int:
        assert self._pins.pool is not None
        return max(1, int(len(self._pins.pool.blocks) * self._settings.max_pinned_share))

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return max(0, self._max_pinned - self._pinned)

    @property
    def pending(self) -> bool:
        """Whether any block is pinned."""
        return self._pinned > 0

    def pinned(self) -> Iterator[Block]:
        """The pinned blocks, each as often as it is being saved."""
        saves = [*self._running.values(), self._open]
        return itertools.chain.from_iterable(save.blocks for save in saves)

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned at the moment, each as often as it is being saved."""
        return self._pinned

    def frees_are_near(self, now: float) -> bool:
        """Whether waiting for pinned blocks is better than preempting, because a save is young."""
        young = (save for save in self._running.values() if now - save.since < WAIT_FOR_FREES_SECONDS)
        return any(save.blocks for save in young)

    def add(
        self,
        state: RequestState,
        computed_tokens: int,
        tables: Tables,
        tables_are_exact: bool,
        wait: bool,
    ) -> None:
        """Queue the blocks of a request that are full once `computed_tokens` are computed.

        `tables` are its block ids by vLLM's groups; if not exact they may name blocks that have been reused since.
        With `wait`, blocks beyond the pin limit are left for a later call; otherwise they are counted as skipped.
        """
        if self._pins.pool is None or state.stale or not state.takes_part():
            return
        if not self._settings.save_decode:
            computed_tokens = min(computed_tokens, state.request.num_prompt_tokens)
        state.next_save = NEVER
        for group in self._groups:
            first = state.saved_blocks[group.index]
            table = tables[group.group_id]
            end = min(computed_tokens // group.tokens_per_block, self._hashes.count(state, group), len(table))
            room = self._max_pinned - self._pinned
            if end - first > room:
                if not wait:
                    self._counters.add("skipped_blocks", end - first - room)
                end = first + room
            if end > first:
                self._add_range(state, group, first, end, table, tables_are_exact)
                state.saved_blocks[group.index] = end
            following = (max(end, first) + 1) * group.tokens_per_block
            if self._settings.save_decode or following <= state.request.num_prompt_tokens:
                state.next_save = min(state.next_save, following)

    def _add_range(
        self,
        state: RequestState,
        group: CacheGroup,
        first: int,
        end: int,
        table: Sequence[int],
        exact: bool,
    ) -> None:
        raw = self._hashes.raw(state, group, first, end)
        stored = self._hashes.stored(state, group, first, end)
        assert self._pins.pool is not None
        pool = self._pins.pool.blocks
        usable = [
            block_if_intact(pool[table[first + offset]], raw[offset], group, exact)
            for offset in range(end - first)
        ]
        offset = 0
        for present, run in itertools.groupby(usable, key=lambda block: block is not None):
            blocks = list(run)
            if present:
                run_first, end = first + offset, first + offset + len(blocks)
                hashes = (raw[offset : offset + len(blocks)], stored[offset : offset + len(blocks)])
                self._add_run(self._open, state, group, run_first, cast("list[Block]", blocks), *hashes)
                self._open.of_requests.append((state.unsaved[group.index], (run_first, end)))
            else:
                state.unsaved[group.index].append((first + offset, first + offset + len(blocks)))
            offset += len(blocks)

    def _add_run(
        self,
        save: _Save,
        state: RequestState,
        group: CacheGroup,
        first: int,
        blocks: list[Block],
        raw: list[bytes],
        stored: list[bytes],
    ) -> None:
        """Adds consecutive blocks of a prompt to a save; they are pinned from here on."""
        parent = b""
        if first > 0 and group.window_blocks == 0:
            parent = self._hashes.stored(state, group, first - 1, first)[0]
        self._pins.pin(blocks)
        self._pinned += len(blocks)
        save.blocks += blocks
        save.groups.append((group.index, parent, stored, [block.block_id for block in blocks]))
        if self._announcements is not None:
            before = self._hashes.raw(state, group, first - 1, first)[0] if first > 0 else None
            event = events.blocks_stored(group, state.request, before, raw, first)
            save.begun.append(self._announcements.begin(group, stored, event))

    def save_apart(
        self,
        state: RequestState,
        group: CacheGroup,
        first: int,
        blocks: list[Block],
        now: float,
        on_end: Callable[[bool], None],
    ) -> SaveJob:
        """A job that saves consecutive blocks of a prompt, which other blocks than the request's own hold, at most as
        many as there is `room` for. They are pinned until its end, and `on_end` is called then."""
        assert len(blocks) <= self.room
        save, end = _Save(on_end=on_end), first + len(blocks)
        raw, stored = (of(state, group, first, end) for of in (self._hashes.raw, self._hashes.stored))
        self._add_run(save, state, group, first, blocks, raw, stored)
        return self._send(save, now)

    def take_job(self, now: float) -> SaveJob | None:
        """The blocks queued since the last call, as one job for the workers."""
        if not self._open.groups:
            return None
        save, self._open = self._open, _Save()
        return self._send(save, now)

    def _send(self, save: _Save, now: float) -> SaveJob:
        job = self.last_job = next(self._jobs)
        save.ranks_left = self._workers
        save.since = now
        if self._announcements is not None:
            save.era = self._announcements.era
        self._running[job] = save
        groups, save.groups = save.groups, []
        return SaveJob(job, groups)

    def ended(self, job: int, ranks: int, ok: bool) -> list[KVEvent] | None:
        """Ranks have reported a job. KV events when it was the last of them; None if the job is not a save."""
        save = self._running.get(job)
        if save is None:
            return None
        save.ranks_left -= ranks
        if save.ok and not ok:
            # The reports do not say which blocks are missing. A block is stored only if all ranks saved it.
            save.fail()
        if save.ranks_left > 0:
            return []
        del self._running[job]
        self._unpin(save)
        if save.on_end is not None:
            save.on_end(save.ok)
        if self._announcements is None:
            return []
        return self._announcements.ended(save.begun, save.ok, save.era)

    def drop_queued(self) -> None:
        """Drops the queued blocks, which no worker has."""
        self._open.fail()
        self._unpin(self._open)
        self._open = _Save()

    def give_up(self) -> None:
        """Unpins the blocks of all saves in progress. The caller has had the daemon give these saves up."""
        for save in self._running.values():
            self._unpin(save)
            save.fail()

    def _unpin(self, save: _Save) -> None:
        self._pinned -= len(save.blocks)
        self._pins.unpin(save.blocks)
        save.blocks = []


def block_if_intact(block: Block, raw_hash: bytes, group: CacheGroup, exact: bool) -> Block | None:
    """The pool's block, or None if it is not there to be saved.

    Sliding windows replace blocks that fell out of them by the null block. A table that was put together from the
    scheduler's messages does not show that, so there the block must still carry the hash.
    """
    if block.is_null or block.ref_cnt == 0:
        return None
    # A table's block may hold a state inside the block. Only one at its end can have the hash.
    if group.kind != STATE and (exact or (group.window_blocks == 0 and block.block_hash is None)):
        return block
    expected = raw_hash + group.group_id.to_bytes(4, "big")
    return block if block.block_hash == expected else None
