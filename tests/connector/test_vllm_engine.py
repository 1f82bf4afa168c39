"""A real vLLM saves and loads through the connector: over a daemon, and for faults of a chosen moment over a fake.

Every answer is compared with one that the same engine computed without kvlane's help.

Tests that only send prompts share an engine, and each has prompts of its own. A test has an engine of its own if it
needs other settings, or restarts the daemon.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import BLOCK, Engines, InProcessEngine, Make, engines, prompt, wait_until_ready
from stores import DaemonStore, FakeStore
from tiny_model import build_tiny_model

from kvlane.connector import capabilities

pytestmark = pytest.mark.old_vllm


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("windowed"), sliding_window=2 * BLOCK)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path_factory.mktemp("daemon"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_shared_store(shared_store: DaemonStore) -> Iterator[Engines]:
    with engines(shared_store.address) as start:
        yield start


@pytest.fixture
def engine(on_shared_store: Engines, shared_store: DaemonStore, model: Path) -> InProcessEngine:
    """The shared engine on the shared daemon; neither has a block or has counted anything."""
    engine = on_shared_store.shared(model)
    shared_store.drop_all()
    return engine


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_shared_fake(shared_fake: FakeStore) -> Iterator[Engines]:
    with engines(shared_fake.address) as start:
        yield start


@pytest.fixture
def engine_on_fake(on_shared_fake: Engines, shared_fake: FakeStore, model: Path) -> InProcessEngine:
    """The shared engine on the shared fake, which has no fault."""
    shared_fake.core.down = False
    shared_fake.core.release_held()
    return on_shared_fake.shared(model)


def test_cold_warm_and_a_corrupted_block(engine: InProcessEngine, shared_store: DaemonStore) -> None:
    store, metric_before = shared_store, engine.metric("vllm:kvlane_hit_tokens")
    cold, cached = engine.generate(prompt(1), 24)
    assert cached == 0
    own, cached = engine.generate(prompt(1), 24)
    assert (own, cached) == (cold, 288)
    assert len(set(cold)) > 10, "an answer that hardly depends on its prompt proves nothing"

    engine.forget()
    store.settle()
    assert store.block_count() == 323 // BLOCK
    warm, cached = engine.generate(prompt(1), 24)
    assert (warm, cached) == (cold, 288)
    assert engine.counted["hit_tokens"] == 288
    assert engine.counted["load_blocks"] == 9
    if capabilities.reports_failed_requests():
        assert engine.metric("vllm:kvlane_hit_tokens") - metric_before == 288

    # A prompt that shares 5 blocks.
    engine.forget()
    branched = prompt(1)[: 5 * BLOCK] + prompt(2)[:100]
    answer, cached = engine.generate(branched)
    assert cached == 5 * BLOCK
    engine.drain()
    assert store.lease_count() == 0
    assert engine.errors() == 0

    engine.forget()
    store.corrupt()
    wrong, cached = engine.generate(prompt(1), 24)
    assert cached == 288
    assert wrong != cold, "the comparison would not notice wrong bytes"

    # The same prompt computed from nothing.
    engine.forget()
    store.drop_all()
    assert store.block_count() == 0
    alone, cached = engine.generate(branched)
    assert (alone, cached) == (answer, 0)


def test_another_engine_finds_it(
    engine: InProcessEngine, on_shared_store: Engines, shared_store: DaemonStore, model: Path
) -> None:
    cold, _ = engine.generate(prompt(3))
    engine.drain()
    shared_store.settle()
    salted = on_shared_store(model, extra={"kvlane.namespace": "other tenant"})
    assert salted.generate(prompt(3)) == (cold, 0)
    second = on_shared_store(model)
    assert second.generate(prompt(3)) == (cold, 288)
    assert second.errors() == 0


def test_preemption(
    engine: InProcessEngine, on_shared_store: Engines, shared_store: DaemonStore, model: Path
) -> None:
    store, prompts = shared_store, [prompt(seed, 150) for seed in range(10, 15)]
    alone = [engine.generate(each, 60)[0] for each in prompts]
    engine.drain()
    store.drop_all()

    cramped = on_shared_store(model, blocks=17, max_model_len=512)
    for _ in range(2):
        names = [cramped.add(each, 60) for each in prompts]
        outputs = cramped.run()
        assert [list(outputs[name].outputs[0].token_ids) for name in names] == alone
        cramped.forget()
        store.settle()
    assert cramped.metric("vllm:num_preemptions") > 0
    assert cramped.counted["hit_tokens"] > 0
    assert store.lease_count() == 0
    assert cramped.errors() == 0


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_a_layout_that_the_backend_cannot_have_is_no_obstacle(
    make: Make, store: DaemonStore, model: Path, layout: str
) -> None:
    """The CPU's attention has its layers apart in every version."""
    engine = make(model, extra={"kvlane.layout": layout})
    cold, _ = engine.generate(prompt(11))
    engine.forget()
    store.settle()
    assert engine.generate(prompt(11)) == (cold, 288)
    assert engine.errors() == 0


