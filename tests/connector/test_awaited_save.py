"""A prompt goes from a prefill engine to a decode engine through the store, and nothing of it is computed twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, Engine, Request, full_group, window_group
from hypothesis import given
from hypothesis import strategies as st

from kvlane.connector.adapters import Adapters
from kvlane.connector.awaited_save import AwaitedSave, NotAnAwaitedSave, is_for_another_engine
from kvlane.connector.groups import CacheGroup
from kvlane.connector.jobs import JobEnd
from kvlane.connector.requests import GroupHashes, RequestState
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
    assert handed_over["kvlane"]["last"] == Request("same", PROMPT).block_hashes[4][:16].hex()
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


def in_chunks(engine: Engine, *chunks: tuple[int, bool]) -> Request:
    """A prefill leg whose prompt is computed in chunks: of so many tokens each, and whether they can be saved."""
    request = Request("p", PROMPT, transfer=TO_PREFILL)
    engine.scheduler.add_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (0, False)
    engine.scheduler.allocated(request, engine.allocate(request, request.num_tokens), 0)
    for tokens, can_be_saved in chunks:
        engine.store.fail_saves = not can_be_saved
        engine.compute(request, tokens)
    return request


def end(engine: Engine, request: Request) -> Any:
    """The end of a prefill leg; gives what its answer says."""
    request.all_token_ids.append(7)
    return engine.finish(request)


def test_what_is_known_not_to_be_stored_is_not_named() -> None:
    """The second chunk's save had failed when the prefill engine answered, and it named the whole prompt all the same:
    the decode engine waited for `kvlane.wait_ms` in vain."""
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d")
    request = in_chunks(first, (8, True), (8, False), (6, True))
    handed_over = end(first, request)
    assert handed_over["kvlane"]["tokens"] == 8
    # Something is still being saved, so that it would be waited for.
    store.hold_saves = True
    prefill(first, tokens=list(range(500, 530)))
    decode = Request("d", PROMPT, transfer=handed_over)
    second.scheduler.add_request(decode)
    assert second.scheduler.matched_tokens(decode, 0) == (8, True)


def test_a_prompt_whose_first_block_is_not_stored_is_not_handed_over() -> None:
    engine = Engine(FakeCore(), engine_id="p")
    assert end(engine, in_chunks(engine, (8, False), (14, True))) is None
    stats = engine.scheduler.take_stats() or {}
    assert (stats["handed_over"], stats["not_handed_over"]) == (1, 1)


def test_a_prompt_that_fills_no_block_is_no_failure() -> None:
    engine = Engine(FakeCore(), engine_id="p")
    assert prefill(engine, tokens=[1, 2, 3])["kvlane"]["tokens"] == 0
    assert counted(engine, "not_handed_over") == 0


def test_a_request_whose_input_has_no_name_of_its_own_hands_nothing_over_and_blames_no_engine() -> None:
    """Such a request is never stored. Its answer named no hand-off, as if the daemon was away: after three of them,
    routers sent everybody's prompts to decode engines alone for ten seconds."""
    engine = Engine(FakeCore(), engine_id="p")
    request = Request("p", PROMPT, transfer=TO_PREFILL)
    request.mm_features = [SimpleNamespace(identifier="renderer0-mm-1-image-0")]
    engine.run(request)
    handed_over = end(engine, request)
    assert handed_over["kvlane"]["tokens"] == 0 and "last" not in handed_over["kvlane"]
    assert counted(engine, "not_handed_over") == 1
    decode = Request("d", PROMPT, transfer=handed_over)
    second = Engine(FakeCore(), engine_id="d")
    second.scheduler.add_request(decode)
    assert second.scheduler.matched_tokens(decode, 0) == (0, False)


def test_a_block_takes_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(FakeCore(), engine_id="p", workers=2)
    request = in_chunks(engine, (8, True))
    core = engine.workers[1]._shared.core
    assert core is not None
    with monkeypatch.context() as patch:
        # It refuses the next save.
        patch.setattr(core, "save", None)
        engine.compute(request, 8)
    engine.compute(request, 6)
    assert end(engine, request)["kvlane"]["tokens"] == 8


