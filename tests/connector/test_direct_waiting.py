"""Bounds the time for which a prompt waits for another engine, and the steps of this engine meanwhile."""

from __future__ import annotations

import pytest
from fakes import BLOCK, Request
from test_direct import ALL, ID, TOKENS, WHOLE, World

from kvlane.connector.direct_request import Lending
from kvlane.connector.kinds.direct_land import IDLE_WAIT_MS, STUCK_SECONDS
from kvlane.connector.prefill_rate import PrefillRate
from kvlane.testing.fake_ends import FakeScheduler


def computes(world: World, name: str, tokens: int, seconds: float) -> None:
    """The engine computes a prompt in a step of this many seconds, and continues it in the next step."""
    request = Request(name, list(range(5000, 5000 + tokens)))
    world.side.add_request(request)
    world.side.matched_tokens(request, 0)
    world.engine.compute(request, tokens - 1)
    world.engine.now += seconds
    world.engine.compute(request, 1)
    world.engine.finish(request)


def test_a_prompt_that_others_compute_waits_twice_as_long_as_this_engine_would_compute_and_two_seconds_at_least() -> (
    None
):
    """The prompt waited for up to a minute beside an engine that would have computed it in a second."""
    world = World(4000)
    computes(world, "own", 1001, seconds=10.0)
    short, long = world.request("short", handoff="short"), world.request("long", tokens=900, handoff="long")
    assert world.waits(short) and world.waits(long)
    world.step()
    budgets = [world.agent.budgets[Lending(name).id] for name in ("short", "long")]
    assert budgets[0] == 2.0
    assert budgets[1] == pytest.approx(2 * 900 / 100, rel=0.01)
    world.agent.ends_at_once = False
    world.engine.now += budgets[1] + STUCK_SECONDS + 0.1
    assert world.side.matched_tokens(long, 0) == (0, False), "whatever becomes of its ranks"


def test_before_an_engine_knows_how_fast_it_is_it_takes_itself_for_a_slow_one() -> None:
    rate = PrefillRate()
    assert rate.budget(100) == 2.0 and rate.budget(2500) == 20.0
    rate.step_is_planned(0.0, {"a": 1000})
    rate.step_is_planned(1.0, {"a": 1})
    assert rate.budget(2500) == pytest.approx(5.0)
    # While it has nothing to do, nothing is learned.
    rate.step_is_planned(2.0, {"b": 1000})
    rate.step_is_planned(99.0, {"c": 1})
    assert rate.budget(2500) == pytest.approx(5.0)
    # If the machine gets busy, the engine gets slower, and a prompt may wait longer.
    for number in range(20):
        rate.step_is_planned(100.0 + number * 10, {"d": 1000})
    assert rate.budget(2500) == pytest.approx(50.0, rel=0.02)


def test_where_steps_overlap_a_step_is_over_when_further_ones_are_planned() -> None:
    rate = PrefillRate(steps_at_once=2)
    # The second step is planned right after the first one, which takes two seconds.
    for time, tokens in ((0.0, 1000), (0.001, 1000), (2.0, 1000), (4.0, 1)):
        rate.step_is_planned(time, {"a": tokens})
    assert rate.budget(1000) == pytest.approx(4.0, rel=0.01), "500 tokens a second"


def test_one_step_that_seems_fast_or_small_steps_among_large_ones_say_little() -> None:
    rate, now = PrefillRate(), 0.0
    rate.step_is_planned(now, {"a": 1000})
    for step in range(12):
        assert rate.tokens_per_s == (0 if step < 3 else 1000), step
        # The sixth step is noticed late, and so the seventh seems to end at once.
        now += {5: 1.999, 6: 0.001}.get(step, 1.0)
        rate.step_is_planned(now, {"a": 1000})
    for _ in range(6):
        # Beside many requests that generate, a step with few tokens of a prompt takes as long.
        rate.step_is_planned(now, {"a": 100})
        now += 1.0
        rate.step_is_planned(now, {"a": 1000})
        now += 1.0
    assert rate.tokens_per_s == 1000


def test_a_lookup_carries_how_fast_this_engine_computes() -> None:
    world = World(4000)
    core = world.engine.scheduler._core
    computes(world, "first", 1001, seconds=10.0)
    assert isinstance(core, FakeScheduler) and core.tokens_per_s == 0, "one step says little"
    for name in "second", "third", "fourth":
        computes(world, name, 1001, seconds=10.0)
    world.side.add_request(Request("a", list(range(100))))
    assert core.tokens_per_s == 100


def test_steps_that_could_overlap_and_do_not_say_no_higher_rate() -> None:
    """A version of vLLM that does not say how many steps it has under way is taken to have two."""
    rate, now = PrefillRate(steps_at_once=2), 0.0
    for _ in range(5):
        # A prompt in one second, then a token in a hundredth.
        for tokens, seconds in ((1000, 1.0), (1, 0.01)):
            rate.step_is_planned(now, {"a": tokens})
            now += seconds
    assert rate.tokens_per_s == 1000


def test_tokens_that_are_generated_say_nothing_of_how_fast_prompts_are_computed() -> None:
    """A decode engine with many requests took itself for a slow one, and waited thrice as long as it should."""
    rate = PrefillRate()
    rate.step_is_planned(0.0, {"a": 20_000})
    for step in range(50):
        rate.step_is_planned(1.0 + step * 0.03, {"a": 1, **{f"r{number}": 1 for number in range(96)}})
    assert rate.budget(100_000) == pytest.approx(10.0)


def test_an_engine_whose_requests_all_wait_does_not_step_without_pause() -> None:
    """The decode engine's steps took half of the processor on which the prefill engine was to compute."""
    world = World()
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.agent.waited == [], "it has just begun: the next step may give it more room"
    assert world.waits(request)
    world.step()
    assert world.agent.waited == [IDLE_WAIT_MS]
    world.agent.end(ID, "landed", ALL, [world.hash(request, WHOLE)])
    world.step()
    assert world.agent.waited == [IDLE_WAIT_MS], "it has landed: the request goes on in the next step"


@pytest.mark.parametrize("other", ["runs", "is new", "is looked up"])
def test_a_step_that_something_else_may_use_does_not_wait(other: str) -> None:
    world = World()
    request = world.request()
    assert world.waits(request)
    world.step()
    another = Request("other", list(range(9000, 9000 + 3 * BLOCK)))
    world.store.hold_lookups = other == "is looked up"
    world.side.add_request(another)
    if other == "runs":
        world.side.matched_tokens(another, 0)
        world.engine.compute(another, 3 * BLOCK)
    else:
        world.step()
    assert world.agent.waited == []
    assert world.waits(request)


def test_a_step_that_other_engines_wait_for_does_not_wait() -> None:
    """Data-parallel engines step together, so they must not pause."""
    world = World()
    world.direct.may_wait = False
    assert world.waits(world.request())
    world.step()
    world.step()
    assert world.agent.waited == []
    assert TOKENS
