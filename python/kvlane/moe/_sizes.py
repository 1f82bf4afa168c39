"""The arguments of an all-to-all that all ranks share."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SCALE_BYTES = {"fp8": 4, "fp8_pow2": 4, "fp8_ue8m0": 1}
_LAYOUTS = ("experts", "masked", "tokens")


@dataclass(frozen=True)
class Sizes:
    """`AllToAll` documents them."""

    experts: int
    top_k: int
    max_tokens: int
    hidden: int
    dtype: str
    row_bytes: int
    scale_bytes: int
    alignment: int
    layout: str
    capacity: int
    exact: bool
    timeout: float
    cast: str | None
    scales_column_major: bool


def sizes_of(
    ranks: int,
    on_gpu: bool,
    *,
    experts: int,
    top_k: int,
    max_tokens: int,
    hidden: int,
    dtype: str,
    row_bytes: int | None,
    scale_bytes: int,
    cast: str | None,
    scales_column_major: bool,
    alignment: int,
    layout: str,
    capacity: int | None,
    exact: bool,
    timeout: float,
) -> Sizes:
    """What `AllToAll` was given, with what follows from it. ValueError for what cannot be; the core knows the bounds of
    sizes."""
    experts, top_k = _number("experts", experts), _number("top_k", top_k)
    max_tokens, hidden = _number("max_tokens", max_tokens), _number("hidden", hidden)
    scale_bytes, alignment = _number("scale_bytes", scale_bytes), _number("alignment", alignment)
    row_bytes = None if row_bytes is None else _number("row_bytes", row_bytes)
    capacity = None if capacity is None else _number("capacity", capacity)
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype is bfloat16, float16 or float32, and not {dtype!r}")
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is experts, masked or tokens, and not {layout!r}")
    if cast is not None:
        if row_bytes is not None or scale_bytes or dtype != "bfloat16":
            raise ValueError("a cast takes bfloat16, and says row_bytes and scale_bytes itself")
        if cast not in _SCALE_BYTES:
            raise ValueError(f"cast is fp8, fp8_pow2 or fp8_ue8m0, and not {cast!r}")
        block = 128 * (4 // _SCALE_BYTES[cast])
        if hidden % block:
            raise ValueError(f"hidden is {hidden}, and has no whole blocks of {block} elements to scale")
        row_bytes, scale_bytes = hidden, hidden // 128 * _SCALE_BYTES[cast]
    if scales_column_major and (scale_bytes == 0 or scale_bytes % 4):
        raise ValueError(f"scales by column have 4 bytes each, and a row has {scale_bytes} bytes of them")
    if layout != "experts" and alignment != 1:
        raise ValueError(f"alignment is for the layout experts, and the layout is {layout}")
    if layout != "masked" and capacity is not None and not on_gpu:
        raise ValueError(f"capacity is for the layout masked on CPUs, and the layout is {layout}")
    if not timeout > 0:
        raise ValueError(f"timeout has to be above 0, and not {timeout}")
    if capacity is None and layout == "masked":
        capacity = ranks * max_tokens
    elif capacity is None and on_gpu:
        capacity = _rows_of_a_dispatch(ranks, experts, top_k, max_tokens, alignment, layout)
    return Sizes(
        experts,
        top_k,
        max_tokens,
        hidden,
        dtype,
        hidden * _ITEM_BYTES[dtype] if row_bytes is None else row_bytes,
        scale_bytes,
        alignment,
        layout,
        capacity or 0,
        bool(exact),
        timeout,
        cast,
        scales_column_major,
    )


def _rows_of_a_dispatch(
    ranks: int, experts: int, top_k: int, max_tokens: int, alignment: int, layout: str
) -> int:
    """Rows that may come to a rank, if no token names an expert twice."""
    if layout == "tokens":
        return ranks * max_tokens
    held = -(-experts // ranks)
    # Padding behind each expert.
    return ranks * max_tokens * min(top_k, held) + held * (alignment - 1)


def _number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, and has to be a whole number") from None
    if not 0 <= number < 1 << 31:
        raise ValueError(f"{name} is {number}, and has to be 0 to {(1 << 31) - 1}")
    return number
