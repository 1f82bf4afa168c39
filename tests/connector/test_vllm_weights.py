"""A real vLLM whose weights are changed where they lie, that sleeps, pauses and is reset: blocks go to those alone
that have the same weights, and vLLM's own calls succeed with saves under way.

Every answer is compared with one of an engine without kvlane.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine import Make, engines, prompt
from stores import DaemonStore, FakeStore
from trainer import interrupt, name_them, retrain, train

from kvlane.connector import weights

pytestmark = pytest.mark.old_vllm
PROMPT = prompt(1)
CACHED = 288  # of its 300 tokens
TURNS = 4


@dataclass(frozen=True)
class Alone:
    """What an engine without kvlane answers."""

    by_factor: dict[float, list[int]]
    """To PROMPT, by the factor that its weights were changed by."""
    long: dict[int, list[int]]
    """To `prompt(seed, 900)`, by seed."""


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    by_factor = {}
    with engines(None) as start:
        engine = start(model)
        long = {seed: engine.generate(prompt(seed, 900), 4)[0] for seed in range(100, 100 + 4 * TURNS)}
        for factor in (1.0, 1.5):
            retrain(engine, factor)
            by_factor[factor], _ = engine.generate(PROMPT)
    assert by_factor[1.0] != by_factor[1.5], "the comparison would not notice other weights"
    return Alone(by_factor, long)


@pytest.fixture(scope="module")
def answers(alone: Alone) -> dict[float, list[int]]:
    return alone.by_factor


def test_what_a_digest_tells_apart() -> None:
    torch.manual_seed(0)
    large, small = torch.randn(512, 1024, dtype=torch.bfloat16), torch.randn(7, 3)
    known = weights.digest([("large", large), ("small", small)])
    assert known == weights.digest([("small", small), ("large", large)])
    assert known == weights.digest([("small", small), ("large", large.t())]), "the same memory"
    small[3, 1] += 1e-3
    assert known != weights.digest([("large", large), ("small", small)])
    small[3, 1] -= 1e-3
    # A training step in 16 bits changes few words: here one in fifty of each row.
    changed = torch.rand_like(large, dtype=torch.float32) < 0.02
    large[changed] += 1
    assert known != weights.digest([("large", large), ("small", small)])


def test_new_weights_get_blocks_of_their_own(
    make: Make, store: DaemonStore, model: Path, answers: dict[float, list[int]]
) -> None:
    """The new weights' blocks went into the files' namespace, and a fresh engine answered wrongly."""
    engine = make(model)
    assert engine.generate(PROMPT) == (answers[1.0], 0)
    # Without draining: the save is under way.
    retrain(engine, 1.5)
    store.settle()
    assert engine.generate(PROMPT) == (answers[1.5], 0), "not those of the old weights"
    engine.forget()
    store.settle()
    assert engine.generate(PROMPT) == (answers[1.5], CACHED), "its own"
    engine.drain()
    fresh = make(model)
    answer, _ = fresh.generate(PROMPT)
    assert answer == answers[1.0]
    fresh.forget()
    store.settle()
    assert fresh.generate(PROMPT) == (answers[1.0], CACHED)
    assert fresh.errors() == 0


def test_a_reset_that_vllm_refuses_leaves_old_blocks_to_nobody(
    make: Make, store: DaemonStore, model: Path, answers: dict[float, list[int]]
) -> None:
    """While requests run vLLM keeps its own blocks, of the old weights, and resets the connector all the same."""
    engine = make(model)
    assert engine.generate(PROMPT) == (answers[1.0], 0)
    engine.drain()
    store.drop_all()
    running = engine.add(prompt(2), 200)
    while not engine.scheduler.running:
        engine.llm.llm_engine.step()
    engine.llm.collective_rpc(functools.partial(train, factor=1.5))
    engine.llm.collective_rpc(functools.partial(name_them, version="step-1"))
    assert not engine.llm.reset_prefix_cache(reset_connector=True)
    # vLLM's own cache answers, with blocks of the old weights.
    wrong, cached = engine.generate(PROMPT)
    assert cached == CACHED
    assert wrong != answers[1.5], "the comparison would not notice blocks of the old weights"
    engine.run([running])
    engine.drain()
    store.settle()
    named = make(model)
    retrain(named, 1.5, "step-1")
    assert named.generate(PROMPT) == (answers[1.5], 0)


def test_engines_whose_weights_have_one_name_share(
    make: Make, store: DaemonStore, model: Path, answers: dict[float, list[int]]
) -> None:
    first = make(model)
    retrain(first, 1.5, "step-1")
    assert first.generate(PROMPT) == (answers[1.5], 0)
    first.drain()
    store.settle()
    second = make(model)
    retrain(second, 1.5, "step-1")
    assert second.generate(PROMPT) == (answers[1.5], CACHED)
    # The control: the name decides, so a wrong one brings the blocks of other weights.
    third = make(model)
    retrain(third, 1.0, "step-1")
    wrong, cached = third.generate(PROMPT)
    assert cached == CACHED
    assert wrong != answers[1.0], "the comparison would not notice the blocks of other weights"


@pytest.mark.parametrize("how", ["sleep", "pause abort", "pause keep", "reset"])
def test_vllm_pauses_sleeps_and_resets_with_saves_under_way(
    make: Make, store: DaemonStore, model: Path, alone: Alone, how: str
) -> None:
    """vLLM resets its own cache before the connector hears of it, and raised as long as a save held one block."""
    engine = make(model)
    under_way = 0
    for turn in range(TURNS):
        names = [engine.add(prompt(100 + 4 * turn + number, 900), 4) for number in range(3)]
        saves = engine.connector._scheduler.saves
        while engine.llm.llm_engine.has_unfinished_requests() and not saves.pinned_blocks:
            engine.llm.llm_engine.step()
        under_way += saves.pinned_blocks > 0
        interrupt(engine, how, names)
        assert saves.pinned_blocks == 0
        # Later requests overwrite the blocks; in some modes those are the same requests again.
        engine.add(prompt(100 + 4 * turn + 3, 900), 4)
        engine.run()
    assert under_way >= TURNS * 3 // 4, f"only {under_way} of {TURNS} calls met a save"
    engine.forget()
    store.settle()
    # The weights are the same, so what was saved before and after is found: and it is right.
    found = {seed: engine.generate(prompt(seed, 900), 4) for seed in alone.long}
    assert {seed: answer for seed, (answer, _) in found.items()} == alone.long
    assert sum(cached > 0 for _, cached in found.values()) >= TURNS
    assert engine.errors() == 0


def test_a_reset_with_a_load_under_way_is_refused_by_vllm_and_works_afterwards(model: Path) -> None:
    """Where a load is written its request holds the blocks itself: vLLM refuses, and engine and request go on."""
    fake = FakeStore()
    with engines(fake.address) as start:
        engine = start(model)
        cold, _ = engine.generate(PROMPT)
        engine.forget()
        fake.core.hold_loads = True
        name = engine.add(PROMPT)
        while not engine.connector._scheduler.loads.under_way:
            engine.llm.llm_engine.step()
        with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
            engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        fake.core.release_held()
        output = engine.run()[name]
        assert (list(output.outputs[0].token_ids), output.num_cached_tokens) == (cold, CACHED)
        assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert engine.generate(PROMPT) == (cold, CACHED)
        assert engine.errors() == 0
    fake.close()


def test_a_daemon_that_does_not_answer_makes_vllm_refuse_for_a_while(
    make: Make, store: DaemonStore, model: Path
) -> None:
    """It may still read the blocks of a save when it goes on. The save ends within its time limit; then it works."""
    engine = make(model)
    engine.generate(PROMPT)
    engine.drain()
    store.stop()
    # Begun and not answered.
    engine.generate(prompt(7))
    assert engine.connector._scheduler.saves.pinned_blocks > 0
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    store.resume()
    assert engine.errors() == 0
