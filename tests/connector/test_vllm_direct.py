"""A prompt's KV blocks go directly from one real engine into the own cache of another one.

P, which computes prompts, is a process of its own; D, which goes on with them, lives here and is stepped by the test.
Answers are compared with those of P alone.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, InProcessEngine, prompt
from prefill_engine import PrefillEngine

pytestmark = pytest.mark.old_vllm
DIRECT = {"kvlane.direct": "on"}
TOKENS = 470
ALL = TOKENS - 1
"""vLLM computes one token of each prompt."""
WHOLE = TOKENS // BLOCK * BLOCK
STEPS_SECONDS = 60


@pytest.fixture(scope="module")
def nobody(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where no daemon listens: direct hand-offs need none."""
    return f"unix:{tmp_path_factory.mktemp('nobody')}/kvlane.sock"


@pytest.fixture(scope="module")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engines find each other in a folder of this test's own."""
    folder = tmp_path_factory.mktemp("runtime")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield


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


def both_params(p: PrefillEngine) -> tuple[dict[str, object], dict[str, object]]:
    """For P's request and for D's, which are sent at once."""
    handoff = secrets.token_hex(16)
    prefill = {"do_remote_decode": True, "kvlane": {"handoff": handoff}}
    return prefill, {"kvlane": {"handoff": handoff, "peer": p.address}}


def step_until(d: InProcessEngine, what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STEPS_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        d.llm.llm_engine.step()


def land_kind(d: InProcessEngine) -> Any:
    (kind,) = (kind for kind in d.connector._scheduler.kinds if kind.name == "land")
    return kind


def landed_blocks(d: InProcessEngine) -> int:
    """Of all landings that go on."""
    kind, agent = land_kind(d), d.connector._scheduler.direct.agent
    standings = [agent.standing(handoff) for handoff in kind._landings]
    return sum(standing[2] for standing in standings if standing is not None)


def answer(d: InProcessEngine, name: str) -> tuple[list[int], int]:
    output = d.run()[name]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


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
    # P hears of it at its next request.
    p.ask("generate", prompt(98, 40), 1)
    assert p.ask("books") == start
    assert p.ask("errors") == 0


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


def test_p_may_be_asked_first_and_its_answer_given_to_d(p: PrefillEngine, d: InProcessEngine) -> None:
    truth = p.ask("generate", prompt(2, TOKENS), 24)
    p.ask("prefill", prompt(2, TOKENS), {"do_remote_decode": True, "do_remote_prefill": False})
    params = p.ask("finish")
    assert params["kvlane"]["peer"] == p.address
    got, cached = answer(d, d.add(prompt(2, TOKENS), 24, params))
    assert (got, cached) == (truth, ALL)


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

    direct = get_kv_transfer_group()._worker._shared.direct  # pyright: ignore
    copy = direct.copy_block

    def flip(source: int, target: int) -> None:
        copy(source, target)
        for layer in get_kv_transfer_group()._kv_caches.values():  # pyright: ignore
            layer[target] += 10

    monkeypatch.setattr(direct, "copy_block", flip)
    got, cached = answer(d, d.add(prompt(10, TOKENS), 24, p.ask("finish")))
    assert cached == ALL
    assert got != truth


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
        p.ask("generate", prompt(98, 40), 1)


# Last: it ends P.
def test_when_p_is_killed_half_way_what_has_landed_is_used(p: PrefillEngine, d: InProcessEngine) -> None:
    truth = p.ask("generate", prompt(9, TOKENS), 24)
    for_p, for_d = both_params(p)
    name = d.add(prompt(9, TOKENS), 24, for_d)
    p.ask("prefill", prompt(9, TOKENS), for_p)
    assert p.ask("step") and p.ask("step")
    step_until(d, "two steps land", lambda: landed_blocks(d) >= 6)
    p.kill()
    got, cached = answer(d, name)
    assert (got, cached) == (truth, 6 * BLOCK)
