"""A prompt that lands, and what both ways of landing do with blocks and hashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from kvlane.connector.direct_request import Landing
from kvlane.connector.kinds.kind import SchedulerShared
from kvlane.connector.requests import RequestState
from kvlane.connector.vllm_protocols import Block, LandingPool

# Once its time is over, a request waits this much longer for the ranks to stop writing its blocks.
STUCK_SECONDS = 5.0
# Landings leave free so many blocks for each running request, which vLLM would preempt otherwise.
BLOCKS_FOR_RUNNING = 2


@dataclass
class Overflowing:
    """A prompt on its way into the daemon's pool."""

    next_save: int
    """The first block of the prompt that is not saved yet. The landing's `taken` blocks begin with it."""
    end_block: int
    """The number of the prompt's blocks that the prefill engine hands over."""
    in_saves: int = 0
    """Blocks that are being saved. The saves pin them."""
    offered: int = 0
    """The prefill engine has offered all blocks before this one."""
    is_over: bool = False
    """No READ writes any more."""
    is_looked_up: bool = False
    is_counted: bool = False
    """It is counted as a prompt that this engine computes in part."""


@dataclass
class Landed:
    """A prompt that another engine computes for this one."""

    landing: Landing
    state: RequestState
    local: list[Block] = field(default_factory=list)
    """The prompt's first blocks, which the engine's own cache had. Pinned."""
    taken: list[Block] = field(default_factory=list)
    """The blocks after `local` in which the prompt lands. Pinned."""
    wanted: int = 0
    """The number of `taken` blocks that the whole prompt needs."""
    fits: bool = True
    """The prompt may land as a whole when its turn comes. Else it can only overflow."""
    stored: int = 0
    """The number of first `taken` blocks that come from the daemon."""
    loads: bool = False
    """The load of the `stored` blocks is in progress."""
    failed: bool = False
    """The load failed, or began before a reset."""
    rest: Block | None = None
    """Once all has landed: the one of `taken` with the prompt's last tokens, which vLLM does not take as a hit.
    `allocated` has it copied into the request's own block."""
    no_room_since: float | None = None
    """When the prefill engine was first seen to have blocks without room here, in seconds of the scheduler's clock."""
    overflow: Overflowing | None = None
    """Set once the prompt overflows. Then `taken` are the blocks of its next READs, `local` and `stored` are empty."""
    is_begun: bool = False
    begun: float = 0.0
    """When the prefill engine was asked, in seconds of the scheduler's clock."""
    is_ready: bool = False
    """The landing is over, so the request waits no longer."""
    until: float = 0.0
    """The request waits until this time at most, in seconds of the scheduler's clock."""
    is_alive: bool = True
    """The request has not ended. A landing may outlive its request until the ranks stop writing."""


def landing_pool(shared: SchedulerShared) -> LandingPool:
    """The engine's block pool, with what landing needs of it."""
    assert shared.pins.pool is not None
    return cast("LandingPool", shared.pins.pool)


def take_blocks(shared: SchedulerShared, count: int, but: frozenset[int] = frozenset()) -> list[Block]:
    """Takes the oldest free blocks, at most `count`, and none of `but`: evicts them from the prefix cache and pins
    them."""
    pool = landing_pool(shared)
    blocks: list[Block] = []
    block = pool.free_block_queue.fake_free_list_head.next_free_block
    watched = getattr(pool, "_reuse_watchers", {})
    while len(blocks) < count and block is not None and block.next_free_block is not None:
        if block.block_id not in watched and block.block_id not in but:
            blocks.append(block)
        block = block.next_free_block
    if blocks:
        pool.evict_blocks({each.block_id for each in blocks})
        pool.touch(blocks)
    return blocks


def proven_blocks(
    shared: SchedulerShared, state: RequestState, hashes: Sequence[tuple[int, bytes]]
) -> int | None:
    """The number of the hand-off's blocks that the other engine computed from this request's tokens, as far as hashes
    prove it: a hash covers its block and all before. None if a hash is not this request's."""
    direct, own = shared.direct, shared.hashes
    assert direct is not None
    order, prompt = direct.order, state.request.num_prompt_tokens

    def of(place: int) -> bytes | None:
        found = order.at(prompt, place)
        if found is None:
            return None
        group, block = found
        size = group.tokens_per_block
        is_rest = (block + 1) * size > prompt
        return own.of_rest(state, block * size) if is_rest else own.ending_at(state, (block + 1) * size)

    if any(of(block) != each for block, each in hashes):
        return None
    return max((block + 1 for block, _ in hashes), default=0)
