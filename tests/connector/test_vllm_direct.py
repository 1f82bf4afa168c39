"""A prompt's KV blocks go directly from one real engine into the own cache of another one.

P, which computes prompts, is a process of its own; D, which goes on with them, lives here and is stepped by the test.
Answers are compared with those of P alone.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from direct_pair import (
    DIRECT,
    STEPS_SECONDS,
    answer,
    both_params,
    interrupt,
    land_kind,
    landed_blocks,
    step_until,
    two_samples,
)
from engine import BLOCK, InProcessEngine, prompt
from prefill_engine import STORE, PrefillEngine
from trainer import retrain, retrain_amid_requests

pytestmark = pytest.mark.old_vllm_soak
TOKENS = 470
ALL = TOKENS - 1
"""vLLM computes one token of each prompt."""
WHOLE = TOKENS // BLOCK * BLOCK


@pytest.fixture(scope="module")
def p(model: Path, nobody: str, runtime_folder: None) -> Iterator[PrefillEngine]:
    engine = PrefillEngine(model, nobody, DIRECT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def d(model: Path, nobody: str, runtime_folder: None) -> Iterator[InProcessEngine]:
    engine = InProcessEngine(model, nobody, extra=DIRECT)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def books_stay_even(d: InProcessEngine, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever happens, every block's reference comes back at the latest with the next request."""
    assert d.llm.reset_prefix_cache()
    before = d.books()
    yield
    d.generate(prompt(99, 40), 1)
    assert d.books() == before
    assert d.errors() == 0


