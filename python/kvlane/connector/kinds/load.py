"""Looks prompts up, promises hits, and has them loaded.

A hit is promised only while its lease is held and the scheduler is connected to the daemon's run that gave it. Else the
prompt is looked up again, or computed. A hit may wait for room in the engine for any time. The lease is released when
all workers have loaded the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvlane.connector.awaited_save import AwaitedSave, NotAnAwaitedSave
from kvlane.connector.core_protocols import Hit, SaveWait
from kvlane.connector.groups import CacheGroup
from kvlane.connector.guard import logger
from kvlane.connector.jobs import JobEnd, LoadJob, StepJobs
from kvlane.connector.kinds.kind import ASK_AGAIN, NOTHING, Answer, SchedulerKind, SchedulerShared
from kvlane.connector.recording import recorded_group
from kvlane.connector.requests import RequestState
from kvlane.connector.vllm_protocols import (
    AllocatedBlocks,
    Block,
    Request,
    SchedulerOutput,
    features,
    traceparent,
    transfer_params,
    waits_for_its_load,
    wants_no_cache,
)

# A miss is asked again when a request has waited this long for its turn: others may have saved its prefix since.
MISS_IS_OLD_SECONDS = 1.0


@dataclass
class _Load:
    """A load in progress."""

    request_id: str
    """Empty for one that no request waits for."""
    boot: bytes
    lease: int
    blocks: list[Block]
    """Pinned until the load's end, because a load may outlive its request."""
    ranks_left: int
    tables: Sequence[Sequence[Block]] = ()
    """vLLM's lists of the request's blocks, by its groups."""
    ok: bool = True
    on_end: Callable[[bool], None] | None = None
    """Called with whether all bytes came, if the load is not for a request."""


