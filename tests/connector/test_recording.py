"""While somebody records, the scheduler reports each request's end: lengths, its leg, and which blocks were saved."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import BLOCK, Engine, Request, full_group, window_group

from kvlane.connector.groups import CacheGroup
from kvlane.connector.recording import recorded_group
from kvlane.testing import FakeCore

PROMPT = list(range(100, 122))  # 5 full blocks and 2 tokens


def recorded(engine: Engine) -> Any:
    core: Any = engine.scheduler._core
    core.is_recorded = True
    return core


def serve(engine: Engine, name: str, prompt: list[int], answer: int = 0, transfer: object = None) -> Request:
    request = Request(name, prompt, transfer=transfer)
    prompt_tokens = len(prompt)
    engine.run(request)
    for token in range(answer):
        request.all_token_ids.append(1000 + token)
        engine.allocate(request, request.num_tokens)
        engine.compute(request, 1)
    request.num_prompt_tokens = prompt_tokens
    engine.finish(request)
    return request


def test_an_end_names_the_request_its_lengths_and_the_blocks_of_its_answer() -> None:
    engine = Engine(FakeCore())
    core = recorded(engine)
    request = serve(engine, "r", PROMPT, answer=7)
    assert core.ended == [], "one message a step"
    engine.now += 2.5
    engine.scheduler.take_events()
    ((number, lengths, age_ms, leg, first, hashes),) = core.ended
    assert number == core.numbers["r"] == 1
    assert (lengths, leg) == ((22, 7, 0), "")
    assert age_ms == 0, "the time until the request's end, not until the message"
    # 29 tokens are 7 blocks, and the last token was never an input.
    assert first == 5 and hashes == request.block_hashes[5:7]


def test_ends_go_out_once_and_only_while_somebody_records() -> None:
    engine = Engine(FakeCore())
    core = recorded(engine)
    for name in ("a", "b"):
        serve(engine, name, PROMPT)
    assert engine.scheduler.has_pending_work()
    engine.step()
    assert [end[0] for end in core.ended] == [1, 2]
    assert not engine.scheduler.has_pending_work()
    core.is_recorded = False
    serve(engine, "c", PROMPT)
    engine.step()
    core.is_recorded = True
    serve(engine, "d", PROMPT)
    engine.step()
    assert [end[0] for end in core.ended] == [1, 2, 4]


def test_a_request_that_was_never_looked_up_has_only_lengths() -> None:
    engine = Engine(FakeCore())
    core = recorded(engine)
    serve(engine, "short", PROMPT[: BLOCK - 1], answer=3)
    engine.step()
    ((_, lengths, _, _, first, hashes),) = core.ended
    assert (lengths, first, hashes) == ((BLOCK - 1, 3, 0), 0, [])
    assert "short" not in core.numbers


def test_a_lookup_after_a_preemption_is_left_out_of_recordings() -> None:
    """It finds what the request has saved itself, and would count as hits of the daemon."""
    engine = Engine(FakeCore())
    core = recorded(engine)
    request = Request("r", PROMPT)
    engine.run(request)
    assert core.again == {"r": False}
    engine.step()
    # vLLM has taken its blocks, and asks again.
    request.all_token_ids += [7] * 2 * BLOCK
    engine.scheduler.matched_tokens(request, 0)
    assert core.again == {"r": True}


@pytest.mark.parametrize("call", ["requests_ended", "is_recorded"])
def test_a_recording_that_fails_keeps_nothing_else_from_being_done(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(FakeCore())
    core = recorded(engine)

    def broken(*_: object) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(
        type(core), call, property(broken) if call == "is_recorded" else broken, raising=False
    )
    if call == "is_recorded":
        del core.__dict__["is_recorded"]
    serve(engine, "r", PROMPT)
    engine.step()
    assert engine.scheduler.requests == {} and engine.failures.count > 0


@pytest.mark.parametrize(
    ("transfer", "leg"),
    [
        (None, ""),
        ({"do_remote_decode": True, "do_remote_prefill": False}, "prefill"),
        ({"kvlane": {"direct": {}}}, "decode"),
        ("nonsense", ""),
    ],
)
def test_the_legs_of_a_pair_are_told_apart(transfer: object, leg: str) -> None:
    engine = Engine(FakeCore())
    core = recorded(engine)
    serve(engine, "r", PROMPT, transfer=transfer)
    engine.step()
    assert [end[3] for end in core.ended] == [leg]


def test_a_save_that_fails_does_not_change_what_was_begun() -> None:
    store = FakeCore()
    engine = Engine(store)
    core = recorded(engine)
    store.fail_saves = True
    serve(engine, "r", PROMPT, answer=7)
    engine.step()
    assert core.ended[0][4] == 5


@pytest.mark.parametrize(
    ("groups", "index"),
    [
        ([full_group()], 0),
        ([window_group(0, 2), full_group(1)], 1),
        ([window_group(0, 2), window_group(1, 1)], 0),
    ],
)
def test_the_group_that_is_recorded_has_the_whole_prefix(groups: list[CacheGroup], index: int) -> None:
    found = recorded_group(groups)
    assert found is not None and found.index == index
    engine = Engine(FakeCore(), groups)
    core = recorded(engine)
    serve(engine, "r", PROMPT, answer=7)
    engine.step()
    assert core.ended[0][4] == 5 and len(core.ended[0][5]) == 2


def test_without_groups_nothing_is_recorded() -> None:
    assert recorded_group([]) is None
