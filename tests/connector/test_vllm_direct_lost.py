"""The engine that goes on with a prompt dies amid a hand-off, or either one preempts a request of one. Both engines are
processes of their own, with small pools. Part of `make gate`."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from busy import stretched
from direct_pair import DIRECT, both_params, wait_until
from engine import BLOCK, prompt
from prefill_engine import PrefillEngine

pytestmark = pytest.mark.soak
LEASE_SECONDS = 5
TOKENS = 470
ALL = TOKENS - 1
WHOLE = TOKENS // BLOCK
P_BLOCKS = 30
"""One of them is vLLM's null block."""
D_BLOCKS = 61
LONG = 760
LONG_BLOCKS = 24
"""Two such prompts leave twelve blocks: six for a landing, two for each of them, and two."""
SHORT = 190
SHORT_BLOCKS = 6
"""As many as may land at once."""


@pytest.fixture(scope="module")
def p(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(
        model, nobody, {**DIRECT, "kvlane.max_pinned_share": 0.9}, blocks=P_BLOCKS, max_model_len=512
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def d(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(model, nobody, DIRECT, blocks=D_BLOCKS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def roomy(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    """An engine in whose pool all of a long prompt may land, to be killed or not."""
    engine = PrefillEngine(model, nobody, DIRECT)
    yield engine
    engine.close()


def counted(engine: PrefillEngine) -> Counter[str]:
    return Counter(engine.ask("counted"))


def begin(p: PrefillEngine, d: PrefillEngine, asked: list[int]) -> str:
    """A hand-off of which three blocks have landed; its name at D."""
    for_p, for_d = both_params(p)
    name = d.ask("add", asked, 24, for_d)
    p.ask("prefill", asked, for_p)
    assert p.ask("step")
    wait_until("the first blocks land", lambda: d.ask("landed_blocks") >= 3, lambda: d.ask("step"))
    return name


def until_free(p: PrefillEngine, start: tuple[int, int]) -> float:
    """Seconds until nobody holds P's blocks any more."""
    began = time.monotonic()
    wait_until("P's blocks are free", lambda: p.ask("books") == start, p.run_a_step)
    return time.monotonic() - began


def test_a_prompt_that_p_preempts_amid_its_leg_lands_as_a_whole(
    p: PrefillEngine, roomy: PrefillEngine
) -> None:
    """Both requests fit when the second one begins. Then the first one takes a block more."""
    other, asked = prompt(1, 446), prompt(2, TOKENS)
    truths = [p.ask("generate", each, 40) for each in (other, asked)]
    start, before = p.ask("books"), counted(roomy)
    running = p.ask("add", other, 40)
    wait_until("the other request runs", lambda: p.ask("books")[1] >= 14, lambda: p.ask("step"))
    for_p, for_d = both_params(p)
    name = roomy.ask("add", asked, 40, for_d)
    p.ask("prefill", asked, for_p)
    preempted = p.ask("preemptions")
    roomy.ask("step")
    answers = p.ask("answers")
    assert p.ask("preemptions") > preempted, "it had room for both"
    assert answers[running][0] == truths[0]
    assert roomy.ask("answers")[name] == (truths[1], ALL)
    grown = counted(roomy) - before
    assert (grown["direct_landed"], grown["direct_fallbacks"]) == (1, 0)
    p.run_a_step()
    assert p.ask("books") == start
    assert p.ask("errors") == roomy.ask("errors") == 0


def test_a_running_request_of_d_gets_the_blocks_in_which_a_prompt_lands(
    p: PrefillEngine, d: PrefillEngine
) -> None:
    """Two requests grow until no block is left, while three blocks of a prompt have landed."""
    long, asked = [prompt(seed, LONG) for seed in (5, 6)], prompt(7, SHORT)
    truths = [d.ask("generate", each, 130) for each in long] + [d.ask("generate", asked, 24)]
    start, before = d.ask("books"), counted(d)
    names = [d.ask("add", each, 130) for each in long]
    wait_until("both are computed", lambda: d.ask("books")[1] >= 2 * LONG_BLOCKS, lambda: d.ask("step"))
    for_p, for_d = both_params(p)
    names.append(d.ask("add", asked, 24, for_d))
    p.ask("prefill", asked, for_p)
    assert p.ask("step")
    # One step gives it room. Further ones would let the running requests take the blocks before something lands.
    d.ask("step")
    wait_until("something lands", lambda: d.ask("landed_blocks") >= 2, lambda: None)
    answers = d.ask("answers")
    assert [answers[name][0] for name in names] == truths
    grown = counted(d) - before
    assert (grown["direct_landings"], grown["direct_landed"], grown["direct_fallbacks"]) == (1, 0, 1)
    p.ask("finish")
    d.run_a_step()
    assert d.ask("books") == start
    assert d.ask("errors") == 0


def test_a_prompt_that_has_landed_is_preempted_and_computed_again(p: PrefillEngine, d: PrefillEngine) -> None:
    long, asked = [prompt(seed, LONG) for seed in (8, 9)], prompt(10, SHORT)
    truths = [d.ask("generate", each, 150) for each in long] + [d.ask("generate", asked, 120)]
    start, before, preempted = d.ask("books"), counted(d), d.ask("preemptions")
    names = [d.ask("add", each, 150) for each in long]
    wait_until("both are computed", lambda: d.ask("books")[1] >= 2 * LONG_BLOCKS, lambda: d.ask("step"))
    for_p, for_d = both_params(p)
    names.append(d.ask("add", asked, 120, for_d))
    p.ask("prefill", asked, for_p)
    p.ask("finish")
    answers = d.ask("answers")
    assert [answers[name][0] for name in names] == truths
    assert answers[names[2]][1] == SHORT - 1
    grown = counted(d) - before
    assert (grown["direct_landed"], grown["direct_fallbacks"]) == (1, 0)
    assert d.ask("preemptions") > preempted
    d.run_a_step()
    assert d.ask("books") == start
    assert d.ask("errors") == 0


def test_when_d_is_stopped_amid_its_reads_ps_blocks_are_free_after_the_lease_and_d_goes_on_later(
    p: PrefillEngine, roomy: PrefillEngine
) -> None:
    asked, other = prompt(11, TOKENS), prompt(12, TOKENS)
    truth, others = (p.ask("generate", each, 24) for each in (asked, other))
    start, before = p.ask("books"), counted(roomy)
    name = begin(p, roomy, asked)
    roomy.signal(signal.SIGSTOP)
    try:
        p.ask("finish")
        seconds = until_free(p, start)
        assert LEASE_SECONDS / 2 < seconds < stretched(3 * LEASE_SECONDS)
        # Other bytes are in P's blocks now.
        assert p.ask("generate", other, 24) == others
    finally:
        roomy.signal(signal.SIGCONT)
    got, cached = roomy.ask("answers")[name]
    assert got == truth and 3 * BLOCK <= cached < WHOLE * BLOCK
    assert (counted(roomy) - before)["direct_fallbacks"] == 1
    assert p.ask("errors") == roomy.ask("errors") == 0


# Last: it ends the engine in whose pool there is room.
def test_when_d_is_killed_amid_its_reads_p_goes_on_and_its_blocks_are_free(
    p: PrefillEngine, roomy: PrefillEngine
) -> None:
    asked = prompt(3, TOKENS)
    truth = p.ask("generate", asked, 24)
    start = p.ask("books")
    begin(p, roomy, asked)
    # D reads the blocks of P's next step as they come.
    assert p.ask("step")
    roomy.kill()
    p.ask("finish")
    assert until_free(p, start) < stretched(3 * LEASE_SECONDS)
    assert p.ask("generate", asked, 24) == truth
    assert p.ask("errors") == 0
