"""Prefill engines come and go while a decode engine serves: nobody has a list of them. Part of `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from direct_pair import DIRECT, both_params, landed_blocks, step_until
from engine import BLOCK, InProcessEngine, prompt
from prefill_engine import PrefillEngine

pytestmark = pytest.mark.soak
TOKENS = 470
ALL = TOKENS - 1
ANSWER = 12
_NUMBERS = itertools.count()


@pytest.fixture
def d(model: Path, nobody: str, runtime_folder: None) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(model, nobody, extra=DIRECT)
    yield engine
    engine.close()


def hand_over(p: PrefillEngine, d: InProcessEngine, count: int = 1) -> None:
    """New prompts, all in flight at once."""
    asked = [prompt(f"joining {next(_NUMBERS)}", TOKENS) for _ in range(count)]
    names = []
    for each in asked:
        for_p, for_d = both_params(p)
        p.ask("prefill", each, for_p)
        names.append(d.add(each, ANSWER, for_d))
    p.ask("finish")
    outputs = d.run()
    for each, name in zip(asked, names, strict=True):
        output = outputs[name]
        assert output.num_cached_tokens == ALL
        assert list(output.outputs[0].token_ids) == p.ask("generate", each, ANSWER)


def test_engines_join_and_leave_while_prompts_are_handed_over(
    model: Path, nobody: str, d: InProcessEngine
) -> None:
    books = d.books()
    first = PrefillEngine(model, nobody, DIRECT)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(PrefillEngine, model, nobody, DIRECT)
        handed_over = 0
        while not coming.done() or handed_over < 5:
            hand_over(first, d)
            handed_over += 1
        second = coming.result()
    try:
        for _ in range(3):
            hand_over(second, d, 2)
            hand_over(first, d, 2)
        # The first one leaves amid a prompt, while one of the second lands.
        lost, kept = prompt("left amid", TOKENS), prompt("stays", TOKENS)
        truths = [second.ask("generate", each, ANSWER) for each in (lost, kept)]
        second.ask("reset")
        for_first, for_d = both_params(first)
        first.ask("prefill", lost, for_first)
        names = [d.add(lost, ANSWER, for_d)]
        first.ask("step")
        step_until(d, "the first blocks land", lambda: landed_blocks(d) >= 3)
        first.kill()
        for_second, for_d = both_params(second)
        second.ask("prefill", kept, for_second)
        names.append(d.add(kept, ANSWER, for_d))
        second.ask("finish")
        outputs = d.run()
        assert [list(outputs[name].outputs[0].token_ids) for name in names] == truths
        cached = [outputs[name].num_cached_tokens for name in names]
        assert 3 * BLOCK <= cached[0] < ALL and cached[1] == ALL
        hand_over(second, d, 2)
    finally:
        second.close()
        first.close()
    # With its next request the engine takes note of what has ended.
    d.generate(prompt("the last", 40), 1)
    assert d.books() == books
    assert d.errors() == 0
