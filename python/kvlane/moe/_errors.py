"""Errors of an all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvlane import _core


class MoeError(Exception):
    """An operation failed. All later ones of this rank fail alike: make a new all-to-all, with the ranks that live.
    `CapacityExceeded` is the exception."""


class CapacityExceeded(MoeError):
    """A rank got more rows than `capacity`. `dispatch` raises it there, and `combine` on each rank that had sent a
    token there; on a GPU `AllToAll.check` does, and each layout can lack room. Later operations work."""

    def __init__(self, text: str, needed: int) -> None:
        super().__init__(text)
        self.needed = needed
        """The capacity that would have been enough."""


class NotJoined(MoeError):
    """The ranks did not find each other, or differ in an argument, which the text names."""


class RankLost(MoeError):
    """A rank's process has ended, or it has closed or failed. The text names it, and the rank because of which."""


class RankSilent(MoeError):
    """A rank lives, and did not send what this one waited for within the timeout."""


@contextmanager
def errors_of_core() -> Iterator[None]:
    try:
        yield
    except _core.MoeFailure as error:
        kind, text, needed = error.args
        if kind == "capacity":
            raise CapacityExceeded(text, needed) from None
        raise {"lost": RankLost, "silent": RankSilent}.get(kind, MoeError)(text) from None
