"""Ranks that run vLLM's own DeepEP classes over `kvlane.moe.deep_ep`, for test_moe_deep_ep.

Started as `python deep_ep_ranks.py STORE DEVICE`, cpu or cuda: a fake GPU, with tensors of the host. Imports vLLM once
and forks the ranks. Each runs all of `SCENARIOS` in their order; the last line of stdout is {scenario: what each rank
says}, and a rank that has nothing to complain of says "".
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_gpu_tensors
import torch
import torch.distributed as dist

RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 4, 8, 3, 2048, 32
HELD = EXPERTS // RANKS
TOKENS = (0, 5, 17, MOST)


def inputs(
    rank: int, seed: int, tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights and ids of a rank; other tokens in each round, none for one of the ranks; some ids are -1."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = TOKENS[(rank + seed) % RANKS] if tokens is None else tokens
    x = torch.randn(tokens, HIDDEN, generator=source).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=source).argsort(1)[:, :TOP_K].contiguous()
    ids[torch.rand(tokens, TOP_K, generator=source) < 0.1] = -1
    return x, torch.rand(tokens, TOP_K, generator=source), ids


def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
    """A function that differs by expert, of float32 rows."""
    factors = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(number))
    return (rows * (number + factors)).bfloat16()


def reference(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, by_rank: bool) -> torch.Tensor:
    """The layer of one rank's tokens, one by one. `by_rank` rounds the sum of each rank's experts, which the ranks here
    make. Else a product is added unrounded: a float64 holds it, and in effect its sum with a float32."""
    out = torch.zeros(len(x), HIDDEN)
    for token in range(len(x)):
        parts: dict[int, torch.Tensor] = {}
        for k in range(TOP_K):
            number = int(ids[token, k])
            if number >= 0:
                holder = number // HELD if by_rank else 0
                wide = torch.float32 if by_rank else torch.float64
                product = weights[token, k].to(wide) * expert(number, x[token].float()).to(wide)
                parts[holder] = (parts.get(holder, torch.zeros(HIDDEN)) + product).float()
        for holder in sorted(parts):
            out[token] += parts[holder].bfloat16().float() if by_rank else parts[holder]
    return out.bfloat16()


def swapped(number: int, is_swapped: bool) -> int:
    return number ^ 1 if is_swapped else number


# With vLLM's classes.


def low_latency_buffer(deep_ep: ModuleType) -> Any:
    """As vLLM's manager makes it."""
    from vllm.distributed.device_communicators.all2all import DeepEPLLAll2AllManager

    manager = SimpleNamespace(cpu_group=dist.group.WORLD, support_fault_tolerance=True)
    made = DeepEPLLAll2AllManager._make_all2all_kwargs(manager, MOST, HIDDEN, RANKS, EXPERTS, HELD)
    return deep_ep.Buffer(**made)


