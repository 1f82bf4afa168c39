"""Casts to fp8 with scales, and scales by column, beside what docs/moe.md says."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

from kvlane import moe

HIDDEN, TOKENS = 1024, 40


def value_of(byte: int) -> float:
    """float8_e4m3fn: a sign, 4 bits of exponent, 3 of mantissa, no infinity."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def nearest_fp8(values: Any) -> Any:
    """The byte of each number, the even one of two that are as near."""
    sizes = np.array([value_of(byte) for byte in range(127)])
    below = np.clip(np.searchsorted(sizes, np.abs(values), side="right") - 1, 0, 125)
    low, high = np.abs(values) - sizes[below], sizes[below + 1] - np.abs(values)
    up: Any = (high < low) | ((high == low) & (below % 2 == 1))
    return (below + up + 128 * np.signbit(values)).astype(np.uint8)


def cast(x: Any, kind: str) -> tuple[Any, Any]:
    blocks = oracle.read(x, "bfloat16").reshape(len(x), -1, 128)
    greatest = np.maximum(np.abs(blocks).max(2), np.float32(1e-4))
    scales, factors = greatest * np.float32(1 / 448), np.float32(448) / greatest
    if kind != "fp8":
        exponents = np.ceil(np.log2(scales.astype(np.float64)))
        scales, factors = np.float32(2) ** exponents, np.float32(2) ** -exponents
    rows = nearest_fp8((blocks * factors[..., None]).astype(np.float32)).reshape(x.shape)
    if kind == "fp8_ue8m0":
        return rows, np.asarray(exponents + 127, np.uint8).view(np.int32)
    return rows, scales.astype(np.float32)


def drawn(tokens: int) -> Any:
    source = np.random.default_rng(tokens)
    values = source.normal(size=(tokens, HIDDEN)) * np.logspace(-9, 9, tokens)[:, None]
    values[0] = 0
    return oracle.written(values.astype(np.float32), "bfloat16")


def alone(layout: str, **more: Any) -> moe.AllToAll:
    group = moe.Group(0, 1, lambda told: [told])
    sizes: dict[str, Any] = {"experts": 3, "top_k": 2, "max_tokens": TOKENS, "hidden": HIDDEN}
    return moe.AllToAll(group, layout=layout, **(sizes | more))


@pytest.mark.parametrize("layout", ["experts", "masked", "tokens"])
@pytest.mark.parametrize("kind", ["fp8", "fp8_pow2", "fp8_ue8m0"])
def test_rows_and_scales_are_those_of_the_docs(kind: str, layout: str) -> None:
    x = drawn(TOKENS)
    ids = np.random.default_rng(5).permuted(np.tile([0, 1, 2], (TOKENS, 1)), axis=1)[:, :2]
    rows, scales = cast(x, kind)
    with alone(layout, cast=kind) as plain, alone(layout, cast=kind, scales_column_major=True) as turned:
        by_row, by_column = plain.dispatch(x, ids), turned.dispatch(x, ids)
        assert by_column.scales.swapaxes(-1, -2).flags.c_contiguous
        for got in (by_row, by_column):
            assert (got.scales.dtype, got.rows.dtype) == (scales.dtype, np.uint8)
            for expert in range(3):
                tokens = np.flatnonzero((ids == expert).any(1))
                if layout == "tokens":
                    here = (got.rows, got.scales) if expert == 0 else (got.rows[tokens], got.scales[tokens])
                    tokens = np.arange(TOKENS) if expert == 0 else tokens
                elif layout == "masked":
                    here = got.rows[expert, : len(tokens)], got.scales[expert, : len(tokens)]
                else:
                    at = slice(got.starts[expert], got.starts[expert] + len(tokens))
                    here = got.rows[at], got.scales[at]
                assert np.array_equal(here[0], rows[tokens])
                assert np.array_equal(here[1], scales[tokens])


def test_scales_of_the_caller_come_by_column_too() -> None:
    scales = np.arange(TOKENS * 3, dtype=np.float32).reshape(TOKENS, 3)
    x, ids = np.zeros((TOKENS, 64), np.uint8), np.zeros((TOKENS, 2), np.int64)
    ids[:, 1] = -1
    with alone("masked", row_bytes=64, scale_bytes=12, scales_column_major=True) as one:
        got = one.dispatch(x, ids, scales=scales)
        assert np.array_equal(got.scales[0, :TOKENS], scales)
        with pytest.raises(ValueError, match="by column have 4 bytes each"):
            one.dispatch(x, ids, scales=scales.view(np.uint8))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"cast": "int8"}, "cast is fp8, fp8_pow2 or fp8_ue8m0, and not 'int8'"),
        ({"cast": "fp8", "hidden": 960}, "hidden is 960, and has no whole blocks of 128"),
        ({"cast": "fp8_ue8m0", "hidden": 640}, "hidden is 640, and has no whole blocks of 512"),
        ({"cast": "fp8", "scale_bytes": 4}, "says row_bytes and scale_bytes itself"),
        ({"cast": "fp8", "dtype": "float32"}, "a cast takes bfloat16"),
        ({"scales_column_major": True}, "a row has 0 bytes of them"),
        ({"scale_bytes": 6, "scales_column_major": True}, "a row has 6 bytes of them"),
    ],
)
def test_sizes_that_cannot_be_cast_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        alone("experts", **more)


@pytest.mark.parametrize("given", ["float32", "scales", "narrow"])
def test_rows_that_cannot_be_cast_are_refused_and_the_next_call_works(given: str) -> None:
    x, ids = drawn(2), np.zeros((2, 2), np.int64)
    wrong = {
        "float32": (x.astype(np.float32), None),
        "scales": (x, np.ones((2, 8), np.float32)),
        "narrow": (x[:, :128].copy(), None),
    }
    with alone("experts", cast="fp8") as one:
        with pytest.raises(ValueError, match=r"has to be \[2, 1024\] of bfloat16 to be cast, without scales"):
            one.dispatch(wrong[given][0], ids, scales=wrong[given][1])
        assert one.dispatch(x, ids).counts.tolist() == [4, 0, 0]
