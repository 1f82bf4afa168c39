"""A rank's agent for direct hand-offs, and what the engine's scheduler hears of it."""

from __future__ import annotations

import ctypes
import functools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvlane.connector.direct import the_group
from kvlane.connector.groups import Unsupported, cache_groups
from kvlane.connector.kinds.kind import DirectRank
from kvlane.connector.layers import Layers
from kvlane.connector.layout import Region, group_layout, layer_hints
from kvlane.connector.settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What an engine's scheduler has to know of a rank. Plain data, which vLLM pickles."""

    rank: int
    endpoint: bytes
    key: bytes
    layout: bytes
    """Digest of what the rank's part of a block is."""


def start_rank(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[DirectRank, RankHandshake]:
    """This rank's agent. The caches have to stay until it is closed. Raises Unsupported."""
    from kvlane import _core

    group = the_group(cache_groups(vllm_config, kv_cache_config))
    areas = _areas(kv_caches)
    parallel = vllm_config.parallel_config
    layout = group_layout(
        kv_caches,
        group.layer_names,
        kv_cache_config.num_blocks,
        layer_hints(vllm_config, kv_cache_config),
        [parallel.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    )
    regions: list[Region] = layout.regions
    key = secrets.token_bytes(16)
    host = settings.direct_listen.rpartition(":")[0]
    agent = _core.HandoffRank(
        f"{host}:0", settings.direct_token, regions, areas, key, settings.direct_transport
    )
    rank = DirectRank(agent, Layers(layout.last_region), functools.partial(_copy_block, regions))
    return rank, RankHandshake(parallel.rank, agent.endpoint, key, layout.digest)


def _copy_block(regions: list[Region], source: int, target: int) -> None:
    """In the memory of the host."""
    for base, stride, _, piece, offsets in regions:
        for offset in offsets:
            at = base + offset
            ctypes.memmove(at + target * stride, at + source * stride, piece)


def _areas(kv_caches: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of each piece of memory in which the caches lie. Raises Unsupported."""
    areas: dict[int, int] = {}
    for cache in kv_caches.values():
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if tensor.device.type != "cpu":
                raise Unsupported("direct hand-offs need KV caches in the memory of the host")
            storage = tensor.untyped_storage()
            areas[storage.data_ptr()] = max(areas.get(storage.data_ptr(), 0), storage.nbytes())
    return sorted(areas.items())
