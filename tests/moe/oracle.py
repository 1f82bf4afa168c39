"""The right results of dispatch and combine, from docs/moe.md alone, in loops of numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    ranks: int
    experts: int
    top_k: int
    hidden: int
    dtype: str = "float32"
    scale_bytes: int = 0
    alignment: int = 1
    layout: str = "experts"
    capacity: int | None = None
    max_tokens: int = 40

    @property
    def room(self) -> int:
        """Rows of an expert, in the layout `masked`."""
        return self.ranks * self.max_tokens if self.capacity is None else self.capacity

    @property
    def experts_a_rank(self) -> int:
        return -(-self.experts // self.ranks)

    def experts_of(self, rank: int) -> range:
        each = self.experts_a_rank
        return range(min(rank * each, self.experts), min((rank + 1) * each, self.experts))


@dataclass
class Input:
    """The tokens of one rank. `x` are elements of the dtype; bfloat16 as uint16."""

    x: Any
    ids: Any
    weights: Any
    scales: Any


def draw(sizes: Sizes, seed: int, skewed: bool = False) -> list[Input]:
    """For each rank its own number of tokens, none for one of them; with -1 and duplicates among the ids."""
    source = np.random.default_rng(seed)
    inputs = []
    for rank in range(sizes.ranks):
        tokens = 0 if rank == seed % (sizes.ranks + 1) else int(source.integers(1, sizes.max_tokens + 1))
        most = 2 if skewed else sizes.experts
        ids = source.integers(-1, most, (tokens, sizes.top_k))
        inputs.append(
            Input(
                written(source.normal(size=(tokens, sizes.hidden)).astype(np.float32), sizes.dtype),
                ids,
                source.normal(size=(tokens, sizes.top_k)).astype(np.float32),
                source.integers(0, 256, (tokens, sizes.scale_bytes)).astype(np.uint8),
            )
        )
    return inputs


def read(elements: Any, dtype: str) -> Any:
    """As float32."""
    if dtype == "bfloat16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)


def written(values: Any, dtype: str) -> Any:
    """float32 rounded to the dtype, to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def rows_of(sizes: Sizes, rank: int, inputs: list[Input]) -> tuple[list[Any], list[int], list[int], int]:
    """(position, source, token, k) of each row of a rank, counts, starts, and how many rows there are with padding. In
    the layout `masked` positions are those of [experts * capacity, ...]."""
    rows, counts, starts, at = [], [], [], 0
    for expert in sizes.experts_of(rank):
        starts.append(at)
        for source, each in enumerate(inputs):
            for token, wanted in enumerate(each.ids):
                for k, one in enumerate(wanted):
                    if one == expert:
                        rows.append((at, source, token, k))
                        at += 1
        counts.append(at - starts[-1])
        at = (
            starts[-1] + sizes.room
            if sizes.layout == "masked"
            else -(-at // sizes.alignment) * sizes.alignment
        )
    return rows, counts, starts, at


def tokens_of(sizes: Sizes, rank: int, inputs: list[Input]) -> tuple[list[tuple[int, int]], Any, Any]:
    """In the layout `tokens`: source and token of each row of a rank; which of its experts they want, and weights."""
    rows, ids, weights = [], [], []
    held = sizes.experts_of(rank)
    for source, each in enumerate(inputs):
        for token, wanted in enumerate(each.ids):
            if any(one in held for one in wanted):
                rows.append((source, token))
                ids.append([one - held.start if one in held else -1 for one in wanted])
                weights.append([each.weights[token, k] if one in held else 0 for k, one in enumerate(wanted)])
    shape = (len(rows), sizes.top_k)
    return rows, np.array(ids, np.int64).reshape(shape), np.array(weights, np.float32).reshape(shape)


def needed(sizes: Sizes, rank: int, inputs: list[Input]) -> int:
    """Rows of the expert of a rank that gets most."""
    every = np.concatenate([each.ids.ravel() for each in inputs])
    return max((int((every == expert).sum()) for expert in sizes.experts_of(rank)), default=0)


def expert_output(sizes: Sizes, expert: int, x: Any) -> Any:
    """A function that differs by expert, of rows of the dtype."""
    return written(read(x, sizes.dtype) * np.float32(expert + 1) + np.float32(expert), sizes.dtype)


def weighted_onto(sums: Any, weight: Any, y: Any) -> Any:
    """`sums + weight * y` of float32, rounded once. A float64 holds the product, but not always the sum. Then that of
    its two neighbours is taken whose last bit is odd (S. Boldo, G. Melquiond, "When double rounding is odd", 2005)."""
    product, added = np.float64(weight) * y.astype(np.float64), sums.astype(np.float64)
    total = product + added
    back = total - product
    lost = (product - (total - back)) + (added - back)
    is_even = total.view(np.int64) % 2 == 0
    neighbour = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & is_even, neighbour, total).astype(np.float32)


def sums_of(sizes: Sizes, rank: int, inputs: list[Input], reduced: bool) -> Any:
    """The sum of each token of a rank, in float32 and in the order that the docs name."""
    each = inputs[rank]
    out = np.zeros((len(each.ids), sizes.hidden), np.float32)
    for token, wanted in enumerate(each.ids):
        parts: dict[int, Any] = {}
        for k, expert in enumerate(wanted):
            if expert < 0:
                continue
            y = read(expert_output(sizes, int(expert), each.x[token]), sizes.dtype)
            holder = int(expert) // sizes.experts_a_rank if reduced else 0
            before = parts.get(holder, np.zeros(sizes.hidden, np.float32))
            parts[holder] = weighted_onto(before, each.weights[token, k], y)
        for holder in sorted(parts):
            part = read(written(parts[holder], sizes.dtype), sizes.dtype) if reduced else parts[holder]
            out[token] = out[token] + part
    return written(out, sizes.dtype)
