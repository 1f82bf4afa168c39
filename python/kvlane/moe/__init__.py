"""The all-to-all of a mixture of experts, among the processes of one host, on their CPUs.

    from kvlane.moe import AllToAll, Group

    group = Group.of_torch()                             # or Group(rank, size, all_gather)
    with AllToAll(group, experts=64, top_k=8, max_tokens=128, hidden=2048) as all_to_all:
        got = all_to_all.dispatch(x, ids, weights)       # rows of the tokens that want this rank's experts
        for expert, start in enumerate(got.starts):
            ...                                          # got.counts[expert] rows begin there
        out = all_to_all.combine(y, got)                 # for each token of x the weighted sum

Each rank holds `experts / size` of the experts, rounded up: rank r those from `r * ceil(experts / size)` on. All
ranks call `dispatch` and `combine` equally often and in the same order, also those without tokens. docs/moe.md has
the layouts, the rounding and what happens when a rank dies. Arrays are torch's, numpy's, or any that
numpy.from_dlpack takes, in the memory of the host; x, y and scales are contiguous. Results are tensors of torch if `x`
and `y` are, else arrays of numpy; no gradient flows through them. Times are in seconds. `kvlane.moe.deep_ep` gives
vLLM's DeepEP backends the same calls.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from kvlane import _core

__all__ = [
    "AllToAll",
    "CapacityExceeded",
    "Group",
    "MoeError",
    "NotJoined",
    "RankLost",
    "RankSilent",
    "Received",
    "Stats",
]

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LAYOUTS = ("experts", "masked", "tokens")


class MoeError(Exception):
    """An operation failed. All later ones of this rank fail alike: make a new all-to-all, with the ranks that live.
    `CapacityExceeded` is the exception."""


class CapacityExceeded(MoeError):
    """An expert got more rows than `capacity`. `dispatch` raises it on the expert's rank, and `combine` on each rank
    that had sent a token there. Later operations work."""

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


class Stats(NamedTuple):
    """Counts of one rank."""

    dispatches: int
    combines: int
    rows_sent: int
    """Rows sent to other ranks, by both."""
    rows_received: int
    """Rows that came from other ranks, by both."""


@dataclass(frozen=True)
class Group:
    """The ranks of an all-to-all: processes of one user on one host."""

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    """Gives every rank the bytes of all, in the order of ranks. Called twice, when the all-to-all is made."""

    @classmethod
    def of_torch(cls, group: Any = None) -> Group:
        """The ranks of a torch.distributed group, by default all. ValueError if it moves only GPU memory (nccl)."""
        import torch
        import torch.distributed as dist

        if dist.get_backend(group) == "nccl":
            raise ValueError(
                "a group of nccl moves only GPU memory: give torch.distributed.new_group(backend='gloo')"
            )
        size = dist.get_world_size(group)

        def all_gather(told: bytes) -> list[bytes]:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(size)]
            dist.all_gather(lengths, torch.tensor([len(told)], device="cpu"), group)
            longest = max(1, *(int(length) for length in lengths))
            own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            own[: len(told)] = torch.tensor(list(told), dtype=torch.uint8, device="cpu")
            found = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(found, own, group)
            return [bytes(each[: int(length)].tolist()) for each, length in zip(found, lengths, strict=True)]

        return cls(dist.get_rank(group), size, all_gather)


@dataclass(frozen=True)
class Received:
    """The rows that want this rank's experts."""

    rows: Any
    """As `x`. Layout `experts`: [n, ...], expert by expert. `masked`: [experts of this rank, capacity, ...], of which
    `rows[e, :counts[e]]` came. One expert's rows are in the order of rank, token and k; those between one expert's last
    row and the next one's first are not initialised. `tokens`: [n, ...], each token once, in the order of rank and
    token."""
    scales: Any
    """As the `scales` that were dispatched, beside `rows`; None without."""
    counts: Any
    """[experts of this rank], int32: how many pairs of a token and a k want each."""
    starts: Any
    """Layout `experts`: [experts of this rank], int32, position of each one's first row, a multiple of `alignment`.
    None for the others."""
    ids: Any
    """Layout `tokens`: [n, top_k], int64, the token's experts as numbers among those of this rank, -1 for other ranks'.
    None for the others."""
    weights: Any
    """Layout `tokens`: [n, top_k], float32, the weights of `ids`, 0 where they are -1. None for the others, or if none
    were dispatched."""
    _dispatch: _core.MoeDispatch
    _tokens: int
    _has_weights: bool

    def give_up(self) -> None:
        """Does not combine it: the second dispatch after it may begin. The rows stay."""
        self._dispatch.give_up()


