"""Finds a KV cache group's blocks in this process's memory from the tensors' strides.

A block of a group is stored as the concatenation of its layers in name order, each layer's pieces in address order.
The description of these bytes (shard_layout.py) and its digest have no addresses. So engines of equal digest can read
each other's blocks, however far apart their layers and blocks lie.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlane.connector.axes import KERNEL_BLOCKS, NO_FACTS, LayerFacts, Sized, dimensions
from kvlane.connector.groups import Unsupported
from kvlane.connector.packing import backend_name
from kvlane.connector.shard_layout import LayerLayout, ShardLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# (base address, block stride, number of blocks, bytes of a piece, byte offsets of the pieces inside a block)
Region = tuple[int, int, int, int, list[int]]

# Ranks that hold the same blocks share their saves if each slice has at least so many bytes; the core requires it.
SLICE_BYTES_MIN = 512


@dataclass(frozen=True)
class TensorView:
    """A tensor's address and shape; strides and element size in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorView:
        """The view of a torch tensor."""
        size = tensor.element_size()
        return TensorView(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(stride * size for stride in tensor.stride()),
            element_bytes=size,
            dtype=str(tensor.dtype),
        )


@dataclass(frozen=True)
class LayerHint:
    """A layer's facts in the engine's configuration, for tensors whose shape alone is ambiguous."""

    block_strides: tuple[int, ...] = ()
    """Bytes from one block to the next, the most certain first."""
    backend: str = ""
    """Name of the attention backend and of its packing, because two of them may order a shape's bytes differently."""


@dataclass(frozen=True)
class GroupLayout:
    """One group's part of this worker."""

    regions: list[Region]
    shard: ShardLayout
    """The meaning of the bytes."""
    block_bytes: int
    """Bytes of a block in this worker."""
    last_region: dict[str, int]
    """The index of the last region that each layer reads."""
    runs: int
    """Contiguous runs of a block in this worker's memory: 1 where all its layers lie one after the other."""
    replicas: int
    """Consecutive ranks that hold the same blocks and share them: each saves a slice of a block, and loads all."""

    @property
    def digest(self) -> bytes:
        """The digest of the meaning of the bytes."""
        return self.shard.digest()


