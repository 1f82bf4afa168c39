"""Blocks found by strides must be the blocks found by slicing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import Tensor, strided

from kvlane.connector.groups import Unsupported
from kvlane.connector.layout import (
    GroupLayout,
    LayerHint,
    TensorView,
    block_dimension,
    group_layout,
    natural_order,
)
from kvlane.testing import read_block, write_block


def one_layer(
    array: np.ndarray[Any, Any], blocks: int, hint: LayerHint | None = None, name: str = "l.0"
) -> GroupLayout:
    return group_layout({name: Tensor(array)}, [name], blocks, {name: hint or LayerHint()}, [0, 1, 1])


# Shapes that vLLM has used, with the position of the blocks and an order of the dimensions in memory.
SHAPES = {
    "blocks, heads, tokens, keys and values": ((7, 3, 5, 8), 0, (0, 1, 2, 3)),
    "blocks, tokens before heads in memory": ((7, 3, 5, 8), 0, (0, 2, 1, 3)),
    "halves, blocks, tokens, heads, size": ((2, 7, 5, 3, 4), 1, (0, 1, 2, 3, 4)),
    "blocks, halves, tokens, heads, size": ((7, 2, 5, 3, 4), 0, (0, 1, 2, 3, 4)),
    "latent": ((7, 5, 24), 0, (0, 1, 2)),
    "heads outermost": ((7, 3, 5, 8), 0, (1, 0, 2, 3)),
}


@pytest.mark.parametrize(("shape", "block_dim", "order"), SHAPES.values(), ids=SHAPES.keys())
def test_each_block_is_the_slice_in_memory_order(
    shape: tuple[int, ...], block_dim: int, order: tuple[int, ...]
) -> None:
    array = strided(shape, order)
    layout = one_layer(array, 7)
    inner = [dim for dim in order if dim != block_dim]
    for block in range(7):
        slice_ = np.take(array, block, axis=block_dim)
        positions = [dim - (dim > block_dim) for dim in inner]
        assert read_block(layout.regions, block) == slice_.transpose(positions).tobytes()
    assert layout.block_bytes == array.nbytes // 7


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    blocks=st.sampled_from([5, 7, 11]),
    data=st.data(),
)
def test_any_order_and_padding_of_dimensions(sizes: list[int], blocks: int, data: st.DataObject) -> None:
    shape = list(sizes)
    block_dim = data.draw(st.integers(0, len(sizes)))
    shape.insert(block_dim, blocks)
    order = data.draw(st.permutations(range(len(shape))))
    padding = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    padded = [shape[dim] + extra for dim, extra in zip(order, padding, strict=True)]
    memory = np.zeros(padded, dtype="int16")
    array = memory[tuple(slice(0, shape[dim]) for dim in order)].transpose(np.argsort(order))
    array[...] = np.arange(array.size, dtype="int16").reshape(shape)
    layout = one_layer(array, blocks)

    inner = [dim - (dim > block_dim) for dim in order if dim != block_dim]
    for block in range(blocks):
        wanted = np.take(array, block, axis=block_dim).transpose(inner).tobytes()
        assert read_block(layout.regions, block) == wanted

    # A load writes what a save has read, and nothing else.
    before = array.copy()
    source, target = data.draw(st.permutations(range(blocks)))[:2]
    write_block(layout.regions, target, read_block(layout.regions, source))
    expected = before.copy()
    index: list[Any] = [slice(None)] * len(shape)
    index[block_dim] = target
    expected[tuple(index)] = np.take(before, source, axis=block_dim)
    assert np.array_equal(array, expected)
    if memory.size > array.size:
        outside = np.ones(padded, dtype=bool)
        outside[tuple(slice(0, shape[dim]) for dim in order)] = False
        assert not memory[outside].any()


@settings(max_examples=200, deadline=None)
@given(
    first=st.permutations(range(4)),
    second=st.permutations(range(4)),
    heads=st.integers(2, 3),
    tokens=st.integers(2, 3),
)
def test_equal_digests_mean_equal_bytes(first: list[int], second: list[int], heads: int, tokens: int) -> None:
    one, other = (strided((7, heads, tokens, 4), tuple(order)) for order in (first, second))
    content = np.arange(one.size, dtype="float32").reshape(one.shape)
    one[...] = content
    other[...] = content
    layouts = [one_layer(one, 7), one_layer(other, 7)]
    same = all(read_block(layouts[0].regions, b) == read_block(layouts[1].regions, b) for b in range(7))
    assert (layouts[0].digest == layouts[1].digest) == same


def test_ranks_that_hold_the_same_blocks_share_one_layout_and_nobody_else_has_it() -> None:
    array = strided((7, 16, 48), (0, 1, 2))  # 3 KiB a block

    def layout(rank: int, tensor: int, pipeline: int = 1, holders: int = 1) -> GroupLayout:
        return group_layout({"l.0": Tensor(array)}, ["l.0"], 7, {}, [rank, tensor, pipeline], holders)

    shared = [layout(rank, 4, holders=4) for rank in range(4)]
    assert {each.replicas for each in shared} == {4}
    assert len({each.digest for each in shared}) == 1
    others = [layout(0, 4), layout(0, 1), layout(0, 2, holders=2), layout(0, 4, 2, holders=4)]
    assert len({each.digest for each in [shared[0], *others]}) == 5
    # A pipeline's stages have blocks of their own.
    stages = [layout(rank, 2, 2, holders=2).digest for rank in range(4)]
    assert stages[0] == stages[1] != stages[2] == stages[3]
    # All of it is stored where the slices would be tiny, as the same number of ranks did before.
    tiny = [layout(rank, 8, holders=8) for rank in range(2)]
    assert [each.replicas for each in tiny] == [1, 1]
    assert tiny[0].digest == layout(0, 8).digest != tiny[1].digest


def test_where_the_halves_stand_does_not_matter_if_the_bytes_agree() -> None:
    outside = strided((2, 7, 5, 3, 4), (0, 1, 2, 3, 4))
    inside = strided((7, 2, 5, 3, 4), (0, 1, 2, 3, 4))
    assert one_layer(outside, 7).digest == one_layer(inside, 7).digest


def test_layers_interleaved_in_one_tensor_are_the_same_layout_as_separate_ones() -> None:
    packed = np.arange(7 * 3 * 20, dtype="float32").reshape(7, 3, 5, 4)
    together = {f"l.{layer}": Tensor(packed[:, layer]) for layer in range(3)}
    apart = {f"l.{layer}": Tensor(packed[:, layer].copy()) for layer in range(3)}
    layouts = [group_layout(layers, layers, 7, {}, [0, 1, 1]) for layers in (together, apart)]
    assert layouts[0].digest == layouts[1].digest
    for block in range(7):
        assert read_block(layouts[0].regions, block) == packed[block].tobytes()
        assert read_block(layouts[1].regions, block) == packed[block].tobytes()


def test_kernel_blocks_are_put_together() -> None:
    array = strided((28, 3, 2, 4), (0, 1, 2, 3))
    layout = one_layer(array, 7)
    for block in range(7):
        assert read_block(layout.regions, block) == array[block * 4 : block * 4 + 4].tobytes()
    assert layout.digest != one_layer(strided((7, 3, 8, 4), (0, 1, 2, 3)), 7).digest


def test_packed_states_are_stored_one_after_the_other() -> None:
    raw = np.arange(7 * 16, dtype="float32").reshape(7, 16)
    states = [Tensor(raw[:, :4]), Tensor(raw[:, 4:12].reshape(7, 2, 4))]
    layout = group_layout({"m": states}, ["m"], 7, {}, [0, 1, 1])
    for block in range(7):
        assert read_block(layout.regions, block) == raw[block, :12].tobytes()


def test_layers_that_share_a_tensor_are_stored_once() -> None:
    array = strided((7, 3, 5, 8), (0, 1, 2, 3))
    layers = {"l.0": Tensor(array), "l.1": Tensor(array)}
    assert group_layout(layers, layers, 7, {}, [0, 1, 1]).block_bytes == array.nbytes // 7


def test_layers_are_paired_by_name_not_by_position() -> None:
    arrays = {f"l.{n}": strided((7, 2, 3), (0, 1, 2)) + 100 * n for n in (0, 2, 10)}
    for names in itertools.permutations(arrays):
        layers = {name: Tensor(arrays[name]) for name in names}
        layout = group_layout(layers, names, 7, {}, [0, 1, 1])
        wanted = b"".join(arrays[name][3].tobytes() for name in ("l.0", "l.2", "l.10"))
        assert read_block(layout.regions, 3) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"name": "l.1"},
        {"cut": [1, 2, 1]},
        {"dtype": "int32"},
        {"backend": "OTHER"},
    ],
)
def test_the_digest_sees(change: dict[str, Any]) -> None:
    def digest(
        name: str = "l.0", cut: tuple[int, ...] = (0, 1, 1), dtype: str = "float32", backend: str = "A"
    ) -> bytes:
        array = strided((7, 3, 5, 8), (0, 1, 2, 3), dtype)
        hints = {name: LayerHint(backend=backend)}
        return group_layout({name: Tensor(array)}, [name], 7, hints, cut).digest

    assert digest() == digest()
    assert digest(**change) != digest()


@pytest.mark.parametrize(
    ("shape", "order", "page", "expected"),
    [
        # As many tokens in a block as there are blocks.
        ((32, 4, 32, 64), (0, 1, 2, 3), 4 * 32 * 64 * 4, (0, 1)),
        ((32, 4, 32, 64), (1, 0, 2, 3), 0, (0, 1)),
        # The size of a head is a multiple of the number of blocks.
        ((2, 32, 32, 4, 64), (0, 1, 2, 3, 4), 2 * 32 * 4 * 64 * 4, (1, 1)),
        # Two kernel blocks a block, and as many tokens as blocks.
        ((64, 4, 32, 8), (0, 1, 2, 3), 2 * 4 * 32 * 8 * 4, (0, 2)),
    ],
)
def test_the_block_dimension_among_several_of_its_size(
    shape: tuple[int, ...], order: tuple[int, ...], page: int, expected: tuple[int, int]
) -> None:
    view = TensorView.of(Tensor(strided(shape, order)))
    strides = tuple(stride for stride in (page, page // 2) if stride)
    assert block_dimension(view, 32, strides, "l") == expected


def test_what_cannot_be_described_is_refused_with_its_shape() -> None:
    with pytest.raises(Unsupported, match=r"\(7, 3\).*5 blocks"):
        one_layer(np.zeros((7, 3)), 5)
    overlapping = np.lib.stride_tricks.as_strided(
        np.zeros(64, dtype="float32"), shape=(7, 3, 4), strides=(48, 4, 4)
    )
    with pytest.raises(Unsupported, match="overlap"):
        one_layer(overlapping, 7)
    with pytest.raises(Unsupported, match="'gone'"):
        group_layout({}, ["gone"], 7, {}, [0])


def test_names_sort_as_people_count() -> None:
    names = [f"model.layers.{n}.attn" for n in range(12)]
    shuffled = random.Random(3).sample(names, len(names))
    assert sorted(shuffled, key=natural_order) == names
