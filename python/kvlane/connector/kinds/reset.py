"""Tracks the weights to which the engine's blocks belong, also after vLLM reset the connector because they change."""

from __future__ import annotations

from kvlane.connector import events
from kvlane.connector.guard import logger
from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.kind import ASK_AGAIN, NOTHING, Answer, SchedulerKind, SchedulerShared
from kvlane.connector.requests import RequestState
from kvlane.connector.vllm_protocols import SchedulerOutput
from kvlane.connector.weights import STARTED_WITH, WeightsReport


class Reset(SchedulerKind):
    """Asks the workers for their weights after a reset, and has prompts wait for the answer."""

    name = "reset"

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        # True if vLLM refused to reset its own cache when it reset the connector. That cache may hold blocks of other
        # weights.
        self._own_cache_is_old = False
        # True if a request was to be scheduled since the last reset. The weights stay as they are from then on.
        self._is_scheduling = False

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        shared = self._shared
        if state.stale:
            # All requests start over, so none has blocks from before the reset.
            state.stale = False
            state.forget_progress()
        self._is_scheduling = True
        if shared.weights.are_known or not shared.shape.can_load or self._own_cache_is_old:
            # Prompts need not wait: the workers are not asked while vLLM's own cache may be of other weights.
            return NOTHING
        return ASK_AGAIN if shared.weights.is_worth_waiting(shared.clock()) else NOTHING

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        runs = self._is_scheduling or output.total_num_scheduled_tokens > 0
        if runs and not self._own_cache_is_old:
            jobs.look_at_weights = self._shared.weights.question()

    def pool_was_reset(self) -> None:
        self._own_cache_is_old = False

    def reset(self) -> None:
        shared = self._shared
        for state in shared.requests.values():
            if state.request.num_computed_tokens > 0:
                state.stale = True
        self._own_cache_is_old = not shared.pins.was_reset
        if self._own_cache_is_old:
            # Log: vLLM was reset while requests ran; the cache stays off for this engine until it is reset
            # successfully. Do: reset again with `reset_running_requests=True`, or without requests.
            logger.warning(
                "kvlane: vLLM could not reset its own cache, so it may hold blocks of other weights: nothing is looked "
                "up or saved until a reset succeeds (reset_running_requests=True, or when no request runs)"
            )
        self._is_scheduling = False
        shared.weights.forget()
        shared.hashes.weights_key = shared.weights.key

    def reported(self, part: object) -> None:
        """Takes the workers' report on their weights."""
        assert isinstance(part, WeightsReport), f"workers report weights, not {part!r}"
        shared = self._shared
        if not shared.weights.answer(part):
            return
        shared.hashes.weights_key = shared.weights.key
        for state in shared.requests.values():
            # Blocks computed meanwhile were not saved.
            state.forget_progress()
        labels = {label for _, label in part.labels}
        if labels == {STARTED_WITH}:
            # Log: the engine shares blocks with others as before.
            logger.info("kvlane: after the reset the engine has the weights that it was started with")
            return
        if shared.announcements is not None:
            shared.events.append(events.all_cleared())
            shared.announcements.forget()
        _log(labels)


def _log(labels: set[str | None]) -> None:
    """Logs whose blocks the engine shares now."""
    (label, *others) = labels
    if None in labels:
        # Log: after new weights this engine uses only blocks of its own, until the next reset. Do: name the
        # weights if engines shall share blocks (docs/weights.md).
        logger.warning(
            "kvlane: after the reset nobody can tell which weights the engine has, so its blocks are shared with "
            "no other engine and not found after the next reset; name them "
            "(kvlane.connector.weights.name_weights)"
        )
    elif not others and label is not None and label.startswith("version "):
        # Log: the engine shares blocks with all that have the same named weights.
        logger.info("kvlane: after the reset the engine has the weights of %s", label)
    else:
        # Log: after new weights this engine uses only blocks of its own. Do: name the weights if engines shall
        # share blocks (docs/weights.md).
        logger.warning(
            "kvlane: after the reset the engine has other weights than it was started with, so its blocks are "
            "shared with no other engine; where several engines get the same weights, name them "
            "(kvlane.connector.weights.name_weights)"
        )
