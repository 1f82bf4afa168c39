"""A rank on a fake GPU, for test_moe_gpu: moe_gpu_ranks.py RANK RANKS STORE WORK."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import fake_gpu_tensors
import torch
import torch.distributed as dist

from kvlane.moe import AllToAll, CapacityExceeded, Group, MoeError, RankLost, Received

EXPERTS, TOP_K, HIDDEN, MOST = 10, 3, 64, 24


def main(rank: int, ranks: int, store: str, work: str) -> None:
    fake_gpu_tensors.use()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    {"compare": compare, "killed": killed, "refused": refused}[work](rank, ranks)
    dist.destroy_process_group()


def on_gpu(group: Group, **more: Any) -> AllToAll:
    sizes = {"experts": EXPERTS, "top_k": TOP_K, "max_tokens": MOST, "hidden": HIDDEN, **more}
    return AllToAll(group, device="cuda", **sizes)


def drawn(seed: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = int(torch.randint(0, MOST + 1, (1,), generator=random))
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    ids = (
        torch.rand(tokens, experts, generator=random).topk(TOP_K).indices
        if tokens
        else torch.zeros(0, TOP_K).long()
    )
    ids[torch.rand(ids.shape, generator=random) < 0.1] = -1
    weights = torch.rand(tokens, TOP_K, generator=random)
    return x, ids, weights, torch.randn(tokens, 2, generator=random)


def compare(rank: int, size: int) -> None:
    """All layouts beside ranks in the memory of the host, bit for bit. With few experts the last of three has none."""
    group = Group.of_torch()
    for layout, experts in itertools.product(("experts", "masked", "tokens"), (EXPERTS, 4)):
        sizes: dict[str, Any] = {"layout": layout, "scale_bytes": 8, "experts": experts}
        if layout == "experts":
            sizes["alignment"] = 4
        host = AllToAll(group, top_k=TOP_K, max_tokens=MOST, hidden=HIDDEN, **sizes)
        with host, on_gpu(group, **sizes) as gpu:
            for number in range(6):
                x, ids, weights, scales = drawn(100 * number + rank, experts)
                narrow = ids.int() if number % 2 else ids
                if number == 4:
                    # They have no -1.
                    ids = ids.clamp(min=0)
                    narrow = ids.to(torch.uint32)
                reduced = layout == "tokens" or number % 3 == 1
                late = weights if number % 3 == 2 and not reduced else None
                wanted = host.dispatch(x, ids, None if late is not None else weights, scales)
                if number % 2:
                    got = gpu.dispatch(x, narrow, None if late is not None else weights, scales)
                else:
                    sent = gpu._send(x, narrow, None if late is not None else weights, scales)
                    got = gpu._receive(sent)
                gpu.check()
                got = got.trimmed()
                same(wanted, got, layout)
                out = host.combine(made_of(wanted.rows), wanted, reduced=reduced, weights=late)
                y = made_of(got.rows)
                if number % 2:
                    found = gpu.combine(y, got, reduced=reduced, weights=late)
                else:
                    checked = gpu._send_back(y, got, reduced, late)
                    found = torch.full_like(out, 7)
                    gpu._gather(checked, found)
                gpu.check()
                assert torch.equal(out, found), (layout, number)
            stats = gpu.stats()
            assert stats == host.stats() and stats.dispatches == 6, (stats, host.stats())
    casts(group)
    print("right")


def casts(group: Group) -> None:
    """Rows that are cast, and scales by column."""
    source = torch.Generator().manual_seed(group.rank)
    for layout, cast in itertools.product(
        ("experts", "masked", "tokens"), ("fp8", "fp8_pow2", "fp8_ue8m0", None)
    ):
        sizes: dict[str, Any] = {"layout": layout, "hidden": 1024, "cast": cast, "scales_column_major": True}
        sizes["scale_bytes"] = 0 if cast else 20
        host = AllToAll(group, experts=EXPERTS, top_k=TOP_K, max_tokens=MOST, **sizes)
        with host, on_gpu(group, **sizes) as gpu:
            _, ids, weights, _ = drawn(group.rank + 40)
            x = torch.randn(len(ids), 1024, generator=source).bfloat16()
            scales = None if cast else torch.randn(len(ids), 5, generator=source)
            wanted, got = host.dispatch(x, ids, weights, scales), gpu.dispatch(x, ids, weights, scales)
            gpu.check()
            assert got.scales.transpose(-1, -2).is_contiguous()
            assert got.rows.dtype == wanted.rows.dtype
            got = got.trimmed()
            as_bytes = [replace(each, rows=each.rows.view(torch.uint8)) for each in (wanted, got)]
            same(as_bytes[0], as_bytes[1], layout)


def same(wanted: Received, got: Received, layout: str) -> None:
    assert torch.equal(wanted.counts, got.counts)
    if layout == "tokens":
        assert torch.equal(wanted.rows, got.rows) and torch.equal(wanted.scales, got.scales)
        assert torch.equal(wanted.ids, got.ids)
        assert (wanted.weights is None) == (got.weights is None)
        assert wanted.weights is None or torch.equal(wanted.weights, got.weights)
        return
    starts = range(len(got.counts)) if layout == "masked" else got.starts.tolist()
    if layout == "experts":
        assert torch.equal(wanted.starts, got.starts)
    for start, count in zip(starts, got.counts.tolist(), strict=True):
        for ours, theirs in ((got.rows, wanted.rows), (got.scales, wanted.scales)):
            if layout == "masked":
                assert torch.equal(ours[start, :count], theirs[start, :count])
            else:
                assert torch.equal(ours[start : start + count], theirs[start : start + count])


def made_of(rows: torch.Tensor) -> torch.Tensor:
    """Rows that no token has may be anything."""
    return torch.nan_to_num(rows.float() * 1.5 + 1, 7).bfloat16()


def killed(rank: int, size: int) -> None:
    """The last rank dies in a dispatch. The others' kernels end, and name it, also in all later calls."""
    ranks = on_gpu(Group.of_torch(), timeout=60)
    x, ids, weights, _ = drawn(7)
    got = ranks.dispatch(x, ids, weights)
    ranks.check()
    dist.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.combine(made_of(got.rows), got)
    begun = time.monotonic()
    try:
        ranks.check()
        raise AssertionError("a combine without one of the ranks")
    except RankLost as error:
        # Unless another one was first to fail because of it.
        assert f"rank {size - 1}" in str(error), error
    assert time.monotonic() - begun < 30
    for _ in range(2):
        try:
            ranks.dispatch(x, ids, weights)
            raise AssertionError("a dispatch after that")
        except RankLost:
            pass
    ranks.close()
    print("right")


