"""Makes KV events, by which routers that listen to vLLM learn which blocks lie in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlane.connector.groups import CacheGroup
from kvlane.connector.vllm_protocols import Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


# vLLM's name for host memory.
MEDIUM = "CPU"


def events_enabled(vllm_config: VllmConfig) -> bool:
    """Whether the user asked vLLM to publish KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def blocks_stored(
    group: CacheGroup, request: Request, parent: bytes | None, hashes: list[bytes], first_block: int
) -> BlockStored:
    """An event for consecutive blocks of a request; `hashes` and `parent` are vLLM's own."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    size = group.tokens_per_block
    lora = request.lora_request
    fields: dict[str, object] = {
        "block_hashes": [maybe_convert_block_hash(each) for each in hashes],
        "parent_block_hash": maybe_convert_block_hash(parent) if parent else None,
        "token_ids": list(request.all_token_ids[first_block * size : (first_block + len(hashes)) * size]),
        "block_size": size,
        "lora_id": lora.lora_int_id if lora else None,
        "lora_name": lora.lora_name if lora else None,
        "medium": MEDIUM,
        "group_idx": group.group_id,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.window if group.kind.startswith("sliding_window") else None,
        "locality": "LOCAL",
    }
    known = BlockStored.__struct_fields__
    return BlockStored(**{name: value for name, value in fields.items() if name in known})


def one_block(stored: BlockStored, index: int) -> BlockStored:
    """The event for one block of those that an event is about."""
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    size = stored.block_size
    fields["block_hashes"] = [stored.block_hashes[index]]
    fields["token_ids"] = stored.token_ids[index * size : (index + 1) * size]
    if index > 0:
        fields["parent_block_hash"] = stored.block_hashes[index - 1]
    return type(stored)(**fields)


def blocks_removed(group_id: int, hashes: list[object]) -> BlockRemoved:
    """An event that says that blocks are in host memory no more; `hashes` are those that were announced."""
    from vllm.distributed.kv_events import BlockRemoved

    fields: dict[str, object] = {
        "block_hashes": hashes,
        "medium": MEDIUM,
        "group_idx": group_id,
        "locality": "LOCAL",
    }
    known = BlockRemoved.__struct_fields__
    return BlockRemoved(**{name: value for name, value in fields.items() if name in known})


def all_cleared() -> AllBlocksCleared:
    """An event that says that nothing is stored any more."""
    from vllm.distributed.kv_events import AllBlocksCleared

    return AllBlocksCleared()
