"""Caches in which a block's layers lie together: one run a block, the same bytes as from layers apart."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import Tensor, strided

from kvlane.connector.cross_layers import layer_caches
from kvlane.connector.layout import GroupLayout, group_layout, layer_hints, run_lengths
from kvlane.testing import read_block, write_block

# vLLM's names for the order of layers (0), blocks (1), heads (2), tokens (3) and content (4) in memory.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
# Before 0.29 the dimensions of the backend's shape: layers, blocks, tokens, heads, content (or a half of it before).
CROSS_LAYERS = {
    "tokens before heads": ("LBNHC", (1, 0, 2, 3, 4)),
    "halves": ("LB2NHD", (1, 0, 2, 3, 4, 5)),
    "heads before layers": ("LBNHC", (1, 3, 0, 2, 4)),
    "heads before layers, halves": ("LB2NHD", (1, 4, 0, 2, 3, 5)),
    "latent": ("LBNC", (1, 0, 2, 3)),
}
CASES = json.loads((Path(__file__).parents[2] / "crates/block/tests/cases/runs.json").read_text())
SIZES = st.fixed_dictionaries(
    {name: st.integers(1, 4) for name in "LHN"} | {"C": st.integers(1, 5), "B": st.sampled_from([5, 7, 11])}
)


def names(count: int) -> list[str]:
    return [f"model.layers.{number}.attn" for number in range(count)]


def layout_of(caches: dict[str, Any], blocks: int, config: Any = None) -> GroupLayout:
    hints = (
        layer_hints(SimpleNamespace(compilation_config=None, parallel_config=None), config) if config else {}
    )
    return group_layout(caches, caches, blocks, hints, [0, 1, 1])


def by_layer(memory: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What vLLM registers from 0.29 on: a view a layer."""
    return {name: Tensor(memory[number]) for number, name in enumerate(names(len(memory)))}


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_every_layout_of_vllm_saves_and_loads_the_same_block(
    sizes: dict[str, int], name: str, data: st.DataObject
) -> None:
    shape = tuple(sizes[dim] for dim in "LBHNC")
    blocks = sizes["B"]
    memory = strided(shape, LAYOUTS[name], "int16")
    memory[...] = np.arange(memory.size, dtype="int16").reshape(shape)
    layout = layout_of(by_layer(memory), blocks)
    inside = [dim - 2 for dim in LAYOUTS[name] if dim > 1]
    for block in range(blocks):
        wanted = b"".join(memory[layer, block].transpose(inside).tobytes() for layer in range(sizes["L"]))
        assert read_block(layout.regions, block) == wanted

    before = memory.copy()
    source, target = data.draw(st.permutations(range(blocks)))[:2]
    write_block(layout.regions, target, read_block(layout.regions, source))
    before[:, target] = before[:, source]
    assert np.array_equal(memory, before)

    if name.startswith("BL"):
        assert layout.runs == 1
    elif name.startswith("LB"):
        assert layout.runs == (sizes["L"] if blocks > 1 else 1)


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES)
def test_where_the_layers_lie_does_not_change_the_digest(sizes: dict[str, int]) -> None:
    shape = tuple(sizes[dim] for dim in "LBHNC")
    digests = {
        name: layout_of(by_layer(strided(shape, order)), sizes["B"]).digest for name, order in LAYOUTS.items()
    }
    assert digests["BLHNC"] == digests["LBHNC"], "engines of both share their blocks"
    assert digests["BLNHC"] == digests["LBNHC"]


@settings(max_examples=50, deadline=None)
@given(chosen=st.lists(st.integers(0, 10), min_size=1, unique=True))
def test_neighbouring_blocks_are_one_run(chosen: list[int]) -> None:
    together = layout_of(by_layer(strided((3, 11, 2, 4, 8), LAYOUTS["BLHNC"])), 11)
    apart = layout_of(by_layer(strided((3, 11, 2, 4, 8), LAYOUTS["LBHNC"])), 11)
    rows = 1 + sum(after != before + 1 for before, after in itertools.pairwise(chosen))
    assert len(run_lengths(together.regions, chosen)) == rows
    assert sum(run_lengths(together.regions, chosen)) == len(chosen) * together.block_bytes
    assert len(run_lengths(apart.regions, chosen)) == 3 * len(chosen)