class LookUpAndLoad(SchedulerKind):
    """Lookups, promises and loads of an engine."""

    name = "load"

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        self.under_way: dict[int, _Load] = {}
        """Loads that have not ended, by job, including those in `to_send`."""
        self.to_send: list[LoadJob] = []
        """Loads that have not been sent to the workers."""
        self._logged: set[str] = set()
        self._waits_for_saves = True
        """Whether this step may still wait for a lookup that awaits a save. A step waits for one such lookup, because
        each can take seconds."""

    # Lookups

    def request_added(self, state: RequestState) -> None:
        state.awaited_save = self._awaited_save(state)
        self._start_lookup(state)

    def _awaited_save(self, state: RequestState) -> AwaitedSave | None:
        """The save of the prompt that another engine named, if it goes to the daemon of this engine."""
        try:
            awaited = AwaitedSave.of(transfer_params(state.request))
            if awaited is None:
                return None
            boot = self._shared.core.boot
            if awaited.daemon == boot:
                return awaited
            self._ignore(
                "another daemon",
                f"it is stored by another daemon, or an earlier run of it ({awaited.daemon.hex()}, not "
                f"{'any' if boot is None else boot.hex()}): engines that hand over have to share one",
            )
        except NotAnAwaitedSave as error:
            self._ignore("nonsense", f"it makes no sense: {error}")
        return None

    def _ignore(self, kind: str, reason: str) -> None:
        """Counts a save that is not awaited, and logs the first one of each kind."""
        self._shared.counters.add("ignored_hand_offs")
        if kind not in self._logged:
            self._logged.add(kind)
            # Log: the engine loads what the daemon already has of this prompt, and computes the rest. Do: give
            # both engines the same daemon; see the reason.
            logger.warning(
                "kvlane: a prompt that a prefill engine handed over is looked up without waiting for it, since %s. "
                "(Further cases are only counted.)",
                reason,
            )

    def _start_lookup(self, state: RequestState, awaited: SaveWait | None = None) -> None:
        shared, request = self._shared, state.request
        self._drop_hit(state)
        if (
            not shared.shape.can_load
            or not shared.shape.has_daemon
            or shared.pins.pool is None
            or not shared.weights.are_known
            or state.load_failed
            or not state.may_be_looked_up
            or not state.takes_part()
            or wants_no_cache(request)
        ):
            return
        tokens = self.tokens_to_find(state)
        state.asked_tokens = tokens
        if tokens <= 0 or not request.block_hashes:
            return
        # Blocks beyond `tokens` are asked for too, because stored ones need no saving.
        hashes = [
            shared.hashes.stored(state, group, 0, shared.hashes.count(state, group))
            for group in shared.shape.groups
        ]
        wait, rate = awaited or self._wait(state), shared.rate.tokens_per_s
        # What is found then, this request may have saved itself.
        again = state.had_blocks or awaited is not None
        traced = traceparent(request)
        shared.core.lookup_start(request.request_id, hashes, tokens, wait, rate, state.number, again, traced)
        state.looking_up = True
        group = recorded_group(shared.shape.groups)
        if group is not None and state.looked_up_blocks == 0:
            state.looked_up_blocks = len(hashes[group.index])

    def tokens_to_find(self, state: RequestState) -> int:
        """Most tokens of a prompt that a lookup finds."""
        shape, tokens = self._shared.shape, state.request.num_tokens
        # The engine must compute at least one token itself.
        return (tokens if shape.takes_last_block else tokens - 1) // shape.hit_alignment * shape.hit_alignment

    def _wait(self, state: RequestState) -> SaveWait | None:
        """The save for which the daemon waits before it answers."""
        awaited = state.awaited_save
        if awaited is None or awaited.tokens == 0:
            return None
        if self._is_other_content(state, awaited):
            state.awaited_save = None
            self._ignore(
                "other content",
                f"what that engine stores of its first {awaited.tokens} tokens is not what this one looks for: start "
                "both with the same weights, tokenizer, chat template, block size, hash algorithm, PYTHONHASHSEED, and "
                "adapters of the same names and files, and send both the same prompt and cache_salt",
            )
            return None
        wait_ms = round(self._shared.settings.wait_ms)
        return (awaited.engine, awaited.run, awaited.tokens, wait_ms)

    def _is_other_content(self, state: RequestState, awaited: AwaitedSave) -> bool:
        """Whether the other engine's save has other content than this engine looks for."""
        if awaited.last is None:
            return False
        own = self._shared.hashes.ending_at(state, awaited.tokens)
        if own is None:
            # A shorter prompt is another one. Otherwise vLLM has no hash there, and the daemon compares the blocks.
            return state.request.num_tokens < awaited.tokens
        return own != awaited.last

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        if not self._poll_lookup(state, self._wait_us):
            return ASK_AGAIN
        if state.hit is None:
            return NOTHING
        alignment = self._shared.shape.hit_alignment
        end = min(state.hit.tokens, state.request.num_tokens - 1)
        if state.request.num_tokens - end == 1 and self._computes_beside_its_load(state, end - local_tokens):
            end = (end - 1) // alignment * alignment
        tokens = end - local_tokens
        # A single block's last tokens are computed as fast as they are loaded.
        return Answer(tokens) if tokens >= alignment else NOTHING

    def _computes_beside_its_load(self, state: RequestState, tokens: int) -> bool:
        """Whether a request that loads so many tokens computes a block of tokens instead of one, because its first
        token comes sooner so.

        A step of one token is a full CUDA graph, which waits for all of the load. With more tokens each layer computes
        as soon as its part is there. That is better for a long load while the engine has no other request. Others that
        decode keep their full graph, but for one step if they come during the load. An image in the block would be
        encoded again."""
        least = self._shared.shape.overlapped_tokens
        return (
            least is not None
            and tokens >= least
            and len(self._shared.requests) == 1
            and not features(state.request)
        )

    def _poll_lookup(self, state: RequestState, wait_us: Callable[[RequestState], int]) -> bool:
        """Polls the request's lookup, or starts one. True if `state.hit` has the daemon's answer."""
        self._drop_former_hit(state)
        if self._wants_new_lookup(state):
            self._start_lookup(state)
        if state.looking_up:
            hit = self._shared.core.lookup_poll(state.request.request_id, wait_us(state))
            if hit is None:
                return False
            self._take_answer(state, hit)
            self._drop_former_hit(state)
        return True

    def _wait_us(self, state: RequestState) -> int:
        """The longest wait for the daemon's answer. vLLM asks for each waiting request in each step, and running
        requests wait meanwhile."""
        waits = state.awaited_save is None or self._waits_for_saves
        if state.awaited_save is not None:
            self._waits_for_saves = False
        return self._shared.settings.lookup_wait_us if waits else 0

    def _drop_former_hit(self, state: RequestState) -> None:
        """Drops a hit of another run of the daemon, because workers may have unmapped that run's pool."""
        if state.hit is None or state.hit.tokens == 0:
            return
        self._shared.connection.tick_if_idle()
        if state.hit.boot != self._shared.core.boot or not self._shared.core.ready:
            self._drop_hit(state)

    def _wants_new_lookup(self, state: RequestState) -> bool:
        if state.looking_up:
            return False
        if state.hit is None:
            # The engine's own cache may have the prompt already.
            return state.request.num_tokens - 1 - state.local_tokens >= self._shared.shape.hit_alignment
        # After a preemption the prompt includes what was generated.
        longer = state.request.num_tokens - 1 >= state.asked_tokens + self._shared.shape.hit_alignment
        old_miss = state.hit.tokens == 0 and self._shared.clock() - state.answered_at >= MISS_IS_OLD_SECONDS
        return longer or old_miss

    def _take_answer(self, state: RequestState, hit: Hit) -> None:
        state.looking_up = False
        state.hit = hit
        self._end_awaited_save(state, hit)
        state.answered_at = self._shared.clock()
        # Blocks that the daemon has are not saved again. Those that only the engine's own cache has are, so a restarted
        # daemon fills up by itself.
        state.are_stored(
            [hit.stored_blocks(group.index) if hit.tokens else 0 for group in self._shared.shape.groups]
        )

    def _end_awaited_save(self, state: RequestState, hit: Hit) -> None:
        """Ends the wait: an engine waits once, and computes the missing blocks."""
        awaited, state.awaited_save = state.awaited_save, None
        if awaited is None or awaited.tokens == 0:
            return
        counters, alignment = self._shared.counters, self._shared.shape.hit_alignment
        counters.add("awaited_hand_offs")
        if hit.tokens < min(awaited.tokens // alignment * alignment, state.asked_tokens):
            counters.add("short_hand_offs")

    def _drop_hit(self, state: RequestState) -> None:
        if state.looking_up:
            self._shared.core.forget(state.request.request_id)
            state.looking_up = False
        hit, state.hit = state.hit, None
        if hit is not None and hit.tokens > 0:
            self._shared.core.release(hit.boot, hit.lease)

    def give_back(self, state: RequestState) -> None:
        """Drops the hit. A load in progress goes on, and releases its lease at its end."""
        self._drop_hit(state)

    def runs_gone(self, gone: Sequence[bytes]) -> None:
        # This holds even if the scheduler comes back to the same run: the daemon released the leases when the session
        # ended.
        for state in self._shared.requests.values():
            if state.hit is not None and state.hit.tokens and state.hit.boot in gone:
                self._drop_hit(state)

    def reset(self) -> None:
        for state in self._shared.requests.values():
            self._drop_hit(state)

    # Loads

    def allocated(
        self, request: Request, state: RequestState | None, blocks: AllocatedBlocks, tokens: int
    ) -> None:
        """The last `tokens` of the request's hit are still to be loaded."""
        if tokens == 0:
            if state is not None:
                self._drop_hit(state)
            return
        shared = self._shared
        job = next(shared.jobs)
        groups = None
        try:
            assert state is not None and state.hit is not None, "the engine loads a hit that was not promised"
            groups = self._plan_load(state, state.hit, blocks, tokens)
        except Exception as error:  # noqa: BLE001
            # The engine already waits for this request, so its load has to be reported, as failed.
            shared.failures.record("planning a load", error, "the request is reported as not loaded")
        local_tokens = state.local_tokens if state is not None else 0
        written = [
            block
            for group in shared.shape.groups
            for block in blocks.blocks[group.group_id][local_tokens // group.tokens_per_block :]
            if not block.is_null
        ]
        # vLLM takes failed blocks of a single group only, and ends the engine over others.
        block_ids = frozenset(() if shared.shape.empties_failed else (block.block_id for block in written))
        if shared.pins.pool is None:
            groups, written = None, []
        else:
            shared.pins.pin(written)
        hit = state.hit if state is not None else None
        boot, lease = (hit.boot, hit.lease) if hit is not None else (b"", 0)
        if state is not None:
            state.hit = None  # the lease belongs to the load now
            state.loading = job
        self.under_way[job] = _Load(
            request.request_id, boot, lease, written, shared.shape.workers, blocks.blocks
        )
        self.to_send.append(LoadJob(job, request.request_id, boot, groups, block_ids))
        shared.counters.add("hit_tokens", tokens)

    def _plan_load(
        self, state: RequestState, hit: Hit, blocks: AllocatedBlocks, tokens: int
    ) -> list[tuple[int, list[int], list[bytes]]]:
        end_tokens = state.local_tokens + tokens
        assert end_tokens <= hit.tokens, f"the engine wants {end_tokens} tokens of a hit of {hit.tokens}"
        first_blocks = dict(hit.groups)
        groups = []
        for group in self._shared.shape.groups:
            end = -(-end_tokens // group.tokens_per_block)
            # A window that ends earlier needs blocks that the hit does not have.
            assert group.window_blocks == 0 or end_tokens == hit.tokens, (
                f"the engine cut a hit of {hit.tokens} tokens with a window to {end_tokens}"
            )
            first = max(state.local_tokens // group.tokens_per_block, first_blocks[group.index])
            table = blocks.blocks[group.group_id]
            wanted = [index for index in range(first, end) if not table[index].is_null]
            ids = [table[index].block_id for index in wanted]
            ranks = range(self._shared.shape.workers)
            pages = [hit.pages_of(group.index, rank, wanted) for rank in ranks]
            groups.append((group.index, ids, pages))
        return groups

    # Loads for other kinds

    def tokens_found(self, state: RequestState) -> int:
        """How many of a prompt's first tokens the daemon has. 0 if its answer does not come within
        `kvlane.lookup_wait_us`."""

        def wait_us(state: RequestState) -> int:
            # A lookup that awaits another engine's save may take seconds.
            return self._shared.settings.lookup_wait_us if state.awaited_save is None else 0

        if not self._poll_lookup(state, wait_us) or state.hit is None:
            return 0
        return state.hit.tokens

    def look_up_again(self, state: RequestState) -> None:
        """Looks a prompt up again, because others may have saved it meanwhile."""
        self._start_lookup(state)

    def find_saved(self, state: RequestState, tokens: int) -> None:
        """Looks a prompt up whose first `tokens` this engine has saved. The answer waits until they can be found."""
        core, wait_ms = self._shared.core, round(self._shared.settings.wait_ms)
        self._start_lookup(state, (core.engine_id, core.run, tokens, wait_ms))

    def has_answer(self, state: RequestState) -> bool:
        """Whether `state.hit` has the answer of the last lookup. Does not wait for it."""
        return self._poll_lookup(state, lambda _: 0)

    def load_into(
        self,
        state: RequestState,
        group: CacheGroup,
        first: int,
        blocks: list[Block],
        on_end: Callable[[bool], None],
    ) -> None:
        """Loads a prompt's blocks from `first` on, which `tokens_found` has found, into these blocks of the engine.
        They are pinned, and may be written, until `on_end` gets whether all bytes came."""
        shared, hit = self._shared, state.hit
        assert hit is not None and hit.tokens >= (first + len(blocks)) * group.tokens_per_block
        wanted = list(range(first, first + len(blocks)))
        pages = [hit.pages_of(group.index, rank, wanted) for rank in range(shared.shape.workers)]
        ids = [block.block_id for block in blocks]
        job = next(shared.jobs)
        shared.pins.pin(blocks)
        state.hit = None  # the lease belongs to the load now
        self.under_way[job] = _Load("", hit.boot, hit.lease, blocks, shared.shape.workers, on_end=on_end)
        self.to_send.append(LoadJob(job, "", hit.boot, [(group.index, ids, pages)]))
        shared.counters.add("hit_tokens", len(blocks) * group.tokens_per_block)

    def promise_no_more(self, state: RequestState) -> None:
        """Records that the daemon's blocks of a prompt did not come."""
        self._drop_hit(state)
        state.may_be_looked_up = False

    def _for_others(self) -> list[LoadJob]:
        """Loads for other kinds that have not been sent to the workers."""
        return [load for load in self.to_send if self.under_way[load.job].on_end is not None]

    def pinned(self) -> list[Block]:
        return [block for load in self._for_others() for block in self.under_way[load.job].blocks]

    def before_pool_reset(self) -> None:
        """Ends unsent loads for other kinds: no worker writes their blocks."""
        for load in self._for_others():
            self.to_send.remove(load)
            self.ended(load.job, JobEnd(self._shared.shape.workers, ok=False))

    def take(self) -> list[LoadJob]:
        """Takes the loads to send to the workers in this step."""
        loads, self.to_send = self.to_send, []
        return loads

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """`take` has taken the loads before. While a lookup is in flight, workers do not wait for their copies."""
        self._waits_for_saves = True
        for job, load in self.under_way.items():
            state = self._shared.requests.get(load.request_id)
            if state is not None and state.loading == job and waits_for_its_load(state.request):
                jobs.unplanned.append(job)
        if jobs.idle and any(state.looking_up for state in self._shared.requests.values()):
            jobs.idle = False

    def ended(self, job: int, end: JobEnd) -> bool:
        load = self.under_way.get(job)
        if load is None:
            return False
        load.ranks_left -= end.ranks
        if load.ok and not end.ok:
            load.ok = False
            self._begin_anew(job, load)
        if load.ranks_left <= 0:
            del self.under_way[job]
            self._load_ended(job, load)
        return True

    def _load_ended(self, job: int, load: _Load) -> None:
        self._shared.pins.unpin(load.blocks)
        if load.lease:
            self._shared.core.release(load.boot, load.lease)
        if load.on_end is not None:
            load.on_end(load.ok)
            return
        state = self._shared.requests.get(load.request_id)
        if state is not None and state.loading == job:
            state.loading = None
            state.tokens_ended(load.ok)

    def _begin_anew(self, job: int, load: _Load) -> None:
        """The first rank has reported that a load failed. Where vLLM cannot be told, the request begins anew: its
        blocks are given back, as by vLLM's own `free`. Other ranks may have released the load, so vLLM may take it for
        done in this step; it then gives no block a hash. Ranks that go on write blocks that are pinned."""
        state = self._shared.requests.get(load.request_id)
        if (
            not self._shared.shape.empties_failed
            or state is None
            or state.loading != job
            or not waits_for_its_load(state.request)
        ):
            return
        assert self._shared.pins.pool is not None
        for table in load.tables:
            self._shared.pins.unpin(table)
            cast("list[Block]", table).clear()
        request = cast("Any", state.request)
        request.num_computed_tokens = 0
        # vLLM adds a hit of its own cache only to a request that never had blocks.
        request.skip_reading_prefix_cache = True

    def pending(self) -> bool:
        return bool(self.under_way)
