"""The scheduler role: keeps the engine's requests, and asks the kinds of job in their order for each answer to vLLM."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from kvlane.connector.adapters import Adapters
from kvlane.connector.announcements import Announcements
from kvlane.connector.awaited_save import is_for_another_engine
from kvlane.connector.connection import Connection
from kvlane.connector.core_protocols import SchedulerCore
from kvlane.connector.counters import Counters
from kvlane.connector.guard import Failures, logger
from kvlane.connector.jobs import JobEnd, LoadJob, Mergeable, StepJobs
from kvlane.connector.kinds import CopyBlocks, LookUpAndLoad, Reset, SaveBlocks, scheduler_kinds
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared
from kvlane.connector.known_weights import KnownWeights
from kvlane.connector.namespace import HASH_SEED_VARIABLE, drawn_hash_seed
from kvlane.connector.pins import Pins
from kvlane.connector.prefill_rate import PrefillRate
from kvlane.connector.recording import Recording
from kvlane.connector.requests import GroupHashes, RequestState
from kvlane.connector.settings import Settings
from kvlane.connector.shape import EngineShape
from kvlane.connector.shared_pool import SchedulerPart
from kvlane.connector.vllm_protocols import (
    AllocatedBlocks,
    Block,
    KVEvent,
    Request,
    SchedulerOutput,
    Tables,
    block_state,
    transfer_params,
)
from kvlane.connector.weights import WeightsReport

if TYPE_CHECKING:
    from kvlane.connector.direct import Direct

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
WITHOUT_IT = "the engine goes on without it"
K = TypeVar("K", bound=SchedulerKind)


class SchedulerSide:
    """All of the scheduler role. Its methods may raise; the connector guards them. A kind that fails is logged and
    counted, and the others go on."""

    def __init__(
        self,
        core: SchedulerCore,
        shape: EngineShape,
        settings: Settings,
        failures: Failures,
        clock: Callable[[], float] = time.monotonic,
        adapters: Adapters | None = None,
        kinds: Callable[[SchedulerShared], list[SchedulerKind]] = scheduler_kinds,
        direct: Direct | None = None,
    ) -> None:
        self._core = core
        self._shape = shape
        self._clock = clock
        self._failures = failures
        self._adapters = adapters or Adapters()
        self._connection = Connection(core, clock)
        self._seed_checked = shape.hash_seed is None
        self.counters = Counters()
        self.pins = Pins()
        hashes = GroupHashes(shape.groups, shape.hash_block_size)
        weights = KnownWeights(settings.weights_version, shape.workers)
        hashes.weights_key = weights.key
        self.pool = SchedulerPart(self._connection, shape, weights, clock)
        self._shared = SchedulerShared(
            core=core,
            connection=self._connection,
            shape=shape,
            settings=settings,
            failures=failures,
            clock=clock,
            counters=self.counters,
            pins=self.pins,
            hashes=hashes,
            weights=weights,
            moment=self._adapters.moment,
            rate=PrefillRate(shape.steps_at_once),
            jobs=itertools.count(1),
            direct=direct,
            announcements=Announcements(shape.groups, self.counters) if shape.emit_events else None,
        )
        self.requests = self._shared.requests
        self._numbers = itertools.count(1)
        self._recording = Recording(core, shape.groups, hashes, clock)
        self.kinds = kinds(self._shared)
        self.loads = self._kind(LookUpAndLoad)
        self.saves = self._kind(SaveBlocks).saves

    def _kind(self, wanted: type[K]) -> K:
        (kind,) = (each for each in self.kinds if isinstance(each, wanted))
        return kind

    # Requests

    def add_request(self, request: Request) -> None:
        """Takes a request that has arrived. Its lookup starts before its turn in the scheduler comes."""
        self._adapters.moment.at(self._clock())
        if request.request_id in self.requests:
            self.forget_request(request.request_id)
        if not self._seed_checked:
            self._check_seed()
        state = RequestState.new(request, self._shape.groups, self._adapters, self._shape.names_are_content)
        state.number, state.arrived_at = next(self._numbers), self._clock()
        self.requests[request.request_id] = state
        if not state.takes_part():
            self.counters.add("unshared_requests")
        self._notify("a new request", lambda kind: kind.request_added(state))

    def _check_seed(self) -> None:
        self._seed_checked = True
        if drawn_hash_seed() not in (None, self._shape.hash_seed):
            # Log: nothing is shared between engines or found after a restart. Do: set the variable that the line
            # names to the same number for all engines.
            logger.warning(
                "kvlane: vLLM's hash seed could not be fixed, so this engine finds no blocks of other engines or of "
                "its own last run; set %s=0 in its environment",
                HASH_SEED_VARIABLE,
            )

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded past `local_tokens`, and whether asynchronously. None: ask again."""
        self._adapters.moment.at(self._clock())
        state = self.requests.get(request.request_id)
        if state is None:
            self.add_request(request)
            state = self.requests[request.request_id]
        state.local_tokens = local_tokens
        if state.first_local_tokens is None:
            state.first_local_tokens = local_tokens
        state.promised_by = None
        if not state.takes_part():
            self._give_back(state)
            return 0, False
        for kind in self.kinds:
            try:
                answer = kind.answer(state, local_tokens)
            except Exception as error:  # noqa: BLE001
                self._failed("a prompt", kind, error)
                continue
            if answer.wait:
                return None, False
            if answer.tokens:
                state.promised_by = kind.name
                return answer.tokens, not answer.at_once
        return 0, False

    def allocated(self, request: Request, blocks: AllocatedBlocks, external_tokens: int) -> None:
        """The engine has allocated blocks for a request. The last `external_tokens` promised are still to be loaded."""
        state = self.requests.get(request.request_id)
        promised_by = state.promised_by if state is not None else None
        if external_tokens and promised_by is None:
            # No kind has promised these tokens, but the engine waits for them. So the load is reported as failed.
            promised_by = self.loads.name
        if state is not None:
            state.had_blocks = True
            if external_tokens:
                state.awaits_tokens = True
        self._notify(
            "blocks of a request",
            lambda kind: kind.allocated(
                request, state, blocks, external_tokens if kind.name == promised_by else 0
            ),
        )

    def request_finished(self, request: Request, tables: Tables) -> dict[str, object] | None:
        """A request has ended, and vLLM is about to free its blocks. Returns the params for the decode engine, if the
        client asked for a hand-off."""
        state = self.requests.get(request.request_id)
        if state is None:
            return None
        self._notify("the end of a request", lambda kind: kind.request_finished(request, state, tables))
        self._record(lambda: self._recording.ended(request, state))
        handed_over = (
            self._hand_over(request, state) if is_for_another_engine(transfer_params(request)) else None
        )
        self.forget_request(request.request_id)
        return handed_over

    def _hand_over(self, request: Request, state: RequestState) -> dict[str, object] | None:
        """The answers of all kinds, merged."""
        answers: dict[str, object] = {}
        for kind in self.kinds:
            try:
                answers.update(kind.hands_over(request, state) or {})
            except Exception as error:  # noqa: BLE001
                self._failed("handing a request over", kind, error)
        return {"kvlane": answers} if answers else None

    def forget_request(self, request_id: str) -> None:
        """Releases what a request holds. Its jobs in progress go on."""
        state = self.requests.pop(request_id, None)
        if state is not None:
            self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        self._notify("what a request held", lambda kind: kind.give_back(state))

    # Kinds

    def _notify(self, what: str, notify: Callable[[SchedulerKind], None], then: str = WITHOUT_IT) -> None:
        """Calls every kind. One that fails does not keep the others from being called."""
        for kind in self.kinds:
            try:
                notify(kind)
            except Exception as error:  # noqa: BLE001
                self._failed(what, kind, error, then)

    def _says(self, what: str, ask: Callable[[SchedulerKind], bool]) -> bool:
        """Calls the kinds in order until one returns True."""
        for kind in self.kinds:
            try:
                if ask(kind):
                    return True
            except Exception as error:  # noqa: BLE001
                self._failed(what, kind, error)
        return False

    def _record(self, act: Callable[[], None]) -> None:
        """A recording that fails does not keep the rest from being done."""
        try:
            act()
        except Exception as error:  # noqa: BLE001
            self._failures.record("recording requests", error, WITHOUT_IT)

    def _failed(self, what: str, kind: SchedulerKind, error: Exception, then: str = WITHOUT_IT) -> None:
        self._failures.record(f"{what} ({kind.name})", error, then)

    # Steps

    def take_loads(self) -> list[LoadJob]:
        """Takes the loads to send to the workers in this step."""
        return self.loads.take()

    def take_copies(self) -> list[tuple[int, int]]:
        """Takes the copies inside the engine's cache to make before this step."""
        return self._kind(CopyBlocks).take()

    def plan_step(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """Called once a step: ticks the connection, and adds the workers' jobs of this step, beside `jobs.loads`."""
        self._connection.tick()
        self._record(self._recording.send)
        if self._connection.take_restart():
            self._notify("a new daemon", lambda kind: kind.daemon_restarted())
        self._plan_runs(jobs)
        jobs.computes = output.total_num_scheduled_tokens > 0
        jobs.idle = not jobs.computes
        jobs.decodes = len(output.num_scheduled_tokens)
        if output.total_num_scheduled_tokens > jobs.decodes:
            jobs.decodes = 0
        self._adapters.moment.at(self._clock())
        if output.num_scheduled_tokens:
            self._shared.rate.step_is_planned(self._clock(), output.num_scheduled_tokens)
        if block_state(output) is None:
            self._follow_tables(output)
        self._notify("planning a step", lambda kind: kind.plan(output, jobs))
        self._adapters.moment.next_step()
        if jobs.idle and not (jobs.loads or jobs.copies or jobs.saves or jobs.others):
            self._notify("a step with nothing to do", lambda kind: kind.idle())

    def _follow_tables(self, output: SchedulerOutput) -> None:
        """For versions before 0.30: put the block tables together from the scheduler's messages."""
        requests = self.requests
        for new in output.scheduled_new_reqs:
            state = requests.get(new.req_id)
            if state is not None:
                state.block_ids = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = requests.get(request_id)
            if state is None or new_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.block_ids = [list(ids) for ids in new_ids]
            else:
                for known, added in zip(state.block_ids, new_ids, strict=True):
                    known.extend(added)

    def _plan_runs(self, jobs: StepJobs) -> None:
        """Names the daemon's runs whose pools the workers may unmap."""
        gone = self._connection.take_newly_gone()
        if gone is not None:
            self._notify("a daemon that is gone", lambda kind: kind.runs_gone(gone))
        boots = {load.boot for load in jobs.loads}
        present = self._connection.boot
        jobs.present = present if boots <= {present} else None
        jobs.gone = [boot for boot in self._connection.over if boot not in boots]

    def jobs_ended(self, ended: Mapping[int, JobEnd]) -> None:
        """Passes the ends of jobs, which the workers have reported, to the kinds."""
        for job, end in ended.items():
            self._says("the end of a job", functools.partial(_ended, job, end))

    def has_pending_work(self) -> bool:
        """Whether the engine has to keep stepping although no request runs."""
        return self._recording.pending or self._says("pending work", lambda kind: kind.pending())

    def free_blocks_soon(self) -> bool:
        """Makes blocks come free if a kind can. True if they will, so that vLLM need not preempt a request."""
        return self._says("blocks that come free", lambda kind: kind.free_blocks_soon())

    # Resets

    def before_pool_reset(self) -> None:
        """vLLM is about to reset its own cache. It refuses while any block is referenced."""
        held = self._pinned()
        # If others hold blocks, or a load is still writing, vLLM refuses anyhow.
        if held and self.pins.pool is not None and self.pins.are_all(held):
            self._notify("a reset of vLLM's cache", lambda kind: kind.before_pool_reset())

    def _pinned(self) -> list[Block]:
        """The blocks that all kinds pin and can release."""
        held: list[Block] = []
        for kind in self.kinds:
            try:
                held += kind.pinned()
            except Exception as error:  # noqa: BLE001
                self._failed("what it pins", kind, error)
        return held

    def pool_was_reset(self) -> None:
        """vLLM's own cache is empty."""
        self._notify("a reset of vLLM's cache", lambda kind: kind.pool_was_reset())

    def reset(self) -> None:
        """The engine's weights may be others from here on. Stored blocks stay, for engines that keep these weights."""
        self._notify("a reset", lambda kind: kind.reset(), "blocks of other weights may be found")

    def weights_reported(self, report: WeightsReport) -> None:
        """Takes the workers' report on their weights."""
        self._kind(Reset).reported(report)

    # Both

    def reported(self, others: Mapping[str, Mergeable]) -> None:
        """Takes the reports of further kinds' worker halves, by name of the kind."""
        for kind in self.kinds:
            if kind.name in others:
                try:
                    kind.reported(others[kind.name])
                except Exception as error:  # noqa: BLE001
                    self._failed("a report", kind, error)

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call. vLLM asks after each step, when the step's requests have ended."""
        self._record(self._recording.send)
        taken, self._shared.events = self._shared.events, []
        return taken

    def take_stats(self) -> dict[str, float] | None:
        """Counters since the last call."""
        self.counters.add_core(self._core.take_stats(), CORE_COUNTS)
        self.counters.add("errors", self._failures.take())
        return self.counters.take()

    @property
    def direct(self) -> Direct | None:
        """Direct hand-offs, where they are wanted."""
        return self._shared.direct

    def close(self) -> None:
        """Ends the connections to the daemon and to other engines."""
        if self._shared.direct is not None:
            self._shared.direct.close()
        self._core.close()


def _ended(job: int, end: JobEnd, kind: SchedulerKind) -> bool:
    return kind.ended(job, end)