def test_chunked_prefill(make: Make, store: DaemonStore, model: Path) -> None:
    engine = make(model, max_num_batched_tokens=48, max_num_seqs=4, enable_chunked_prefill=True)
    prompts = [prompt(seed, 200 + seed) for seed in range(4)]
    names = [engine.add(each) for each in prompts]
    outputs = engine.run()
    cold = [list(outputs[name].outputs[0].token_ids) for name in names]
    engine.forget()
    store.settle()
    for each, answer in zip(prompts, cold, strict=True):
        warm, cached = engine.generate(each)
        assert cached == (len(each) - 1) // BLOCK * BLOCK
        assert warm == answer
    assert engine.errors() == 0


def test_several_kv_cache_groups(make: Make, store: DaemonStore, windowed_model: Path) -> None:
    engine = make(windowed_model)
    groups = engine.connector._scheduler._shape.groups
    assert [group.window for group in groups] == [0, 2 * BLOCK]
    cold, _ = engine.generate(prompt(5), 24)
    engine.forget()
    store.settle()
    assert store.block_count() == 2 * (323 // BLOCK)
    warm, cached = engine.generate(prompt(5), 24)
    assert warm == cold
    assert cached == 288
    assert engine.counted["load_blocks"] == 9 + 2
    assert engine.errors() == 0


def test_the_store_restarts_while_an_engine_runs(make: Make, store: DaemonStore, model: Path) -> None:
    engine = make(model)
    cold, _ = engine.generate(prompt(6))
    engine.forget()
    store.settle()
    store.restart()
    answer, _ = engine.generate(prompt(6))
    assert answer == cold
    wait_until_ready(engine)
    # Its own cache has the prompt, the new daemon has not; running it once more tells the daemon.
    assert engine.generate(prompt(6))[0] == cold
    engine.forget()
    store.settle()
    assert engine.generate(prompt(6)) == (cold, 288)


# Over the fake.


def test_without_a_daemon(engine_on_fake: InProcessEngine, shared_fake: FakeStore) -> None:
    engine, fake = engine_on_fake, shared_fake
    fake.core.down = True
    cold, _ = engine.generate(prompt(7))
    engine.forget()
    assert engine.generate(prompt(7)) == (cold, 0)
    fake.core.down = False
    assert engine.generate(prompt(7)) == (cold, 288)
    engine.forget()
    assert engine.generate(prompt(7)) == (cold, 288)
    assert engine.errors() == 0


def test_an_abort_while_its_blocks_are_loaded(
    engine_on_fake: InProcessEngine, shared_fake: FakeStore
) -> None:
    engine, fake = engine_on_fake, shared_fake
    cold, _ = engine.generate(prompt(8))
    engine.forget()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    fake.core.hold_loads = True
    aborted = engine.add(prompt(8))
    other = engine.add(prompt(9))
    for _ in range(3):
        engine.llm.llm_engine.step()
    assert fake.lease_count() == 1
    engine.llm.llm_engine.abort_request([aborted])
    outputs = engine.run()
    assert other in outputs and aborted not in outputs
    assert engine.connector.has_pending_push_work()
    fake.core.release_held()
    engine.drain()
    assert fake.lease_count() == 0
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert engine.generate(prompt(8))[0] == cold
    assert engine.errors() == 0


def test_slow_lookups_delay_only_their_own_request(
    engine_on_fake: InProcessEngine, shared_fake: FakeStore
) -> None:
    engine, fake = engine_on_fake, shared_fake
    cold, _ = engine.generate(prompt(11))
    engine.forget()
    running = engine.add(prompt(12), 40)
    engine.llm.llm_engine.step()
    fake.core.hold_lookups = True
    waiting = engine.add(prompt(11))
    finished = {}
    while running not in finished:
        for output in engine.llm.llm_engine.step():
            finished[output.request_id] = output
            if not output.finished:
                del finished[output.request_id]
    assert waiting not in finished
    fake.core.release_held()
    outputs = engine.run()
    assert list(outputs[waiting].outputs[0].token_ids) == cold
    assert outputs[waiting].num_cached_tokens == 288


@pytest.mark.parametrize("windowed", [False, True])
def test_a_load_that_fails_is_computed_instead(
    windowed: bool, make_on_fake: Make, fake: FakeStore, model: Path, windowed_model: Path
) -> None:
    engine = make_on_fake(windowed_model if windowed else model, policy="recompute")
    cold, _ = engine.generate(prompt(10))
    engine.forget()
    fake.core.fail_loads = True
    again, _ = engine.generate(prompt(10))
    assert again == cold
    assert engine.counted["failed_loads"] == 1
    assert engine.counted["lookups"] <= 3, "a failed promise must not be made again"
    engine.forget()
    fake.core.fail_loads = False
    assert engine.generate(prompt(10))[0] == cold


@pytest.mark.parametrize("windowed", [False, True])
def test_an_engine_under_random_faults(
    windowed: bool, make_on_fake: Make, fake: FakeStore, model: Path, windowed_model: Path
) -> None:
    """Answers stay right, whatever the store does, and the engine's blocks all come back."""
    seed = int(os.environ.get("KVLANE_TEST_SEED", time.time_ns() // 1000))
    print(f"KVLANE_TEST_SEED={seed}")
    rng = random.Random(seed)
    prompts = [prompt(20 + seed % 3, 90 + 40 * seed) for seed in range(6)]
    path, blocks = (windowed_model, 100) if windowed else (model, 60)
    engine = make_on_fake(path, blocks=blocks, policy="recompute", max_num_batched_tokens=128)
    fake.core.down = True
    alone = [engine.generate(each, 12)[0] for each in prompts]
    fake.core.down = False
    engine.forget()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    asked: dict[str, int] = {}
    for _ in range(250):
        fault = rng.randrange(14)
        if fault == 0:
            fake.restart()
        elif fault == 1:
            fake.core.down = not fake.core.down
        elif fault == 2:
            fake.core.hold_loads, fake.core.hold_saves = rng.random() < 0.5, rng.random() < 0.5
        elif fault == 3:
            fake.core.fail_loads = rng.random() < 0.4
        elif fault == 4:
            fake.core.release_held()
        elif fault == 5 and asked:
            name = rng.choice(list(asked))
            engine.llm.llm_engine.abort_request([name])
            del asked[name]
        elif fault < 8 and len(asked) < 6:
            number = rng.randrange(len(prompts))
            asked[engine.add(prompts[number], 12)] = number
        for output in engine.llm.llm_engine.step():
            if output.finished and output.request_id in asked:
                assert list(output.outputs[0].token_ids) == alone[asked.pop(output.request_id)]
    fake.core.down = fake.core.fail_loads = False
    fake.core.release_held()
    for name, output in engine.run().items():
        assert list(output.outputs[0].token_ids) == alone[asked.pop(name)]
    assert not asked
    engine.forget()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert fake.lease_count() == 0
