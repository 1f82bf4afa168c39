"""The members of vLLM's objects that the connector reads, and no others: an object of a test needs no other members.

vLLM's own classes are not named here, because they differ between versions, and many tests run without vLLM. A member
that only some versions have is read in one place, by a function at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

KVEvent = object
"""An event for routers, which vLLM takes from its connector and publishes."""
Tables = Sequence[Sequence[int]]
"""A request's block ids, by vLLM's KV cache groups."""


class LoraRequest(Protocol):
    """The LoRA adapter that a request names."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...


class Feature(Protocol):
    """A multimodal input of a request."""

    @property
    def identifier(self) -> str: ...


class Request(Protocol):
    """A request as vLLM's scheduler keeps it. It changes while it runs."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def lora_request(self) -> LoraRequest | None: ...


class Block(Protocol):
    """A block of the engine's pool."""

    @property
    def block_id(self) -> int: ...
    @property
    def ref_cnt(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash(self) -> bytes | None: ...


class AllocatedBlocks(Protocol):
    """The blocks that a request has, by vLLM's KV cache groups."""

    @property
    def blocks(self) -> Sequence[Sequence[Block]]: ...


class BlockPool(Protocol):
    """All blocks of the engine."""

    @property
    def blocks(self) -> Sequence[Block]: ...
    def touch(self, blocks: Sequence[Block], /) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Block], /) -> None: ...
    def get_num_free_blocks(self) -> int: ...
    def get_cached_block(self, block_hash: bytes, group_ids: list[int], /) -> list[Block] | None: ...
    def reset_prefix_cache(self) -> bool: ...


class FreeBlock(Block, Protocol):
    """A block in the queue of those that are free."""

    @property
    def next_free_block(self) -> FreeBlock | None: ...


class FreeBlockQueue(Protocol):
    """The free blocks, the oldest first, between two that are none."""

    @property
    def fake_free_list_head(self) -> FreeBlock: ...


class LandingPool(BlockPool, Protocol):
    """All blocks of the engine, with what landing in them needs."""

    @property
    def free_block_queue(self) -> FreeBlockQueue: ...
    @property
    def null_block(self) -> Block: ...
    def evict_blocks(self, block_ids: set[int], /) -> None: ...
    def cache_full_blocks(
        self,
        *,
        request: Request,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None: ...


class BlockState(Protocol):
    """The block tables of a step's requests."""

    def resolve_block_ids(self, request_id: str, /) -> Tables: ...


class NewRequest(Protocol):
    """A step's data of a request that is scheduled for the first time."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> Tables: ...


class CachedRequests(Protocol):
    """A step's data of the requests that were scheduled before."""

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def new_block_ids(self) -> Sequence[Tables | None]: ...
    @property
    def resumed_req_ids(self) -> set[str]: ...


class SchedulerOutput(Protocol):
    """The work of a step."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...


def block_state(output: SchedulerOutput) -> BlockState | None:
    """The step's block tables; None in versions before 0.30, which do not show them."""
    return getattr(output, "kv_connector_block_state", None)


def features(request: object) -> Sequence[Feature]:
    """The request's multimodal inputs."""
    return getattr(request, "mm_features", None) or ()


def transfer_params(request: object) -> object:
    """The request's `kv_transfer_params`, which its client wrote; JSON."""
    return getattr(request, "kv_transfer_params", None)


def traceparent(request: object) -> str:
    """The header by which the request's caller traces it; empty if there is none. vLLM keeps it only with
    `--otlp-traces-endpoint`."""
    headers = getattr(request, "trace_headers", None)
    value = headers.get("traceparent", "") if isinstance(headers, Mapping) else ""
    # A longer one is none, and would only travel to the daemon.
    return value if isinstance(value, str) and len(value) <= 256 else ""


def waits_for_its_load(request: object) -> bool:
    """Whether the request waits until its promised blocks have come. Until it no longer does, vLLM has no request read
    these blocks: it gives them their hashes afterwards."""
    status = getattr(request, "status", None)
    return getattr(status, "name", "") == "WAITING_FOR_REMOTE_KVS"


def wants_no_cache(request: object) -> bool:
    """Whether the request has to be computed although its prefix is stored, as for the prompt's own probabilities."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))
