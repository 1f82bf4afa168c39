"""Carries saves out in one rank."""

from __future__ import annotations

from kvlane.connector.core_protocols import Finished
from kvlane.connector.jobs import JobEnd, SaveJob, StepJobs
from kvlane.connector.kinds.kind import WorkerKind, WorkerShared

# Longest wait of a step without work for this rank's saves, so that it does not spin through empty steps. It is short,
# because a request that arrives meanwhile waits too.
SAVE_WAIT_MS = 0.2


class SaveWorker(WorkerKind):
    """Saves of one rank."""

    name = "save"

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._saves: dict[int, int] = {}  # job to its number of blocks

    def computed(self, jobs: StepJobs) -> None:
        for save in jobs.saves:
            self._start(save)

    def _start(self, save: SaveJob) -> None:
        shared = self._shared
        self._saves[save.job] = sum(len(ids) for _, _, _, ids in save.groups)
        if shared.core is None:
            self._end(save.job, ok=False)
            return
        try:
            shared.core.save(save.job, save.groups, shared.stream_handle())
        except Exception as error:  # noqa: BLE001
            shared.failures.record("starting a save", error, "its blocks are not saved")
            self._end(save.job, ok=False)

    def finished(self, end: Finished) -> bool:
        blocks = self._saves.get(end.job)
        if blocks is None:
            return False
        counters = self._shared.counters
        counters.add("save_jobs")
        counters.add("save_blocks", end.blocks)
        counters.add("present_blocks", end.present)
        counters.add("save_bytes", end.bytes)
        counters.add("save_seconds", end.seconds)
        self._end(end.job, ok=end.ok and end.blocks + end.present >= blocks)
        return True

    def _end(self, job: int, ok: bool) -> None:
        del self._saves[job]
        self._shared.counters.add("failed_saves", 0 if ok else 1)
        self._shared.reports.jobs[job] = JobEnd(1, ok)

    def waits_for(self) -> float:
        return SAVE_WAIT_MS if self._saves else 0.0

    def detached(self) -> None:
        for job in list(self._saves):
            self._end(job, ok=False)
