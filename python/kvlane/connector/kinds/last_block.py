"""Keeps a prompt of whole blocks from being computed in its last block, if the engine's own cache has that block.

vLLM takes at most all blocks but the last one from its cache, because it has to compute the last token. Sixteen tokens
beside requests that decode keep the whole step from running as a full CUDA graph, one token does not:

    prompt    | block 0 | block 1 | ... | block n-1      |
    vLLM        hit       hit             computes all of it
    kvlane      hit       hit             copied from the cached block, only its last token is computed

A prompt whose blocks are loaded (`load`), or handed over (`direct_land`), computes one token in the same way, but for
long loads of a request that is alone (`load`).
"""

from __future__ import annotations

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.copies import CopyBlocks
from kvlane.connector.kinds.kind import NOTHING, Answer, SchedulerKind, SchedulerShared
from kvlane.connector.requests import RequestState
from kvlane.connector.vllm_protocols import (
    AllocatedBlocks,
    Block,
    Request,
    SchedulerOutput,
    wants_no_cache,
)


class LastBlock(SchedulerKind):
    """Promises the last block of prompts whose other blocks vLLM has found."""

    name = "last_block"

    def __init__(self, shared: SchedulerShared, copies: CopyBlocks) -> None:
        super().__init__(shared)
        self._copies = copies
        self._promised: dict[str, Block] = {}
        """By request: the cached block, pinned until the request has its own blocks or this step is planned."""
        self._without_room: set[str] = set()
        """Requests that got no blocks while the cached one was pinned. It may be the one that they lack, so their next
        attempt goes without."""

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        shared, request = self._shared, state.request
        if not shared.shape.takes_last_block or not self._copies.is_possible or shared.pins.pool is None:
            return NOTHING
        (group,) = shared.shape.groups
        rest = request.num_tokens - 1 - local_tokens
        block = local_tokens // group.tokens_per_block
        if (
            rest != group.tokens_per_block - 1
            or wants_no_cache(request)
            or shared.hashes.count(state, group) <= block
        ):
            return NOTHING
        if request.request_id in self._without_room:
            self._without_room.remove(request.request_id)
            return NOTHING
        (block_hash,) = shared.hashes.raw(state, group, block, block + 1)
        found = shared.pins.pool.get_cached_block(block_hash, [group.group_id])
        # A block in use may be one that this very step computes.
        if not found or found[0].ref_cnt > 0:
            return NOTHING
        self._give_back(request.request_id)
        shared.pins.pin(found)
        self._promised[request.request_id] = found[0]
        return Answer(rest, at_once=True)

    def allocated(
        self, request: Request, state: RequestState | None, blocks: AllocatedBlocks, tokens: int
    ) -> None:
        if tokens and state is not None:
            (group,) = self._shared.shape.groups
            own = blocks.blocks[group.group_id][(request.num_tokens - 1) // group.tokens_per_block]
            self._copies.copy(self._promised[request.request_id], own)
            self._shared.counters.add("copied_last_blocks")
            # The step copies the block before it computes, and so before its saves.
            state.tokens_ended(ok=True)
        self._give_back(request.request_id)

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        for request_id in list(self._promised):
            self._without_room.add(request_id)
            self._give_back(request_id)

    def _give_back(self, request_id: str) -> None:
        block = self._promised.pop(request_id, None)
        if block is not None:
            self._shared.pins.unpin([block])

    def give_back(self, state: RequestState) -> None:
        self._without_room.discard(state.request.request_id)
        self._give_back(state.request.request_id)