def refused(rank: int, size: int) -> None:
    """Wrong calls, each with a sentence; and what kernels refuse."""
    ranks = on_gpu(Group.of_torch(), capacity=5)
    x, ids, weights, _ = (each[:4] for each in drawn(3))
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("has to be a tensor", ([1], ids, weights)),
        ("has to be on cpu", (x.to("meta"), ids, weights)),
        ("ids are float32", (x, weights, weights)),
        ("weights are float64", (x, ids, weights.double())),
        ("has to be 4 rows of 128 bytes", (x[:, :32].contiguous(), ids, weights)),
        ("x is not contiguous", (x.expand(2, *x.shape)[0].t(), ids, weights)),
    ]
    for why, arguments in wrong:
        try:
            ranks.dispatch(*arguments)
            raise AssertionError(why)
        except ValueError as error:
            assert why in str(error), error
    without_room(ranks, x, weights)
    if rank == 0:
        ranks.dispatch(x, torch.full_like(ids, EXPERTS), weights)
        try:
            ranks.check()
            raise AssertionError("an expert that does not exist")
        except MoeError as error:
            assert f"wants expert {EXPERTS} as its number 0" in str(error), error
    print("right")


def without_room(ranks: AllToAll, x: torch.Tensor, weights: torch.Tensor) -> None:
    """All tokens want the first three experts, which are rank 0's, and then none does but one."""
    ids = torch.arange(TOP_K).expand(len(x), TOP_K).contiguous()
    for fits in (False, True):
        if fits:
            ids = torch.full_like(ids, -1)
            ids[0, 0] = 9
        got = ranks.dispatch(x, ids, weights)
        out = ranks.combine(made_of(got.rows), got)
        assert torch.isnan(out).all() != fits, out
        try:
            ranks.check()
            assert fits
        except CapacityExceeded as error:
            assert not fits and error.needed > 5 and f"a capacity of at least {error.needed}" in str(error)
        ranks.check()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
