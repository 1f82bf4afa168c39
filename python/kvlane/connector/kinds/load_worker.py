"""Carries loads out in one rank, and makes steps wait for loads that were released before their end."""

from __future__ import annotations

from kvlane.connector.core_protocols import Finished, Release
from kvlane.connector.jobs import JobEnd, LoadJob, StepJobs
from kvlane.connector.kinds.kind import LayerHook, WorkerKind, WorkerShared

# Longest wait of a step without work for this rank's copies, so that it does not spin through empty steps. It is short
# for loads whose request was released, because a request that arrives meanwhile waits too.
LOAD_WAIT_MS = 2.0
RELEASED_WAIT_MS = 0.2
# Empty steps after a load was released: the engine planned one of them before the release reached it.
STEPS_TO_A_RELEASED_REQUEST = 2


class LoadWorker(WorkerKind):
    """Loads of one rank."""

    name = "load"

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._loads: dict[int, LoadJob] = {}
        # Loads that run on while their request computes already.
        self._released: set[int] = set()
        # Kinds of steps of which one called every layer's hook, and those of which a later one left a hook out.
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()
        # The kind of this step, or None if nobody looks which hooks it calls.
        self._followed_kind: str | None = None
        # The layers whose hook this step has called.
        self._called_layers: set[str] = set()
        self._awaited: list[int] = []
        """Released loads that this step waits for."""

    def attached(self) -> None:
        self._trusted, self._distrusted = set(), set()
        self._followed_kind = None

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        """Starts this step's loads. vLLM has zeroed new blocks before."""
        self._followed_kind = None
        hook = None
        try:
            hook = self._wait_for_released(jobs) if jobs.computes else None
        except Exception as error:  # noqa: BLE001
            # New loads are started all the same: their requests wait.
            self._shared.failures.record(
                "waiting for a load", error, "this step may have read blocks too early"
            )
        for load in jobs.loads:
            self._start(load, jobs.idle)
        return hook

    # Steps that have to wait

    def _wait_for_released(self, jobs: StepJobs) -> LayerHook | None:
        """Holds this step up until released loads have ended, layer by layer if possible.
        It waits for those that vLLM knew to be released when it planned the step: other requests may have hit their
        blocks, or own them by now. It does not wait for later ones: they were released ahead of their ends, which come
        before their requests' steps."""
        core, stream = self._shared.core, self._shared.stream
        if core is None or stream is None or not stream.awaited:
            return None
        kind = stream.step_kind()
        if kind is not None and jobs.decodes:
            # Some models compute one token of few requests in another way, without hooks.
            kind += f", one token of each of {jobs.decodes}"
        outstanding = self._awaited = [job for job in core.outstanding_loads() if job not in jobs.unplanned]
        self._called_layers.clear()
        if kind in self._trusted:
            if not outstanding:
                return None
            self._followed_kind = kind
            if stream.awaited_first is not None:
                self._hold_up(stream.awaited_first)
            return self._wait_for_layer
        if outstanding:
            self._hold_up(None)
        if kind is None or kind in self._distrusted:
            return None
        self._followed_kind = kind
        return self._called_layers.add

    def _wait_for_layer(self, layer_name: str) -> None:
        assert self._shared.stream is not None
        self._called_layers.add(layer_name)
        # An unknown layer waits for all regions.
        self._hold_up(self._shared.stream.awaited.get(layer_name))

    def _hold_up(self, region: tuple[int, int] | None) -> None:
        core, stream = self._shared.core, self._shared.stream
        assert core is not None and stream is not None
        try:
            core.wait_for_loads(stream.handle(), self._awaited, region)
        except Exception as error:  # noqa: BLE001
            self._shared.failures.record("waiting for a load", error, "the GPU's context is lost")

    def computed(self, jobs: StepJobs) -> None:
        """Trusts a kind of step that called all hooks. Withdraws the trust, for good, if it leaves one out."""
        kind = self._followed_kind
        if kind is None:
            return
        assert self._shared.stream is not None
        missing = self._shared.stream.awaited.keys() - self._called_layers
        if not missing:
            self._trusted.add(kind)
        elif kind in self._trusted:
            self._trusted.remove(kind)
            self._distrusted.add(kind)
            error = RuntimeError(f"{len(missing)} layers did not wait for a load in a step of kind {kind}")
            self._shared.failures.record(
                "waiting for a load", error, "this step may have read blocks too early"
            )

    # Loads

    def _start(self, load: LoadJob, idle: bool) -> None:
        shared = self._shared
        self._loads[load.job] = load
        if load.groups is None or shared.core is None:
            self._end(load.job, ok=False)
            return
        try:
            groups = [(group, ids, self._pages(group, pages)) for group, ids, pages in load.groups if ids]
            if groups:
                shared.core.load(
                    load.job, load.boot, groups, shared.stream_handle(), self._release(load, idle)
                )
            else:
                self._end(load.job, ok=True)
        except Exception as error:  # noqa: BLE001
            shared.failures.record("starting a load", error, "the request is reported as not loaded")
            self._end(load.job, ok=False)

    def _pages(self, group: int, pages: list[bytes]) -> bytes:
        """The pages of this rank's shards of a group's blocks; of all slices, if several ranks hold the blocks."""
        shared = self._shared
        replicas = shared.replicas[group] if shared.replicas else 1
        first = shared.rank - shared.rank % replicas
        return b"".join(pages[first : first + replicas])

    def _release(self, load: LoadJob, idle: bool) -> Release:
        """When a load's request may compute. A request computes before its load's end only if every step can be made to
        wait. If others run, which would wait too, that is not long before the end."""
        stream = self._shared.stream
        if not load.request_id or stream is None or not stream.awaited:
            return "at_end"
        return "at_once" if idle else "when_near"

    def finished(self, end: Finished) -> bool:
        load = self._loads.get(end.job)
        if load is None:
            return False
        shared = self._shared
        if end.kind == "released":
            self._released.add(end.job)
            shared.steps_at_once = STEPS_TO_A_RELEASED_REQUEST
            shared.reports.loaded.add(load.request_id)
            return True
        shared.counters.add("load_jobs")
        shared.counters.add("load_blocks", end.blocks)
        shared.counters.add("load_bytes", end.bytes)
        shared.counters.add("load_seconds", end.seconds)
        if not end.ok:
            released = end.job in self._released
            then = "its request computes with wrong blocks" if released else "what did not come is computed"
            shared.failures.record("a load", RuntimeError(end.detail), then)
        self._end(end.job, ok=end.ok)
        return True

    def _end(self, job: int, ok: bool) -> None:
        shared, reports = self._shared, self._shared.reports
        load = self._loads.pop(job)
        if not ok:
            shared.counters.add("failed_loads")
        if job in self._released:
            self._released.remove(job)
        elif load.request_id:
            reports.loaded.add(load.request_id)
            if not ok:
                reports.failed.add(load.request_id)
                reports.failed_blocks |= load.block_ids
        reports.jobs[job] = JobEnd(1, ok)

    def waits_for(self) -> float:
        if self._loads.keys() - self._released:
            return LOAD_WAIT_MS
        return RELEASED_WAIT_MS if self._loads else 0.0

    def detached(self) -> None:
        for job in list(self._loads):
            self._end(job, ok=False)
