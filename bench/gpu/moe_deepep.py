"""Compares one rank's low-latency calls of kvlane.moe.deep_ep with those of DeepEP's wheel, which get the same
arguments: rows, scales and sums, bit for bit.

    python bench/gpu/moe_deepep.py --seconds 20 --out out/moe-deepep

Both add a token's rows in the order of its experts, however many ranks there are, so one GPU is enough. DeepEP gives
an expert its rows in any order. So the script sorts rows before it compares them, and its experts treat each row alike.
Controls: the script has to find the sums of other weights, and the rows of another x.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_check import bytes_of, made_of
from provenance import add_arguments, head

from kvlane.bench.all_to_all_gpu import keep_nvshmem_on_this_host
from kvlane.moe.deep_ep import Buffer

EXPERTS, MOST = 64, 128
# Hidden sizes and numbers of experts a token that DeepEP's kernels are made for.
HIDDEN, TOP_K = (2048, 4096, 7168), (1, 2, 4, 8)


def layer(
    buffer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, is_fp8: bool
) -> tuple[list[list[bytes]], torch.Tensor]:
    """Dispatches x, lets the experts work, and combines. Returns the sorted rows of each expert, and the sums."""
    got, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=is_fp8)
    rows, scales = got if is_fp8 else (got, None)
    received = [
        by_bytes(rows[expert, :count], None if scales is None else scales[expert, :count])
        for expert, count in enumerate(counts.tolist())
    ]
    y = made_of(rows)
    sums, _, _ = buffer.low_latency_combine(y, ids, weights, handle)
    return received, sums.clone()


def by_bytes(rows: torch.Tensor, scales: torch.Tensor | None) -> list[bytes]:
    """Rows with their scales, sorted."""
    parts = [
        bytes_of(each).reshape(len(rows), -1) for each in (rows, scales) if each is not None and len(rows)
    ]
    return sorted(row.tobytes() for row in torch.cat(parts, 1).cpu().numpy()) if parts else []


def other_rows(one: list[list[bytes]], other: list[list[bytes]]) -> int:
    """Rows of experts that differ."""
    return sum(
        max(len(ours), len(theirs)) if len(ours) != len(theirs) else sum(map(bytes.__ne__, ours, theirs))
        for ours, theirs in zip(one, other, strict=True)
    )


def drawn(source: random.Random, device: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids of which a tenth is none, and weights of a rank."""
    seed = torch.Generator().manual_seed(source.randrange(1 << 30))
    hidden, top_k = source.choice(HIDDEN), source.choice(TOP_K)
    ids = torch.rand(tokens, EXPERTS, generator=seed).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(ids.shape, generator=seed) < 0.1] = -1
    x = torch.randn(tokens, hidden, generator=seed).bfloat16()
    return x.to(device), ids.to(device), torch.rand(tokens, top_k, generator=seed).to(device)


def compare(ours: Any, theirs: Any, seconds: float, seed: int, device: str) -> dict[str, Any]:
    """Rows and numbers of sums that were compared, and those that differ."""
    source = random.Random(seed)
    end = time.monotonic() + seconds
    found: dict[str, Any] = dict.fromkeys(("rounds", "rows", "other_rows", "sums", "other_sums"), 0)
    while not found["rounds"] or time.monotonic() < end:
        x, ids, weights = drawn(source, device, source.choice((1, MOST // 4, MOST)))
        for buffer in (ours, theirs):
            buffer.clean_low_latency_buffer(MOST, x.shape[1], EXPERTS)
        is_fp8 = source.random() < 0.5
        (rows, sums), (their_rows, their_sums) = (
            layer(buffer, x, ids, weights, is_fp8) for buffer in (ours, theirs)
        )
        found["rounds"] += 1
        found["rows"] += sum(map(len, their_rows))
        found["other_rows"] += other_rows(rows, their_rows)
        found["sums"] += sums.numel()
        found["other_sums"] += int((sums.view(torch.int16) != their_sums.view(torch.int16)).sum())
    return found


def controls(ours: Any, theirs: Any, seed: int, device: str) -> dict[str, bool]:
    """Whether differences are found where there are some."""
    x, ids, weights = drawn(random.Random(seed), device, MOST)
    for buffer in (ours, theirs):
        buffer.clean_low_latency_buffer(MOST, x.shape[1], EXPERTS)
    rows, sums = layer(theirs, x, ids, weights, True)
    other_x, _ = layer(ours, x * 1.01, ids, weights, True)
    same_rows, other_weights = layer(ours, x, ids, weights * 1.01, True)
    return {
        "another_x_is_found": other_rows(other_x, rows) > 0,
        "other_weights_are_found": not torch.equal(other_weights, sums) and not other_rows(same_rows, rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/moe-deepep"))
    add_arguments(parser)
    settings = parser.parse_args()
    keep_nvshmem_on_this_host()
    from deep_ep import Buffer as DeepEP  # pyright: ignore[reportMissingImports]

    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"about": head("moe-deepep", settings)}
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        room = max(DeepEP.get_low_latency_rdma_size_hint(MOST, hidden, 1, EXPERTS) for hidden in HIDDEN)
        theirs = DeepEP(dist.group.WORLD, 0, room, low_latency_mode=True, num_qps_per_rank=EXPERTS)
        ours = Buffer(dist.group.WORLD, low_latency_mode=True)
        found["compared"] = compare(ours, theirs, settings.seconds, settings.seed, "cuda")
        found["controls"] = controls(ours, theirs, settings.seed, "cuda")
    print(json.dumps(found, indent=2), flush=True)
    (settings.out / "moe-deepep.json").write_text(json.dumps(found, indent=2) + "\n")
    is_equal = not found["compared"]["other_rows"] and not found["compared"]["other_sums"]
    sys.exit(0 if is_equal and all(found["controls"].values()) else 1)


if __name__ == "__main__":
    main()
