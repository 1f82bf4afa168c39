"""The latencies and the prefix cache of a fake engine, with a clock that the tests turn."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvlane.testing.fake_engine import answers
from kvlane.testing.fake_engine.model import EngineModel, Latencies, PrefixCache, block_hashes

BLOCK_BYTES = 64


def engine(rate: float = 100.0, seats: int = 256, ttft: float = 0.0, blocks: int = 1000) -> EngineModel:
    return EngineModel(Latencies(rate, ttft, 0.0, seats), PrefixCache(blocks))


def begun(model: EngineModel, now: float) -> list[tuple[object, int, float]]:
    return [(each.key, each.cached_tokens, each.first_token_at) for each in model.advance(now)]


def test_a_prefill_costs_its_tokens_and_the_fixed_part():
    model = engine(rate=100.0, ttft=0.5)
    model.submit("a", [], 200, 0, now=10.0)
    assert begun(model, 10.0) == []
    assert model.wake_at() == 12.0
    assert begun(model, 12.0) == [("a", 0, 12.5)]
    assert model.wake_at() is None


def test_prefills_run_one_after_the_other_even_if_the_clock_is_read_late():
    model = engine(rate=100.0)
    model.submit("a", [], 100, 0, now=0.0)
    model.submit("b", [], 100, 0, now=0.5)
    assert begun(model, 0.5) == []
    assert (model.running, model.waiting) == (1, 1)
    assert begun(model, 9.0) == [("a", 0, 1.0), ("b", 0, 2.0)]


def test_with_no_prefill_rate_all_begin_at_once():
    model = engine(rate=0.0)
    for key in "abc":
        model.submit(key, [], 1000, 0, now=3.0)
    assert begun(model, 3.0) == [(key, 0, 3.0) for key in "abc"]


def test_requests_beyond_the_seats_wait_until_one_ends():
    model = engine(rate=0.0, seats=2)
    for key in "abc":
        model.submit(key, [], 10, 0, now=0.0)
    assert [key for key, _, _ in begun(model, 0.0)] == ["a", "b"]
    assert (model.running, model.waiting) == (2, 1)
    model.leave("a", now=4.0)
    assert begun(model, 4.0) == [("c", 0, 4.0)]


def test_an_aborted_prefill_gives_its_time_to_the_next():
    model = engine(rate=100.0)
    model.submit("a", [], 1000, 0, now=0.0)
    model.submit("b", [], 100, 0, now=0.0)
    assert begun(model, 0.0) == []
    model.leave("a", now=2.0)
    assert begun(model, 2.0) == []
    assert model.wake_at() == 3.0


def test_a_request_that_waits_can_be_aborted():
    model = engine(rate=100.0)
    for key in "abc":
        model.submit(key, [], 100, 0, now=0.0)
    assert begun(model, 0.0) == []
    model.leave("b", now=0.5)
    assert begun(model, 5.0) == [("a", 0, 1.0), ("c", 0, 2.0)]


def test_a_cached_prefix_costs_nothing_but_the_last_token_is_computed():
    prompt = bytes(range(128))
    blocks = block_hashes(prompt, BLOCK_BYTES, 0)
    assert len(blocks) == 2
    model = engine(rate=16.0)
    model.submit("a", blocks, 32, 0, now=0.0)
    model.submit("b", blocks, 32, 0, now=0.0)
    assert begun(model, 0.0) == []
    # The prompt is two whole blocks; the second has the last token and is computed again.
    assert begun(model, 9.0) == [("a", 0, 2.0), ("b", 16, 3.0)]
    assert (model.cache_queries, model.cache_hits) == (64, 16)


def test_tokens_that_another_engine_computed_cost_nothing():
    model = engine(rate=10.0)
    model.submit("some", [], 100, 90, now=0.0)
    model.submit("all", [], 100, 1 << 60, now=0.0)
    assert begun(model, 0.0) == []
    assert begun(model, 9.0) == [("some", 90, 1.0), ("all", 99, 1.1)]


def test_usage_counts_the_blocks_of_running_requests():
    model = engine(rate=0.0, blocks=10)
    model.submit("a", [], 33, 0, now=0.0)
    assert begun(model, 0.0)
    assert model.usage == 0.3
    model.leave("a", now=1.0)
    assert model.usage == 0.0


def test_hashes_cover_what_came_before_and_the_root():
    first, second = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert block_hashes(first + second, BLOCK_BYTES, 0)[1] != block_hashes(second, BLOCK_BYTES, 0)[0]
    assert block_hashes(first, BLOCK_BYTES, 0) != block_hashes(first, BLOCK_BYTES, 1)
    assert block_hashes(first + b"rest", BLOCK_BYTES, 0) == block_hashes(first, BLOCK_BYTES, 0)


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_hashes_of_a_longer_text_continue_those_of_its_prefix(prefix: bytes, rest: bytes):
    known = block_hashes(prefix, 16, 7)
    assert block_hashes(prefix + rest, 16, 7, known) == block_hashes(prefix + rest, 16, 7)


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 12), unique=True, max_size=10), max_size=30))
def test_the_cache_holds_the_most_recently_used(capacity: int, insertions: list[list[int]]):
    cache = PrefixCache(capacity)
    expected: OrderedDict[int, None] = OrderedDict()
    for blocks in insertions:
        before = set(expected)
        kept = blocks[:capacity]
        for block in reversed(kept):
            expected.pop(block, None)
            expected[block] = None
        while len(expected) > capacity:
            expected.popitem(last=False)
        change = cache.insert(blocks)
        assert {kept[index] for index in change.stored} == set(kept) - before
        assert set(change.removed) == (before | set(kept)) - set(expected)
        assert len(cache) == len(expected)
        assert cache.hit(kept) == len(kept)
    assert {block for block in range(13) if cache.hit([block])} == set(expected)


@given(st.text(max_size=20), st.binary(max_size=50), st.integers(1, 40))
def test_an_answer_depends_on_model_and_prompt_alone_and_a_longer_one_continues_it(
    model: str, prompt: bytes, count: int
):
    said = answers.words(model, prompt, count)
    assert answers.words(model, prompt, count + 5)[:count] == said
    assert len(said) == count


def test_answers_to_other_prompts_and_models_differ():
    said = {tuple(answers.words(model, prompt, 16)) for model in ("a", "b") for prompt in (b"x", b"y")}
    assert len(said) == 4
