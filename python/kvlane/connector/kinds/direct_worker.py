"""Tells a rank's agent which blocks of direct hand-offs a step fills, and how far it is with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.direct_land import LandDirect
from kvlane.connector.kinds.direct_offer import NAME, Computed
from kvlane.connector.kinds.kind import LayerHook, WorkerKind, WorkerShared

LANDS = LandDirect.name


class DirectWorker(WorkerKind):
    """What a rank computes for others. What lands here needs no step: the agent reads it."""

    name = NAME

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._fills = False
        self._stream = 0

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        """Copies the last tokens of prompts that have landed into their requests' own blocks."""
        direct = self._shared.direct
        for source, target in cast("Sequence[tuple[int, int]]", jobs.others.get(LANDS, ())):
            if direct is not None:
                direct.copy_block(source, target)
        return None

    def layers_computed(self, jobs: StepJobs) -> LayerHook | None:
        filled = cast("Sequence[Computed]", jobs.others.get(NAME, ()))
        direct = self._shared.direct
        self._fills = bool(filled) and direct is not None
        if direct is None or not filled:
            return None
        agent, stream, failures = direct.agent, direct.stream(), self._shared.failures
        self._stream = stream
        agent.step_begins(filled)

        def tell(regions: int) -> None:
            try:
                agent.layers_computed(regions, stream)
            except Exception as error:  # noqa: BLE001
                failures.record("telling how far a step is", error, "its layers are offered later")

        return direct.layers.begin(tell)

    def computed(self, jobs: StepJobs) -> None:
        direct, fills = self._shared.direct, self._fills
        self._fills = False
        if direct is not None and fills:
            direct.agent.step_ends(self._stream)
