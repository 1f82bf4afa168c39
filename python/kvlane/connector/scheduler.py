"""The scheduler role: looks prompts up, promises hits, has them loaded, and has new blocks saved.

A hit is promised only while its lease is held; the lease is given back when all workers have loaded the blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvlane.connector import events
from kvlane.connector.adapters import Adapters
from kvlane.connector.core_protocols import Hit, SchedulerCore
from kvlane.connector.counters import Counters
from kvlane.connector.groups import CacheGroup
from kvlane.connector.guard import Failures, logger
from kvlane.connector.jobs import JobEnd, LoadJob, StepJobs
from kvlane.connector.known_weights import KnownWeights
from kvlane.connector.namespace import HASH_SEED_VARIABLE, drawn_hash_seed
from kvlane.connector.pins import Pins
from kvlane.connector.requests import GroupHashes, RequestState
from kvlane.connector.saves import Saves
from kvlane.connector.settings import Settings
from kvlane.connector.vllm_protocols import (
    AllocatedBlocks,
    Block,
    KVEvent,
    Request,
    SchedulerOutput,
    Tables,
    block_state,
    wants_no_cache,
)
from kvlane.connector.weights import STARTED_WITH, WeightsReport

# A miss is asked again when a request has waited this long for its turn: others may have saved its prefix since.
MISS_IS_OLD_SECONDS = 1.0
# After so long without a step the connection is looked at before a hit is promised: an idle worker lets the pool of
# a dead daemon go after a minute.
LOOK_BEFORE_PROMISE_SECONDS = 1.0
# How long a reset of vLLM's cache waits for the daemon to give up the saves that are under way.
CANCEL_TIMEOUT_MS = 2000.0
CORE_COUNTS = frozenset(
    {
        "lookups",
        "hits",
        "misses",
        "timeouts",
        "unavailable",
        "lookup_seconds",
        "connects",
        "disconnects",
    }
)


@dataclass(frozen=True)
class EngineShape:
    """What the scheduler role has to know of its engine."""

    groups: list[CacheGroup]
    workers: int
    hash_block_size: int
    """Tokens that one entry of `request.block_hashes` covers."""
    hit_alignment: int
    """Hits are multiples of this many tokens."""
    can_load: bool
    can_save: bool
    emit_events: bool
    names_are_content: bool = True
    """Whether vLLM names multimodal inputs by their content."""
    hash_seed: bytes | None = None
    """The hash that prompts start from, as the namespaces say; None if it is random."""


@dataclass
class _Load:
    request_id: str
    boot: bytes
    lease: int
    blocks: list[Block]
    """Pinned until the end: a load may outlive its request."""
    ranks_left: int
    ok: bool = True


class SchedulerSide:
    """All of the scheduler role. Its methods may raise; the connector guards them."""

    def __init__(
        self,
        core: SchedulerCore,
        shape: EngineShape,
        settings: Settings,
        failures: Failures,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
    ) -> None:
        self._core = core
        self._adapters = adapters or Adapters()
        self._shape = shape
        self._settings = settings
        self._clock = clock
        self._failures = failures
        self.counters = Counters()
        jobs = itertools.count(1)
        self._jobs = jobs
        self._hashes = GroupHashes(shape.groups, shape.hash_block_size)
        self.pins = Pins()
        self.saves = Saves(
            shape.groups,
            self._hashes,
            shape.workers,
            settings,
            shape.emit_events,
            self.counters,
            jobs,
            self.pins,
        )
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[int, _Load] = {}
        self._loads_to_send: list[LoadJob] = []
        self._events: list[KVEvent] = []
        self._boot: bytes | None = None
        self._ticked_at = clock()
        self._told_gone: list[bytes] = []
        self._weights = KnownWeights(settings.weights_version, shape.workers)
        self._hashes.weights_key = self._weights.key
        # vLLM refused to reset its own cache when it reset the connector: it may hold blocks of other weights.
        self._own_cache_is_old = False
        # Since the last reset a request was to be scheduled: from here on the weights stay as they are.
        self._is_scheduling = False
        self._seed_checked = shape.hash_seed is None

    # Lookups

    def add_request(self, request: Request) -> None:
        """A request has arrived: ask for its prefix before it is its turn."""
        self._adapters.moment.at(self._clock())
        if request.request_id in self._requests:
            self.forget_request(request.request_id)
        if not self._seed_checked:
            self._check_seed()
        state = RequestState.new(request, self._shape.groups, self._adapters, self._shape.names_are_content)
        self._requests[request.request_id] = state
        if not state.takes_part():
            self.counters.add("unshared_requests")
        self._start_lookup(state)

    def _check_seed(self) -> None:
        self._seed_checked = True
        if drawn_hash_seed() not in (None, self._shape.hash_seed):
            logger.warning(
                "kvlane: vLLM's hash seed could not be fixed, so this engine finds no blocks of other engines or of "
                "its own last run; set %s=0 in its environment",
                HASH_SEED_VARIABLE,
            )

    def _start_lookup(self, state: RequestState) -> None:
        request = state.request
        self._drop_hit(state)
        if (
            not self._shape.can_load
            or self.pins.pool is None
            or not self._weights.are_known
            or state.load_failed
            or not state.takes_part()
            or wants_no_cache(request)
        ):
            return
        # The engine must compute at least one token itself.
        tokens = (request.num_tokens - 1) // self._shape.hit_alignment * self._shape.hit_alignment
        state.asked_tokens = tokens
        if tokens <= 0 or not request.block_hashes:
            return
        # Also those beyond the limit: what is stored of them needs no saving.
        hashes = [
            self._hashes.stored(state, group, 0, self._hashes.count(state, group))
            for group in self._shape.groups
        ]
        self._core.lookup_start(request.request_id, hashes, tokens)
        state.looking_up = True

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded past `local_tokens`, and whether asynchronously. None: ask again."""
        self._adapters.moment.at(self._clock())
        state = self._requests.get(request.request_id)
        if state is None:
            self.add_request(request)
            state = self._requests[request.request_id]
        state.local_tokens = local_tokens
        if not state.takes_part():
            self._drop_hit(state)
            return 0, False
        if state.stale:
            # It starts over, so nothing of before the reset is left of it.
            state.stale = False
            state.forget_progress()
        self._is_scheduling = True
        if (
            not self._weights.are_known
            and self._shape.can_load
            and self._weights.is_worth_waiting(self._clock())
        ):
            return None, False
        self._drop_former_hit(state)
        if self._wants_new_lookup(state):
            self._start_lookup(state)
        if state.looking_up:
            hit = self._core.lookup_poll(request.request_id, self._settings.lookup_wait_us)
            if hit is None:
                return None, False
            self._take_answer(state, hit)
            self._drop_former_hit(state)
        if state.hit is None or state.hit.tokens <= local_tokens:
            return 0, False
        return state.hit.tokens - local_tokens, True

    def _drop_former_hit(self, state: RequestState) -> None:
        """A hit is promised only of the daemon's present run, whose pool all workers have mapped as far as it knows: of
        another run they may have let the pool go."""
        if state.hit is None or state.hit.tokens == 0:
            return
        if self._clock() - self._ticked_at >= LOOK_BEFORE_PROMISE_SECONDS:
            self._tick()
        if state.hit.boot != self._core.boot or not self._core.ready:
            self._drop_hit(state)

    def _wants_new_lookup(self, state: RequestState) -> bool:
        if state.looking_up:
            return False
        if state.hit is None:
            return True
        # After a preemption the prompt includes what was generated.
        longer = state.request.num_tokens - 1 >= state.asked_tokens + self._shape.hit_alignment
        old_miss = state.hit.tokens == 0 and self._clock() - state.answered_at >= MISS_IS_OLD_SECONDS
        return longer or old_miss

    def _take_answer(self, state: RequestState, hit: Hit) -> None:
        state.looking_up = False
        state.hit = hit
        state.answered_at = self._clock()
        # What the daemon has is not saved again; what only the engine's own cache has is, so that a daemon that
        # was restarted fills up by itself.
        state.saved_blocks = [
            hit.stored_blocks(group.index) if hit.tokens else 0 for group in self._shape.groups
        ]
        state.next_save = 0

    def _drop_hit(self, state: RequestState) -> None:
        if state.looking_up:
            self._core.forget(state.request.request_id)
            state.looking_up = False
        hit, state.hit = state.hit, None
        if hit is not None and hit.tokens > 0:
            self._core.release(hit.boot, hit.lease)

    # Loads

    def allocated(self, request: Request, blocks: AllocatedBlocks, external_tokens: int) -> None:
        """The engine has blocks for a request, the last `external_tokens` of its hit still to be loaded."""
        state = self._requests.get(request.request_id)
        if external_tokens == 0:
            if state is not None:
                self._drop_hit(state)
            return
        job = next(self._jobs)
        groups = None
        try:
            assert state is not None and state.hit is not None, "the engine loads a hit that was not promised"
            groups = self._plan_load(state, state.hit, blocks, external_tokens)
        except Exception as error:  # noqa: BLE001
            # The engine already waits for this request, so its load has to be reported, as failed.
            self._failures.record("planning a load", error, "the request is reported as not loaded")
        local_tokens = state.local_tokens if state is not None else 0
        written = [
            block
            for group in self._shape.groups
            for block in blocks.blocks[group.group_id][local_tokens // group.tokens_per_block :]
            if not block.is_null
        ]
        block_ids = frozenset(block.block_id for block in written)
        if self.pins.pool is None:
            groups, written = None, []
        else:
            self.pins.pin(written)
        hit = state.hit if state is not None else None
        boot, lease = (hit.boot, hit.lease) if hit is not None else (b"", 0)
        if state is not None:
            state.hit = None  # the lease belongs to the load now
            state.loading = job
        self._loads[job] = _Load(request.request_id, boot, lease, written, self._shape.workers)
        self._loads_to_send.append(LoadJob(job, request.request_id, boot, groups, block_ids))
        self.counters.add("hit_tokens", external_tokens)

    def _plan_load(
        self, state: RequestState, hit: Hit, blocks: AllocatedBlocks, external_tokens: int
    ) -> list[tuple[int, list[int], list[bytes]]]:
        end_tokens = state.local_tokens + external_tokens
        assert end_tokens <= hit.tokens, f"the engine wants {end_tokens} tokens of a hit of {hit.tokens}"
        first_blocks = dict(hit.groups)
        groups = []
        for group in self._shape.groups:
            end = end_tokens // group.tokens_per_block
            # A window that ends earlier needs blocks that the hit does not have.
            assert group.window_blocks == 0 or end_tokens == hit.tokens, (
                f"the engine cut a hit of {hit.tokens} tokens with a window to {end_tokens}"
            )
            first_hit = first_blocks[group.index]
            first = max(state.local_tokens // group.tokens_per_block, first_hit)
            table = blocks.blocks[group.group_id]
            wanted = [index for index in range(first, end) if not table[index].is_null]
            ids = [table[index].block_id for index in wanted]
            pages = []
            for rank in range(self._shape.workers):
                all_pages = hit.pages(group.index, rank)
                pages.append(
                    b"".join(
                        all_pages[(index - first_hit) * 4 : (index - first_hit + 1) * 4] for index in wanted
                    )
                )
            groups.append((group.index, ids, pages))
        return groups

    # Steps

    def take_loads(self) -> list[LoadJob]:
        """Loads that the workers have not been told of."""
        loads, self._loads_to_send = self._loads_to_send, []
        return loads

    def plan_step(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Once a step: keep the connection alive, and queue what this step fills."""
        self._tick()
        self._notice_restart()
        self._tell_promises(jobs)
        runs = self._is_scheduling or output.total_num_scheduled_tokens > 0
        if runs and not self._own_cache_is_old:
            jobs.look_at_weights = self._weights.question()
        self._adapters.moment.at(self._clock())
        self._plan_saves(output)
        self._adapters.moment.next_step()
        save = self.saves.take_job(self._clock())
        if save is not None:
            jobs.saves.append(save)
        jobs.computes = output.total_num_scheduled_tokens > 0
        jobs.idle = not jobs.computes and not any(state.looking_up for state in self._requests.values())

    def _tick(self) -> None:
        self._core.tick()
        self._ticked_at = self._clock()

    def _tell_promises(self, jobs: StepJobs) -> None:
        """Which pools the workers may let go."""
        gone = self._core.gone
        if gone != self._told_gone:
            self._told_gone = gone
            # Also if the scheduler comes back to the same run: from here on the workers may let its pool go.
            for state in self._requests.values():
                if state.hit is not None and state.hit.tokens and state.hit.boot in gone:
                    self._drop_hit(state)
        boots = {load.boot for load in jobs.loads}
        present = self._core.boot
        jobs.present = present if boots <= {present} else None
        jobs.gone = [boot for boot in gone if boot not in boots]

    def _notice_restart(self) -> None:
        """A new daemon has nothing: what runs is saved from its beginning."""
        boot = self._core.boot
        if boot is None or boot == self._boot:
            return
        if self._boot is not None:
            for state in self._requests.values():
                state.forget_progress()
        self._boot = boot

    def _plan_saves(self, output: SchedulerOutput) -> None:
        shown = block_state(output)
        if shown is None:
            self._follow_tables(output)
        if not self._shape.can_save or not self._weights.are_known or not self._core.ready:
            return
        known = self._requests.get
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = known(request_id)
            if state is None:
                continue
            # The workers copy after this step's forward pass.
            computed = state.request.num_computed_tokens + scheduled
            if computed < state.next_save:
                continue
            tables = shown.resolve_block_ids(request_id) if shown is not None else state.block_ids
            if tables:
                self.saves.add(state, computed, tables, tables_are_exact=shown is not None, wait=True)

    def _follow_tables(self, output: SchedulerOutput) -> None:
        """For versions before 0.30: put the block tables together from the scheduler's messages."""
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:
                state.block_ids = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._requests.get(request_id)
            if state is None or new_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.block_ids = [list(ids) for ids in new_ids]
            else:
                for known, added in zip(state.block_ids, new_ids, strict=True):
                    known.extend(added)

    def jobs_ended(self, ended: Mapping[int, JobEnd]) -> None:
        """Workers have reported the ends of jobs."""
        for job, end in ended.items():
            stored = self.saves.ended(job, end.ranks, end.ok)
            if stored is not None:
                self._events += stored
                continue
            load = self._loads.get(job)
            if load is None:
                continue
            load.ranks_left -= end.ranks
            load.ok = load.ok and end.ok
            if load.ranks_left <= 0:
                del self._loads[job]
                self._load_ended(job, load)

    def _load_ended(self, job: int, load: _Load) -> None:
        self.pins.unpin(load.blocks)
        if load.lease:
            self._core.release(load.boot, load.lease)
        state = self._requests.get(load.request_id)
        if state is not None and state.loading == job:
            state.loading = None
            # Promising it again would fail again, and vLLM would ask without end.
            state.load_failed = state.load_failed or not load.ok

    # Ends

    def request_finished(self, request: Request, tables: Tables) -> None:
        """A request is over; its last full blocks are saved before vLLM frees them."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if (
            self._shape.can_save
            and self._weights.are_known
            and state.loading is None
            and not state.load_failed
            and self._core.ready
        ):
            # The last sampled token was never an input: its keys and values were not computed.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self.saves.add(state, computed, tables, tables_are_exact=True, wait=False)
        self.forget_request(request.request_id)

    def forget_request(self, request_id: str) -> None:
        """Give back what a request holds. A load under way goes on and gives its lease back at its end."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._drop_hit(state)

    def has_pending_work(self) -> bool:
        """Whether the engine has to keep stepping although no request runs."""
        return self.saves.pending or bool(self._loads)

    def frees_are_near(self) -> bool:
        """Whether blocks come free without preempting a request."""
        return self.saves.frees_are_near(self._clock())

    # Resets

    def before_pool_reset(self) -> None:
        """vLLM is about to reset its own cache, which it does only when nobody holds a block: give the pins back.

        What has lost its pins may be overwritten at once, so the daemon must have given up its saves first.
        """
        # Where others hold blocks, or a load is still written, vLLM refuses anyhow.
        if self._loads or not self.saves.pending or not self.pins.are_all(self.saves.pinned()):
            return
        self.saves.drop_queued()
        if not self.saves.pending:
            return
        if self._core.cancel_saves(self.saves.last_job, CANCEL_TIMEOUT_MS):
            self.saves.give_up()
            for state in self._requests.values():
                # What is computed again is saved again.
                state.forget_progress()
        else:
            logger.warning(
                "kvlane: vLLM cannot reset its cache now: saves are under way, and the daemon did not confirm that it "
                "has given them up; they end by themselves within the save timeout"
            )

    def pool_was_reset(self) -> None:
        """vLLM's own cache is empty."""
        self._own_cache_is_old = False

    def reset(self) -> None:
        """The engine's weights may be others from here on. What is stored stays, for those that still have these."""
        for state in self._requests.values():
            self._drop_hit(state)
            if state.request.num_computed_tokens > 0:
                state.stale = True
        self.saves.drop_queued()
        self._own_cache_is_old = not self.pins.was_reset
        if self._own_cache_is_old:
            logger.warning(
                "kvlane: vLLM could not reset its own cache, so it may hold blocks of other weights: nothing is looked "
                "up or saved until a reset succeeds (reset_running_requests=True, or when no request runs)"
            )
        self._is_scheduling = False
        self._weights.forget()
        self._hashes.weights_key = self._weights.key

    def weights_reported(self, report: WeightsReport) -> None:
        """Workers have looked at their weights."""
        if not self._weights.answer(report):
            return
        self._hashes.weights_key = self._weights.key
        for state in self._requests.values():
            # What was computed meanwhile was not saved.
            state.forget_progress()
        labels = {label for _, label in report.labels}
        if labels == {STARTED_WITH}:
            logger.info("kvlane: after the reset the engine has the weights that it was started with")
            return
        if self._shape.emit_events:
            self._events.append(events.all_cleared())
        (label, *others) = labels
        if None in labels:
            logger.warning(
                "kvlane: after the reset nobody can tell which weights the engine has, so its blocks are shared with "
                "no other engine and not found after the next reset; name them "
                "(kvlane.connector.weights.name_weights)"
            )
        elif not others and label is not None and label.startswith("version "):
            logger.info("kvlane: after the reset the engine has the weights of %s", label)
        else:
            logger.warning(
                "kvlane: after the reset the engine has other weights than it was started with, so its blocks are "
                "shared with no other engine; where several engines get the same weights, name them "
                "(kvlane.connector.weights.name_weights)"
            )

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call."""
        taken, self._events = self._events, []
        return taken

    def take_stats(self) -> dict[str, float] | None:
        """Counters since the last call."""
        self.counters.add_core(self._core.take_stats(), CORE_COUNTS)
        self.counters.add("errors", self._failures.take())
        return self.counters.take()

    def close(self) -> None:
        """Say goodbye to the daemon."""
        self._core.close()
