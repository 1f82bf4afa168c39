"""The last block of a prompt of whole blocks: loaded, or copied inside the engine's own cache, and not computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, Engine, Request, full_group, window_group

from kvlane.connector.assemble import overlapped_tokens, takes_last_block
from kvlane.connector.groups import CacheGroup
from kvlane.connector.kinds.copies import CopyBlocks
from kvlane.connector.kinds.last_block import LastBlock
from kvlane.testing import FakeCore

WHOLE = 3
TOKENS = WHOLE * BLOCK
LOCAL = TOKENS - BLOCK


def whole(name: str = "r", blocks: int = WHOLE) -> Request:
    return Request(name, list(range(blocks * BLOCK)))


def cached(engine: Engine, request: Request) -> list[Any]:
    """Runs a request to its end, as the engine's first. Its blocks, which stay in the engine's own cache."""
    engine.step()
    engine.run(request)
    blocks = [engine.pool.blocks[each] for each in engine.tables[request.request_id][0]]
    for block, block_hash in zip(blocks, request.block_hashes, strict=True):
        block.block_hash = block_hash
    engine.finish(request)
    for _ in range(3):
        engine.step()
    return blocks


def promised(engine: Engine, request: Request, local: int = LOCAL) -> tuple[int | None, bool]:
    engine.scheduler.add_request(request)
    return engine.scheduler.matched_tokens(request, local)


def kind(engine: Engine) -> LastBlock:
    (found,) = (each for each in engine.scheduler.kinds if isinstance(each, LastBlock))
    return found


def references(engine: Engine) -> int:
    return sum(block.ref_cnt for block in engine.pool.blocks)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_block_of_the_engines_own_cache_is_copied_and_one_token_is_computed(workers: int) -> None:
    engine = Engine(FakeCore(), workers=workers)
    source = cached(engine, whole())[-1]
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    own = engine.allocate(again, TOKENS)
    target = own.blocks[0][-1].block_id
    assert target != source.block_id
    engine.scheduler.allocated(again, own, BLOCK - 1)
    again.num_computed_tokens = TOKENS - 1
    before = [engine.content(rank, 0, source.block_id) for rank in range(workers)]
    engine.step({"again": 1})
    assert [engine.content(rank, 0, target) for rank in range(workers)] == before
    assert source.ref_cnt == 1, "the step may still read it"
    again.num_computed_tokens += 1
    engine.step()
    engine.step()
    assert source.ref_cnt == 0
    counted = engine.scheduler.take_stats() or {}
    assert counted["copied_last_blocks"] == 1 and "errors" not in counted
    engine.finish(again)
    engine.step()
    assert references(engine) == 0


def test_a_copied_block_that_the_daemon_lost_is_saved_again() -> None:
    store = FakeCore()
    engine = Engine(store)
    cached(engine, whole())
    store.restart()
    engine.step()
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    engine.scheduler.allocated(again, engine.allocate(again, TOKENS), BLOCK - 1)
    again.num_computed_tokens = TOKENS - 1
    engine.step({"again": 1})
    again.num_computed_tokens += 1
    engine.step()
    assert store.block_count() == WHOLE


def test_a_daemons_last_block_is_loaded_with_the_others_but_not_alone() -> None:
    store = FakeCore()
    cached(Engine(store, engine_id="other"), whole())
    engine = Engine(store)
    engine.step()
    assert promised(engine, whole("a"), 0) == (TOKENS - 1, True)
    assert promised(engine, whole("b"), LOCAL - BLOCK) == (2 * BLOCK - 1, True)
    assert promised(engine, whole("c"), LOCAL) == (0, False), "a block is computed as fast"
    assert promised(engine, whole("d", 1), 0) == (0, False)
    longer = Request("e", list(range(TOKENS + 1)))
    assert promised(engine, longer, 0) == (TOKENS, True)


def test_a_long_load_with_nothing_beside_it_leaves_the_last_block_to_the_engine() -> None:
    """A step of one token waits for all of the load, where it is a full CUDA graph and others are not."""
    engine = Engine(FakeCore(), overlapped_tokens=TOKENS - 1)
    cached(engine, whole())
    shorter = whole("shorter", WHOLE - 1)
    assert promised(engine, shorter, 0) == (TOKENS - BLOCK - 1, True)
    engine.scheduler.request_finished(shorter, ((),))
    longer = Request("longer", list(range(TOKENS + 1)))
    assert promised(engine, longer, 0) == (LOCAL, True), "one token more than whole blocks"
    engine.scheduler.request_finished(longer, ((),))
    partly = whole("partly")
    assert promised(engine, partly, BLOCK) == (TOKENS - 1 - BLOCK, True), (
        "the engine has a block: the load is shorter"
    )
    engine.scheduler.request_finished(partly, ((),))
    shows = whole("shows")
    shows.mm_features = [SimpleNamespace(identifier="an-image")]
    assert promised(engine, shows, 0) == (TOKENS - 1, True), "an image could have to be encoded again"
    engine.scheduler.request_finished(shows, ((),))
    alone, other = whole("alone"), whole("other")
    assert promised(engine, alone, 0) == (TOKENS - BLOCK, True)
    assert promised(engine, other, 0) == (TOKENS - 1, True), (
        "others may decode: their step stays a full graph"
    )
    assert engine.scheduler.matched_tokens(alone, 0) == (TOKENS - 1, True), (
        "asked again, beside the other one"
    )
    engine.scheduler.request_finished(other, ((),))
    assert engine.scheduler.matched_tokens(alone, 0) == (TOKENS - BLOCK, True)
    blocks = engine.allocate(alone, TOKENS)
    engine.scheduler.allocated(alone, blocks, TOKENS - BLOCK)
    alone.num_computed_tokens = TOKENS - BLOCK
    engine.step()
    engine.step({"alone": BLOCK})
    counted = engine.scheduler.take_stats() or {}
    assert counted["hit_tokens"] == TOKENS - BLOCK and "errors" not in counted
    engine.finish(alone)
    engine.step()
    assert references(engine) == 0


@pytest.mark.parametrize(
    ("decodes", "others", "tokens"),
    [
        ("FULL", "PIECEWISE", 10 * BLOCK),
        ("FULL", "NONE", None),
        ("FULL", "FULL", None),
        ("PIECEWISE", "PIECEWISE", None),
    ],
)
def test_loads_leave_the_last_block_only_where_one_token_is_computed_by_a_full_graph(
    decodes: str, others: str, tokens: int | None
) -> None:
    mode = SimpleNamespace(
        decode_mode=lambda: SimpleNamespace(name=decodes), mixed_mode=lambda: SimpleNamespace(name=others)
    )
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=BLOCK + 1),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    caches: Any = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=96_000_000)] * 2, num_blocks=10)
    assert overlapped_tokens(config, caches, [full_group()]) == tokens
    assert overlapped_tokens(config, caches, [full_group(), window_group(1, 2)]) is None
    config.parallel_config.data_parallel_size = 2
    assert overlapped_tokens(config, caches, [full_group()]) is None
    config.parallel_config.data_parallel_size = 1
    config.compilation_config.max_cudagraph_capture_size = BLOCK
    assert overlapped_tokens(config, caches, [full_group()]) is None, "a block and a token have no graph"
    config.compilation_config.cudagraph_mode = None
    assert overlapped_tokens(config, caches, [full_group()]) is None


def test_a_prompt_of_one_block_is_copied() -> None:
    engine = Engine(FakeCore())
    cached(engine, whole("r", 1))
    assert promised(engine, whole("again", 1), 0) == (BLOCK - 1, False)


def test_a_block_in_use_is_not_copied_because_the_same_step_may_compute_it() -> None:
    engine = Engine(FakeCore())
    source = cached(engine, whole())[-1]
    engine.pool.touch([source])
    assert promised(engine, whole("again")) == (0, False)


@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS + 1, TOKENS + BLOCK])
def test_other_prompts_are_as_before(tokens: int) -> None:
    engine = Engine(FakeCore())
    cached(engine, whole())
    local = (tokens - 1) // BLOCK * BLOCK
    request = Request("again", list(range(tokens)))
    assert promised(engine, request, min(local, TOKENS)) == (0, False)


def test_a_prompt_that_has_to_be_computed_is() -> None:
    engine = Engine(FakeCore())
    cached(engine, whole("r", 1))
    again = whole("again", 1)
    again.skip_reading_prefix_cache = True
    assert promised(engine, again, 0) == (0, False)


def test_a_rank_that_cannot_copy_keeps_blocks_from_being_promised() -> None:
    engine = Engine(FakeCore(), workers=2)
    cached(engine, whole())
    engine.workers[1].can_copy_by(None)
    engine.step()
    assert promised(engine, whole("again")) == (0, False)
    engine.workers[1].can_copy_by(lambda source, target: None)
    engine.step()
    assert promised(engine, whole("and again")) == (BLOCK - 1, False)


def test_models_with_windows_are_as_before() -> None:
    engine = Engine(FakeCore(), groups=[Engine(FakeCore()).groups[0], window_group(1, 2)])
    engine.run(whole())
    engine.finish(whole())
    again = whole("again")
    assert promised(engine, again, 0) == (LOCAL, True)


def test_a_request_without_room_gives_the_block_back_and_goes_without_the_next_time() -> None:
    """The pinned block may be the very one that the request lacks; then it would wait for ever."""
    engine = Engine(FakeCore())
    source = cached(engine, whole())[-1]
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    assert source.ref_cnt == 1, "the allocation that follows must not take it"
    engine.step()
    assert source.ref_cnt == 0
    assert engine.scheduler.matched_tokens(again, LOCAL) == (0, False), "all blocks are free this time"
    assert engine.scheduler.matched_tokens(again, LOCAL) == (BLOCK - 1, False), "something else was short"


@pytest.mark.parametrize("when", ["promised", "allocated"])
def test_an_abort_gives_the_block_back(when: str) -> None:
    engine = Engine(FakeCore())
    cached(engine, whole())
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    engine.allocate(again, TOKENS)
    if when == "allocated":
        own = engine.allocate(again, TOKENS)
        engine.scheduler.allocated(again, own, BLOCK - 1)
    engine.finish(again)
    for _ in range(3):
        engine.step()
    assert references(engine) == 0
    assert not kind(engine)._promised and not kind(engine)._without_room


def test_a_copy_is_sent_even_if_the_rest_of_the_plan_fails() -> None:
    """vLLM computes one token with the copied block whatever the connector does."""
    engine = Engine(FakeCore())
    source = cached(engine, whole())[-1]
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    own = engine.allocate(again, TOKENS)
    engine.scheduler.allocated(again, own, BLOCK - 1)
    assert engine.scheduler.take_copies() == [(source.block_id, own.blocks[0][-1].block_id)]
    assert engine.scheduler.take_copies() == [], (
        "a later step must not copy: the block may be another's by then"
    )


def test_a_rank_that_fails_to_copy_is_told_of_once_and_copies_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(FakeCore())
    cached(engine, whole())

    def fail(source: int, target: int) -> None:
        raise OSError("the driver refuses")

    engine.workers[0].can_copy_by(fail)
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    engine.scheduler.allocated(again, engine.allocate(again, TOKENS), BLOCK - 1)
    engine.step({"again": 1})
    assert "wrong bytes" in caplog.text
    engine.finish(again)
    for _ in range(3):
        engine.step()
    assert promised(engine, whole("and again")) == (0, False)


def spec(**more: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(**more))


@pytest.mark.parametrize(
    ("takes", "config", "specs", "groups"),
    [
        (True, {}, [spec()], [full_group()]),
        (False, {"speculative_config": object()}, [spec()], [full_group()]),
        (False, {"scheduler_config": SimpleNamespace(policy="priority")}, [spec()], [full_group()]),
        (False, {"cache_config": SimpleNamespace(enable_prefix_caching=False)}, [spec()], [full_group()]),
        # A second group that has no hashes may hold raw keys of the tokens that are being gathered.
        (False, {}, [spec(), spec()], [full_group()]),
        (False, {}, [spec(tokens_per_state=4)], [full_group()]),
        (False, {}, [spec(kv_cache_specs={"a": SimpleNamespace(compress_ratio=4)})], [full_group()]),
        (False, {}, [spec()], [window_group(0, 2)]),
    ],
)
def test_only_plain_attention_takes_a_hit_that_ends_inside_a_block(
    takes: bool, config: dict[str, Any], specs: list[Any], groups: list[CacheGroup]
) -> None:
    usual = {
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(policy="fcfs"),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
    }
    vllm_config: Any = SimpleNamespace(**{**usual, **config})
    assert takes_last_block(vllm_config, SimpleNamespace(kv_cache_groups=specs), groups) == takes  # pyright: ignore


def test_a_preempted_request_is_copied_what_it_has_generated() -> None:
    engine = Engine(FakeCore())
    cached(engine, whole("r", WHOLE + 1))
    again = Request("again", list(range(TOKENS)))
    engine.scheduler.add_request(again)
    again.all_token_ids += range(TOKENS, TOKENS + BLOCK)
    assert engine.scheduler.matched_tokens(again, TOKENS) == (BLOCK - 1, False)


def test_a_reset_unpins_the_source_and_the_next_plans_are_not_settled() -> None:
    engine = Engine(FakeCore(), steps_at_once=2)
    cached(engine, whole())
    (copies,) = (each for each in engine.scheduler.kinds if isinstance(each, CopyBlocks))
    again = whole("again")
    assert promised(engine, again) == (BLOCK - 1, False)
    own = engine.allocate(again, TOKENS)
    engine.scheduler.allocated(again, own, BLOCK - 1)
    engine.step({"again": 1})
    engine.finish(again)
    assert engine.pool.reset_prefix_cache()
    engine.step()
    assert not copies.is_settled
    engine.step()
    assert copies.is_settled
