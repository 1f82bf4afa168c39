"""Tells a rank's agent which blocks of direct hand-offs a step has filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.direct_offer import NAME, Computed
from kvlane.connector.kinds.kind import WorkerKind


class DirectWorker(WorkerKind):
    """What a rank computes for others. What lands here needs no step: the agent reads it."""

    name = NAME

    def computed(self, jobs: StepJobs) -> None:
        rank = self._shared.direct
        if rank is None:
            return
        for each in cast("Iterable[Computed]", jobs.others.get(NAME, ())):
            rank.computed(*each)