@dataclass(frozen=True)
class _Sent:
    """A dispatch whose rows did not come yet. Its arrays have no rows: they say type, device and shape."""

    x: Any
    scales: Any
    ids: Any
    tokens: int
    has_weights: bool
    dispatch: _core.MoeDispatch


class AllToAll:
    """One rank's end. Calls of several threads come one after the other: in the same order in all ranks."""

    def __init__(
        self,
        group: Group,
        *,
        experts: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        dtype: str = "bfloat16",
        row_bytes: int | None = None,
        scale_bytes: int = 0,
        alignment: int = 1,
        layout: str = "experts",
        capacity: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Returns once all ranks have joined.

        `top_k`: experts of a token, at most 32. `max_tokens`: most tokens of a rank in one dispatch. `hidden`:
        elements of a row that `combine` sums, of `dtype` (bfloat16, float16 or float32). `row_bytes`: bytes of a row
        that `dispatch` moves, a multiple of 16; by default as many. `scale_bytes`: bytes of scales that go with it.
        `layout`: how received rows stand, see `Received.rows`. `alignment`: each expert's rows begin at a multiple of
        it, for `experts`. `capacity`: most rows of an expert, for `masked`; by default `max_tokens` of each rank, which
        is enough unless a token names an expert twice. `timeout`: longest wait for a rank.

        ValueError for sizes that cannot be; NotJoined if the ranks do not agree or do not find each other.
        """
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype is bfloat16, float16 or float32, and not {dtype!r}")
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is experts, masked or tokens, and not {layout!r}")
        if layout != "experts" and alignment != 1:
            raise ValueError(f"alignment is for the layout experts, and the layout is {layout}")
        if layout != "masked" and capacity is not None:
            raise ValueError(f"capacity is for the layout masked, and the layout is {layout}")
        if layout == "masked" and capacity is None:
            capacity = group.size * max_tokens
        if not timeout > 0:
            raise ValueError(f"timeout has to be above 0, and not {timeout}")
        sizes = {"experts": experts, "top_k": top_k, "max_tokens": max_tokens, "hidden": hidden}
        sizes |= {"scale_bytes": scale_bytes, "alignment": alignment, "row_bytes": row_bytes or 0}
        sizes |= {"capacity": capacity or 0}
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"{name} is {size}")
        self._turn = threading.RLock()
        self._dtype, self._hidden, self._top_k = dtype, hidden, top_k
        self._layout, self._capacity = layout, capacity or 0
        self._row_bytes = hidden * _ITEM_BYTES[dtype] if row_bytes is None else row_bytes
        self._scale_bytes = scale_bytes
        raised: list[BaseException] = []

        def all_gather(told: bytes) -> list[bytes]:
            try:
                return list(group.all_gather(told))
            except BaseException as error:
                raised.append(error)
                raise

        try:
            self._rank = _core.MoeRank(
                group.rank,
                group.size,
                experts,
                top_k,
                max_tokens,
                self._row_bytes,
                scale_bytes,
                hidden,
                dtype,
                alignment,
                layout,
                self._capacity,
                timeout * 1e3,
                all_gather,
            )
        except _core.MoeFailure as error:
            if raised:
                raise raised[0] from None
            raise NotJoined(error.args[1]) from None

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory of this rank. The kernel gives a page when it is first written."""
        return self._rank.bytes()

    def dispatch(self, x: Any, ids: Any, weights: Any = None, scales: Any = None) -> Received:
        """Sends row t of `x` to the ranks that hold the experts `ids[t]`, and returns the rows that came here.

        `x` is [T, ...] with `row_bytes` a row, `ids` [T, top_k] of integers, -1 for none, `weights` [T, top_k] of
        float32, or None if `combine` gets them or nobody needs them. An earlier result has to be combined or given up
        before the second dispatch after it.

        ValueError for wrong arguments, with nothing sent. CapacityExceeded if an expert of this rank got too many rows.
        RankLost, RankSilent or MoeError for the rest.
        """
        with self._turn:
            return self._receive(self._send(x, ids, weights, scales))

    def _send(self, x: Any, ids: Any, weights: Any, scales: Any) -> _Sent:
        """The first part of `dispatch`, which waits for no rank. `_receive` is due before the next one."""
        x = _array(x, "x")
        ids = _int64(_array(ids, "ids", copy=True))
        tokens = x.shape[0] if x.ndim else 0
        self._check_pairs("ids", ids, tokens)
        has_weights = weights is not None
        weights = self._weights(weights, tokens) if has_weights else _zeros(ids, "float32")
        if (scales is None) != (self._scale_bytes == 0):
            raise ValueError(
                f"scales of {self._scale_bytes} bytes a row were said to come with each dispatch"
            )
        given = None if scales is None else _array(scales, "scales")
        for name, array, size in (("x", x, self._row_bytes), ("scales", given, self._scale_bytes)):
            if array is None:
                continue
            row = math.prod(array.shape[1:]) * _item_bytes(array)
            if (array.shape[0] if array.ndim else 0, row) != (tokens, size):
                raise ValueError(
                    f"{name} is {list(array.shape)} of {_name(array)}, and has to be {tokens} rows of {size} bytes"
                )
        with self._turn, _errors():
            dispatch = self._rank.send(
                _memory(x),
                (0, 0) if given is None else _memory(given),
                _memory(ids),
                _memory(weights),
            )
        return _Sent(x[:0], None if given is None else given[:0], ids[:0], tokens, has_weights, dispatch)

    def _receive(self, sent: _Sent, rows: Any = None, scales: Any = None) -> Received:
        """The second part of `dispatch`. `rows` and `scales`, if given, are memory of the host, for the layout
        `masked`."""
        dispatch, ids, weights = sent.dispatch, None, None
        with self._turn, _errors():
            try:
                counts, starts, count = self._rank.arrive(dispatch)
                lead = (len(counts), self._capacity) if self._layout == "masked" else (count,)
                if rows is None:
                    rows = _empty(sent.x, (*lead, *sent.x.shape[1:]))
                if scales is None and sent.scales is not None:
                    scales = _empty(sent.scales, (*lead, *sent.scales.shape[1:]))
                self._rank.place(dispatch, _memory(rows), (0, 0) if scales is None else _memory(scales))
                if self._layout == "tokens":
                    ids, weights = _empty(sent.ids, (count, self._top_k)), _zeros(sent.ids, "float32", count)
                    self._rank.wanted(dispatch, _memory(ids), _memory(weights))
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
            _int32(sent.x, counts),
            _int32(sent.x, starts) if self._layout == "experts" else None,
            ids,
            weights if sent.has_weights else None,
            dispatch,
            sent.tokens,
            sent.has_weights,
        )

    def combine(self, y: Any, received: Received, *, reduced: bool = False, weights: Any = None) -> Any:
        """Returns [T, hidden]: for each token of the dispatch the weighted sum of what its experts made, zeros for one
        that wanted none. `y` is as `received.rows`, with rows of `hidden` elements of the all-to-all's dtype: row by
        row what became of them. In the layout `tokens` a row of `y` is the weighted sum over this rank's experts.

        Sums are of float32. By default each token's are added in the order of k and rounded once, so the result does
        not depend on the number of ranks. With `reduced`, and always in the layout `tokens`, each rank's sum of its own
        experts is rounded first, and one row a token and rank comes back. All ranks say the same.

        `weights`, [T, top_k] of float32, take the place of those that were dispatched. Not with `reduced`, where other
        ranks multiply.

        ValueError for wrong arguments, with nothing sent. CapacityExceeded if a rank had no room for one of the tokens.
        RankLost, RankSilent or MoeError for the rest.
        """
        with self._turn:
            out = _empty(_array(y, "y"), (received._tokens, self._hidden))
            self._send_back(y, received, reduced, weights)
            self._gather(received, out)
        return out

    def _send_back(self, y: Any, received: Received, reduced: bool, weights: Any) -> None:
        """The first part of `combine`, which waits for no rank."""
        y = _array(y, "y")
        by_token = self._layout == "tokens"
        if weights is not None:
            if by_token or reduced:
                raise ValueError(
                    "combine takes weights only for exact sums: other ranks multiply by those that were dispatched"
                )
            weights = self._weights(weights, received._tokens)
        elif not (by_token or received._has_weights):
            raise ValueError("this dispatch had no weights: give them to it, or to an exact combine")
        wanted = (*received.rows.shape[: 2 if self._layout == "masked" else 1], self._hidden)
        # numpy has no bfloat16.
        names = {self._dtype, "uint16"} if self._dtype == "bfloat16" else {self._dtype}
        if tuple(y.shape) != wanted or _name(y) not in names:
            raise ValueError(
                f"y is {list(y.shape)} of {_name(y)}, and has to be {list(wanted)} of {self._dtype}"
            )
        with self._turn, _errors():
            self._rank.send_back(
                received._dispatch,
                _memory(y),
                reduced or by_token,
                (0, 0) if weights is None else _memory(weights),
            )

    def _gather(self, received: Received, out: Any) -> None:
        """The second part of `combine`. `out` is contiguous memory of the host, [T, hidden]."""
        with self._turn, _errors():
            self._rank.gather(received._dispatch, _memory(out))

    def _weights(self, weights: Any, tokens: int) -> Any:
        weights = _array(weights, "weights", copy=True)
        self._check_pairs("weights", weights, tokens)
        if _name(weights) != "float32":
            raise ValueError(f"weights are {_name(weights)}, and have to be float32")
        return weights

    def _check_pairs(self, name: str, array: Any, tokens: int) -> None:
        if tuple(array.shape) != (tokens, self._top_k):
            raise ValueError(f"{name} is {list(array.shape)}, and has to be [{tokens}, {self._top_k}]")

    def stats(self) -> Stats:
        """Counts so far. Waits for a call that another thread has begun."""
        return Stats(*self._rank.stats())

    def check(self) -> None:
        """Raises what an earlier operation failed with for good."""
        with _errors():
            self._rank.check()

    def close(self) -> None:
        """Takes no part any more. Ranks that wait for this one raise RankLost; a call of another thread ends."""
        self._rank.close()

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except _core.MoeFailure as error:
        kind, text, needed = error.args
        if kind == "capacity":
            raise CapacityExceeded(text, needed) from None
        raise {"lost": RankLost, "silent": RankSilent}.get(kind, MoeError)(text) from None


