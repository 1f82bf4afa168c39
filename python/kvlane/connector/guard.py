"""No error leaves the connector: a callback that fails is logged once, counted, and answers with its default."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

# A child of vLLM's logger: its lines appear where and as the user expects them.
logger = logging.getLogger("vllm.kvlane")

S = TypeVar("S", bound="HasFailures")
P = ParamSpec("P")
R = TypeVar("R")


class Failures:
    """Errors of one connector."""

    def __init__(self) -> None:
        self.count = 0
        """Errors counted since the last `take`."""
        self._seen: set[tuple[str, str]] = set()

    def record(self, where: str, error: BaseException, consequence: str) -> None:
        """Count an error; log it with its traceback the first time that it happens at this place."""
        self.count += 1
        reason = f"{type(error).__name__}: {error}"
        # The type, not the sentence, decides what is new: sentences may hold ids that differ each time.
        if (where, type(error).__name__) not in self._seen:
            self._seen.add((where, type(error).__name__))
            # Log: an error in kvlane that the engine survived; the line says what is lost. Do: report it, with
            # the traceback below.
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


class HasFailures(Protocol):
    """An object whose methods can be guarded."""

    failures: Failures


def guarded(
    default: Callable[[], object], consequence: str = "the engine goes on without it"
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For a method of an object that has `failures`: an error inside becomes `default()`, which gives what the method
    gives."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001
                self.failures.record(method.__name__, error, consequence)
                return cast("R", default())

        return call

    return decorate