def group_layout(
    layers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    names: Iterable[str],
    num_blocks: int,
    hints: Mapping[str, LayerHint],
    cut: Sequence[int],
    holders: int = 1,
    facts: Mapping[str, LayerFacts] | None = None,
) -> GroupLayout:
    """The layout of the layers `names`. `layers` maps names to tensors, or to lists of tensors (packed states).

    `cut` is the part of the model in this worker: its rank, and the engine's tensor- and pipeline-parallel sizes.
    `holders` consecutive ranks hold the same bytes. `facts` is from vLLM's specification of the layers. Raises
    Unsupported.
    """
    names = sorted(names, key=natural_order)
    together = Counter(id(layers.get(name)) for name in names)
    regions: list[Region] = []
    described: list[LayerLayout] = []
    stored: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    last_region: dict[str, int] = {}
    for name in names:
        if name not in layers:
            raise Unsupported(f"vLLM registered no KV cache for the layer {name!r}")
        tensors = layers[name]
        parts = tensors if isinstance(tensors, list | tuple) else [tensors]
        hint, known = hints.get(name, LayerHint()), (facts or {}).get(name, NO_FACTS)
        for part, tensor in enumerate(parts):
            view = TensorView.of(tensor)
            place = (view.address, view.shape, view.strides)
            if place in stored:
                # This layer reads another layer's cache.
                last_region[name] = max(last_region.get(name, 0), stored[place])
                continue
            found, shape = tensor_regions(view, num_blocks, hint.block_strides, f"{name}[{part}]")
            regions += found
            stored[place] = last_region[name] = len(regions) - 1
            described.append(
                LayerLayout(
                    name,
                    part,
                    view.dtype,
                    view.element_bytes,
                    hint.backend,
                    dimensions(shape, len(view.shape), known, together[id(tensors)]),
                    known.heads,
                    known.tokens,
                )
            )
    block_bytes = sum(piece * len(offsets) for _, _, _, piece, offsets in regions)
    replicas = holders if block_bytes >= holders * SLICE_BYTES_MIN else 1
    rank, tensor_parallel, pipeline_parallel = cut
    return GroupLayout(
        regions=regions,
        shard=ShardLayout(rank // replicas, replicas, tensor_parallel, pipeline_parallel, tuple(described)),
        block_bytes=block_bytes,
        last_region=last_region,
        runs=len(run_lengths(regions)),
        replicas=replicas,
    )


def reading_order(layouts: Sequence[GroupLayout]) -> list[list[int]]:
    """For each region of each group the place, among all layers, of the first one that reads it or a later region of
    its group. Layers are read in the order of the numbers in their names."""
    order = sorted((name for layout in layouts for name in layout.last_region), key=natural_order)
    places = {name: place for place, name in enumerate(order)}
    found = []
    for layout in layouts:
        first = [len(order)] * len(layout.regions)
        for name, region in layout.last_region.items():
            first[region] = min(first[region], places[name])
        # A layer that reads a region has read those before it.
        for region in range(len(first) - 1, 0, -1):
            first[region - 1] = min(first[region - 1], first[region])
        found.append(first)
    return found


def run_lengths(regions: Iterable[Region], blocks: Iterable[int] = (0,)) -> list[int]:
    """The lengths of the contiguous runs in which blocks are copied, if their extents follow each other in the pool.
    Adjacent pieces make one run. The core's `plan` cuts runs the same way; both have the same test cases."""
    regions = list(regions)
    runs: list[int] = []
    end = None
    for block in blocks:
        for address, block_stride, _, piece, offsets in regions:
            for offset in offsets:
                start = address + block * block_stride + offset
                if start == end:
                    runs[-1] += piece
                else:
                    runs.append(piece)
                end = start + piece
    return runs


def tensor_regions(
    view: TensorView, num_blocks: int, block_strides: Sequence[int], name: str
) -> tuple[list[Region], list[Sized]]:
    """The pieces of a tensor's blocks, and their dimensions in memory order as (index, size).

    The index counts the tensor's dimensions without that of the blocks; dimensions of size 1 are left out.
    """
    dim, ratio = block_dimension(view, num_blocks, block_strides, name)
    block_stride = view.strides[dim] * ratio
    inner: list[tuple[int, int, int]] = []  # (stride, size, index)
    if ratio > 1:
        # The attention kernel sees each block as several smaller ones.
        inner.append((view.strides[dim], ratio, KERNEL_BLOCKS))
    index = 0
    for each, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if each == dim:
            continue
        if size > 1:
            inner.append((stride, size, index))
        index += 1
    inner.sort(key=lambda entry: (-entry[0], entry[2]))

    piece = view.element_bytes
    outer = list(inner)
    while outer and outer[-1][0] == piece:
        piece *= outer.pop()[1]
    offsets = [0]
    for stride, size, _ in outer:
        if stride < piece:
            raise Unsupported(
                f"the elements of the KV cache {name} overlap: {view.shape} by {view.strides} bytes"
            )
        offsets = [offset + step * stride for offset in offsets for step in range(size)]
    offsets.sort()
    if any(after - before < piece for before, after in itertools.pairwise(offsets)):
        raise Unsupported(
            f"the elements of the KV cache {name} overlap: {view.shape} by {view.strides} bytes"
        )
    region = (view.address, block_stride, num_blocks, piece, offsets)
    return [region], [(index, size) for _, size, index in inner]


def block_dimension(
    view: TensorView, num_blocks: int, block_strides: Sequence[int], name: str
) -> tuple[int, int]:
    """(dimension that counts blocks, how many of its entries make a block). Raises Unsupported.

    A dimension may have the right size by chance. The one that steps as far as the configuration says wins, then
    the one of exactly the right size, then the farthest step, then the first.
    """
    best: tuple[tuple[int, bool, int, int], int, int] | None = None
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if size == 0 or size % num_blocks != 0:
            continue
        ratio = size // num_blocks
        step = stride * ratio
        expected = block_strides.index(step) if step in block_strides else len(block_strides)
        rank = (expected, ratio != 1, -step, dim)
        if best is None or rank < best[0]:
            best = (rank, dim, ratio)
    if best is None:
        raise Unsupported(
            f"the KV cache {name} of shape {view.shape} has no dimension for {num_blocks} blocks"
        )
    return best[1], best[2]


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.10 after layers.9."""
    return [
        (1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name) if part
    ]


def layer_hints(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, LayerHint]:
    """The facts about each layer of this worker from vLLM's configuration. Raises Unsupported."""
    modules = getattr(vllm_config.compilation_config, "static_forward_context", {})
    packed: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        stride = getattr(tensor, "block_stride", 0)
        for name in getattr(tensor, "layers", None) or getattr(tensor, "shared_by", ()):
            packed[name] = stride
    hints = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", {})
        for name in group.layer_names:
            page = inner.get(name, spec).page_size_bytes
            # The candidates: the pages of all layers, which one tensor holds before 0.29; a page; or half of one, if
            # keys and values are two halves of the tensor. Separate caches never step as far as all pages, so the order
            # is safe.
            all_pages = page * len(kv_cache_config.kv_cache_tensors)
            strides = [packed.get(name, 0), all_pages, page, page // 2]
            hints[name] = LayerHint(
                block_strides=tuple(dict.fromkeys(stride for stride in strides if stride)),
                backend=backend_name(
                    getattr(modules.get(name), "attn_backend", None), vllm_config, inner.get(name, spec)
                ),
            )
    return hints
