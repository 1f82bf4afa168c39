"""Reports the ends of requests to the daemon while `kvlane record` reads them: lengths, and which blocks were saved.

The daemon records lookups itself. It joins a request's end to its lookup by the request's number. Requests that were
never looked up have only lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvlane.connector.awaited_save import is_for_another_engine
from kvlane.connector.core_protocols import EndedRequest, SchedulerCore
from kvlane.connector.groups import CacheGroup
from kvlane.connector.requests import GroupHashes, RequestState
from kvlane.connector.vllm_protocols import Request, transfer_params

# Ends that one message has at most; a step in which more end sends several.
ENDS_MAX = 4096


def recorded_group(groups: list[CacheGroup]) -> CacheGroup | None:
    """The group whose blocks the daemon records: the first one without a window, else the first one."""
    whole = [group for group in groups if group.window_blocks == 0]
    return next(iter(whole or groups), None)


class Recording:
    """The ends of this step's requests, if the daemon records."""

    def __init__(
        self,
        core: SchedulerCore,
        groups: list[CacheGroup],
        hashes: GroupHashes,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._group = recorded_group(groups)
        self._hashes = hashes
        self._clock = clock
        self._ended: list[EndedRequest] = []

    def ended(self, request: Request, state: RequestState) -> None:
        """Notes a request that has ended and whose last saves have begun."""
        if not self._core.is_recorded:
            self._ended.clear()
            return
        prompt, total = request.num_prompt_tokens, request.num_tokens
        lengths = (prompt, total - prompt, state.first_local_tokens or 0)
        age_ms = max(0, round(1e3 * (self._clock() - state.arrived_at)))
        first, hashes = self._saved(state)
        self._ended.append((state.number, lengths, age_ms, _leg(transfer_params(request)), first, hashes))

    def _saved(self, state: RequestState) -> tuple[int, list[bytes]]:
        """The blocks behind the looked-up ones that are saved: the index of the first one, and their hashes."""
        first = state.looked_up_blocks
        if self._group is None or first == 0:
            return 0, []
        end = min(state.saved_blocks[self._group.index], self._hashes.count(state, self._group))
        return first, self._hashes.stored(state, self._group, first, end) if end > first else []

    def send(self) -> None:
        """Sends what was noted."""
        while self._ended:
            sent, self._ended = self._ended[:ENDS_MAX], self._ended[ENDS_MAX:]
            self._core.requests_ended(sent)

    @property
    def pending(self) -> bool:
        """Whether something is noted and not sent."""
        return bool(self._ended)


def _leg(params: object) -> str:
    """The engine's part in serving a request: the whole, or the prompt for or from another engine."""
    if is_for_another_engine(params):
        return "prefill"
    from_another = isinstance(params, Mapping) and params.get("kvlane") is not None
    return "decode" if from_another else ""
