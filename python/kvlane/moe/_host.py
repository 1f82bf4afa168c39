"""A rank in the memory of the host."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvlane import _core
from kvlane.moe._arrays import (
    as_array,
    as_int64,
    as_library_of,
    by_column,
    cast_like,
    empty_like,
    int32_like,
    memory_of,
    zeros_like,
)
from kvlane.moe._errors import NotJoined, errors_of_core
from kvlane.moe._group import Joining
from kvlane.moe._received import Received, Sent
from kvlane.moe._sizes import Sizes

_NONE = (0, 0)


class HostEnd:
    """Calls return when their work is done. What `send` and `send_back` need is checked before."""

    dispatch_type = _core.MoeDispatch

    def __init__(self, joining: Joining, sizes: Sizes) -> None:
        self._sizes = sizes
        try:
            self._rank = _core.MoeRank(joining.rank, joining.size, sizes, joining.all_gather)
        except _core.MoeFailure as error:
            joining.raise_what_was_raised()
            raise NotJoined(error.args[1]) from None

    def nbytes(self) -> int:
        return self._rank.bytes()

    def as_array(self, value: Any, label: str, copy: bool = False) -> Any:
        return as_array(value, label, copy)

    def as_ids(self, value: Any, x: Any) -> Any:
        """Of the library that `x` is of: results are like both."""
        return as_library_of(x, as_int64(as_array(value, "ids", copy=True)))

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return empty_like(like, shape)

    def cast(self, x: Any, kind: str) -> tuple[Any, Any]:
        rows, scales = cast_like(x, kind)
        _core.moe_cast(memory_of(x), memory_of(rows), memory_of(scales), kind)
        return rows, scales

    def dispatch(self, x: Any, ids: Any, weights: Any, scales: Any) -> Received:
        return self.receive(self.send(x, ids, weights, scales))

    def send(self, x: Any, ids: Any, weights: Any, scales: Any) -> Sent:
        given = zeros_like(ids, "float32") if weights is None else weights
        with errors_of_core():
            dispatch = self._rank.send(
                memory_of(x), _NONE if scales is None else memory_of(scales), memory_of(ids), memory_of(given)
            )
        without = None if scales is None else scales[:0]
        return Sent(x[:0], without, ids[:0], x.shape[0], weights is not None, dispatch)

    def receive(self, sent: Sent, rows: Any = None, scales: Any = None) -> Received:
        dispatch, ids, weights, columns = sent.dispatch, None, None, scales
        layout = self._sizes.layout
        with errors_of_core():
            try:
                counts, starts, count = self._rank.arrive(dispatch)
                lead = (len(counts), self._sizes.capacity) if layout == "masked" else (count,)
                if rows is None:
                    rows = self.empty(sent.x, (*lead, *sent.x.shape[1:]))
                if sent.scales is not None:
                    scales = self.empty(sent.scales, (*lead, *sent.scales.shape[1:]))
                self._rank.place(dispatch, memory_of(rows), _NONE if scales is None else memory_of(scales))
                if layout == "tokens":
                    ids = self.empty(sent.ids, (count, self._sizes.top_k))
                    weights = zeros_like(sent.ids, "float32", count)
                    self._rank.wanted(dispatch, memory_of(ids), memory_of(weights))
                if scales is not None and self._sizes.scales_column_major:
                    if columns is None:
                        columns = self.empty(scales, by_column(scales).shape)
                    columns[:] = by_column(scales)
                    scales = by_column(columns)
            except BaseException as error:
                if isinstance(error, _core.MoeFailure) and error.args[0] == "capacity":
                    # It was received, and the others know.
                    raise
                # The others go on as if this rank had received it. It may be closed by now.
                with suppress(ValueError):
                    self._rank.give_up()
                raise
        return Received(
            rows,
            scales,
            int32_like(sent.x, counts),
            int32_like(sent.x, starts) if layout == "experts" else None,
            ids,
            weights if sent.has_weights else None,
            dispatch,
            sent.tokens,
            sent.has_weights,
        )

    def combine(self, y: Any, received: Received, reduced: bool, weights: Any) -> Any:
        out = self.empty(y, (received._tokens, self._sizes.hidden))
        self.send_back(y, received, reduced, weights)
        self.gather(y, received, reduced, weights, out)
        return out

    def send_back(self, y: Any, received: Received, reduced: bool, weights: Any) -> None:
        given = _NONE if weights is None else memory_of(weights)
        with errors_of_core():
            self._rank.send_back(received._dispatch, memory_of(y), reduced, given)

    def gather(self, y: Any, received: Received, reduced: bool, weights: Any, out: Any) -> None:
        with errors_of_core():
            self._rank.gather(received._dispatch, memory_of(out))

    def stats(self) -> tuple[int, int, int, int]:
        return self._rank.stats()

    def check(self) -> None:
        with errors_of_core():
            self._rank.check()

    def close(self) -> None:
        self._rank.close()