@pytest.mark.parametrize("name", ["BLHNC", "BLNHC"])
def test_the_parts_of_an_early_load_are_long_runs_too(name: str) -> None:
    """The shape of Llama-3.1-8B: 64 KiB a layer, and a flag after each 256 KiB of every block."""
    memory = strided((32, 3, 8, 16, 256), LAYOUTS[name], "int16")
    layout = layout_of(by_layer(memory), 3)
    assert (layout.block_bytes, layout.runs) == (2 << 20, 1)
    assert [layout.last_region[layer] for layer in names(32)] == list(range(32))
    for first in range(0, 32, 4):
        assert run_lengths(layout.regions[first : first + 4], [0, 1]) == [256 << 10] * 2


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_runs_are_those_that_the_core_copies(case: dict[str, Any]) -> None:
    """crates/block/tests/all/runs_match_a_byte_model.rs plans the same cases."""
    assert run_lengths(case["regions"], case["blocks"]) == case["lengths"]


def cross_layer_config(page: int, layers: int) -> Any:
    """As far as it is read: one group of equal layers, a tensor of its own for each in the configuration."""
    group = SimpleNamespace(layer_names=names(layers), kv_cache_spec=SimpleNamespace(page_size_bytes=page))
    tensors = [SimpleNamespace(shared_by=[name]) for name in names(layers)]
    return SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=tensors)


@pytest.mark.parametrize(("dims", "order"), CROSS_LAYERS.values(), ids=CROSS_LAYERS.keys())
@pytest.mark.parametrize("tokens", [7, 4, 14], ids=["as many tokens as blocks", "fewer", "twice"])
def test_one_tensor_of_all_layers_is_one_run_a_block(dims: str, order: tuple[int, ...], tokens: int) -> None:
    sizes = {"L": 3, "B": 7, "2": 2, "N": tokens, "H": 2, "D": 4, "C": 8}
    shape = tuple(sizes[dim] for dim in dims)
    memory = np.arange(np.prod(shape), dtype="int16").reshape([shape[dim] for dim in order])
    layered = memory.transpose(np.argsort(order))  # what the backend computes with
    config = cross_layer_config(layered[0, 0].nbytes, 3)
    caches = layer_caches(Tensor(memory), order, [[name] for name in names(3)], 7)
    layout = layout_of(caches, 7, config)

    assert (layout.runs, layout.block_bytes) == (1, memory[0].nbytes)
    for block in range(7):
        assert read_block(layout.regions, block) == memory[block].tobytes()
    wanted = layered.copy()
    wanted[:, 2] = wanted[:, 5]
    write_block(layout.regions, 2, read_block(layout.regions, 5))
    assert np.array_equal(layered, wanted)

    # A layer is there when the region is that it reads; of layers that lie between each other's heads, all at once.
    interleaved = order[1] != 0
    assert [layout.last_region[name] for name in names(3)] == ([0, 0, 0] if interleaved else [0, 1, 2])


def test_kernel_blocks_of_all_layers_are_put_together() -> None:
    memory = np.arange(14 * 3 * 4 * 2 * 8, dtype="int16").reshape(14, 3, 4, 2, 8)
    config = cross_layer_config(2 * memory[0, 0].nbytes, 3)
    caches = layer_caches(Tensor(memory), (1, 0, 2, 3, 4), [[name] for name in names(3)], 7)
    layout = layout_of(caches, 7, config)
    assert (layout.runs, layout.block_bytes) == (1, 2 * memory[0].nbytes)
    assert read_block(layout.regions, 4) == memory[8:10].tobytes()
    assert set(layout.last_region.values()) == {0}


def test_layers_that_share_an_entry_share_its_cache() -> None:
    memory = strided((7, 2, 4, 2, 8), (0, 1, 2, 3, 4), "int16")
    layers = [["model.layers.0.attn", "model.layers.2.attn"], ["model.layers.1.attn"]]
    layout = layout_of(layer_caches(Tensor(memory), (1, 0, 2, 3, 4), layers, 7), 7)
    assert layout.block_bytes == memory[0].nbytes
    assert layout.last_region == {
        "model.layers.0.attn": 0,
        "model.layers.1.attn": 1,
        "model.layers.2.attn": 0,
    }
