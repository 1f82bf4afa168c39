"""The all-to-all of a mixture of experts, among the processes of one host, on their CPUs or GPUs.

    from kvlane.moe import AllToAll, Group

    group = Group.of_torch()                             # or Group.at(path, rank, size)
    with AllToAll(group, experts=64, top_k=8, max_tokens=128, hidden=2048) as all_to_all:
        got = all_to_all.dispatch(x, ids, weights)       # rows of the tokens that want this rank's experts
        for expert, start in enumerate(got.starts):
            ...                                          # got.counts[expert] rows begin there
        out = all_to_all.combine(y, got)                 # for each token of x the weighted sum

Each rank holds `experts / size` of the experts, rounded up: rank r those from `r * ceil(experts / size)` on. All
ranks call `dispatch` and `combine` equally often and in the same order, also those without tokens. docs/moe.md has
the layouts, the rounding and what happens when a rank dies.

On CPUs arrays are torch's, numpy's, or any that numpy.from_dlpack takes; on a GPU torch's, or any that
torch.from_dlpack takes, and calls only enqueue work in torch's current stream. x, y and scales are contiguous. Results
are tensors of torch if `x` and `y` are, else arrays of numpy; no gradient flows through them. Times are in seconds.
`kvlane.moe.deep_ep` gives vLLM's DeepEP backends the same calls.
"""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import Any

