"""A real vLLM that computes one token of a prompt of whole blocks: loaded from the daemon, or copied in its own cache.

Every answer is compared with one that the same engine computed. Controls change the bytes of the last block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, Engines, InProcessEngine, engines, prompt
from stores import DaemonStore
from trainer import interrupt, retrain

from kvlane.connector import assemble
from kvlane.connector.kinds.copies import CopyBlocks

pytestmark = pytest.mark.old_vllm

TOKENS = 10 * BLOCK


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path_factory.mktemp("daemon"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def start(store: DaemonStore) -> Iterator[Engines]:
    with engines(store.address) as made:
        yield made


@pytest.fixture
def engine(start: Engines, store: DaemonStore, model: Path) -> InProcessEngine:
    engine = start.shared(model)
    store.drop_all()
    return engine


def flip_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    copy = group._worker._copies._copy

    def flip(source: int, target: int) -> None:
        copy(source, target)
        for layer in group._kv_caches.values():
            layer[target] += 10

    monkeypatch.setattr(group._worker._copies, "_copy", flip)


@pytest.mark.parametrize("tokens", [BLOCK, TOKENS])
def test_a_cached_block_is_copied_and_the_answer_is_the_same(
    engine: InProcessEngine, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, cached = engine.generate(prompt(1, tokens), 24)
    assert cached == 0 and len(set(truth)) > 10
    engine.drain()
    for _ in range(3):
        assert engine.generate(prompt(1, tokens), 24) == (truth, tokens - 1)
        engine.drain()
    assert engine.counted["copied_last_blocks"] == 3
    # The block that was read, and those that were written, are whole: a longer prompt reads them.
    longer = prompt(1, tokens) + prompt(2, 20)
    warm = engine.generate(longer, 24)
    assert warm[1] == tokens
    engine.drain()
    free, references = engine.books()
    assert references == 0 and free > 0
    flip_what_is_copied(monkeypatch)
    wrong, cached = engine.generate(prompt(1, tokens), 24)
    assert cached == tokens - 1
    assert wrong != truth, "the comparison would not notice wrong bytes"
    assert engine.errors() == 0
    engine.forget()
    assert engine.generate(longer, 24)[0] == warm[0]


def test_the_last_block_is_loaded_with_the_others(engine: InProcessEngine, store: DaemonStore) -> None:
    truth, _ = engine.generate(prompt(1, TOKENS), 24)
    engine.forget()
    store.settle()
    assert engine.generate(prompt(1, TOKENS), 24) == (truth, TOKENS - 1)
    engine.drain()
    assert engine.counted["load_blocks"] == TOKENS // BLOCK
    assert store.lease_count() == 0
    # What was loaded is the engine's own cache now.
    assert engine.generate(prompt(1, TOKENS), 24) == (truth, TOKENS - 1)
    engine.drain()
    assert engine.counted["load_blocks"] == TOKENS // BLOCK
    engine.forget()
    store.corrupt()
    wrong, cached = engine.generate(prompt(1, TOKENS), 24)
    assert cached == TOKENS - 1 and wrong != truth
    assert engine.errors() == 0


def test_a_request_that_loads_alone_computes_its_last_block(
    start: Engines, store: DaemonStore, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines with CUDA graphs do for long loads; engines on CPUs have no graphs, so the length is given here."""
    monkeypatch.setattr(assemble, "overlapped_tokens", lambda *_: TOKENS - 1)
    store.drop_all()
    engine = start(model)
    truth, _ = engine.generate(prompt(1, TOKENS), 24)
    shorter, _ = engine.generate(prompt(2, TOKENS - BLOCK), 24)
    for _ in range(2):
        engine.forget()
        store.settle()
        assert engine.generate(prompt(1, TOKENS), 24) == (truth, TOKENS - BLOCK)
        engine.drain()
    assert engine.generate(prompt(2, TOKENS - BLOCK), 24) == (shorter, TOKENS - BLOCK - 1)
    engine.drain()
    engine.forget()
    names = [engine.add(prompt(1, TOKENS), 24), engine.add(prompt(2, TOKENS - BLOCK), 24)]
    outputs = engine.run()
    assert [list(outputs[name].outputs[0].token_ids) for name in names] == [truth, shorter]
    assert [outputs[name].num_cached_tokens for name in names] == [TOKENS - 1, TOKENS - BLOCK - 1], (
        "neither is alone"
    )
    engine.drain()
    assert store.lease_count() == 0 and engine.books()[1] == 0 and engine.errors() == 0


def test_samples_of_one_prompt_and_others_beside_them_are_answered_as_alone(
    engine: InProcessEngine, store: DaemonStore
) -> None:
    prompts = [prompt(1, TOKENS), prompt(1, TOKENS), prompt(2, 5 * BLOCK), prompt(1, TOKENS)]
    truth = [engine.generate(each, 12)[0] for each in prompts]
    for is_loaded in (False, True):
        if is_loaded:
            engine.forget()
            store.settle()
        names = [engine.add(each, 12) for each in prompts]
        outputs = engine.run()
        assert [list(outputs[name].outputs[0].token_ids) for name in names] == truth
    assert engine.errors() == 0