def low_latency_layer(rank: int, deep_ep: ModuleType, is_fp8: bool, is_swapped: bool) -> list[Any]:
    """For each round what the layer gave, and what it should have."""
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    one = torch.ones(1)
    config = (
        fp8_w8a8_moe_quant_config(w1_scale=one, w2_scale=one, block_shape=[128, 128])
        if is_fp8
        else FUSED_MOE_UNQUANTIZED_CONFIG
    )
    buffer = low_latency_buffer(deep_ep)
    layer = DeepEPLLPrepareAndFinalize(buffer, MOST, RANKS, use_fp8_dispatch=is_fp8)
    found = []
    for seed in range(5):
        x, weights, ids = inputs(rank, seed)
        arguments = (x, weights, ids, EXPERTS, None, False, config)
        if seed % 2:
            hook, receive = layer.prepare_async(*arguments)
            hook()
            rows, scales, meta, *_ = receive()
        else:
            rows, scales, meta, *_ = layer.prepare(*arguments)
        assert rows.shape == (HELD, RANKS * MOST, HIDDEN), rows.shape
        assert rows.dtype == (torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
        wide = rows.float()
        if is_fp8:
            assert scales.shape == (HELD, RANKS * MOST, HIDDEN // 128) and scales.dtype == torch.float32
            wide = (wide.unflatten(2, (-1, 128)) * scales.unsqueeze(3)).flatten(2)
        # Rows that did not come must not be read.
        y = torch.full(rows.shape, torch.nan, dtype=torch.bfloat16)
        for here, count in enumerate(meta.expert_num_tokens.tolist()):
            y[here, :count] = expert(swapped(rank * HELD + here, is_swapped), wide[here, :count])
        every = torch.cat([inputs(other, seed)[2].flatten() for other in range(RANKS)])
        wanted = [int((every == rank * HELD + here).sum()) for here in range(HELD)]
        assert meta.expert_num_tokens.tolist() == wanted, (meta.expert_num_tokens, wanted)
        out = torch.full_like(x, torch.nan)
        finished = (out, y, weights, ids, False, TopKWeightAndReduceDelegate())
        if seed % 2:
            for step in layer.finalize_async(*finished):
                step()
        else:
            layer.finalize(*finished)
        found.append((out, reference(x, weights, ids, by_rank=False)))
    buffer.destroy()
    return found


def high_throughput_layer(rank: int, deep_ep: ModuleType, is_swapped: bool) -> list[Any]:
    """As above. Tokens of a rank go beyond any earlier number. The experts here add their own rows, because vLLM's own
    reduction is an operation of CUDA."""
    from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    manager = SimpleNamespace(cpu_group=dist.group.WORLD, num_sms=20, internode=False)
    buffer = deep_ep.Buffer(**DeepEPHTAll2AllManager._make_all2all_kwargs(manager))
    DeepEPHTAll2AllManager.set_num_sms(manager, 8)
    layer = DeepEPHTPrepareAndFinalize(buffer, RANKS, RANKS, rank * HELD)
    found = []
    for seed in range(5):
        x, weights, ids = inputs(rank, seed, 80 if seed == 3 and rank == 2 else None)
        config = FUSED_MOE_UNQUANTIZED_CONFIG
        arguments = (x, weights, ids, EXPERTS, None, False, config)
        received = layer.prepare_async(*arguments)() if seed % 2 else layer.prepare(*arguments)
        rows, _, meta, row_ids, row_weights = received
        y = torch.zeros(rows.shape, dtype=torch.bfloat16)
        counts = [0] * HELD
        for row in range(len(rows)):
            total = torch.zeros(HIDDEN)
            for number, weight in zip(row_ids[row].tolist(), row_weights[row], strict=True):
                if number // HELD == rank:
                    counts[number - rank * HELD] += 1
                    total += weight * expert(swapped(number, is_swapped), rows[row].float()).float()
            y[row] = total.bfloat16()
        assert meta.expert_num_tokens.tolist() == counts, (meta.expert_num_tokens, counts)
        out = torch.full_like(x, torch.nan)
        finished = (out, y, weights, ids, False, TopKWeightAndReduceNoOP())
        if seed % 2:
            layer.finalize_async(*finished)()
        else:
            layer.finalize(*finished)
        found.append((out, reference(x, weights, ids, by_rank=True)))
    buffer.destroy()
    return found


def same_bits(found: list[Any]) -> str:
    wrong = [seed for seed, (out, wanted) in enumerate(found) if not torch.equal(out, wanted)]
    return f"rounds {wrong} of {len(found)} differ" if wrong else ""


def near(found: list[Any]) -> str:
    """Each element of a row in fp8 is off by at most 1/16 of itself, or of the smallest normal number of its block."""
    for seed, (out, wanted) in enumerate(found):
        off = (out.float() - wanted.float()).abs()
        # 3 experts of at most 9 times a weight of at most 1; blocks reach to about 5 times 2 ** -6 / 448 of a step.
        if not (off <= wanted.float().abs() / 16 + 0.5).all() or out.isnan().any():
            return f"round {seed} is off by {off.max()}"
        if len(out) and not off.mean() < 0.1 * wanted.float().abs().mean():
            return f"round {seed} is off by {off.mean()} on average"
    return ""


# With the module alone.


def hooks(rank: int, deep_ep: ModuleType) -> str:
    """The first half of a call waits for nobody; two dispatches are under way, and hooks run in any order."""
    buffer = low_latency_buffer(deep_ep)
    given = [inputs(rank, seed) for seed in (0, 1)]

    def dispatch(seed: int) -> Any:
        x, _, ids = given[seed]
        return buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=True)

    def combine(seed: int, sent: Any) -> Any:
        rows, counts, handle, *_ = sent
        y = torch.zeros_like(rows)
        for here, count in enumerate(counts.tolist()):
            y[here, :count] = expert(rank * HELD + here, rows[here, :count].float())
        _, weights, ids = given[seed]
        # A tensor with gaps.
        out = torch.zeros(len(ids), 2 * HIDDEN, dtype=torch.bfloat16)[:, ::2]
        done = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=True, out=out)
        assert done[0] is out
        return out, done[2]

    # Makes the all-to-all.
    buffer.low_latency_dispatch(*given[0][::2], MOST, EXPERTS, use_fp8=False)
    if rank == RANKS - 1:
        # The others' dispatches return before this rank has sent anything.
        dist.barrier()
    first = dispatch(0)
    if rank != RANKS - 1:
        dist.barrier()
    second = dispatch(1)
    second[4]()
    first[4]()
    if rank == 0:
        # The others' combines return before this rank has sent anything back.
        dist.barrier()
    on_meta = torch.zeros(given[0][0].shape, dtype=torch.bfloat16, device="meta")
    try:
        buffer.low_latency_combine(first[0], given[0][2], given[0][1], first[2], out=on_meta)
    except ValueError as error:
        if "on meta, and has to be" not in str(error):
            return str(error)
    else:
        return "sums went to another device"
    later, earlier = combine(1, second), combine(0, first)
    if rank != 0:
        dist.barrier()
    for (out, hook), (x, weights, ids) in zip((earlier, later), given, strict=True):
        hook()
        hook()
        if not torch.equal(out, reference(x, weights, ids, by_rank=False)):
            return "sums"
    # As benchmarks do.
    for _ in range(5):
        last = dispatch(0)
    last[1].fill_(-7)
    last[4]()
    if (last[1] < 0).any():
        return "the rows came before the hook ran"
    out, hook = combine(0, last)
    hook()
    x, weights, ids = given[0]
    if not torch.equal(out, reference(x, weights, ids, by_rank=False)):
        return "sums after dispatches that nobody combined"
    try:
        combine(0, first)
    except ValueError as error:
        if "dispatch again" not in str(error):
            return str(error)
    else:
        return "combined twice"
    buffer.destroy()
    return ""