def _is_torch(array: Any) -> bool:
    return hasattr(array, "data_ptr")


def _array(value: Any, name: str, copy: bool = False) -> Any:
    """A tensor of torch or an array of numpy over the same memory; with `copy` over other if it has gaps."""
    if _is_torch(value):
        import torch

        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}, and has to be in the memory of the host")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, and none flows through kvlane: give {name}.detach()"
            )
        if copy:
            value = value.contiguous()
            value = value.clone() if value.data_ptr() % value.element_size() else value
        if not value.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        if value.nbytes and not value.data_ptr():
            raise ValueError(
                f"{name} has no memory of its own, as a tensor of several devices: give the local part"
            )
        return value
    import numpy

    if not isinstance(value, numpy.ndarray):
        if not hasattr(value, "__dlpack__"):
            raise ValueError(f"{name} is a {type(value).__name__}, and has to be a tensor or an array")
        value = numpy.from_dlpack(value)
    if value.dtype.hasobject:
        raise ValueError(f"{name} has objects of Python, which mean nothing in another process")
    value = numpy.require(value, requirements=["C", "A"]) if copy else value
    if not (value.flags.c_contiguous and value.flags.aligned):
        raise ValueError(f"{name} is not contiguous")
    return value


def _name(array: Any) -> str:
    """The name of its type of element, such as float32."""
    return str(array.dtype).removeprefix("torch.")


