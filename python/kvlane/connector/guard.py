"""No error leaves the connector: a callback that fails is logged once, counted, and answers with its default."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

# A child of vLLM's logger: its lines appear where and as the user expects them.
logger = logging.getLogger("vllm.kvlane")

F = TypeVar("F", bound=Callable[..., Any])


class Failures:
    """Errors of one connector."""

    def __init__(self) -> None:
        self.count = 0
        """Errors since the last `take`."""
        self._seen: set[tuple[str, str]] = set()

    def record(self, where: str, error: BaseException, consequence: str) -> None:
        """Count an error; log it with its traceback the first time that it happens at this place."""
        self.count += 1
        reason = f"{type(error).__name__}: {error}"
        # The type, not the sentence, decides what is new: sentences may hold ids that differ each time.
        if (where, type(error).__name__) not in self._seen:
            self._seen.add((where, type(error).__name__))
            logger.error(
                "kvlane: %s failed, %s. %s (Further errors of this kind are only counted.)",
                where,
                consequence,
                reason,
                exc_info=error,
            )

    def take(self) -> int:
        """The errors since the last call."""
        count, self.count = self.count, 0
        return count


def guarded(
    default: Callable[[], Any], consequence: str = "the engine goes on without it"
) -> Callable[[F], F]:
    """For a method of an object that has `failures`: an error inside becomes `default()`."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001
                self.failures.record(method.__name__, error, consequence)
                return default()

        return cast(F, call)

    return decorate
