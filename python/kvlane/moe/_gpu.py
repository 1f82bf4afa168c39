"""A rank on a GPU, for tensors of torch.

Kernels read and write them in torch's current stream. Calls return when that is enqueued, so graphs may capture them.
"""

from __future__ import annotations

from typing import Any

from kvlane import _core
from kvlane.moe._arrays import by_column, cast_like, kind_of
from kvlane.moe._errors import NotJoined, errors_of_core
from kvlane.moe._group import Joining
from kvlane.moe._received import Received, Sent
from kvlane.moe._sizes import Sizes

_ID_BYTES = {"int32": 4, "int64": 8}


class GpuEnd:
    """Errors of kernels are raised by the next call, or by `check`."""

    dispatch_type = _core.MoeGpuDispatch

    def __init__(self, joining: Joining, sizes: Sizes, device: str, num_sms: int | None) -> None:
        index = _index_of(device)
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"num_sms is {num_sms}, and has to be at least 1")
        import torch

        self._sizes = sizes
        self._device = self._torch_device(index)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError("an all-to-all cannot be made while a graph is captured: make it before")
        self._held = len(range(*_experts_of(joining, sizes)))
        try:
            self._rank = _core.MoeGpuRank(
                self._device.index or 0, joining.rank, joining.size, sizes, num_sms, joining.all_gather
            )
        except _core.MoeFailure as error:
            joining.raise_what_was_raised()
            raise NotJoined(error.args[1]) from None

    @staticmethod
    def _torch_device(index: int | None) -> Any:
        import torch

        if index is None:
            # Without a GPU the core says so.
            index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return torch.device("cuda", index)

    def _stream(self) -> int:
        import torch

        return torch.cuda.current_stream(self._device).cuda_stream

    def _keep_for_current_stream(self, tensors: list[Any]) -> None:
        """Torch gives their memory to nobody before what is enqueued now is done."""
        import torch

        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def nbytes(self) -> int:
        return self._rank.bytes()

    def as_array(self, value: Any, label: str, copy: bool = False) -> Any:
        import torch

        if not isinstance(value, torch.Tensor):
            if not hasattr(value, "__dlpack__"):
                raise ValueError(f"{label} is a {type(value).__name__}, and has to be a tensor")
            value = torch.from_dlpack(value)
        if value.device != self._device:
            raise ValueError(f"{label} is on {value.device}, and has to be on {self._device}")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{label} requires a gradient, and none flows through kvlane: give {label}.detach()"
            )
        value = value.contiguous() if copy else value
        if not value.is_contiguous():
            raise ValueError(f"{label} is not contiguous")
        return value

    def as_ids(self, value: Any, x: Any) -> Any:
        """As the kernels read them: signed, of 4 or 8 bytes."""
        ids = self.as_array(value, "ids", copy=True)
        kind = kind_of(ids)
        if not kind.startswith(("int", "uint")) or kind == "uint64":
            raise ValueError(f"ids are {kind}, and have to be integers of at most 63 bits")
        return ids if kind in _ID_BYTES else ids.long()

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return like.new_empty(shape)

    def cast(self, x: Any, kind: str) -> tuple[Any, Any]:
        rows, scales = cast_like(x, kind)
        with errors_of_core():
            self._rank.cast(self._stream(), len(x), x.data_ptr(), rows.data_ptr(), scales.data_ptr(), kind)
        return rows, scales

    def dispatch(self, x: Any, ids: Any, weights: Any, scales: Any) -> Received:
        room = self._room(x, scales, None, None)
        with errors_of_core():
            dispatch = self._rank.dispatch(
                self._stream(), self._input(x, ids, weights, scales), room.addresses()
            )
        return room.received(dispatch, x.shape[0], weights is not None)

    def send(self, x: Any, ids: Any, weights: Any, scales: Any) -> Sent:
        with errors_of_core():
            dispatch = self._rank.dispatch(self._stream(), self._input(x, ids, weights, scales), None)
        without = None if scales is None else scales[:0]
        # Kernels read this rank's own rows when it receives.
        held = (self._stream(), [each for each in (x, ids, weights, scales) if each is not None])
        return Sent(x[:0], without, ids[:0], x.shape[0], weights is not None, dispatch, held)

    def receive(self, sent: Sent, rows: Any = None, scales: Any = None) -> Received:
        room = self._room(sent.x, sent.scales, rows, scales)
        dispatch, (stream, tensors) = sent.dispatch, sent.held
        with errors_of_core():
            self._rank.receive(self._stream(), dispatch, room.addresses())
        if stream != self._stream():
            self._keep_for_current_stream(tensors)
        return room.received(dispatch, sent.tokens, sent.has_weights)

    def combine(self, y: Any, received: Received, reduced: bool, weights: Any) -> Any:
        out = self.empty(y, (received._tokens, self._sizes.hidden))
        self._combine(y, received, reduced, weights, out.data_ptr(), "both")
        return out

    def send_back(self, y: Any, received: Received, reduced: bool, weights: Any) -> None:
        self._combine(y, received, reduced, weights, 0, "send")

    def gather(self, y: Any, received: Received, reduced: bool, weights: Any, out: Any) -> None:
        self._combine(y, received, reduced, weights, out.data_ptr(), "receive")

    def _combine(self, y: Any, received: Received, reduced: bool, weights: Any, out: int, part: Any) -> None:
        given = None if weights is None else weights.data_ptr()
        with errors_of_core():
            self._rank.combine(
                self._stream(),
                received._dispatch,
                y.data_ptr(),
                out,
                given,
                reduced,
                part,
            )

    def stats(self) -> tuple[int, int, int, int]:
        with errors_of_core():
            return self._rank.stats()

    def check(self) -> None:
        with errors_of_core():
            self._rank.check()

    def close(self) -> None:
        self._rank.close()

    def _input(
        self, x: Any, ids: Any, weights: Any, scales: Any
    ) -> tuple[int, int, int, int, int, int | None]:
        return (
            x.shape[0],
            x.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            ids.data_ptr(),
            _ID_BYTES[kind_of(ids)],
            None if weights is None else weights.data_ptr(),
        )

    def _room(self, x: Any, scales: Any, rows: Any, room_of_scales: Any) -> _Room:
        sizes = self._sizes
        lead = (self._held, sizes.capacity) if sizes.layout == "masked" else (sizes.capacity,)
        if rows is None:
            rows = self.empty(x, (*lead, *x.shape[1:]))
        if room_of_scales is None and scales is not None:
            shape = (*lead, *scales.shape[1:])
            if sizes.scales_column_major:
                shape = (*shape[:-2], shape[-1], shape[-2])
            room_of_scales = self.empty(scales, shape)
        return _Room(self._held, sizes, rows, room_of_scales)


