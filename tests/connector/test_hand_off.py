"""A prompt goes from a prefill engine to a decode engine through the store, and nothing of it is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import BLOCK, Engine, Request, full_group, window_group
from hypothesis import given
from hypothesis import strategies as st

from kvlane.connector.groups import CacheGroup
from kvlane.connector.hand_off import HandOff, NotAHandOff, asks_for_hand_off
from kvlane.testing import FakeCore

PROMPT = list(range(100, 122))  # 5 full blocks and 2 tokens
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
RUN, DAEMON = bytes(range(16)), bytes(range(16, 32))
GOOD = {"engine": "p", "run": RUN.hex(), "daemon": DAEMON.hex(), "tokens": 20}


def prefill(engine: Engine, tokens: list[int] | None = None, transfer: object = TO_PREFILL) -> Any:
    """A prefill leg; gives what its answer says."""
    request = Request("p", PROMPT if tokens is None else tokens, transfer=transfer)
    engine.run(request)
    # The one token that the leg asks for.
    request.all_token_ids.append(7)
    return engine.finish(request)


def counted(engine: Engine, name: str) -> float:
    """Of what was counted since the last question, which this one ends."""
    return (engine.scheduler.take_stats() or {}).get(name, 0)


@pytest.mark.parametrize("groups", [[full_group()], [full_group(), window_group(1, 2)]])
def test_a_decode_engine_waits_for_what_its_prefill_engine_saves(groups: list[CacheGroup]) -> None:
    """The prefill engine's answer is faster than its saves: the lookup used to find nothing, and the decode engine
    computed the whole prompt again."""
    store = FakeCore()
    first, second = Engine(store, groups, engine_id="p"), Engine(store, groups, engine_id="d")
    store.hold_saves = True
    handed_over = prefill(first)
    assert set(handed_over) == {"kvlane"}
    assert handed_over["kvlane"]["tokens"] == 20
    assert store.block_count() == 0

    request = Request("d", PROMPT, transfer=handed_over)
    second.scheduler.add_request(request)
    assert [second.scheduler.matched_tokens(request, 0) for _ in range(3)] == [(None, False)] * 3
    store.release_held()
    first.step()
    assert second.scheduler.matched_tokens(request, 0) == (20, True)
    assert counted(second, "awaited_hand_offs") == 1


def test_without_a_hand_off_a_lookup_waits_for_nobody() -> None:
    """The control of the test above."""
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d")
    store.hold_saves = True
    prefill(first)
    request = Request("d", PROMPT)
    second.scheduler.add_request(request)
    assert second.scheduler.matched_tokens(request, 0) == (0, False)


def test_a_save_that_fails_ends_the_wait_and_is_counted() -> None:
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d")
    store.hold_saves = True
    request = Request("d", PROMPT, transfer=prefill(first))
    second.scheduler.add_request(request)
    assert second.scheduler.matched_tokens(request, 0) == (None, False)
    store.fail_saves = True
    store.release_held()
    first.step()
    assert second.scheduler.matched_tokens(request, 0) == (0, False)
    stats = second.scheduler.take_stats() or {}
    assert (stats["awaited_hand_offs"], stats["short_hand_offs"]) == (1, 1)


def test_a_prefill_engine_that_dies_ends_the_wait() -> None:
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d")
    store.hold_saves = True
    request = Request("d", PROMPT, transfer=prefill(first))
    second.scheduler.add_request(request)
    assert second.scheduler.matched_tokens(request, 0) == (None, False)
    first.scheduler.close()
    assert second.scheduler.matched_tokens(request, 0) == (0, False)


def test_an_engine_that_restarted_is_not_waited_for() -> None:
    """It has the same id, and knows nothing of what the run before it said."""
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d")
    store.hold_saves = True
    handed_over = prefill(first)
    first.scheduler.close()
    again = Engine(store, engine_id="p")
    prefill(again, tokens=list(range(500, 530)))
    request = Request("d", PROMPT, transfer=handed_over)
    second.scheduler.add_request(request)
    assert second.scheduler.matched_tokens(request, 0) == (0, False)


def test_only_blocks_that_are_asked_to_be_saved_are_named() -> None:
    store = FakeCore()
    engine = Engine(store, engine_id="p", blocks=8, settings={"kvlane.max_pinned_share": 0.3})
    store.hold_saves = True
    # Two of eight blocks may be pinned.
    assert prefill(engine)["kvlane"]["tokens"] == 2 * BLOCK


def test_generated_tokens_are_not_part_of_what_is_named() -> None:
    """The decode engine has the prompt only: the block that the generated token fills is none of its."""
    engine = Engine(FakeCore(), engine_id="p")
    assert prefill(engine, tokens=list(range(100, 123)))["kvlane"]["tokens"] == 20
    assert prefill(engine, tokens=list(range(100, 124)))["kvlane"]["tokens"] == 24


def test_who_is_not_asked_to_hand_over_says_nothing() -> None:
    engine = Engine(FakeCore(), engine_id="p")
    assert prefill(engine, transfer=None) is None
    assert prefill(engine, transfer={"do_remote_decode": False}) is None
    assert counted(engine, "handed_over") == 0


def test_who_cannot_store_says_nothing_and_counts_it() -> None:
    store = FakeCore()
    engine = Engine(store, engine_id="p")
    store.down = True
    assert prefill(engine) is None
    stats = engine.scheduler.take_stats() or {}
    assert (stats["handed_over"], stats["not_handed_over"]) == (1, 1)


@pytest.mark.parametrize(
    "transfer",
    [
        {"kvlane": GOOD},
        {"kvlane": {**GOOD, "daemon": "x"}},
    ],
    ids=["another daemon", "nonsense"],
)
def test_a_hand_off_that_cannot_be_waited_for_is_said_once(
    transfer: object, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(FakeCore(), engine_id="d")
    for name in ("a", "b"):
        request = Request(name, PROMPT, transfer=transfer)
        engine.scheduler.add_request(request)
        assert engine.scheduler.matched_tokens(request, 0) == (0, False)
    assert sum("without waiting" in message for message in caplog.messages) == 1
    assert counted(engine, "ignored_hand_offs") == 2


def test_other_connectors_hand_offs_are_left_alone() -> None:
    assert HandOff.of({"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1]}) is None
    assert HandOff.of({"do_remote_prefill": True, "kvlane": {"hand_off": "kvlane-1"}}) is None
    assert HandOff.of(None) is None
    assert not asks_for_hand_off(["do_remote_decode"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", ""),
        ("engine", "\N{EURO SIGN}" * 171),
        ("engine", 7),
        ("run", "0" * 31),
        ("run", "g" * 32),
        ("run", None),
        ("daemon", "0" * 33),
        ("tokens", -1),
        ("tokens", True),
        ("tokens", 1 << 41),
        ("tokens", "20"),
        ("tokens", 2.5),
    ],
)
def test_what_a_client_writes_is_checked(key: str, value: object) -> None:
    with pytest.raises(NotAHandOff, match=key):
        HandOff.of({"kvlane": {**GOOD, key: value}})


def test_an_object_is_wanted() -> None:
    with pytest.raises(NotAHandOff, match="an object"):
        HandOff.of({"kvlane": [1]})


@given(st.text(min_size=1, max_size=256), st.binary(min_size=16, max_size=16), st.integers(0, 1 << 40))
def test_what_is_said_is_understood(engine: str, run: bytes, tokens: int) -> None:
    said = HandOff(engine, run, DAEMON, tokens)
    assert HandOff.of(said.params()) == said