def normal_calls(rank: int, deep_ep: ModuleType) -> str:
    """fp8 rows with scales; a larger dispatch while a smaller one is under way; what is not served."""
    buffer = deep_ep.Buffer(group=dist.group.WORLD)
    config = deep_ep.Buffer.get_dispatch_config(RANKS)

    def dispatch(x: Any, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        to_rank, to_node, to_expert, is_in_rank, event = buffer.get_dispatch_layout(ids, EXPERTS)
        assert to_node is None and event.event is None
        assert is_in_rank.tolist() == [
            [any(number // HELD == other for number in row if number >= 0) for other in range(RANKS)]
            for row in ids.tolist()
        ]
        assert to_rank.tolist() == is_in_rank.sum(0).tolist() and to_rank.dtype == torch.int32
        assert to_expert.tolist() == [int((ids == number).sum()) for number in range(EXPERTS)]
        return buffer.dispatch(
            x,
            num_tokens_per_rank=to_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=16,
            config=config,
        )

    found = []
    for seed, tokens in ((0, None), (1, 100 + rank)):
        x, weights, ids = inputs(rank, seed, tokens)
        fp8, scales = x.to(torch.float8_e4m3fn), torch.rand(len(x), HIDDEN // 128)
        (rows, row_scales), _, _, counts, handle, event = dispatch((fp8, scales), ids, weights)
        event.current_stream_wait()
        assert rows.dtype == torch.float8_e4m3fn and len(row_scales) == len(rows)
        assert len(counts) == HELD and all(count % 16 == 0 for count in counts)
        found.append((handle, rows.bfloat16(), fp8.bfloat16(), ids))
    # Rows come back as they were, once for each rank that had the token.
    for handle, rows, sent, ids in found:
        out, nothing, _ = buffer.combine(rows, handle)
        holders = [len({number // HELD for number in row if number >= 0}) for row in ids.tolist()]
        if nothing is not None or not torch.equal(
            out, (sent.float() * torch.tensor(holders)[:, None]).bfloat16()
        ):
            return "sums"
    last, ids, weights = found[-1][0], found[-1][3], torch.ones(len(found[-1][3]), TOP_K)
    rows = found[-1][1]
    other = deep_ep.Buffer(group=dist.group.WORLD)
    refused: dict[str, Callable[[], object]] = {
        "leave topk_weights and bias": lambda: buffer.combine(rows, last, topk_weights=weights),
        "dispatch again": lambda: buffer.combine(rows, last),
        "repeats no layout": lambda: buffer.dispatch(rows, handle=last),
        "9 experts cannot be divided evenly": lambda: buffer.get_dispatch_layout(ids, 9),
        "VLLM_DEEPEPLL_NVFP4_DISPATCH=0": lambda: buffer.low_latency_dispatch(
            rows, ids, MOST, EXPERTS, use_nvfp4=True
        ),
        "has a low-latency combine": lambda: buffer.low_latency_combine(rows, ids, weights, last),
        "what a dispatch of this Buffer returned": lambda: other.combine(rows, last),
        "handle has to be what a dispatch": lambda: buffer.low_latency_combine(rows, ids, weights, None),
        "x is .* has to be": lambda: buffer.low_latency_dispatch(rows.float(), ids, MOST, EXPERTS),
    }
    for why, call in refused.items():
        try:
            call()
        except ValueError as error:
            if not re.search(why, str(error)):
                return str(error)
        else:
            return f"not refused: {why}"
    mask = torch.ones(RANKS, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    buffer.low_latency_clean_mask_buffer()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    # Ids that are no experts are counted nowhere: dispatch refuses them.
    to_rank, _, to_expert, _, _ = buffer.get_dispatch_layout(torch.full((2, TOP_K), EXPERTS), EXPERTS)
    if to_rank.any() or to_expert.tolist() != [0] * EXPERTS:
        return "an id that is no expert is counted"
    buffer.destroy()
    try:
        buffer.low_latency_dispatch(rows, ids, MOST, EXPERTS)
    except ValueError as error:
        if "this Buffer was destroyed" not in str(error):
            return str(error)
    else:
        return "a Buffer that was destroyed dispatches"
    return "" if mask.tolist() == [0] * RANKS else "a rank is masked"


def cast(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and scales that an all-to-all of this rank alone dispatches."""
    from kvlane.moe import AllToAll, Group

    with AllToAll(
        Group(0, 1, lambda told: [told]),
        experts=1,
        top_k=1,
        max_tokens=len(x),
        hidden=x.shape[1],
        cast=kind,
        layout="tokens",
    ) as alone:
        got = alone.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int64))
        return got.rows, got.scales


def scales_of_fp8(rank: int, deep_ep: ModuleType) -> str:
    """Scales as DeepEP's kernels compute them, plain, rounded to powers of two, and packed."""
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16()
    x[3, :128] = 0
    x[4, 128:256] = 448.0
    x *= torch.logspace(-3, 3, 64)[:, None]
    x = x.bfloat16()
    blocks = x.double().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(2).clamp(min=1e-4)
    for is_rounded in (False, True):
        rows, scales = cast(x, "fp8_pow2" if is_rounded else "fp8")
        wide = rows.double().unflatten(1, (-1, 128)) * scales.double().unsqueeze(2)
        # Half of the last of 3 bits, or of the smallest number, 2 ** -9.
        bound = torch.maximum(blocks.abs() * 2**-4, scales.double().unsqueeze(2) * 2**-10)
        if not ((wide - blocks).abs() <= bound * 1.001).all():
            return f"rounded {is_rounded}: off by {(wide - blocks).abs().max()}"
        ratio = scales.double() * 448 / amax
        if is_rounded:
            exponents = torch.log2(scales.double())
            if not ((ratio > 0.9999) & (ratio < 2) & (exponents == exponents.round())).all():
                return f"scales of powers of two: {ratio.min()} to {ratio.max()}"
            packed = cast(x, "fp8_ue8m0")[1]
            shifts = torch.arange(0, 32, 8)
            unpacked = (packed.unsqueeze(2).long() >> shifts & 255).flatten(1) - 127
            if packed.dtype != torch.int32 or not torch.equal(unpacked, exponents.long()):
                return "packed scales"
        elif not torch.allclose(ratio, torch.ones_like(ratio), rtol=1e-6):
            return f"scales: {ratio.min()} to {ratio.max()}"
    return ""


def lost(rank: int, deep_ep: ModuleType, say: Callable[[], None]) -> str:
    """The last rank dies. The others' next call fails, and names it. On a GPU that is the one after the hook."""
    from kvlane.moe import RankLost
    from kvlane.moe import deep_ep as ours

    buffer = low_latency_buffer(deep_ep)
    x, _, ids = inputs(rank, 0)
    buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
    if rank == RANKS - 1:
        say()
        os._exit(0)
    *_, hook = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, return_recv_hook=True)
    for _ in range(2):
        try:
            hook()
            if ours._device_of(x) != "cpu":
                buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False)
        except RankLost as error:
            told = str(error)
        else:
            return "the hook returned"
    # Another rank may have failed first, because of it.
    return "" if f"rank {RANKS - 1}" in told else told


LOST = "a rank that dies"
SCENARIOS: dict[str, Callable[[int, ModuleType], str]] = {
    "low latency": lambda rank, deep_ep: same_bits(low_latency_layer(rank, deep_ep, False, False)),
    "low latency, fp8": lambda rank, deep_ep: near(low_latency_layer(rank, deep_ep, True, False)),
    "high throughput": lambda rank, deep_ep: same_bits(high_throughput_layer(rank, deep_ep, False)),
    "low latency, experts swapped": lambda rank, deep_ep: same_bits(
        low_latency_layer(rank, deep_ep, False, True)
    ),
    "low latency, fp8, experts swapped": lambda rank, deep_ep: near(
        low_latency_layer(rank, deep_ep, True, True)
    ),
    "high throughput, experts swapped": lambda rank, deep_ep: same_bits(
        high_throughput_layer(rank, deep_ep, True)
    ),
    "hooks": hooks,
    "normal calls": normal_calls,
    "scales of fp8": scales_of_fp8,
}


def provided() -> ModuleType:
    """The module, as the plugin gives it to vLLM. A DeepEP that was there first stays, and so does none without the
    variable."""
    from kvlane.plugin import register

    os.environ.pop("KVLANE_DEEP_EP", None)
    register()
    assert "deep_ep" not in sys.modules
    os.environ["KVLANE_DEEP_EP"] = "1"
    sys.modules["deep_ep"] = theirs = ModuleType("deep_ep")
    register()
    assert sys.modules.pop("deep_ep") is theirs
    # As engines do. Layers look for DeepEP when they are imported.
    import vllm.v1.engine.core
    import vllm.v1.worker.worker_base  # noqa: F401
    from vllm.plugins import load_general_plugins

    assert "vllm.model_executor.layers.fused_moe.all2all_utils" not in sys.modules
    load_general_plugins()
    register()
    assert importlib.util.find_spec("deep_ep") is not None
    from vllm.utils import import_utils

    assert import_utils.has_deep_ep()
    if hasattr(import_utils, "has_deep_ep_v2"):
        assert not import_utils.has_deep_ep_v2()
    import deep_ep  # type: ignore[import-not-found]

    assert deep_ep.__name__ == "kvlane.moe.deep_ep" and deep_ep.topk_idx_t == torch.int64
    return deep_ep


def run(rank: int, store: str, device: str, deep_ep: ModuleType, pipe: Connection) -> None:
    from kvlane.moe import deep_ep as ours

    if device == "cuda":
        fake_gpu_tensors.use()
        setattr(ours, "_device_of", lambda _: "cuda")  # noqa: B010 - of a module

    said: dict[str, str] = {}
    try:
        timeout = timedelta(seconds=40)
        dist.init_process_group("gloo", f"file://{store}", timeout=timeout, world_size=RANKS, rank=rank)
        ours._TIMEOUT_S = 20.0
        for name, scenario in SCENARIOS.items():
            said[name] = "begun"
            said[name] = scenario(rank, deep_ep)
        name = LOST
        said[name] = lost(rank, deep_ep, lambda: pipe.send(said | {LOST: ""}))
    except Exception:  # noqa: BLE001 - it is the result
        said[name] = traceback.format_exc()
    pipe.send(said)
    # The others' groups end, too.
    os._exit(0)


def main(store: str, device: str) -> None:
    deep_ep = provided()
    import vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht
    import vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll  # noqa: F401

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=run, args=(rank, store, device, deep_ep, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    said = [pipe.recv() for pipe in pipes]
    print(json.dumps({name: [each.get(name, "not begun") for each in said] for name in (*SCENARIOS, LOST)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