def test_a_prompt_whose_own_probabilities_are_asked_for_is_computed(engine: InProcessEngine) -> None:
    from vllm import SamplingParams

    truth, _ = engine.generate(prompt(1, TOKENS), 8)
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
    engine.llm.llm_engine.add_request("scored", {"prompt_token_ids": prompt(1, TOKENS)}, parameters)
    output = engine.run()["scored"]
    assert list(output.outputs[0].token_ids) == truth
    assert len(output.prompt_logprobs) == TOKENS
    assert engine.counted["copied_last_blocks"] == 0


def test_aborts_and_resets_leave_nothing_pinned(engine: InProcessEngine) -> None:
    truth, _ = engine.generate(prompt(1, TOKENS), 8)
    engine.drain()
    for steps in range(4):
        name = engine.add(prompt(1, TOKENS), 8)
        for _ in range(steps):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request([name])
        engine.run()
    engine.forget()
    assert engine.generate(prompt(1, TOKENS), 8)[0] == truth
    engine.drain()
    assert engine.books()[1] == 0


@pytest.mark.parametrize("how", ["sleep", "pause abort", "pause keep", "reset"])
def test_vllm_sleeps_pauses_and_resets_while_a_block_is_copied(engine: InProcessEngine, how: str) -> None:
    (copies,) = (kind for kind in engine.connector._scheduler.kinds if isinstance(kind, CopyBlocks))
    truth, _ = engine.generate(prompt(1, TOKENS), 8)
    for _ in range(3):
        engine.drain()
        name = engine.add(prompt(1, TOKENS), 8)
        while not any(copies.pinned()):
            assert engine.llm.llm_engine.has_unfinished_requests(), "nothing was copied"
            engine.llm.llm_engine.step()
        interrupt(engine, how, [name])
        outputs = engine.run()
        if how in ("pause keep", "reset"):
            assert list(outputs[name].outputs[0].token_ids) == truth
        assert engine.generate(prompt(1, TOKENS), 8)[0] == truth
    engine.drain()
    assert engine.books()[1] == 0
    assert engine.errors() == 0


def test_new_weights_copy_and_load_blocks_of_their_own(
    start: Engines, store: DaemonStore, model: Path
) -> None:
    store.drop_all()
    engine = start(model)
    former: list[int] = []
    for factor in (1.0, 1.5):
        retrain(engine, factor)
        truth, cached = engine.generate(prompt(1, TOKENS), 24)
        assert cached == 0 and truth != former
        engine.drain()
        assert engine.generate(prompt(1, TOKENS), 24) == (truth, TOKENS - 1), "copied"
        engine.forget()
        store.settle()
        assert engine.generate(prompt(1, TOKENS), 24) == (truth, TOKENS - 1), "loaded"
        former = truth
    assert engine.counted["copied_last_blocks"] == 2
    assert engine.errors() == 0


def test_a_full_engine_goes_on(start: Engines, store: DaemonStore, model: Path) -> None:
    """The cached block may be among the few that an engine has left. Running requests are preempted and come back."""
    store.drop_all()
    blocks = 2 * TOKENS // BLOCK + 6
    engine = start(model, blocks=blocks, max_model_len=blocks * BLOCK // 2)
    prompts = [prompt(seed, TOKENS) for seed in (1, 2, 3)]
    truth = [engine.generate(each, 2 * BLOCK)[0] for each in prompts]
    for _ in range(3):
        names = [engine.add(each, 2 * BLOCK) for each in prompts]
        outputs = engine.run()
        assert [list(outputs[name].outputs[0].token_ids) for name in names] == truth
    engine.drain()
    assert engine.books()[1] == 0
    assert engine.errors() == 0


def test_chunks_of_a_prompt_read_the_same(start: Engines, store: DaemonStore, model: Path) -> None:
    store.drop_all()
    engine = start(model, max_num_batched_tokens=2 * BLOCK, enable_chunked_prefill=True, max_num_seqs=2)
    truth, _ = engine.generate(prompt(1, TOKENS), 12)
    engine.drain()
    assert engine.generate(prompt(1, TOKENS), 12) == (truth, TOKENS - 1)
    engine.forget()
    store.settle()
    assert engine.generate(prompt(1, TOKENS), 12) == (truth, TOKENS - 1)


def test_without_prefix_caching_the_last_block_is_computed(
    start: Engines, store: DaemonStore, model: Path
) -> None:
    store.drop_all()
    engine = start(model, enable_prefix_caching=False)
    truth, _ = engine.generate(prompt(1, TOKENS), 8)
    engine.drain()
    store.settle()
    assert engine.generate(prompt(1, TOKENS), 8) == (truth, TOKENS - BLOCK)
    assert engine.errors() == 0
