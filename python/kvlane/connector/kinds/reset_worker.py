"""Digests the weights of one rank when the scheduler role asks after a reset."""

from __future__ import annotations

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.kind import LayerHook, WorkerKind, WorkerShared
from kvlane.connector.weights import Weights, WeightsReport


class DigestWeights(WorkerKind):
    """Digests of one rank's weights."""

    name = "reset"

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self.weights: Weights | None = None
        """The weights that the model computes with; None if they could not be found."""

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        """Digests the weights before this step computes, because its blocks will belong to them."""
        if jobs.look_at_weights is None:
            return None
        label = None
        try:
            if self.weights is not None:
                label = self.weights.label(jobs.look_at_weights)
        except Exception as error:  # noqa: BLE001
            self._shared.failures.record(
                "looking at the weights", error, "this engine shares no blocks with others"
            )
        # Also without a label, because the scheduler waits for the report.
        self._shared.reports.weights = WeightsReport(
            jobs.look_at_weights, frozenset({(self._shared.rank, label)})
        )
        return None
