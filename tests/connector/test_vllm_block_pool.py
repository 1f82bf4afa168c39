"""What landing relies on of vLLM's block pool, which is nobody's public interface; no engine is started."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

pytestmark = pytest.mark.old_vllm

BLOCK = 16
BLOCKS = 10
GROUP = 0

RELIED_ON = {
    "touch": "one reference more; a free block leaves the queue",
    "free_blocks": "one reference less; without a hash to the queue's front, with one to its end, in this order",
    "evict_blocks": "forgets the hashes of blocks, also of free ones, and leaves references and queue as they are",
    "get_cached_block": "the block of a hash in each group, or None; changes nothing",
    "cache_full_blocks": "gives blocks the request's hashes; whoever looks them up from now on finds them",
    "get_num_free_blocks": "the length of the queue",
    "reset_prefix_cache": "False, and nothing is done, while any block but the null block has a reference",
}
LEFT_ALONE = {
    "cache_partial_block": "a hash for a beginning of a block: only where a group has blocks of several hashes",
    "get_new_blocks": "vLLM takes blocks by it; it is the only one that takes them from the queue's front",
    "get_usage": "a figure",
    "take_events": "hands the events over; landing adds BlockStored as a computed block does",
    # Not in 0.24.
    "emit_cached_block_events": "events of blocks that are hit; changes no block",
    "is_block_writable": "one reference and no hash, so not a block that has landed",
    "move_block_hashes": "hashes of one block of a request to a copy of it",
    "unpin_blocks": "a reference back, with a call when the block is reused",
}
QUEUE_RELIED_ON = {"num_free_blocks", "fake_free_list_head"}
QUEUE_LEFT_ALONE = {
    "popleft": "takes the oldest",
    "popleft_n": "takes the oldest ones",
    "remove": "takes one from anywhere, for touch",
    "append": "to the end",
    "append_n": "to the end",
    "prepend_n": "to the front",
    "get_all_free_blocks": "all, oldest first",
    # Not in 0.24.
    "iter_blocks_after": "the same, from a block on",
}


def public_methods(made: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(made, callable) if not name.startswith("_")}


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=BLOCK)


def request(*hashes: bytes) -> Any:
    return SimpleNamespace(block_hashes=[each.ljust(32, b".") for each in hashes])


def cache(pool: BlockPool, asked: Any, blocks: list[Any], known: int = 0) -> None:
    pool.cache_full_blocks(
        request=asked,
        blocks=blocks,
        num_cached_blocks=known,
        num_full_blocks=len(blocks),
        block_size=BLOCK,
        kv_cache_group_id=GROUP,
    )


def found(pool: BlockPool, asked: Any) -> list[Any]:
    hits = (pool.get_cached_block(each, [GROUP]) for each in asked.block_hashes)
    return [hit[0] if hit else None for hit in hits]


def queue(pool: BlockPool) -> list[int]:
    """The free blocks as landing walks them, oldest first: between two fakes."""
    walked = []
    block: Any = pool.free_block_queue.fake_free_list_head.next_free_block
    while block.next_free_block is not None:
        walked.append(block.block_id)
        block = block.next_free_block
    return walked


def test_the_pool_has_no_method_that_we_have_not_looked_at() -> None:
    """One more could take blocks, move hashes or hold something back: say here what it does to landing."""
    assert public_methods(BlockPool) <= RELIED_ON.keys() | LEFT_ALONE.keys()
    assert public_methods(BlockPool) >= RELIED_ON.keys()


def test_the_queue_of_free_blocks_has_no_method_that_we_have_not_looked_at(pool: BlockPool) -> None:
    assert public_methods(FreeKVCacheBlockQueue) <= QUEUE_LEFT_ALONE.keys()
    assert vars(pool.free_block_queue).keys() >= QUEUE_RELIED_ON


def test_the_walk_gives_all_free_blocks_in_the_order_in_which_vllm_takes_them(pool: BlockPool) -> None:
    walked = queue(pool)
    assert sorted(walked) == list(range(1, BLOCKS)), "all but the null block"
    assert [block.block_id for block in pool.get_new_blocks(BLOCKS - 1)] == walked
    assert queue(pool) == []


def test_touch_takes_a_free_block_out_of_the_queue_once(pool: BlockPool) -> None:
    pool.touch([pool.blocks[4], pool.blocks[6]])
    pool.touch([pool.blocks[4]])
    assert [pool.blocks[number].ref_cnt for number in (4, 6)] == [2, 1]
    assert queue(pool) == [1, 2, 3, 5, 7, 8, 9]
    assert pool.get_num_free_blocks() == 7
    pool.free_blocks([pool.blocks[4]])
    assert 4 not in queue(pool)
    pool.free_blocks([pool.blocks[4]])
    assert queue(pool)[0] == 4


def test_freed_blocks_go_to_the_front_without_a_hash_and_to_the_end_with_one(pool: BlockPool) -> None:
    taken = [pool.blocks[number] for number in (2, 3, 4, 5)]
    pool.touch(taken)
    cache(pool, request(b"a", b"b"), taken[:2])
    pool.free_blocks(reversed(taken))
    assert queue(pool) == [5, 4, 1, 6, 7, 8, 9, 3, 2]


def test_evicted_blocks_are_found_no_more_and_stay_where_they_are(pool: BlockPool) -> None:
    asked = request(b"a", b"b")
    taken = [pool.blocks[2], pool.blocks[3]]
    pool.touch(taken)
    cache(pool, asked, taken)
    pool.free_blocks(taken)
    order = queue(pool)
    pool.evict_blocks({3, 7})  # one without a hash, too
    assert found(pool, asked) == [taken[0], None]
    assert taken[1].block_hash is None
    assert queue(pool) == order
    pool.touch(taken)
    pool.evict_blocks({2})
    assert [block.ref_cnt for block in taken] == [1, 1]
    assert found(pool, asked) == [None, None]


def test_cached_blocks_are_found_from_then_on_and_until_they_are_taken(pool: BlockPool) -> None:
    asked = request(b"a", b"b", b"c")
    taken = [pool.blocks[number] for number in (2, 3, 4)]
    pool.touch(taken)
    cache(pool, asked, taken[:1])
    assert found(pool, asked) == [taken[0], None, None]
    cache(pool, asked, taken, known=1)
    assert found(pool, asked) == taken
    assert [block.ref_cnt for block in taken] == [1, 1, 1]
    assert found(pool, request(b"d")) == [None]
    pool.free_blocks(taken)
    assert found(pool, asked) == taken
    pool.get_new_blocks(BLOCKS - 1)
    assert found(pool, asked) == [None, None, None]


def test_a_hash_may_have_two_blocks_and_a_block_no_second_hash(pool: BlockPool) -> None:
    """Two, since a prompt may be computed here while it lands. A block that has one is never cached again."""
    asked = request(b"a")
    first, second = pool.blocks[2], pool.blocks[3]
    pool.touch([first, second])
    cache(pool, asked, [first])
    cache(pool, asked, [second])
    assert found(pool, asked)[0] in (first, second)
    pool.evict_blocks({found(pool, asked)[0].block_id})
    assert found(pool, asked)[0] in (first, second)
    with pytest.raises(AssertionError):
        cache(pool, request(b"b"), [first if first.block_hash else second])


def test_a_reset_is_refused_while_a_block_is_held(pool: BlockPool) -> None:
    asked = request(b"a")
    pool.touch([pool.blocks[2]])
    cache(pool, asked, [pool.blocks[2]])
    assert pool.reset_prefix_cache() is False
    assert found(pool, asked) == [pool.blocks[2]]
    pool.free_blocks([pool.blocks[2]])
    assert pool.reset_prefix_cache() is True
    assert found(pool, asked) == [None]
    assert Counter(queue(pool)) == Counter(range(1, BLOCKS))