from kvlane.moe._arrays import item_bytes, kind_of
from kvlane.moe._errors import CapacityExceeded, MoeError, NotJoined, RankLost, RankSilent
from kvlane.moe._gpu import GpuEnd
from kvlane.moe._group import Group, Joining
from kvlane.moe._host import HostEnd
from kvlane.moe._received import Received, Sent, Stats
from kvlane.moe._sizes import sizes_of

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
        cast: str | None = None,
        scales_column_major: bool = False,
        alignment: int = 1,
        layout: str = "experts",
        capacity: int | None = None,
        exact: bool = True,
        device: Any = "cpu",
        num_sms: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Returns once all ranks have joined.

        `top_k`: experts of a token, at most 32. `max_tokens`: most tokens of a rank in one dispatch. `hidden`:
        elements of a row that `combine` sums, of `dtype` (bfloat16, float16 or float32). `row_bytes`: bytes of a row
        that `dispatch` moves, a multiple of 16; by default as many. `scale_bytes`: bytes of scales that go with it.
        `cast`: what dispatch makes of rows of bfloat16 before it sends them: `fp8` float8_e4m3fn with a float32 scale
        for each 128 elements, `fp8_pow2` scales that are powers of two, `fp8_ue8m0` their exponents, four in an int32.
        It replaces `row_bytes` and `scale_bytes`. `scales_column_major`: scales, of 4 bytes each, come in columns.
        `layout`: how received rows stand, see `Received.rows`. `alignment`: each expert's rows begin at a multiple of
        it, for `experts`. `capacity`: most rows of an expert, for `masked`; by default `max_tokens` of each rank. For
        the other layouts on a GPU: most rows of a dispatch, by default as many as may come. Both defaults are enough
        unless a token names an expert twice. `exact`: whether combine may be exact; without, a GPU needs less memory.
        `device`: cpu, cuda or cuda:N, the same kind for all ranks. `num_sms`: most multiprocessors of a GPU that a call
        takes. `timeout`: longest wait for a rank.

        ValueError for arguments that cannot be; NotJoined if the ranks do not agree or do not find each other, and on
        all others if one of them could not join; OSError without a GPU. A rank tells the others why it cannot join
        before it raises, so it waits for them in all_gather.
        """
        on_gpu = str(device) != "cpu"
        joining = Joining(group)
        self._turn = threading.RLock()
        self._end: HostEnd | GpuEnd
        try:
            self._sizes = sizes_of(
                group.size,
                on_gpu,
                experts=experts,
                top_k=top_k,
                max_tokens=max_tokens,
                hidden=hidden,
                dtype=dtype,
                row_bytes=row_bytes,
                scale_bytes=scale_bytes,
                cast=cast,
                scales_column_major=scales_column_major,
                alignment=alignment,
                layout=layout,
                capacity=capacity,
                exact=exact,
                timeout=timeout,
            )
            if on_gpu:
                self._end = GpuEnd(joining, self._sizes, str(device), num_sms)
            elif num_sms is not None:
                raise ValueError("num_sms is for GPUs, and the device is cpu")
            else:
                self._end = HostEnd(joining, self._sizes)
        except Exception as error:
            joining.decline(error)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of this rank: on CPUs shared memory, whose pages the kernel gives when they are first written; on a GPU
        its memory, without that of results."""
        return self._end.nbytes()

    def dispatch(self, x: Any, ids: Any, weights: Any = None, scales: Any = None) -> Received:
        """Sends row t of `x` to the ranks that hold the experts `ids[t]`, and returns the rows that came here.

        `x` is [T, ...] with `row_bytes` a row, or [T, hidden] of bfloat16 for a cast; `ids` [T, top_k] of integers, -1
        for none; `weights` [T, top_k] of float32, or None if `combine` gets them or nobody needs them. An earlier
        result has to be combined or given up before the second dispatch after it, and before a CUDA graph is replayed
        that dispatches: each replay takes the place of the dispatch that was captured.

        ValueError for wrong arguments, with nothing sent. CapacityExceeded if an expert of this rank got too many rows.
        RankLost, RankSilent or MoeError for the rest. On a GPU these come with a later call, or `check`, and are for
        good, and CapacityExceeded comes with `check` alone: ranks stay in step, and sums without rows are NaN.
        """
        with self._turn:
            return self._end.dispatch(*self._checked(x, ids, weights, scales))

    def _send(self, x: Any, ids: Any, weights: Any, scales: Any) -> Sent:
        """The first part of `dispatch`, which waits for no rank. `_receive` is due before the next one."""
        with self._turn:
            return self._end.send(*self._checked(x, ids, weights, scales))

    def _receive(self, sent: Sent, rows: Any = None, scales: Any = None) -> Received:
        """The second part of `dispatch`. `rows`, and `scales` by column, are memory for the layout `masked`, if given.
        The caller changes `x` of `_send` after it."""
        with self._turn:
            return self._end.receive(sent, rows, scales)

    def combine(self, y: Any, received: Received, *, reduced: bool | None = None, weights: Any = None) -> Any:
        """Returns [T, hidden]: for each token of the dispatch the weighted sum of what its experts made, zeros for one
        that wanted none. `y` is as `received.rows`, with rows of `hidden` elements of the all-to-all's dtype: row by
        row what became of them. In the layout `tokens` a row of `y` is the weighted sum over this rank's experts.

        Sums are of float32. By default each token's are added in the order of k, by fused multiply-adds, and the last
        is rounded to the dtype, so the result does not depend on the number of ranks. With `reduced`, and always in the
        layout `tokens` and without `exact`, each rank's sum of its own experts is rounded first, and one row a token
        and rank comes back. All ranks say the same.

        `weights`, [T, top_k] of float32, take the place of those that were dispatched. Not with `reduced`, where other
        ranks multiply.

        ValueError for wrong arguments, with nothing sent. CapacityExceeded if a rank had no room for one of the tokens.
        RankLost, RankSilent or MoeError for the rest. On a GPU as with `dispatch`.
        """
        with self._turn:
            return self._end.combine(*self._checked_back(y, received, reduced, weights))

    def _send_back(self, y: Any, received: Received, reduced: bool | None, weights: Any) -> tuple[Any, ...]:
        """The first part of `combine`, which waits for no rank. What it returns is for `_gather`."""
        with self._turn:
            checked = self._checked_back(y, received, reduced, weights)
            self._end.send_back(*checked)
            return checked

    def _gather(self, checked: tuple[Any, ...], out: Any) -> None:
        """The second part of `combine`. `out` is contiguous memory, [T, hidden]. The caller changes `y` after it."""
        with self._turn:
            y, received, reduced, weights = checked
            self._end.gather(y, received, reduced, weights, out)

    def _checked(self, x: Any, ids: Any, weights: Any, scales: Any) -> tuple[Any, Any, Any, Any]:
        """The arguments of a dispatch as arrays of the device."""
        x = self._end.as_array(x, "x")
        ids = self._end.as_ids(ids, x)
        tokens = x.shape[0] if x.ndim else 0
        self._check_pairs("ids", ids, tokens)
        weights = None if weights is None else self._weights(weights, tokens)
        row_bytes, scale_bytes = self._sizes.row_bytes, self._sizes.scale_bytes
        if self._sizes.cast is not None:
            wanted = (tokens, self._sizes.hidden)
            if tuple(x.shape) != wanted or kind_of(x) not in ("bfloat16", "uint16") or scales is not None:
                raise ValueError(
                    f"x is {list(x.shape)} of {kind_of(x)}, and has to be {list(wanted)} of bfloat16 to be cast, "
                    "without scales"
                )
            rows, scales = self._end.cast(x, self._sizes.cast)
            return rows, ids, weights, scales
        if (scales is None) != (scale_bytes == 0):
            raise ValueError(f"scales of {scale_bytes} bytes a row were said to come with each dispatch")
        scales = None if scales is None else self._end.as_array(scales, "scales")
        for name, array, size in (("x", x, row_bytes), ("scales", scales, scale_bytes)):
            if array is None:
                continue
            row = math.prod(array.shape[1:]) * item_bytes(array)
            if (array.shape[0] if array.ndim else 0, row) != (tokens, size):
                raise ValueError(
                    f"{name} is {list(array.shape)} of {kind_of(array)}, and has to be {tokens} rows of {size} bytes"
                )
        if self._sizes.scales_column_major and (scales.ndim != 2 or item_bytes(scales) != 4):
            raise ValueError(
                f"scales are {list(scales.shape)} of {kind_of(scales)}, and by column have 4 bytes each"
            )
        return x, ids, weights, scales

    def _checked_back(
        self, y: Any, received: Received, reduced: bool | None, weights: Any
    ) -> tuple[Any, Received, bool, Any]:
        """The arguments of a combine, as arrays of the device."""
        sizes = self._sizes
        if not isinstance(received, Received):
            raise ValueError(
                f"received is a {type(received).__name__}, and has to be what a dispatch returned"
            )
        if not isinstance(received._dispatch, self._end.dispatch_type):
            raise ValueError("this dispatch is of another all-to-all")
        y = self._end.as_array(y, "y")
        by_token = sizes.layout == "tokens"
        reduced = by_token or not sizes.exact if reduced is None else reduced or by_token
        if not (reduced or sizes.exact):
            raise ValueError("this all-to-all was made without exact sums: combine is reduced")
        if weights is not None:
            if reduced:
                raise ValueError(
                    "combine takes weights only for exact sums: other ranks multiply by those that were dispatched"
                )
            weights = self._weights(weights, received._tokens)
        elif not (by_token or received._has_weights):
            raise ValueError("this dispatch had no weights: give them to it, or to an exact combine")
        wanted = (*received.rows.shape[: 2 if sizes.layout == "masked" else 1], sizes.hidden)
        # numpy has no bfloat16.
        names = {sizes.dtype, "uint16"} if sizes.dtype == "bfloat16" else {sizes.dtype}
        if tuple(y.shape) != wanted or kind_of(y) not in names:
            raise ValueError(
                f"y is {list(y.shape)} of {kind_of(y)}, and has to be {list(wanted)} of {sizes.dtype}"
            )
        return y, received, reduced, weights

    def _weights(self, weights: Any, tokens: int) -> Any:
        weights = self._end.as_array(weights, "weights", copy=True)
        self._check_pairs("weights", weights, tokens)
        if kind_of(weights) != "float32":
            raise ValueError(f"weights are {kind_of(weights)}, and have to be float32")
        return weights

    def _check_pairs(self, name: str, array: Any, tokens: int) -> None:
        wanted = (tokens, self._sizes.top_k)
        if tuple(array.shape) != wanted:
            raise ValueError(f"{name} is {list(array.shape)}, and has to be {list(wanted)}")

    def stats(self) -> Stats:
        """Counts so far. Waits for a call that another thread has begun, and for a copy from a GPU."""
        return Stats(*self._end.stats())

    def check(self) -> None:
        """Raises what an earlier operation failed with for good. On a GPU also CapacityExceeded, once, for the last of
        the dispatches without room that kernels have met. It waits for no kernel."""
        self._end.check()

    def close(self) -> None:
        """Takes no part any more. Ranks that wait for this one raise RankLost; a call of another thread ends. On a GPU
        it waits for all work, and graphs that captured calls must not be replayed any more."""
        self._end.close()

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
