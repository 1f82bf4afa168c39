"""Reports to a rank's agent which blocks of direct hand-offs a step fills, and the step's progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.direct_offer import NAME, Computed
from kvlane.connector.kinds.kind import LayerHook, WorkerKind, WorkerShared


class DirectWorker(WorkerKind):
    """Reports blocks that a rank computes for other engines. Landings need no step, because the agent reads them."""

    name = NAME

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._fills = False
        self._stream = 0

    def layers_computed(self, jobs: StepJobs) -> LayerHook | None:
        filled = cast("Sequence[Computed]", jobs.others.get(NAME, ()))
        direct = self._shared.direct
        self._fills = bool(filled) and direct is not None
        if direct is None or not filled:
            return None
        self._stream = direct.stream()
        direct.agent.step_begins(filled)
        if direct.layer_hook is not None:
            direct.layer_hook.begin(self._stream)
        return direct.layer_hook

    def computed(self, jobs: StepJobs) -> None:
        direct, fills = self._shared.direct, self._fills
        self._fills = False
        if direct is None or not fills:
            return
        try:
            if direct.layer_hook is not None:
                direct.layer_hook.check()
        except Exception as error:  # noqa: BLE001
            self._shared.failures.record("telling how far a step is", error, "its layers are offered later")
        direct.agent.step_ends(self._stream)
