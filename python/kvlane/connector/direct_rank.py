"""A rank's agent for direct hand-offs, and its handshake with the engine's scheduler."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvlane.connector import core_log
from kvlane.connector.affinity import unbound, warn_of_shared_processors
from kvlane.connector.assemble import compute_stream, device_uuid, gpu_of, handoff_order
from kvlane.connector.block_copier import storages_of
from kvlane.connector.direct_order import shared_memory
from kvlane.connector.groups import STATE, Unsupported, cache_groups
from kvlane.connector.guard import logger
from kvlane.connector.kinds.kind import DirectRank
from kvlane.connector.layout import group_layout, layer_hints
from kvlane.connector.settings import Settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """The facts of a rank for the engine's scheduler. Plain data, which vLLM pickles."""

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

    with unbound():
        core_log.start(_core)
    with suppress(Exception):
        # The rank starts also if this warning fails.
        warn_of_shared_processors()
    groups = cache_groups(vllm_config, kv_cache_config)
    handoff_order(vllm_config, kv_cache_config, groups)
    device = gpu_of(kv_caches)
    if device is not None and vllm_config.model_config.enable_sleep_mode:
        raise Unsupported("in sleep mode a GPU's memory may go away while another engine reads it")
    if device is None and settings.direct_transport == "cuda":
        raise Unsupported(
            "kvlane.direct.transport is cuda, and this engine's cache is in the host's memory: take auto"
        )
    parallel = vllm_config.parallel_config
    hints = layer_hints(vllm_config, kv_cache_config)
    cut = [parallel.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    memory = shared_memory(
        [
            group_layout(kv_caches, group.layer_names, kv_cache_config.num_blocks, hints, cut)
            for group in groups
        ]
    )
    key = secrets.token_bytes(16)
    host = settings.direct_listen.rpartition(":")[0]
    storages = storages_of(kv_caches)
    with unbound():
        agent = _core.HandoffRank(
            f"{host}:0",
            settings.direct_token,
            memory.regions,
            [(address, storage.nbytes()) for address, storage in storages.items()],
            key,
            settings.direct_transport,
            device_uuid(device) if device is not None else None,
            settings.tls_files(),
        )
    # Where a step is computed in micro-batches, each layer is computed several times: only its end says something.
    in_parts = getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False)
    # vLLM calls no hook behind a layer that computes a state, so a region may lack one after its last attention layer.
    has_states = any(group.kind == STATE for group in groups)
    if in_parts or has_states:
        # Log: with micro-batches or states a prompt is offered after each step, which is a little later.
        logger.info(
            "kvlane: prompts are handed over step by step, not layer by layer: vLLM %s",
            "computes micro-batches" if in_parts else "does not say when it has computed a layer's state",
        )
    rank = DirectRank(
        agent,
        None if in_parts or has_states else agent.layer_hook(list(memory.last_region.items())),
        compute_stream(device) if device is not None else lambda: 0,
    )
    return rank, RankHandshake(parallel.rank, agent.endpoint, key, memory.digest)