def test_a_worker_that_has_failed_counts_before_the_others_have_ended() -> None:
    store = FakeCore()
    engine = Engine(store, engine_id="p", workers=2)
    request = in_chunks(engine, (8, True))
    store.hold_saves = True
    engine.compute(request, 8)
    engine.scheduler.jobs_ended({engine.scheduler.saves.last_job: JobEnd(1, False)})
    assert end(engine, request)["kvlane"]["tokens"] == 8


def test_what_is_saved_again_after_a_preemption_is_named() -> None:
    """Also if the first save of these blocks ends later, and badly."""
    store = FakeCore()
    engine = Engine(store, engine_id="p")
    request = in_chunks(engine, (8, True))
    store.hold_saves = True
    engine.compute(request, 8)
    late = engine.scheduler.saves.last_job
    engine.free(request)
    request.num_computed_tokens = 0
    assert engine.scheduler.matched_tokens(request, 0) == (8, True)
    engine.scheduler.allocated(request, engine.allocate(request, 8), 8)
    engine.step()
    request.num_computed_tokens = 8
    engine.compute(request, 14)
    engine.scheduler.jobs_ended({late: JobEnd(1, False)})
    assert end(engine, request)["kvlane"]["tokens"] == 20


def test_what_was_loaded_is_named() -> None:
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="q")
    first.run(Request("before", PROMPT[:12]))
    store.fail_saves = True
    assert prefill(second)["kvlane"]["tokens"] == 12


@pytest.mark.parametrize(("gone", "named"), [(0, 20), (2, 20), (3, 12), (4, 16)])
def test_a_window_needs_its_last_blocks_only(gone: int, named: int) -> None:
    """What fell out of a sliding window cannot be saved, and nobody needs it."""
    engine = Engine(FakeCore(), [full_group(), window_group(1, 2)], engine_id="p")
    request = in_chunks(engine)
    table = engine.tables["p"][1]
    engine.pool.free_blocks([engine.pool.blocks[table[gone]]])
    table[gone] = 0
    engine.compute(request, 22)
    assert end(engine, request)["kvlane"]["tokens"] == named


GAPS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), max_size=3)


@given(GAPS, GAPS, st.integers(0, 3), st.integers(0, 64))
def test_the_longest_prompt_that_can_be_found_is_named(
    gaps: list[tuple[int, int]], of_window: list[tuple[int, int]], window: int, limit: int
) -> None:
    groups = [full_group(tokens_per_block=8), window_group(1, window) if window else full_group(1)]
    state = RequestState.new(Request("p", []), groups, Adapters())
    state.saved_blocks = [6, 11]
    state.unsaved = [[(first, first + count) for first, count in each] for each in (gaps, of_window)]

    def is_stored(group: CacheGroup, block: int) -> bool:
        return block < state.saved_blocks[group.index] and not any(
            first <= block < after for first, after in state.unsaved[group.index]
        )

    def can_be_found(tokens: int) -> bool:
        for group in groups:
            end = tokens // group.tokens_per_block
            start = max(0, end - group.window_blocks) if group.window_blocks else 0
            if not all(is_stored(group, block) for block in range(start, end)):
                return False
        return True

    longest = max(tokens for tokens in range(0, limit + 1, 8) if can_be_found(tokens))
    assert state.tokens_to_find(groups, 8, limit) == longest


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


def decode(engine: Engine, handed_over: object, tokens: list[int] | None = None) -> tuple[int | None, bool]:
    """What vLLM hears of a prompt that was handed over."""
    request = Request("d", PROMPT if tokens is None else tokens, transfer=handed_over)
    engine.scheduler.add_request(request)
    return engine.scheduler.matched_tokens(request, 0)


