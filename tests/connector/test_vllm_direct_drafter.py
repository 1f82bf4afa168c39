"""Engines with a drafter hand over whole blocks. Part of `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from direct_pair import DIRECT, answer, both_params
from engine import BLOCK, InProcessEngine, prompt
from prefill_engine import PrefillEngine

pytestmark = pytest.mark.soak
# Some tokens of an answer stand in its prompt, too: then this proposes those that follow there.
DRAFTER = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
}
TOKENS = 470
WHOLE = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def p(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(model, nobody, DIRECT, speculative_config=DRAFTER)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def without(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    """One that prefills and has no drafter."""
    engine = PrefillEngine(model, nobody, DIRECT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def d(model: Path, nobody: str, runtime_folder: None) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(model, nobody, extra=DIRECT, speculative_config=DRAFTER)
    yield engine
    engine.close()


def drafted(d: InProcessEngine) -> float:
    return d.metric("vllm:spec_decode_num_draft_tokens")


def test_whole_blocks_land_and_the_rest_is_computed(p: PrefillEngine, d: InProcessEngine) -> None:
    asked = prompt("drafted", TOKENS)
    truth = p.ask("generate", asked, 48)
    books, before = d.books(), drafted(d)
    for_p, for_d = both_params(p)
    p.ask("prefill", asked, for_p)
    name = d.add(asked, 48, for_d)
    p.ask("finish")
    assert answer(d, name) == (truth, WHOLE)
    assert d.books() == books
    assert drafted(d) > before


def test_a_prompt_of_an_engine_without_a_drafter_is_computed(
    without: PrefillEngine, d: InProcessEngine
) -> None:
    asked = prompt("no drafter", TOKENS)
    truth = without.ask("generate", asked, 24)
    for_p, for_d = both_params(without)
    without.ask("prefill", asked, for_p)
    fallbacks = d.counted["direct_fallbacks"]
    assert answer(d, d.add(asked, 24, for_d)) == (truth, 0)
    assert d.counted["direct_fallbacks"] == fallbacks + 1
    without.ask("finish")