@pytest.mark.old_vllm
def test_a_prompt_that_both_engines_get_at_once_lands_while_it_is_computed(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    truth = p.ask("generate", prompt(1, TOKENS), 24)
    start = p.ask("books")
    for_p, for_d = both_params(p)
    landed = d.counted["direct_landed_tokens"]
    name = d.add(prompt(1, TOKENS), 24, for_d)
    p.ask("prefill", prompt(1, TOKENS), for_p)
    seen = []
    goes_on = True
    while goes_on:
        goes_on = p.ask("step")
        offered = p.ask("counted").get("direct_offered_blocks", 0)
        if goes_on:
            step_until(d, "what P has computed lands", lambda: landed_blocks(d) > len(seen) * 2)
            seen.append(landed_blocks(d))
    got, cached = answer(d, name)
    assert (got, cached) == (truth, ALL)
    assert len(set(got)) > 10, "an answer that hardly depends on its prompt proves nothing"
    assert d.counted["direct_landed_tokens"] - landed == TOKENS
    assert offered >= WHOLE // BLOCK
    assert len(seen) >= 3 and seen == sorted(seen) and seen[0] < WHOLE // BLOCK, "it landed in parts"
    p.run_a_step()
    assert p.ask("books") == start
    assert p.ask("errors") == 0


@pytest.mark.soak
def test_with_get_a_prompt_lands_once_all_of_it_is_computed(
    model: Path, nobody: str, runtime_folder: None, d: InProcessEngine
) -> None:
    p = PrefillEngine(model, nobody, {**DIRECT, "send_type": "GET", "kv_buffer_size": "1e9"})
    try:
        truth = p.ask("generate", prompt(20, TOKENS), 24)
        start = p.ask("books")
        for_p, for_d = both_params(p)
        name = d.add(prompt(20, TOKENS), 24, for_d)
        p.ask("prefill", prompt(20, TOKENS), for_p)
        steps = 1
        while p.ask("step"):
            assert p.ask("counted").get("direct_offered_blocks", 0) == 0
            step_until(d, "D asks for it", lambda: bool(land_kind(d)._landings))
            assert landed_blocks(d) == 0
            steps += 1
        assert steps >= 3 and p.ask("counted")["direct_offered_blocks"] == WHOLE // BLOCK + 1
        assert answer(d, name) == (truth, ALL)
        # P hears of it at its next request.
        p.ask("generate", prompt(98, 40), 1)
        assert p.ask("books") == start and p.ask("errors") == 0
    finally:
        p.close()


@pytest.mark.soak
def test_a_prompt_that_does_not_fit_what_may_be_pinned_with_get_is_computed(
    model: Path, nobody: str, runtime_folder: None, d: InProcessEngine
) -> None:
    p = PrefillEngine(model, nobody, {**DIRECT, "send_type": "GET", "kv_buffer_size": "1e1"})
    try:
        truth = p.ask("generate", prompt(21, TOKENS), 24)
        for_p, for_d = both_params(p)
        name = d.add(prompt(21, TOKENS), 24, for_d)
        p.ask("prefill", prompt(21, TOKENS), for_p)
        p.ask("finish")
        assert answer(d, name) == (truth, 0)
        assert p.ask("counted").get("direct_not_offered") == 1 and p.ask("errors") == 0
    finally:
        p.close()


@pytest.mark.old_vllm
def test_p_may_be_asked_first_and_its_answer_given_to_d(p: PrefillEngine, d: InProcessEngine) -> None:
    truth = p.ask("generate", prompt(2, TOKENS), 24)
    p.ask("prefill", prompt(2, TOKENS), {"do_remote_decode": True, "do_remote_prefill": False})
    params = p.ask("finish")
    assert params["kvlane"]["peer"] == p.address
    got, cached = answer(d, d.add(prompt(2, TOKENS), 24, params))
    assert (got, cached) == (truth, ALL)


@pytest.mark.old_vllm
def test_one_landed_byte_that_is_flipped_changes_the_answer(
    p: PrefillEngine, d: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = p.ask("generate", prompt(3, TOKENS), 24)
    p.ask("prefill", prompt(3, TOKENS), {"do_remote_decode": True})
    params = p.ask("finish")
    kind = land_kind(d)
    cache = kind._cache

    def flip(landed: Any, count: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layers: dict[str, Any] = get_kv_transfer_group()._kv_caches  # pyright: ignore
        first = next(iter(layers.values()))
        values = first[landed.taken[0].block_id]
        values.view(-1)[:8] += 100
        cache(landed, count)

    monkeypatch.setattr(kind, "_cache", flip)
    got, cached = answer(d, d.add(prompt(3, TOKENS), 24, params))
    assert cached == ALL
    assert got != truth


@pytest.mark.parametrize("tokens", [480, 65, 95, 96, 129])
def test_one_token_is_computed_whatever_the_prompts_length(
    p: PrefillEngine, d: InProcessEngine, tokens: int
) -> None:
    truth = p.ask("generate", prompt(tokens, tokens), 12)
    p.ask("prefill", prompt(tokens, tokens), {"do_remote_decode": True})
    got, cached = answer(d, d.add(prompt(tokens, tokens), 12, p.ask("finish")))
    assert (got, cached) == (truth, tokens - 1)


def test_a_byte_flipped_in_the_last_block_changes_the_answer(
    p: PrefillEngine, d: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = p.ask("generate", prompt(10, TOKENS), 24)
    p.ask("prefill", prompt(10, TOKENS), {"do_remote_decode": True})
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copies = get_kv_transfer_group()._worker._copies  # pyright: ignore
    copy = copies._copy

    def flip(source: int, target: int) -> None:
        copy(source, target)
        for layer in get_kv_transfer_group()._kv_caches.values():  # pyright: ignore
            layer[target] += 10

    monkeypatch.setattr(copies, "_copy", flip)
    got, cached = answer(d, d.add(prompt(10, TOKENS), 24, p.ask("finish")))
    assert cached == ALL
    assert got != truth


@pytest.mark.old_vllm
def test_other_requests_go_on_while_one_waits_and_an_abort_leaves_what_has_landed(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    for_p, for_d = both_params(p)
    p.ask("prefill", prompt(4, TOKENS), for_p)
    name = d.add(prompt(4, TOKENS), 8, for_d)
    assert p.ask("step")
    step_until(d, "the first blocks land", lambda: landed_blocks(d) >= 3)
    other, cached = d.add(prompt(5, 40), 8), 0
    outputs: dict[str, Any] = {}
    while other not in outputs:
        outputs |= {each.request_id: each for each in d.llm.llm_engine.step() if each.finished}
    d.llm.llm_engine.abort_request([name])
    d.llm.llm_engine.step()
    for handoff in land_kind(d)._landings:
        assert d.connector._scheduler.direct.agent.wait_over(handoff, 10_000)
    # An idle engine makes no step: the next request takes note of it.
    again, cached = d.generate(prompt(4, TOKENS), 8)
    p.ask("finish")
    assert again == p.ask("generate", prompt(4, TOKENS), 8)
    assert 3 * BLOCK <= cached < WHOLE


@pytest.mark.old_vllm
def test_a_reset_of_either_engine_succeeds_at_the_first_call_and_answers_stay_right(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    truth = p.ask("generate", prompt(6, TOKENS), 24)
    # P has computed it all, and nobody has asked for it.
    p.ask("prefill", prompt(6, TOKENS), {"do_remote_decode": True})
    p.ask("finish")
    assert p.ask("reset")
    for_p, for_d = both_params(p)
    p.ask("prefill", prompt(6, TOKENS), for_p)
    name = d.add(prompt(6, TOKENS), 24, for_d)
    assert p.ask("step")
    step_until(d, "the first blocks land", lambda: landed_blocks(d) >= 3)
    assert d.llm.reset_prefix_cache()
    got, _ = answer(d, name)
    assert got == truth
    p.ask("finish")


def test_samples_of_one_prompt_share_what_lands(p: PrefillEngine, d: InProcessEngine) -> None:
    """The second one has the first one's id, and was computed at once: nothing was left to land for the first."""
    truth = p.ask("generate", prompt(20, TOKENS), 24)
    before, cached = d.counted.copy(), d.metric("vllm:prompt_tokens_cached")
    for_p, for_d = both_params(p)
    name = two_samples(d, prompt(20, TOKENS), 24, for_d)
    p.ask("prefill", prompt(20, TOKENS), for_p)
    p.ask("finish")
    output = d.run()[name]
    assert [list(each.token_ids) for each in output.outputs] == [truth, truth]
    # The second computes what is behind its last whole block.
    assert d.metric("vllm:prompt_tokens_cached") - cached == ALL + WHOLE
    grown = d.counted - before
    assert (grown["direct_landed_tokens"], grown["direct_fallbacks"]) == (TOKENS, 0)


def test_prompts_in_flight_at_once_all_land(p: PrefillEngine, d: InProcessEngine) -> None:
    """Together they need more blocks than may be written at once: one waits for another one's room."""
    prompts = [prompt(seed, TOKENS) for seed in range(21, 25)]
    truths = [p.ask("generate", each, 12) for each in prompts]
    start, before = p.ask("books"), d.counted.copy()
    names = []
    for each in prompts:
        for_p, for_d = both_params(p)
        names.append(d.add(each, 12, for_d))
        p.ask("prefill", each, for_p)
    outputs: dict[str, Any] = {}
    while p.ask("step"):
        outputs |= {each.request_id: each for each in d.llm.llm_engine.step() if each.finished}
    outputs |= d.run()
    assert [list(outputs[name].outputs[0].token_ids) for name in names] == truths
    assert [outputs[name].num_cached_tokens for name in names] == [ALL] * len(prompts)
    assert (d.counted - before)["direct_landed"] == len(prompts)
    p.run_a_step()
    assert p.ask("books") == start


@pytest.mark.parametrize("first", [0, 1])
def test_where_a_batch_gets_one_prompts_params_only_that_prompt_may_land(
    p: PrefillEngine, d: InProcessEngine, first: int
) -> None:
    """As with a proxy that asks P for all prompts at once, and gives D its last answer's parameters for all of them."""
    prompts = [prompt(25, TOKENS), prompt(26, TOKENS)]
    truths = [p.ask("generate", each, 12) for each in prompts]
    for each in prompts:
        p.ask("prefill", each, {"do_remote_decode": True})
    params = p.ask("finish")
    before = d.counted.copy()
    names = [d.add(prompts[number], 12, params) for number in (first, 1 - first)]
    outputs = d.run()
    answers = [list(outputs[name].outputs[0].token_ids) for name in names]
    assert answers == [truths[first], truths[1 - first]]
    # The parameters are the second prompt's; D takes them for those of whichever comes first.
    assert [outputs[name].num_cached_tokens for name in names] == [ALL if first == 1 else 0, 0]
    assert (d.counted - before)["direct_fallbacks"] == (1 if first == 1 else 2)
    # P's other prompt is wanted by nobody.
    assert p.ask("reset")


def test_of_two_prompts_with_one_id_at_both_engines_one_lands(p: PrefillEngine, d: InProcessEngine) -> None:
    prompts = [prompt(27, TOKENS), prompt(28, TOKENS)]
    truths = [p.ask("generate", each, 12) for each in prompts]
    for_p, for_d = both_params(p)
    start, before = p.ask("books"), d.counted.copy()
    not_offered = p.ask("counted").get("direct_not_offered", 0)
    names = [d.add(each, 12, for_d) for each in prompts]
    for each in prompts:
        p.ask("prefill", each, for_p)
    p.ask("finish")
    outputs = d.run()
    assert [list(outputs[name].outputs[0].token_ids) for name in names] == truths
    assert [outputs[name].num_cached_tokens for name in names] == [ALL, 0]
    grown = d.counted - before
    assert (grown["direct_landed"], grown["direct_fallbacks"]) == (1, 1)
    assert p.ask("counted")["direct_not_offered"] == not_offered + 1
    p.run_a_step()
    assert p.ask("books") == start


def test_what_ds_daemon_has_of_a_prompt_is_loaded_while_p_hands_over_the_rest(
    p: PrefillEngine, model: Path, runtime_folder: None
) -> None:
    beginning = 5 * BLOCK
    other = PrefillEngine(model, f"fake:{STORE}", DIRECT)
    try:
        for seed in (50, 51):
            asked = prompt(seed, TOKENS)
            truth = p.ask("generate", asked, 24)
            # It stores whole blocks, and forgets its own cache.
            other.ask("generate", [*asked[:beginning], 5], 1)
            before = other.ask("counted")
            if seed == 51:
                # A control: wrong bytes have to change the answer.
                assert other.ask("corrupt_store") > 0
            for_p, for_d = both_params(p)
            name = other.ask("add", asked, 24, for_d)
            p.ask("prefill", asked, for_p)
            p.ask("finish")
            got, cached = other.ask("answers")[name]
            assert cached == ALL
            assert (got == truth) == (seed == 50)
            counted = other.ask("counted")
            names = ("direct_loaded_tokens", "direct_landed_tokens", "direct_fallbacks", "failed_loads")
            grown = [counted.get(each, 0) - before.get(each, 0) for each in names]
            assert grown == [beginning, TOKENS - beginning, 0, 0]
        other.run_a_step()
        assert other.ask("reset") and other.ask("errors") == 0
    finally:
        other.close()


TRAINED = 2.0
"""A power of two: its inverse brings the first weights back, bit for bit."""


@dataclass(frozen=True)
class Begun:
    """A hand-off of which three blocks have landed, and what one engine answers to its prompt."""

    name: str
    prompt: list[int]
    old: list[int]
    new: list[int]
    """With the trained weights."""


@pytest.fixture
def begin(p: PrefillEngine, d: InProcessEngine) -> Iterator[Callable[[int], Begun]]:
    """Begins one; whatever becomes of the engines' weights, they have their first ones afterwards."""

    def start(seed: int) -> Begun:
        asked = prompt(seed, TOKENS)
        old = p.ask("generate", asked, 24)
        p.ask("retrain", TRAINED)
        new = p.ask("generate", asked, 24)
        p.ask("retrain", 1 / TRAINED)
        assert p.ask("generate", asked, 24) == old and new != old
        for_p, for_d = both_params(p)
        name = d.add(asked, 24, for_d)
        p.ask("prefill", asked, for_p)
        assert p.ask("step")
        step_until(d, "the first blocks land", lambda: landed_blocks(d) >= 3)
        return Begun(name, asked, old, new)

    yield start
    # Both know what they have again, and hand over.
    d.generate(prompt(97, 40), 1)
    p.ask("generate", prompt(97, 40), 1)
    p.ask("prefill", prompt(96, TOKENS), {"do_remote_decode": True})
    _, cached = answer(d, d.add(prompt(96, TOKENS), 1, p.ask("finish")))
    assert cached == ALL


@pytest.mark.old_vllm
def test_what_has_landed_of_old_weights_is_not_used_when_d_gets_new_ones(
    p: PrefillEngine, d: InProcessEngine, begin: Callable[[int], Begun]
) -> None:
    begun = begin(30)
    retrain(d, TRAINED)
    try:
        p.ask("finish")
        assert answer(d, begun.name) == (begun.new, 0)
        # P has the old weights: D wants nothing of it.
        assert d.llm.reset_prefix_cache()
        fallbacks = d.counted["direct_fallbacks"]
        p.ask("prefill", begun.prompt, {"do_remote_decode": True})
        assert answer(d, d.add(begun.prompt, 24, p.ask("finish"))) == (begun.new, 0)
        assert d.counted["direct_fallbacks"] == fallbacks + 1
    finally:
        retrain(d, 1 / TRAINED)


def test_what_p_computes_with_new_weights_does_not_land_where_the_old_ones_are(
    p: PrefillEngine, d: InProcessEngine, begin: Callable[[int], Begun]
) -> None:
    begun = begin(31)
    fallbacks = d.counted["direct_fallbacks"]
    p.ask("retrain", TRAINED)
    p.ask("finish")
    # The landed blocks were computed with the old weights, which D still has.
    assert answer(d, begun.name) == (begun.old, 3 * BLOCK)
    assert d.counted["direct_fallbacks"] == fallbacks + 1
    p.ask("retrain", 1 / TRAINED)


def test_when_vllm_refuses_ps_reset_nothing_is_used_that_new_weights_may_have_computed(
    p: PrefillEngine, d: InProcessEngine, begin: Callable[[int], Begun]
) -> None:
    """P goes on with a prompt of which the old weights have computed the beginning."""
    begun = begin(32)
    fallbacks = d.counted["direct_fallbacks"]
    p.ask("retrain_amid_requests", TRAINED)
    p.ask("finish")
    got, cached = answer(d, begun.name)
    assert (got, cached) == (begun.old, 0)
    assert d.counted["direct_fallbacks"] == fallbacks + 1
    p.ask("retrain", 1 / TRAINED)


def test_when_vllm_refuses_ds_reset_nothing_is_used_that_old_weights_have_computed(
    p: PrefillEngine, d: InProcessEngine, begin: Callable[[int], Begun]
) -> None:
    begun = begin(33)
    fallbacks = d.counted["direct_fallbacks"]
    other = d.add(prompt(34, 40), 200)
    step_until(d, "another request runs", lambda: bool(d.scheduler.running))
    retrain_amid_requests(d, TRAINED)
    try:
        p.ask("finish")
        outputs = d.run()
        assert other in outputs
        assert list(outputs[begun.name].outputs[0].token_ids) == begun.new
        assert outputs[begun.name].num_cached_tokens == 0
        assert d.counted["direct_fallbacks"] == fallbacks + 1
    finally:
        retrain(d, 1 / TRAINED)


def test_engines_with_new_weights_of_one_name_hand_over(
    p: PrefillEngine, d: InProcessEngine, begin: Callable[[int], Begun]
) -> None:
    begun = begin(35)
    retrain(d, TRAINED, "step-1")
    p.ask("retrain", TRAINED, "step-1")
    try:
        p.ask("finish")
        assert answer(d, begun.name) == (begun.new, 0)
        assert d.llm.reset_prefix_cache()
        p.ask("prefill", begun.prompt, {"do_remote_decode": True})
        assert answer(d, d.add(begun.prompt, 24, p.ask("finish"))) == (begun.new, ALL)
    finally:
        retrain(d, 1 / TRAINED, "step-2")
        p.ask("retrain", 1 / TRAINED, "step-2")


@pytest.mark.parametrize("how", ["both at once", "one after the other"])
def test_the_first_prompt_after_new_weights_of_one_name_lands(
    p: PrefillEngine, d: InProcessEngine, how: str
) -> None:
    asked = prompt(f"first after new weights, {how}", TOKENS)
    retrain(d, TRAINED, f"{how}, new")
    p.ask("retrain", TRAINED, f"{how}, new")
    try:
        if how == "both at once":
            for_p, for_d = both_params(p)
            p.ask("prefill", asked, for_p)
            name = d.add(asked, 24, for_d)
            p.ask("finish")
        else:
            p.ask("prefill", asked, {"do_remote_decode": True})
            name = d.add(asked, 24, p.ask("finish"))
        assert answer(d, name) == (p.ask("generate", asked, 24), ALL)
    finally:
        retrain(d, 1 / TRAINED, f"{how}, old")
        p.ask("retrain", 1 / TRAINED, f"{how}, old")


# Sleep is a pause on CPUs, whose caches stay.
@pytest.mark.parametrize("how", ["sleep", "pause abort", "pause keep"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_either_engine_sleeps_or_pauses_amid_a_hand_off(
    p: PrefillEngine, d: InProcessEngine, who: str, how: str
) -> None:
    asked = prompt(f"{who} {how}", TOKENS)
    truth = p.ask("generate", asked, 24)
    start = p.ask("books")
    for_p, for_d = both_params(p)
    name = d.add(asked, 24, for_d)
    leg = p.ask("prefill", asked, for_p)
    assert p.ask("step")
    step_until(d, "the first blocks land", lambda: landed_blocks(d) >= 3)
    if who == "d":
        interrupt(d, how, [name])
    else:
        p.ask("interrupt", how, [leg])
    if who == "d" and how != "pause keep":
        assert not d.llm.llm_engine.has_unfinished_requests()
        name = d.add(asked, 24)
    assert answer(d, name) == (truth, 3 * BLOCK if who == "p" else 0)
    p.run_a_step()
    assert p.ask("books") == start
    # From then on they hand over again.
    assert d.llm.reset_prefix_cache()
    p.ask("prefill", asked, {"do_remote_decode": True})
    assert answer(d, d.add(asked, 24, p.ask("finish"))) == (truth, ALL)


def test_what_names_no_engine_is_computed_at_once(p: PrefillEngine, d: InProcessEngine) -> None:
    truth = p.ask("generate", prompt(7, TOKENS), 8)
    for peer in ("127.0.0.1:9", "10.1.2.3:80", "[::1]:70000", "nonsense", p.address + "0", ""):
        named = {"handoff": secrets.token_hex(16), "peer": peer}
        got, cached = answer(d, d.add(prompt(7, TOKENS), 8, {"kvlane": named}))
        assert (got, cached) == (truth, 0), peer
        assert d.llm.reset_prefix_cache()
    for nonsense in ({"handoff": ""}, {"handoff": 7, "peer": p.address}, 7, {"handoff": "0" * 32}):
        got, cached = answer(d, d.add(prompt(7, TOKENS), 8, {"kvlane": nonsense}))
        assert (got, cached) == (truth, 0), nonsense
        assert d.llm.reset_prefix_cache()


def test_a_prompt_that_p_never_gets_is_computed(p: PrefillEngine, d: InProcessEngine) -> None:
    truth = p.ask("generate", prompt(8, TOKENS), 8)
    _, for_d = both_params(p)
    got, cached = answer(d, d.add(prompt(8, TOKENS), 8, for_d))
    assert (got, cached) == (truth, 0)


def test_when_p_is_stopped_half_way_what_has_landed_is_used_and_p_goes_on_later(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    truth = p.ask("generate", prompt(11, TOKENS), 24)
    start = p.ask("books")
    for_p, for_d = both_params(p)
    name = d.add(prompt(11, TOKENS), 24, for_d)
    p.ask("prefill", prompt(11, TOKENS), for_p)
    assert p.ask("step") and p.ask("step")
    step_until(d, "two steps land", lambda: landed_blocks(d) >= 6)
    p.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        got, cached = answer(d, name)
        assert (got, cached) == (truth, 6 * BLOCK)
        assert time.monotonic() - began < 20, "not as long as a request without progress may wait"
    finally:
        p.signal(signal.SIGCONT)
    p.ask("finish")
    # Both find each other again, and P's blocks are free.
    p.ask("prefill", prompt(12, TOKENS), {"do_remote_decode": True})
    _, cached = answer(d, d.add(prompt(12, TOKENS), 1, p.ask("finish")))
    assert cached == ALL
    deadline = time.monotonic() + STEPS_SECONDS
    while p.ask("books") != start:
        assert time.monotonic() < deadline, "P's blocks are free"
        p.run_a_step()


# Last: it ends P.
def test_when_p_is_killed_with_four_fifths_landed_d_computes_the_rest(
    p: PrefillEngine, d: InProcessEngine
) -> None:
    truth = p.ask("generate", prompt(9, TOKENS), 24)
    for_p, for_d = both_params(p)
    name = d.add(prompt(9, TOKENS), 24, for_d)
    p.ask("prefill", prompt(9, TOKENS), for_p)
    for _ in range(4):
        assert p.ask("step")
    step_until(d, "four steps land", lambda: landed_blocks(d) >= 12)
    p.kill()
    got, cached = answer(d, name)
    assert (got, cached) == (truth, 12 * BLOCK)
    assert cached >= 0.8 * TOKENS
