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
and `y` are, else arrays of numpy; no gradient flows through them. Times are in seconds.
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

__all__ = ["AllToAll", "Group", "MoeError", "NotJoined", "RankLost", "RankSilent", "Received", "Stats"]

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class MoeError(Exception):
    """An operation failed. All later ones of this rank fail alike: make a new all-to-all, with the ranks that live."""


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
    """The rows that want this rank's experts. Expert by expert; of one expert by rank, token and k."""

    rows: Any
    """[n, ...] as `x`. Between one expert's rows and the next one's there may be padding, which is not initialised."""
    scales: Any
    """[n, ...] as the `scales` that were dispatched; None without."""
    counts: Any
    """[experts of this rank], int32: rows of each."""
    starts: Any
    """[experts of this rank], int32: position of each one's first row, a multiple of `alignment`."""
    _dispatch: _core.MoeDispatch
    _tokens: int

    def give_up(self) -> None:
        """Does not combine it: the second dispatch after it may begin. The rows stay."""
        self._dispatch.give_up()


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
        timeout: float = 60.0,
    ) -> None:
        """Returns once all ranks have joined.

        `top_k`: experts of a token, at most 32. `max_tokens`: most tokens of a rank in one dispatch. `hidden`:
        elements of a row that `combine` sums, of `dtype` (bfloat16, float16 or float32). `row_bytes`: bytes of a row
        that `dispatch` moves, a multiple of 16; by default as many. `scale_bytes`: bytes of scales that go with it.
        `alignment`: each expert's rows begin at a multiple of it. `timeout`: longest wait for a rank.

        ValueError for sizes that cannot be; NotJoined if the ranks do not agree or do not find each other.
        """
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype is bfloat16, float16 or float32, and not {dtype!r}")
        if not timeout > 0:
            raise ValueError(f"timeout has to be above 0, and not {timeout}")
        sizes = {"experts": experts, "top_k": top_k, "max_tokens": max_tokens, "hidden": hidden}
        sizes |= {"scale_bytes": scale_bytes, "alignment": alignment, "row_bytes": row_bytes or 0}
        for name, size in sizes.items():
            if size < 0:
                raise ValueError(f"{name} is {size}")
        self._turn = threading.Lock()
        self._dtype, self._hidden, self._top_k = dtype, hidden, top_k
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

    def dispatch(self, x: Any, ids: Any, weights: Any, scales: Any = None) -> Received:
        """Sends row t of `x` to the ranks that hold the experts `ids[t]`, and returns the rows that came here.

        `x` is [T, ...] with `row_bytes` a row, `ids` [T, top_k] of integers, -1 for none, `weights` [T, top_k] of
        float32. An earlier result has to be combined or given up before the second dispatch after it.

        ValueError for wrong arguments, with nothing sent; RankLost, RankSilent or MoeError for the rest.
        """
        x = _array(x, "x")
        ids, weights = _int64(_array(ids, "ids", copy=True)), _array(weights, "weights", copy=True)
        tokens = x.shape[0] if x.ndim else 0
        for name, array in (("ids", ids), ("weights", weights)):
            if tuple(array.shape) != (tokens, self._top_k):
                raise ValueError(f"{name} is {list(array.shape)}, and has to be [{tokens}, {self._top_k}]")
        if _name(weights) != "float32":
            raise ValueError(f"weights are {_name(weights)}, and have to be float32")
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
            try:
                counts, starts, count = self._rank.arrive(dispatch)
                rows = _empty(x, (count, *x.shape[1:]))
                room = None if given is None else _empty(given, (count, *given.shape[1:]))
                self._rank.place(dispatch, _memory(rows), (0, 0) if room is None else _memory(room))
            except BaseException:
                # The others go on as if this rank had received it. It may be closed by now.
                with suppress(ValueError):
                    self._rank.give_up()
                raise
        return Received(rows, room, _int32(x, counts), _int32(x, starts), dispatch, tokens)

    def combine(self, y: Any, received: Received, *, reduced: bool = False) -> Any:
        """Returns [T, hidden]: for each token of the dispatch the weighted sum of what its experts made, zeros for one
        that wanted none. `y` is [n, hidden] of the all-to-all's dtype, row by row what became of `received.rows`.

        Sums are of float32. By default each token's are added in the order of k and rounded once, so the result does
        not depend on the number of ranks. With `reduced` each rank adds and rounds those of its own experts first,
        and sends one row a token. All ranks say the same.

        ValueError for wrong arguments, with nothing sent; RankLost, RankSilent or MoeError for the rest.
        """
        y = _array(y, "y")
        wanted = (received.rows.shape[0], self._hidden)
        # numpy has no bfloat16.
        names = {self._dtype, "uint16"} if self._dtype == "bfloat16" else {self._dtype}
        if tuple(y.shape) != wanted or _name(y) not in names:
            raise ValueError(
                f"y is {list(y.shape)} of {_name(y)}, and has to be {list(wanted)} of {self._dtype}"
            )
        out = _empty(y, (received._tokens, self._hidden))
        with self._turn, _errors():
            self._rank.combine(received._dispatch, _memory(y), reduced, _memory(out))
        return out

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
        kind, text = error.args
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


def _int32(like: Any, values: list[int]) -> Any:
    if _is_torch(like):
        import torch

        return torch.tensor(values, dtype=torch.int32, device="cpu")
    import numpy

    return numpy.array(values, dtype=numpy.int32)