class _Room:
    """The tensors that a dispatch writes."""

    def __init__(self, held: int, sizes: Sizes, rows: Any, scales: Any) -> None:
        import torch

        self._rows, self._scales, self._layout = rows, scales, sizes.layout
        self._by_column = sizes.scales_column_major
        by_token = sizes.layout == "tokens"
        self._counts = rows.new_empty(held, dtype=torch.int32)
        # In the layout `tokens` the number of rows that came.
        numbers = 1 if by_token else held
        self._starts = None if sizes.layout == "masked" else rows.new_empty(numbers, dtype=torch.int32)
        self._ids = self._weights = None
        if by_token:
            shape = (sizes.capacity, sizes.top_k)
            self._ids = rows.new_full(shape, -1, dtype=torch.int64)
            self._weights = rows.new_zeros(shape, dtype=torch.float32)

    def addresses(self) -> tuple[int, int, int, int, int, int, bool]:
        tensors = (self._rows, self._scales, self._counts, self._starts, self._ids, self._weights)
        rows, scales, counts, starts, ids, weights = (
            0 if tensor is None else tensor.data_ptr() for tensor in tensors
        )
        return rows, scales, counts, starts, ids, weights, self._by_column

    def received(self, dispatch: Any, tokens: int, has_weights: bool) -> Received:
        return Received(
            self._rows,
            by_column(self._scales) if self._by_column else self._scales,
            self._counts,
            self._starts if self._layout == "experts" else None,
            self._ids,
            self._weights if has_weights else None,
            dispatch,
            tokens,
            has_weights,
            self._starts if self._layout == "tokens" else None,
            True,
        )


def _index_of(device: str) -> int | None:
    """The number of a GPU; None: torch's current one."""
    kind, colon, index = device.partition(":")
    if kind != "cuda" or bool(colon) != index.isdecimal():
        raise ValueError(f"device is cpu, cuda or cuda:N, and not {device!r}")
    return int(index) if index else None


def _experts_of(group: Joining, sizes: Sizes) -> tuple[int, int]:
    """The experts of this rank: the first one, and the end."""
    each = -(-sizes.experts // group.size)
    return min(group.rank * each, sizes.experts), min((group.rank + 1) * each, sizes.experts)
