"""The worker role: describes its memory to the core once, then hands it jobs and reports their ends.

Every job that arrives is reported exactly once, as failed if nothing else is possible: the scheduler keeps blocks
pinned, and vLLM keeps a request waiting, until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlane.connector.core_protocols import Release, WorkerCore
from kvlane.connector.counters import Counters
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import JobEnd, LoadJob, SaveJob, StepJobs
from kvlane.connector.weights import Weights, WeightsReport

# With nothing to compute the worker waits this long for its copies instead of spinning through empty steps: for saves
# not long, since a request that arrives meanwhile waits too.
LOAD_WAIT_MS = 2.0
OTHER_WAIT_MS = 0.2
# Empty steps after a load was released: the engine has planned one of them before it learns of it.
STEPS_TO_A_RELEASED_REQUEST = 2
CORE_COUNTS = frozenset({"connects", "disconnects", "save_timeouts"})


@dataclass(frozen=True)
class Stream:
    """How the engine computes on a GPU."""

    handle: Callable[[], int]
    """Gives the handle of the stream that the calling thread computes in."""
    last_region: dict[str, int]
    """Of each layer, the last region that it reads; empty where loads cannot be waited for in parts."""
    step_kind: Callable[[], str | None]
    """Of the step that begins: how vLLM runs its forward pass. None where layers do not call their hooks, as in a full
    CUDA graph. Steps of one kind call the same hooks."""


class WorkerSide:
    """All of the worker role. Its methods may raise; the connector guards them."""

    def __init__(self, rank: int, failures: Failures) -> None:
        self._rank = rank
        self._failures = failures
        self._core: WorkerCore | None = None
        self._stream: Stream | None = None
        self._replicas: Sequence[int] = ()
        # Loads that run on while their request computes already.
        self._released: set[int] = set()
        # By kind of step, the layers whose hook was called: with all of them, such steps can be trusted to call it.
        self._seen_layers: dict[str, set[str]] = {}
        self._kind: str | None = None
        self._waited_layers: set[str] = set()
        self._steps_at_once = 0
        self.on_layer: Callable[[str], None] | None = None
        """What vLLM's hook of each layer has to call, if anything."""
        self.counters = Counters()
        self._loads: dict[int, LoadJob] = {}
        self._saves: dict[int, int] = {}  # job to its number of blocks
        self._ended: dict[int, JobEnd] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._jobs: StepJobs | None = None
        self._saves_started = False
        self.weights: Weights | None = None
        """What the model computes with; None where it could not be found."""
        self._weights_report: WeightsReport | None = None

    def attach(self, core: WorkerCore, stream: Stream | None = None, replicas: Sequence[int] = ()) -> None:
        """The core's worker; before, and after `detach`, every job fails. `stream` is for caches on a GPU; `replicas`
        says for each group how many consecutive ranks hold the same blocks, if any do."""
        self._core = core
        self._stream = stream
        self._replicas = replicas
        self._seen_layers = {}
        self.on_layer = None

    @property
    def attached(self) -> bool:
        """Whether jobs are carried out."""
        return self._core is not None

    def detach(self) -> None:
        """End all copies: the KV caches are about to go away."""
        core, self._core = self._core, None
        if core is None:
            return
        core.close()
        self._collect(core)
        for job in [*self._loads, *self._saves]:
            self._end(job, ok=False)

    def bind(self, jobs: StepJobs) -> None:
        """A step begins: start its loads, which vLLM's own zeroing of new blocks precedes."""
        self._jobs = jobs
        self._saves_started = False
        self.on_layer = None
        if self._core is not None:
            self._core.step_begins(jobs.computes, jobs.present, jobs.gone)
            if jobs.computes:
                self._wait_for_released()
        for load in jobs.loads:
            self._start_load(load)
        if jobs.look_at_weights is not None:
            self._look_at_weights(jobs.look_at_weights)

    def _look_at_weights(self, reset: int) -> None:
        """Before this step computes anything: the weights are those that its blocks will belong to."""
        label = None
        try:
            if self.weights is not None:
                label = self.weights.label(reset)
        except Exception as error:  # noqa: BLE001
            self._failures.record("looking at the weights", error, "this engine shares no blocks with others")
        # Also if nothing is known: the scheduler waits for it.
        self._weights_report = WeightsReport(reset, frozenset({(self._rank, label)}))

    def _wait_for_released(self) -> None:
        """Holds up what this step computes until the loads that were released are there, layer by layer if possible.
        All of them: their blocks may be hit by other requests, or belong to others by now."""
        if self._stream is None or not self._stream.last_region:
            return
        self._kind = self._stream.step_kind()
        assert self._core is not None
        outstanding = self._core.has_outstanding_loads
        if self._kind is not None and self._is_trusted(self._kind):
            if outstanding:
                self._waited_layers.clear()
                self.on_layer = self._wait_for_layer
            return
        if self._kind is not None:
            self.on_layer = self._see_layer
        if outstanding:
            self._hold_up(None)

    def _is_trusted(self, kind: str) -> bool:
        assert self._stream is not None
        return self._seen_layers.get(kind, set()) >= self._stream.last_region.keys()

    def _see_layer(self, layer_name: str) -> None:
        assert self._kind is not None
        self._seen_layers.setdefault(self._kind, set()).add(layer_name)

    def _wait_for_layer(self, layer_name: str) -> None:
        assert self._stream is not None
        self._waited_layers.add(layer_name)
        # A layer that is not known waits for everything.
        self._hold_up(self._stream.last_region.get(layer_name))

    def _check_waits(self) -> None:
        """Steps of a kind that left a hook out are not trusted again."""
        if self.on_layer != self._wait_for_layer:
            return
        assert self._stream is not None
        assert self._kind is not None
        missing = self._stream.last_region.keys() - self._waited_layers
        if missing:
            self._seen_layers[self._kind] = set()
            error = RuntimeError(
                f"{len(missing)} layers did not wait for a load in a step of kind {self._kind}"
            )
            self._failures.record("waiting for a load", error, "this step may have read blocks too early")

    def _hold_up(self, region: int | None) -> None:
        assert self._stream is not None
        assert self._core is not None
        try:
            self._core.wait_for_loads(self._stream.handle(), region)
        except Exception as error:  # noqa: BLE001
            self._failures.record("waiting for a load", error, "the GPU's context is lost")

    def start_saves(self) -> None:
        """The step's forward pass is over: start its saves. Calling it again changes nothing."""
        if self._jobs is None or self._saves_started:
            return
        self._saves_started = True
        self._check_waits()
        for save in self._jobs.saves:
            self._start_save(save)

    def unbind(self) -> None:
        """A step ends. Steps without a forward pass have not started their saves yet in some versions."""
        self.start_saves()
        self._jobs = None

    def _start_load(self, load: LoadJob) -> None:
        self._loads[load.job] = load
        if load.groups is None or self._core is None:
            self._end(load.job, ok=False)
            return
        groups = [(group, ids, self._pages(group, pages)) for group, ids, pages in load.groups if ids]
        if not groups:
            self._end(load.job, ok=True)
            return
        try:
            self._core.load(load.job, load.boot, groups, self._stream_handle(), self._release)
        except Exception as error:  # noqa: BLE001
            self._failures.record("starting a load", error, "the request is reported as not loaded")
            self._end(load.job, ok=False)

    def _pages(self, group: int, pages: list[bytes]) -> bytes:
        """Where this rank's shards of a group's blocks are; of blocks that several ranks hold, where all slices are."""
        replicas = self._replicas[group] if self._replicas else 1
        first = self._rank - self._rank % replicas
        return b"".join(pages[first : first + replicas])

    def _start_save(self, save: SaveJob) -> None:
        self._saves[save.job] = sum(len(ids) for _, _, _, ids in save.groups)
        if self._core is None:
            self._end(save.job, ok=False)
            return
        try:
            self._core.save(save.job, save.groups, self._stream_handle())
        except Exception as error:  # noqa: BLE001
            self._failures.record("starting a save", error, "its blocks are not saved")
            self._end(save.job, ok=False)

    def _stream_handle(self) -> int:
        return self._stream.handle() if self._stream is not None else 0

    @property
    def _release(self) -> Release:
        """When a load's request may compute. Before its end only where every step can be made to wait; where others
        run that would have to wait with it, not long before."""
        if self._stream is None or not self._stream.last_region:
            return "at_end"
        return "at_once" if self._jobs is not None and self._jobs.idle else "when_near"

    def poll(self) -> None:
        """Notice the jobs that ended."""
        if self._core is None:
            return
        self._steps_at_once = max(0, self._steps_at_once - 1)
        if self._jobs is not None and self._jobs.idle and not self._steps_at_once:
            if self._loads.keys() - self._released:
                self._core.wait(LOAD_WAIT_MS)
            elif self._loads or self._saves:
                self._core.wait(OTHER_WAIT_MS)
        self._collect(self._core)

    def _collect(self, core: WorkerCore) -> None:
        for finished in core.poll():
            if finished.kind == "released":
                self._released.add(finished.job)
                self._steps_at_once = STEPS_TO_A_RELEASED_REQUEST
                self._loaded.add(self._loads[finished.job].request_id)
            elif finished.job in self._saves:
                stored = finished.blocks + finished.present
                self.counters.add("save_jobs")
                self.counters.add("save_blocks", finished.blocks)
                self.counters.add("present_blocks", finished.present)
                self.counters.add("save_bytes", finished.bytes)
                self.counters.add("save_seconds", finished.seconds)
                self._end(finished.job, ok=finished.ok and stored >= self._saves[finished.job])
            elif finished.job in self._loads:
                self.counters.add("load_jobs")
                self.counters.add("load_blocks", finished.blocks)
                self.counters.add("load_bytes", finished.bytes)
                self.counters.add("load_seconds", finished.seconds)
                if not finished.ok:
                    released = finished.job in self._released
                    then = (
                        "its request computes with wrong blocks"
                        if released
                        else "the request is reported as not loaded"
                    )
                    self._failures.record("a load", RuntimeError(finished.detail), then)
                self._end(finished.job, ok=finished.ok)

    def _end(self, job: int, ok: bool) -> None:
        load = self._loads.pop(job, None)
        if job in self._released:
            self._released.remove(job)
            if not ok:
                self.counters.add("failed_loads")
        elif load is None:
            del self._saves[job]
            self.counters.add("failed_saves", 0 if ok else 1)
        else:
            self._loaded.add(load.request_id)
            if not ok:
                self.counters.add("failed_loads")
                self._failed.add(load.request_id)
                self._failed_blocks |= load.block_ids
        self._ended[job] = JobEnd(1, ok)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those among them whose load failed."""
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, set()
        return loaded, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_ended(self) -> dict[int, JobEnd]:
        """The ends of jobs since the last call, for the scheduler."""
        ended, self._ended = self._ended, {}
        return ended

    def take_weights_report(self) -> WeightsReport | None:
        """What the last look at the weights found, if there was one since the last call."""
        report, self._weights_report = self._weights_report, None
        return report

    def take_stats(self) -> dict[str, float] | None:
        """Counters since the last call."""
        if self._core is not None:
            self.counters.add_core(self._core.take_stats(), CORE_COUNTS)
        self.counters.add("errors", self._failures.take())
        return self.counters.take()

    def close(self) -> None:
        """Say goodbye to the daemon."""
        self.detach()