OF_OTHER_WEIGHTS = {"kvlane.weights_version": "2"}


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        (OF_OTHER_WEIGHTS, PROMPT),
        ({}, [*PROMPT[:19], 7, *PROMPT[20:]]),
        ({}, PROMPT[:18]),
    ],
    ids=["weights", "prompt", "shorter prompt"],
)
def test_what_would_not_be_found_is_not_waited_for(
    settings: dict[str, Any], tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Where one engine had other weights, or rendered a chat otherwise, the decode engine waited for `kvlane.wait_ms`
    with each prompt, and nobody said so."""
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d", settings=settings)
    store.hold_saves = True
    handed_over = prefill(first)
    assert [decode(second, handed_over, tokens) for _ in range(2)] == [(0, False)] * 2
    (said,) = (message for message in caplog.messages if "without waiting" in message)
    assert "its first 20 tokens" in said and "start both with the same weights" in said
    stats = second.scheduler.take_stats() or {}
    assert (stats["ignored_hand_offs"], stats.get("awaited_hand_offs")) == (2, None)


def test_engines_with_the_same_other_weights_wait() -> None:
    """The control of the test above."""
    store = FakeCore()
    first, second = (Engine(store, engine_id=each, settings=OF_OTHER_WEIGHTS) for each in ("p", "d"))
    store.hold_saves = True
    assert decode(second, prefill(first)) == (None, False)


def test_an_engine_of_the_release_before_is_waited_for() -> None:
    """It does not say the hash of its last block; so nothing is compared, and differences cost the wait."""
    store = FakeCore()
    first, second = Engine(store, engine_id="p"), Engine(store, engine_id="d", settings=OF_OTHER_WEIGHTS)
    store.hold_saves = True
    handed_over = prefill(first)
    del handed_over["kvlane"]["last"]
    assert decode(second, handed_over) == (None, False)


def test_hashes_that_end_elsewhere_are_not_compared() -> None:
    """An engine whose blocks are cut otherwise cannot know; the daemon says that its blocks are others."""
    store = FakeCore()
    first, second = (
        Engine(store, engine_id="p"),
        Engine(store, [full_group(tokens_per_block=8)], engine_id="d"),
    )
    store.hold_saves = True
    request = Request("d", PROMPT, hash_block=8, transfer=prefill(first))
    hashes = GroupHashes(second.groups, 8)
    state = RequestState.new(request, second.groups, Adapters())
    assert [hashes.ending_at(state, tokens) is None for tokens in (0, 8, 16, 20, 24)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    second.scheduler.add_request(request)
    assert second.scheduler.requests["d"].awaited_save is not None


@pytest.mark.parametrize("key", [b"", b"other weights"])
def test_a_place_in_a_prompt_has_one_hash_in_all_groups(key: bytes) -> None:
    groups = [full_group(tokens_per_block=16), window_group(1, 2, tokens_per_block=8)]
    hashes = GroupHashes(groups, BLOCK)
    hashes.weights_key = key
    state = RequestState.new(Request("p", list(range(40))), groups, Adapters())
    assert hashes.stored(state, groups[0], 1, 2)[0][:16] == hashes.ending_at(state, 32)
    assert hashes.stored(state, groups[1], 3, 4)[0][:16] == hashes.ending_at(state, 32)


def test_members_of_later_releases_are_ignored() -> None:
    assert AwaitedSave.of({"kvlane": {**GOOD, "later": [1]}}) == AwaitedSave.of({"kvlane": GOOD})


def test_other_connectors_hand_offs_are_left_alone() -> None:
    assert (
        AwaitedSave.of({"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1]}) is None
    )
    assert AwaitedSave.of({"do_remote_prefill": True, "kvlane": {"hand_off": "kvlane-1"}}) is None
    assert AwaitedSave.of(None) is None
    assert not is_for_another_engine(["do_remote_decode"])


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
        ("last", "0" * 31),
        ("last", "0" * 64),
        ("last", "G" * 32),
        ("last", 7),
        ("last", None),
    ],
)
def test_what_a_client_writes_is_checked(key: str, value: object) -> None:
    with pytest.raises(NotAnAwaitedSave, match=key):
        AwaitedSave.of({"kvlane": {**GOOD, key: value}})


def test_an_object_is_wanted() -> None:
    with pytest.raises(NotAnAwaitedSave, match="an object"):
        AwaitedSave.of({"kvlane": [1]})


SIXTEEN_BYTES = st.binary(min_size=16, max_size=16)


@given(st.text(min_size=1, max_size=256), SIXTEEN_BYTES, st.integers(0, 1 << 40), st.none() | SIXTEEN_BYTES)
def test_what_is_said_is_understood(engine: str, run: bytes, tokens: int, last: bytes | None) -> None:
    said = AwaitedSave(engine, run, DAEMON, tokens, last)
    assert AwaitedSave.of({"kvlane": said.params()}) == said
