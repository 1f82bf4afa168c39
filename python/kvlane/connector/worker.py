"""The worker role: passes a step's jobs to the kinds of job, and reports their ends.

Every job that arrives is reported exactly once, as failed if nothing else is possible. Until then the scheduler keeps
blocks pinned, and vLLM keeps a request waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlane.connector.core_protocols import WorkerCore
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import JobEnd, Mergeable, StepJobs
from kvlane.connector.kinds import CopyBlocksWorker, DigestWeights, worker_kinds
from kvlane.connector.kinds.direct_offer import OfferDirect, RankGone
from kvlane.connector.kinds.kind import CopyBlock, DirectRank, LayerHook, WorkerKind, WorkerShared
from kvlane.connector.shared_pool import WorkerPart
from kvlane.connector.stream import Stream
from kvlane.connector.weights import Weights, WeightsReport

# In the order in which the agent of direct hand-offs returns them.
DIRECT_COUNTS = (
    "direct_reads",
    "direct_failed_reads",
    "direct_read_runs",
    "direct_cuda_bytes",
    "direct_cma_bytes",
    "direct_tcp_bytes",
)
CORE_COUNTS = frozenset({"connects", "disconnects", "save_timeouts"})
WITHOUT_IT = "the engine goes on without it"


class WorkerSide:
    """The worker role. Its methods may raise; the connector guards them. A kind that fails is logged and counted, and
    the others go on."""

    def __init__(
        self,
        rank: int,
        failures: Failures,
        kinds: Callable[[WorkerShared], list[WorkerKind]] = worker_kinds,
    ) -> None:
        self._failures = failures
        self._shared = WorkerShared(rank, failures)
        self._reports = self._shared.reports
        self.counters = self._shared.counters
        self.pool = WorkerPart(rank)
        self.kinds = kinds(self._shared)
        (self._weights,) = (each for each in self.kinds if isinstance(each, DigestWeights))
        (self._copies,) = (each for each in self.kinds if isinstance(each, CopyBlocksWorker))
        self.on_layer_computed: LayerHook | None = None
        """The same after a layer has written its KV cache."""
        self.on_layer: LayerHook | None = None
        """The function that vLLM's hook of each layer calls in this step, or None."""
        self._jobs: StepJobs | None = None
        self._is_computed = False

    @property
    def weights(self) -> Weights | None:
        """The weights that the model computes with; None if they were not found."""
        return self._weights.weights

    @weights.setter
    def weights(self, weights: Weights | None) -> None:
        self._weights.weights = weights

    def attach(
        self,
        core: WorkerCore,
        stream: Stream | None = None,
        replicas: Sequence[int] = (),
        layouts: Sequence[bytes] = (),
    ) -> None:
        """Sets the core's worker. Before this, and after `detach`, every job fails. `stream` is for caches on a GPU.
        `replicas` has, for each group, how many consecutive ranks hold the same blocks; it is empty if none do.
        `layouts` has the cut of each group's blocks."""
        self._shared.core = core
        self._shared.stream = stream
        self._shared.replicas = replicas
        self.pool.attached(layouts)
        self.on_layer = None
        self._notify("new caches", lambda kind: kind.attached())

    def can_copy_by(self, copy: CopyBlock | None) -> None:
        """Copies blocks inside the caches by this function from now on; None if that is not possible."""
        self._copies.can_copy_by(copy)

    def attach_direct(self, rank: DirectRank) -> None:
        """Adds the rank's side of direct hand-offs, until `detach`."""
        self._shared.direct = rank

    @property
    def attached(self) -> bool:
        """Whether jobs are carried out."""
        return self._shared.core is not None

    def detach(self) -> None:
        """Ends all copies, because the KV caches are about to go away."""
        self.can_copy_by(None)
        direct, self._shared.direct = self._shared.direct, None
        if direct is not None:
            direct.agent.close()
            self._reports.others[OfferDirect.name] = RankGone()
        core, self._shared.core = self._shared.core, None
        if core is None:
            return
        # Whatever fails, all jobs are reported.
        try:
            core.close()
            self._collect(core)
        except Exception as error:  # noqa: BLE001
            self._failures.record("closing the core", error, "what was under way is reported as failed")
        self._notify("the end of copies", lambda kind: kind.detached())

    def bind(self, jobs: StepJobs) -> None:
        """Begins a step."""
        # In a pipeline with a drafter, vLLM ends a step in the last stage only.
        self.start_saves()
        self._jobs = jobs
        self._is_computed = False
        self.on_layer = self.on_layer_computed = None
        if self._shared.core is not None:
            try:
                self._shared.core.step_begins(jobs.computes, jobs.present, jobs.gone)
            except Exception as error:  # noqa: BLE001
                self._failures.record("telling the core of a step", error, WITHOUT_IT)
        for kind in self.kinds:
            try:
                hook = kind.step_begins(jobs)
            except Exception as error:  # noqa: BLE001
                self._failed("the begin of a step", kind, error)
                continue
            if hook is not None:
                self.on_layer = hook if self.on_layer is None else _one_after_the_other(self.on_layer, hook)
        for kind in self.kinds:
            try:
                hook = kind.layers_computed(jobs)
            except Exception as error:  # noqa: BLE001
                self._failed("the begin of a step", kind, error)
                continue
            if hook is not None:
                former = self.on_layer_computed
                self.on_layer_computed = hook if former is None else _one_after_the_other(former, hook)

    def start_saves(self) -> None:
        """Called after the step's forward pass: starts what waited for it. Calling it again changes nothing."""
        if self._jobs is None or self._is_computed:
            return
        self._is_computed = True
        jobs = self._jobs
        self._notify("a computed step", lambda kind: kind.computed(jobs))

    def unbind(self) -> None:
        """Ends a step. In some versions, steps without a forward pass have not started their saves before."""
        self.start_saves()
        self._jobs = None

    def poll(self) -> None:
        """Takes the ends of jobs from the core, for the kinds."""
        core, shared = self._shared.core, self._shared
        if core is None:
            return
        shared.steps_at_once = max(0, shared.steps_at_once - 1)
        if self._jobs is not None and self._jobs.idle and not shared.steps_at_once:
            wait_ms = self._waits_for()
            if wait_ms:
                core.wait(wait_ms)
        self._collect(core)

    def _waits_for(self) -> float:
        longest = 0.0
        for kind in self.kinds:
            try:
                longest = max(longest, kind.waits_for())
            except Exception as error:  # noqa: BLE001
                self._failed("how long to wait", kind, error)
        return longest

    def _notify(self, what: str, notify: Callable[[WorkerKind], None]) -> None:
        """Calls every kind. One that fails does not keep the others from being called."""
        for kind in self.kinds:
            try:
                notify(kind)
            except Exception as error:  # noqa: BLE001
                self._failed(what, kind, error)

    def _failed(self, what: str, kind: WorkerKind, error: Exception) -> None:
        self._failures.record(f"{what} ({kind.name})", error, WITHOUT_IT)

    def _collect(self, core: WorkerCore) -> None:
        for end in core.poll():
            for kind in self.kinds:
                try:
                    if kind.finished(end):
                        break
                except Exception as error:  # noqa: BLE001
                    self._failed("the end of a job", kind, error)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those among them whose load failed."""
        reports = self._reports
        loaded, reports.loaded = reports.loaded, set()
        failed, reports.failed = reports.failed, set()
        return loaded, failed

    def take_failed_blocks(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        blocks, self._reports.failed_blocks = self._reports.failed_blocks, set()
        return blocks

    def take_ended(self) -> dict[int, JobEnd]:
        """The ends of jobs since the last call, for the scheduler."""
        ended, self._reports.jobs = self._reports.jobs, {}
        return ended

    def take_weights_report(self) -> WeightsReport | None:
        """The report on the weights, if they were digested since the last call."""
        report, self._reports.weights = self._reports.weights, None
        return report

    def take_others(self) -> dict[str, Mergeable]:
        """Reports of further kinds for their scheduler halves, by name of the kind."""
        others, self._reports.others = self._reports.others, {}
        return others

    def take_stats(self) -> dict[str, float] | None:
        """Counters since the last call."""
        if self._shared.core is not None:
            self.counters.add_core(self._shared.core.take_stats(), CORE_COUNTS)
        if self._shared.direct is not None:
            for name, count in zip(DIRECT_COUNTS, self._shared.direct.agent.take_counts(), strict=True):
                self.counters.add(name, count)
        self.counters.add("errors", self._failures.take())
        return self.counters.take()

    def close(self) -> None:
        """Ends the connection to the daemon."""
        self.detach()


def _one_after_the_other(first: LayerHook, second: LayerHook) -> LayerHook:
    def both(layer_name: str) -> None:
        first(layer_name)
        second(layer_name)

    return both
