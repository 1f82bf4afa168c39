"""A layer of a mixture of experts in four processes of this host, each with two of eight experts.

    python examples/moe_layer.py

Needs numpy beside kvlane. Each process has tokens of its own, and sends them where their experts are. It compares the
result with a layer that has all experts.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from kvlane.moe import AllToAll, Group

RANKS, EXPERTS, TOP_K, TOKENS, HIDDEN = 4, 8, 2, 16, 64


def expert(number: int, rows: Any) -> Any:
    """A small network with weights of its own."""
    weights = np.random.default_rng(number).normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
    return np.maximum(rows @ weights, 0)


def layer(rank: int, path: str) -> tuple[int, bool]:
    """One process: how many rows came to its experts, and whether the sums are those of one layer."""
    source = np.random.default_rng(100 + rank)
    x = source.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    ids = np.argsort(source.normal(size=(TOKENS, EXPERTS)))[:, :TOP_K]
    weights = np.full((TOKENS, TOP_K), 1 / TOP_K, np.float32)
    group = Group.at(path, rank, RANKS)
    with AllToAll(
        group, experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, hidden=HIDDEN, dtype="float32"
    ) as ranks:
        got = ranks.dispatch(x, ids, weights)
        y = np.zeros_like(got.rows)
        for here, (start, count) in enumerate(zip(got.starts, got.counts, strict=True)):
            own = rank * EXPERTS // RANKS + here
            y[start : start + count] = expert(own, got.rows[start : start + count])
        out = ranks.combine(y, got)
    alone = sum(
        weights[:, k : k + 1] * np.stack([expert(ids[t, k], x[t]) for t in range(TOKENS)])
        for k in range(TOP_K)
    )
    return len(got.rows), bool(np.allclose(out, alone, rtol=1e-4, atol=1e-4))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, context) as processes:
        found = list(processes.map(layer, range(RANKS), [f"{folder}/ranks.sock"] * RANKS))
    for rank, (rows, is_equal) in enumerate(found):
        print(
            f"rank {rank}: {rows} rows came to its experts; sums {'are' if is_equal else 'ARE NOT'} those of one layer"
        )
    if not all(is_equal for _, is_equal in found):
        raise SystemExit("the sums differ")


if __name__ == "__main__":
    main()
