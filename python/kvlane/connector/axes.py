"""The units that the dimensions of a layer's KV cache count, if vLLM's specification says it for certain.

Uncertain ones stay unnamed ("untold"), because a wrong name could claim that two engines' bytes differ, or agree.
Before vLLM 0.29 two dimensions of one size stay unnamed. So do heads if several ranks have one each, because that may
be a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlane.connector.groups import STATE, CacheGroup
from kvlane.connector.shard_layout import Axis, Dimension, Heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# A dimension of a block in memory order: its index in the tensor without that of the blocks, and its size.
Sized = tuple[int, int]
KERNEL_BLOCKS = -1
"""The index for blocks of the attention kernel, several of which make one block: no dimension of the tensor."""
CONTENT_SIZES_MAX = 3
"""Bound on a token's content in a head, in sizes of the head: keys, values and their scales."""


@dataclass(frozen=True)
class LayerFacts:
    """The facts of a layer's cache in vLLM's specification."""

    tokens: int | None = None
    """Tokens of a block."""
    heads: Heads | None = None
    """None where there is no attention."""
    is_state: bool = False
    """Whether it is a state-space layer's."""
    is_named: bool = False
    """Whether vLLM promises the order of the tensor's dimensions: blocks, heads, tokens, content."""


NO_FACTS = LayerFacts()


def layer_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: Iterable[CacheGroup], is_named: bool
) -> dict[str, LayerFacts]:
    """The facts of each layer of these groups in this rank. `is_named` is as in LayerFacts."""
    facts = {}
    for group in groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", {})
        for name in group.layer_names:
            facts[name] = _facts(vllm_config, group, inner.get(name, spec), is_named)
    return facts


def _facts(vllm_config: VllmConfig, group: CacheGroup, spec: KVCacheSpec, is_named: bool) -> LayerFacts:
    tokens = getattr(spec, "block_size", None)
    count, size = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
    if count and size:
        heads = Heads(count, size, _head_place(vllm_config, group, count))
        return LayerFacts(tokens, heads, is_named=is_named)
    return LayerFacts(tokens, is_state=group.kind == STATE)


def _head_place(vllm_config: VllmConfig, group: CacheGroup, count: int) -> tuple[int, int] | None:
    """The first of a layer's KV heads in this rank and how many the layer has in all; None if that is not certain."""
    parallel = vllm_config.parallel_config
    tensor = parallel.tensor_parallel_size
    if tensor == 1:
        return 0, count
    among = parallel.rank % tensor
    if group.tensor_shards and tensor % group.tensor_shards == 0:
        return among // (tensor // group.tensor_shards) * count, group.tensor_shards * count
    # One head may be a copy, of a layer with fewer heads than ranks. A drafter may be split in another way.
    usual = vllm_config.model_config.get_num_kv_heads(parallel)
    if count == 1 or count != usual or vllm_config.speculative_config is not None:
        return None
    return among * count, tensor * count


def dimensions(
    shape: Sequence[Sized], tensor_dimensions: int, facts: LayerFacts, layers_together: int = 1
) -> tuple[Dimension, ...]:
    """Names the unit that each entry of `shape` counts. `tensor_dimensions` includes that of the blocks;
    `layers_together` layers share the tensor."""
    axes = _axes(shape, tensor_dimensions - 1, facts, layers_together)
    return tuple(
        Dimension(axis, None if index == KERNEL_BLOCKS else index, size)
        for (index, size), axis in zip(shape, axes, strict=True)
    )


def _axes(shape: Sequence[Sized], inner: int, facts: LayerFacts, layers_together: int) -> list[Axis]:
    known: dict[int, Axis] = {KERNEL_BLOCKS: "kernel block"}
    if facts.is_state:
        known |= {index: "state" for index, _ in shape if index != KERNEL_BLOCKS}
    elif facts.heads is not None and facts.is_named and inner == 3:
        known |= {0: "head", 1: "token", 2: "content"}
    elif facts.heads is not None:
        # The content of a token comes last, if the backend has not folded all dimensions into one.
        if dict(shape).get(inner - 1, 0) <= CONTENT_SIZES_MAX * facts.heads.size:
            known[inner - 1] = "content"
        known |= _by_size(shape, known, facts.heads, facts.tokens or 0, layers_together)
    return [known.get(index, "untold") for index, _ in shape]


def _by_size(
    shape: Sequence[Sized], known: dict[int, Axis], heads: Heads, tokens: int, layers_together: int
) -> dict[int, Axis]:
    """Names a dimension if only one axis has its size, and only this dimension has the axis's size."""
    kernel_blocks = dict(shape).get(KERNEL_BLOCKS, 1)
    sizes: dict[Axis, int] = {"half": 2, "head": heads.count, "token": tokens // kernel_blocks}
    if layers_together > 1:
        sizes["layer"] = layers_together
    axes_of_size = Counter(sizes.values())
    left = [(index, size) for index, size in shape if index not in known]
    dimensions_of_size = Counter(size for _, size in left)
    found: dict[int, Axis] = {}
    for index, size in left:
        if axes_of_size[size] == 1 and dimensions_of_size[size] == 1:
            found[index] = next(axis for axis, wanted in sizes.items() if wanted == size)
    return found
