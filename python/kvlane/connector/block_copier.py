"""Copies blocks inside one rank's KV caches, in the stream that the engine computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlane.connector.groups import cache_groups, keeps_tokens_apart
from kvlane.connector.kinds.kind import CopyBlock
from kvlane.connector.layout import Region, group_layout, layer_hints

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def block_copier(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> CopyBlock | None:
    """A function that copies one block of the caches to another one. None for a model whose blocks do not hold all that
    is kept of their tokens. Raises Unsupported."""
    groups = cache_groups(vllm_config, kv_cache_config)
    if not keeps_tokens_apart(kv_cache_config, groups):
        return None
    parallel = vllm_config.parallel_config
    layout = group_layout(
        kv_caches,
        groups[0].layer_names,
        kv_cache_config.num_blocks,
        layer_hints(vllm_config, kv_cache_config),
        [parallel.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    )
    return copier_of(layout.regions, storages_of(kv_caches))


def copier_of(regions: list[Region], storages: Mapping[int, torch.UntypedStorage]) -> CopyBlock:
    """The same of these regions. `storages` are named by their addresses."""
    import torch

    pieces: list[torch.Tensor] = []  # each with a row of bytes for each block
    for base, stride, blocks, piece, offsets in regions:
        begin = max(address for address in storages if address <= base)
        storage = storages[begin]
        for offset in offsets:
            rows = torch.empty(0, dtype=torch.uint8, device=storage.device)
            pieces.append(rows.set_(storage, base - begin + offset, (blocks, piece), (stride, 1)))

    def copy(source: int, target: int) -> None:
        # vLLM computes in this mode; a step without a forward pass may come without it.
        with torch.inference_mode():
            # One call for all layers.
            torch._foreach_copy_([rows[target] for rows in pieces], [rows[source] for rows in pieces])

    return copy


def storages_of(kv_caches: Mapping[str, torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory that holds the caches, by its address."""
    storages: dict[int, torch.UntypedStorage] = {}
    for cache in kv_caches.values():
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            storage = tensor.untyped_storage()
            known = storages.get(storage.data_ptr())
            if known is None or known.nbytes() < storage.nbytes():
                storages[storage.data_ptr()] = storage
    return storages
