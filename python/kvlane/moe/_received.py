"""What calls give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Stats(NamedTuple):
    """Counts of one rank. On a GPU those of the work that is done."""

    dispatches: int
    combines: int
    rows_sent: int
    """Rows sent to other ranks, by both."""
    rows_received: int
    """Rows that came from other ranks, by both."""


@dataclass(frozen=True)
class Received:
    """The rows that want this rank's experts."""

    rows: Any
    """As `x`. Layout `experts`: [n, ...], expert by expert. `masked`: [experts of this rank, capacity, ...], of which
    `rows[e, :counts[e]]` came. One expert's rows are in the order of rank, token and k; those between one expert's last
    row and the next one's first are not initialised. `tokens`: [n, ...], each token once, in the order of rank and
    token. On a GPU n is the capacity, and what is behind the rows that came is not initialised: see `trimmed`."""
    scales: Any
    """As the `scales` that were dispatched or that the cast made, beside `rows`; None without. With
    `scales_column_major` a view whose last dimension but one is contiguous."""
    counts: Any
    """[experts of this rank], int32: how many pairs of a token and a k want each."""
    starts: Any
    """Layout `experts`: [experts of this rank], int32, position of each one's first row, a multiple of `alignment`.
    None for the others."""
    ids: Any
    """Layout `tokens`: [n, top_k], int64, the token's experts as numbers among those of this rank, -1 for other ranks',
    and where no row came. None for the others."""
    weights: Any
    """Layout `tokens`: [n, top_k], float32, the weights of `ids`, 0 where they are -1. None for the others, or if none
    were dispatched."""
    _dispatch: Any
    _tokens: int
    _has_weights: bool
    _came: Any = None
    """On a GPU, [1] int32: rows that came, in the layout `tokens`."""
    _has_room: bool = False
    """On a GPU: there may be room for more rows than came."""

    def give_up(self) -> None:
        """Does not combine it: the second dispatch after it may begin. The rows stay."""
        self._dispatch.give_up()

    def trimmed(self) -> Received:
        """The same with as many rows as came, for which it waits on a GPU. Elsewhere it has no more."""
        if not self._has_room:
            return self
        if self._came is not None:
            end = int(self._came)
        elif self.starts is not None and len(self.starts):
            last = int(self.starts[-1]) + int(self.counts[-1])
            end = min(last, len(self.rows))
        else:
            return self
        cut = {"rows": self.rows[:end]}
        for name in ("scales", "ids", "weights"):
            array = getattr(self, name)
            cut[name] = None if array is None else array[:end]
        return replace(self, **cut)


@dataclass(frozen=True)
class Sent:
    """A dispatch whose rows did not come yet. Its arrays have no rows: they say type, device and shape."""

    x: Any
    scales: Any
    ids: Any
    tokens: int
    has_weights: bool
    dispatch: Any
    held: Any = None
    """What kernels read until the rows came."""
