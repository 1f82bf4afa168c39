"""Copies blocks inside one rank's cache before a step computes."""

from __future__ import annotations

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.copies import CanCopy, CopyBlocks
from kvlane.connector.kinds.kind import CopyBlock, LayerHook, WorkerKind, WorkerShared


class CopyBlocksWorker(WorkerKind):
    """Copies of one rank. On a GPU they run in the stream that the engine computes in."""

    name = CopyBlocks.name

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._copy: CopyBlock | None = None

    def can_copy_by(self, copy: CopyBlock | None) -> None:
        """Copies by this function from now on; None if this rank cannot copy. The scheduler half learns of it."""
        change = int(copy is not None) - int(self._copy is not None)
        self._copy = copy
        if change:
            known = self._shared.reports.others.get(self.name)
            report = CanCopy(change)
            self._shared.reports.others[self.name] = (
                report.merge(known) if isinstance(known, CanCopy) else report
            )

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        try:
            for source, target in jobs.copies:
                assert self._copy is not None, "the scheduler has a block copied that this rank cannot copy"
                self._copy(source, target)
        except Exception as error:  # noqa: BLE001
            self._shared.failures.record("copying a block", error, "its request computes with wrong bytes")
            self.can_copy_by(None)
        return None