def _item_bytes(array: Any) -> int:
    return array.element_size() if _is_torch(array) else array.itemsize


def _memory(array: Any) -> tuple[int, int]:
    """Address and bytes."""
    return (array.data_ptr() if _is_torch(array) else array.ctypes.data), array.nbytes


def _int64(ids: Any) -> Any:
    if not _name(ids).startswith(("int", "uint")) or _name(ids) == "uint64":
        raise ValueError(f"ids are {_name(ids)}, and have to be integers of at most 63 bits")
    if _is_torch(ids):
        return ids.long()
    return ids.astype("int64", copy=False)


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    if _is_torch(like):
        return like.new_empty(shape)
    import numpy

    return numpy.empty(shape, dtype=like.dtype)


def _zeros(like: Any, name: str, rows: int | None = None) -> Any:
    """Of another type of element, and another number of rows."""
    shape = (like.shape[0] if rows is None else rows, *like.shape[1:])
    if _is_torch(like):
        import torch

        return like.new_zeros(shape, dtype=getattr(torch, name))
    import numpy

    return numpy.zeros(shape, dtype=name)


def _int32(like: Any, values: list[int]) -> Any:
    if _is_torch(like):
        import torch

        return torch.tensor(values, dtype=torch.int32, device="cpu")
    import numpy

    return numpy.array(values, dtype=numpy.int32)
