"""What vLLM 0.24 to 0.33 imports from DeepEP, over `kvlane.moe.AllToAll`.

With KVLANE_DEEP_EP=1 the plugin gives vLLM this module as `deep_ep`, and `--all2all-backend deepep_low_latency` and
`deepep_high_throughput` call it. docs/moe.md says what is left out. ValueError names a call or an argument that this
module does not serve; errors of the all-to-all are those of `kvlane.moe`.

A `Buffer` makes an all-to-all when it first sees its sizes, so all ranks make the same calls in the same order, as
DeepEP wants it, too. Its results stand in the caller's stream once a call or a hook has returned: there is no event to
wait for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from kvlane.moe import AllToAll, Group, Received

__all__ = ["Buffer", "Config", "EventOverlap", "topk_idx_t"]

logger = logging.getLogger("vllm.kvlane")

topk_idx_t = torch.int64
"""Type of the ids of experts."""

_BLOCK = 128
"""Channels that share a scale."""
_TIMEOUT_S = 600.0
"""A rank that compiles kernels is silent for minutes. One whose process ended is noticed at once."""
_FEWEST_TOKENS = 64


class EventOverlap:
    """DeepEP's event of a stream. There is nothing to wait for here, so `event` is None."""

    def __init__(self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Returns at once."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.current_stream_wait()


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of a normal call. Accepted, and of no effect."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: a `Buffer` takes its memory when it sees its sizes."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, as above."""
        return 0


class _Channel:
    """The all-to-all of one size, of a `Buffer`."""

    def __init__(self, owner: Buffer, ranks: AllToAll, max_tokens: int) -> None:
        self.owner = owner
        self.ranks = ranks
        self.max_tokens = max_tokens
        self.dispatches = 0
        self.open: list[_Handle] = []
        """Dispatches that are neither combined nor given up."""
        self._is_replaced = False

    def make_room(self) -> None:
        """Gives up the second last dispatch if it is open: DeepEP overwrites it. The next one may begin then."""
        for handle in list(self.open):
            if handle.number < self.dispatches:
                handle.give_up()

    def remove(self, handle: _Handle) -> None:
        if handle in self.open:
            self.open.remove(handle)
        self._close_if_over()

    def replace(self) -> None:
        """Closes it once its open dispatches are combined."""
        self._is_replaced = True
        self._close_if_over()

    def _close_if_over(self) -> None:
        if self._is_replaced and not self.open:
            self.ranks.close()


class _Handle:
    """A dispatch, for combine."""

    def __init__(self, channel: _Channel, is_low_latency: bool, receive: Callable[[], Received]) -> None:
        self.channel = channel
        self.is_low_latency = is_low_latency
        self.received: Received | None = None
        self._receive: Callable[[], Received] | None = receive
        channel.dispatches += 1
        self.number = channel.dispatches
        channel.open.append(self)

    def receive(self) -> Received:
        """The rows. The first call waits for them."""
        if self._receive is not None:
            receive, self._receive = self._receive, None
            try:
                self.received = receive()
            except BaseException:
                self.channel.remove(self)
                raise
        if self.received is None:
            raise ValueError(
                "this dispatch failed, or is given up because two others followed: dispatch again"
            )
        return self.received

    def give_up(self) -> None:
        if self.received is not None:
            self.received.give_up()
        self.close()

    def close(self) -> None:
        self.received = None
        self.channel.remove(self)


class _Rest:
    """The receiving half of a call. The caller's hook runs it, or the next dispatch if that comes first."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish: Callable[[], object] | None = finish
        self._failed: Exception | None = None

    def run(self) -> None:
        """Keeps an error for the hook."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish()
            except Exception as error:  # noqa: BLE001 - the hook raises it
                self._failed = error

    def hook(self) -> None:
        self.run()
        if self._failed is not None:
            raise self._failed


class Buffer:
    """One rank's end, as `deep_ep.Buffer`. `group` is a torch.distributed group of the ranks that moves memory of the
    host. Sizes and numbers of SMs and queue pairs are accepted, and of no effect."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
    ) -> None:
        self.group = group
        self._ranks = Group.of_torch(group)
        self.rank, self.group_size = self._ranks.rank, self._ranks.size
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self._channels: dict[tuple[Any, ...], _Channel] = {}
        self._due: list[_Rest] = []
        self._turn = threading.RLock()
        self._is_destroyed = False

    # Settings and questions beside the calls.

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Of no effect."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of now, for `previous_event`."""
        return EventOverlap()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """0: a `Buffer` takes its memory when it sees its sizes."""
        return 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A tuning of no effect."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """A tuning of no effect."""
        return Config(Buffer.num_sms)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """An empty tensor: vLLM zeroes it, and here no memory needs that."""
        return torch.empty(0, dtype=dtype, device="cpu")

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: each size has memory of its own."""

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Zeros: no rank is masked. A call that a lost rank is needed for raises RankLost."""
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Does nothing: no rank is masked."""

    def destroy(self) -> None:
        """Takes no part any more."""
        with self._turn:
            self._is_destroyed = True
            self._due.clear()
            for channel in self._channels.values():
                channel.ranks.close()
            self._channels.clear()

    # Low latency: rows by expert, for at most `num_max_dispatch_tokens_per_rank` tokens a rank.

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Any, torch.Tensor, _Handle, EventOverlap, Callable[[], None] | None]:
        """Sends bfloat16 rows `x` [T, hidden] to the ranks of the experts `topk_idx` [T, top_k], -1 for none.

        Returns rows [experts of this rank, ranks * most tokens, hidden], or them as float8_e4m3fn and their scales; how
        many each expert has, int32; a handle for `low_latency_combine`; an event; and with `return_recv_hook` a hook.
        The rows stand there once the hook has returned, or else now; `x` may change then. Each 128 channels share a
        scale: float32 [.., hidden / 128]; with `round_scale` a power of two; with `use_ue8m0` four exponents in an
        int32.
        """
        if use_nvfp4 or x_global_scale is not None:
            raise ValueError("kvlane dispatches bfloat16 and fp8 only: set VLLM_DEEPEPLL_NVFP4_DISPATCH=0")
        if x.dtype != torch.bfloat16 or x.ndim != 2:
            raise ValueError(f"x is {list(x.shape)} of {x.dtype}, and has to be [tokens, hidden] of bfloat16")
        hidden = x.shape[1]
        if use_fp8 and hidden % (4 * _BLOCK if use_ue8m0 else _BLOCK):
            raise ValueError(f"hidden is {hidden}, and has no whole blocks of {_BLOCK} channels to scale")
        cast = ("fp8_ue8m0" if use_ue8m0 else "fp8_pow2" if round_scale else "fp8") if use_fp8 else None
        most, held = self.group_size * num_max_dispatch_tokens_per_rank, self._held(num_experts)
        with self._turn:
            self._begin()
            channel = self._channel(
                "low latency", x, None, topk_idx, num_experts, num_max_dispatch_tokens_per_rank, hidden, cast
            )
            channel.make_room()
            channel.ranks.check()
            recv_x = x.new_empty((held, most, hidden), dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
            recv_count = torch.empty(held, dtype=torch.int32, device=x.device)
            columns = None
            if use_fp8:
                number = hidden // _BLOCK // (4 if use_ue8m0 else 1)
                kind = torch.int32 if use_ue8m0 else torch.float32
                columns = x.new_empty((held, number, most), dtype=kind)
            sent = channel.ranks._send(x, topk_idx, None, None)

            def receive() -> Received:
                received = channel.ranks._receive(sent, recv_x, columns)
                recv_count.copy_(received.counts)
                return received

            handle = _Handle(channel, True, receive)
            hook = self._later(x, handle.receive, return_recv_hook)
        # Consumers want scales column by column.
        found = recv_x if columns is None else (recv_x, columns.transpose(1, 2))
        return found, recv_count, handle, EventOverlap(), hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: _Handle,
        *,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Returns for each token of the dispatch the sum of its experts' rows in `x`, times `topk_weights`: added in
        float32 in the order of k, by fused multiply-adds, as DeepEP does. `x` is as the rows of the dispatch, of
        bfloat16; `topk_idx` are those of the dispatch. The sums stand in `out` once the hook has returned, or else now;
        `x` may change then."""
        if use_logfmt or zero_copy:
            raise ValueError("kvlane combines tensors of bfloat16 only: leave use_logfmt and zero_copy")
        with self._turn:
            received = self._received(handle, True)
            tokens, hidden = received._tokens, x.shape[-1]
            sums = x.new_empty((tokens, hidden)) if out is None else out
            if sums.shape != (tokens, hidden) or (sums.dtype, sums.device) != (x.dtype, x.device):
                raise ValueError(
                    f"out is {list(sums.shape)} of {sums.dtype} on {sums.device}, and has to be {[tokens, hidden]} of "
                    f"{x.dtype} on {x.device}"
                )
            into = sums if sums.is_contiguous() else x.new_empty((tokens, hidden))
            sent = handle.channel.ranks._send_back(x, received, False, topk_weights)

            def gather() -> None:
                handle.channel.ranks._gather(sent, into)
                if into is not sums:
                    sums.copy_(into)

            hook = self._later(x, lambda: self._gathered(handle, gather), return_recv_hook)
        return sums, EventOverlap(), hook

    # Normal: each token once a rank, for any number of tokens.

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Tokens for each rank; None; tokens for each expert, also int32; [T, ranks], whether a token goes there; an
        event."""
        held = self._held(num_experts)
        # Ids that are no experts are in no rank here, and dispatch tells of them.
        known = (topk_idx >= 0) & (topk_idx < num_experts)
        rank = torch.where(known, topk_idx.div(held, rounding_mode="floor"), self.group_size).long()
        is_in_rank = topk_idx.new_zeros((topk_idx.shape[0], self.group_size + 1), dtype=torch.bool)
        is_in_rank = is_in_rank.scatter_(1, rank, True)[:, : self.group_size].contiguous()
        of_experts = torch.bincount(topk_idx[known], minlength=num_experts).int()
        return is_in_rank.sum(0, dtype=torch.int32), None, of_experts, is_in_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: _Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor, torch.Tensor | None, list[int], _Handle, EventOverlap]:
        """Sends rows `x` [T, hidden], with scales or without, to the ranks that hold one of the experts `topk_idx`.

        Returns each token that came once, with its scales if `x` has some; its experts by their number on this rank,
        -1 for others'; their weights; how many pairs each expert has, rounded up to `expert_alignment`; a handle for
        `combine`; an event.
        """
        if handle is not None or topk_idx is None or num_tokens_per_expert is None:
            raise ValueError(
                "kvlane repeats no layout: give dispatch topk_idx and what get_dispatch_layout said"
            )
        if num_worst_tokens:
            raise ValueError("kvlane returns as many rows as came: leave num_worst_tokens")
        rows, scales = x if isinstance(x, tuple) else (x, None)
        rows, scales = rows.contiguous(), None if scales is None else scales.contiguous()
        with self._turn:
            self._begin()
            most = torch.tensor([rows.shape[0]], dtype=torch.int64, device="cpu")
            dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
            num_experts = num_tokens_per_expert.numel()
            self._held(num_experts)
            channel = self._channel("normal", rows, scales, topk_idx, num_experts, int(most), rows.shape[-1])
            channel.make_room()
            sent = channel.ranks._send(rows, topk_idx, topk_weights, scales)
            # Waits for a GPU: the caller gets as many rows as came.
            made = _Handle(channel, False, lambda: channel.ranks._receive(sent).trimmed())
            got = made.receive()
        counts = [-(-count // expert_alignment) * expert_alignment for count in got.counts.tolist()]
        found = got.rows if scales is None else (got.rows, got.scales)
        return found, got.ids, got.weights, counts, made, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: _Handle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, EventOverlap]:
        """Returns for each token of the dispatch the sum of the rows `x` that its ranks made of it: added in float32 in
        the order of ranks, rounded once."""
        if topk_weights is not None or bias is not None:
            raise ValueError("kvlane combines rows only: leave topk_weights and bias")
        with self._turn:
            received = self._received(handle, False)
            out = x.new_empty((received._tokens, x.shape[-1]))
            sent = handle.channel.ranks._send_back(x.contiguous(), received, True, None)
            self._gathered(handle, lambda: handle.channel.ranks._gather(sent, out))
        return out, None, EventOverlap()

    def _held(self, num_experts: int) -> int:
        """Experts of a rank."""
        if num_experts % self.group_size:
            raise ValueError(
                f"{num_experts} experts cannot be divided evenly among {self.group_size} ranks: add redundant ones"
            )
        return num_experts // self.group_size

    def _channel(
        self,
        kind: str,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        topk_idx: torch.Tensor,
        experts: int,
        tokens: int,
        hidden: int,
        cast: str | None = None,
    ) -> _Channel:
        """The all-to-all of these sizes. All ranks come here together."""
        row_bytes = hidden * rows.element_size()
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
        top_k = topk_idx.shape[1]
        key = (
            kind,
            _device_of(rows),
            row_bytes,
            scale_bytes,
            top_k,
            experts,
            hidden,
            cast,
            tokens if kind == "low latency" else None,
        )
        found = self._channels.get(key)
        if found is not None and found.max_tokens >= tokens:
            return found
        if kind == "normal":
            tokens = max(_FEWEST_TOKENS, 1 << (tokens - 1).bit_length())
        ranks = AllToAll(
            self._ranks,
            experts=experts,
            top_k=top_k,
            max_tokens=tokens,
            hidden=hidden,
            dtype="bfloat16",
            row_bytes=None if cast else row_bytes,
            scale_bytes=scale_bytes,
            cast=cast,
            scales_column_major=cast is not None,
            layout="masked" if kind == "low latency" else "tokens",
            device=_device_of(rows),
            timeout=_TIMEOUT_S,
        )
        # Log: vLLM's DeepEP backend uses kvlane, for calls of these sizes. Once for each size.
        logger.info(
            "kvlane: all-to-all for DeepEP's %s calls: %d ranks, %d experts, %d a token, at most %d tokens, "
            "rows of %d bytes, %d MB",
            kind,
            self.group_size,
            experts,
            top_k,
            tokens,
            hidden if cast else row_bytes + scale_bytes,
            ranks.nbytes >> 20,
        )
        if found is not None:
            found.replace()
        self._channels[key] = _Channel(self, ranks, tokens)
        return self._channels[key]

    def _received(self, handle: _Handle, is_low_latency: bool) -> Received:
        if not isinstance(handle, _Handle) or handle.channel.owner is not self:
            raise ValueError("handle has to be what a dispatch of this Buffer returned")
        if handle.is_low_latency != is_low_latency:
            raise ValueError(
                "a low-latency dispatch has a low-latency combine, and a normal one a normal combine"
            )
        return handle.receive()

    def _gathered(self, handle: _Handle, gather: Callable[[], None]) -> None:
        try:
            gather()
        finally:
            handle.close()

    def _later(
        self, x: torch.Tensor, finish: Callable[[], object], is_hook: bool
    ) -> Callable[[], None] | None:
        """Finishes a call now, or returns a hook that does, in the stream of the call."""
        if not is_hook:
            finish()
            return None
        rest = _Rest(finish if x.device.type == "cpu" else _in_current_stream(x.device, finish))

        def hook() -> None:
            with self._turn:
                rest.hook()

        self._due.append(rest)
        return hook

    def _begin(self) -> None:
        """Begins a dispatch. It runs what is left of earlier calls, because an all-to-all receives a dispatch before it
        sends the next one."""
        if self._is_destroyed:
            raise ValueError("this Buffer was destroyed: make another one")
        due, self._due = self._due, []
        for rest in due:
            rest.run()


def _in_current_stream(device: torch.device, act: Callable[[], object]) -> Callable[[], object]:
    """Has it run in the stream that is current now."""
    stream = torch.cuda.current_stream(device)

    def run() -> object:
        with torch.cuda.stream(stream):
            return act()

    return run


def _device_of(rows: torch.Tensor) -> str:
    return str(rows.device)
