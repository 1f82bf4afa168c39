"""What listeners know from KV events against what the store has, with events that need no vLLM."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import BLOCK, Engine, Request, full_group, window_group
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.connector import events
from kvlane.connector.announcements import BATCH, RECENT_MAX, Announcements
from kvlane.connector.counters import Counters
from kvlane.connector.groups import CacheGroup
from kvlane.connector.vllm_protocols import KVEvent
from kvlane.testing import FakeCore

Known = set[tuple[int, bytes]]


@dataclass
class Stored:
    """vLLM's BlockStored, as far as it counts here."""

    __struct_fields__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "group_idx")
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group_idx: int


@dataclass
class Removed:
    group_idx: int
    block_hashes: list[bytes]


class Cleared:
    pass


@pytest.fixture(autouse=True)
def plain_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(
        group: CacheGroup, request: Any, parent: bytes | None, hashes: list[bytes], first: int
    ) -> Stored:
        size = group.tokens_per_block
        tokens = request.all_token_ids[first * size : (first + len(hashes)) * size]
        return Stored(list(hashes), parent, tokens, size, group.group_id)

    monkeypatch.setattr(events, "blocks_stored", stored)
    monkeypatch.setattr(events, "blocks_removed", Removed)
    monkeypatch.setattr(events, "all_cleared", Cleared)


class Listener:
    """A router's index: a plain set, and what it knows of each block."""

    def __init__(self) -> None:
        self.known: Known = set()
        self.chain: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.removed: list[bytes] = []

    def hear(self, told: list[KVEvent]) -> None:
        for event in told:
            if isinstance(event, Stored):
                size, parent = event.block_size, event.parent_block_hash
                for index, each in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                    assert self.chain.setdefault(each, (parent, tokens)) == (parent, tokens)
                    self.known.add((event.group_idx, each))
                    parent = each
            elif isinstance(event, Removed):
                gone = {(event.group_idx, each) for each in event.block_hashes}
                assert gone <= self.known, "what was never announced is taken back"
                assert len(event.block_hashes) <= BATCH
                self.known -= gone
                self.removed += event.block_hashes
            else:
                assert isinstance(event, Cleared)
                self.known.clear()


def stored(store: FakeCore) -> Known:
    """What lookups can find: the fake keeps whole hashes, and namespaces are made of a group's number."""
    return {(key[0][0] - 1, key[2]) for key, ranks in store.blocks.items() if len(ranks) == len(key[1])}


def hear_all(engine: Engine, listener: Listener) -> None:
    for _ in range(3):
        engine.step()
    listener.hear(engine.scheduler.take_events())


def run(engine: Engine, name: str, tokens: list[int]) -> Request:
    request = Request(name, tokens)
    engine.run(request)
    engine.finish(request)
    return request


def test_an_evicted_block_is_taken_back_by_the_hash_that_was_announced() -> None:
    store, listener = FakeCore(), Listener()
    engine = Engine(store, emit_events=True, workers=2)
    request = run(engine, "r", list(range(20)))
    hear_all(engine, listener)
    assert listener.known == {(0, each) for each in request.block_hashes}
    gone = [key for key in store.blocks if key[2] in request.block_hashes[3:]]
    for key in gone:
        store.evict(key)
    hear_all(engine, listener)
    assert sorted(listener.removed) == sorted(request.block_hashes[3:])
    assert listener.known == stored(store)
    counted = engine.scheduler.take_stats()
    assert counted is not None and counted["withdrawn_blocks"] == 2


def test_blocks_of_other_weights_are_stored_and_taken_back_under_their_own_names() -> None:
    """Stored hashes are mixed with what the weights are: listeners know vLLM's own."""
    store, listener = FakeCore(), Listener()
    engine = Engine(store, emit_events=True)
    engine.weights.present = "life 2"
    engine.scheduler.reset()
    asking = Request("asking", list(range(20)))
    engine.scheduler.add_request(asking)
    engine.scheduler.matched_tokens(asking, 0)
    engine.step()
    engine.scheduler.forget_request("asking")
    request = run(engine, "r", list(range(20)))
    hear_all(engine, listener)
    assert listener.known == {(0, each) for each in request.block_hashes}
    assert not {key[2] for key in store.blocks} & set(request.block_hashes)
    store.evict(next(iter(store.blocks)))
    hear_all(engine, listener)
    assert listener.removed == request.block_hashes[:1]


def test_what_went_while_it_was_saved_is_not_announced() -> None:
    """Its end comes after the daemon has evicted it again, and said so."""
    store, listener = FakeCore(), Listener()
    engine = Engine(store, emit_events=True, workers=2)
    engine.step()
    store.hold_saves = True
    request = Request("r", list(range(20)))
    engine.run(request)
    engine.finish(request)
    # One rank is done, then all blocks are there, and two of them gone, before the other's end is heard of.
    store.hold_saves = False
    late, held = engine.workers[1], {}
    for worker in engine.workers:
        worker.poll()
    held = late.take_ended()
    for key in list(store.blocks)[1:3]:
        store.evict(key)
    engine.step()
    engine.scheduler.jobs_ended(held)
    hear_all(engine, listener)
    assert listener.known == stored(store) and len(listener.known) == 3
    assert listener.removed == [], "nobody had heard of them"


def test_a_save_that_ends_in_part_is_announced_in_part() -> None:
    """Nothing of a save was announced of which one block found no room."""
    store, listener = FakeCore(), Listener()
    engine = Engine(store, emit_events=True)
    first = run(engine, "first", list(range(20)))
    hear_all(engine, listener)
    # Without its parent, a block is not stored; what its own prompt saves besides, is.
    for key in [key for key in store.blocks if key[2] == first.block_hashes[4]]:
        store.evict(key)
    engine.scheduler.add_request(longer := Request("longer", list(range(32))))
    engine.scheduler.allocated(longer, engine.allocate(longer, 32), 0)
    engine.scheduler.requests["longer"].saved_blocks = [5]
    other = Request("other", list(range(50, 62)))
    engine.scheduler.add_request(other)
    engine.scheduler.allocated(other, engine.allocate(other, 12), 0)
    engine.step({"longer": 32, "other": 12})
    hear_all(engine, listener)
    assert listener.known == stored(store)
    assert {(0, each) for each in other.block_hashes} <= listener.known


@pytest.mark.parametrize("fault", ["restart", "down", "lose_journal"])
def test_when_the_daemon_is_left_or_says_too_little_all_is_taken_back(fault: str) -> None:
    store, listener = FakeCore(), Listener()
    engine = Engine(store, emit_events=True)
    run(engine, "r", list(range(20)))
    hear_all(engine, listener)
    assert len(listener.known) == 5
    if fault == "down":
        # It was left for another run, which is not there yet.
        engine.scheduler._core._gone.append(store.boot)  # type: ignore[attr-defined]
        store.down = True
    elif fault == "restart":
        store.restart()
    else:
        store.evict(next(iter(store.blocks)))
        store.lose_journal()
    hear_all(engine, listener)
    assert listener.known == set()
    if fault == "down":
        return
    # And it goes on from there.
    again = run(engine, "again", list(range(100, 112)))
    hear_all(engine, listener)
    assert {(0, each) for each in again.block_hashes} <= listener.known <= stored(store)
    store.evict(next(key for key in store.blocks if key[2] == again.block_hashes[2]))
    hear_all(engine, listener)
    assert listener.known == {(0, each) for each in again.block_hashes[:2]}


def random_life(seed: int, follow: bool) -> tuple[Known, Known, bool]:
    """What a listener knows after random saves and evictions, what is stored, and whether both are to be the same."""
    dice = random.Random(seed)
    store, listener = FakeCore(), Listener()
    groups = [full_group(), window_group(1, 2)][: dice.randint(1, 2)]
    engine = Engine(store, groups, workers=dice.randint(1, 2), blocks=4096, emit_events=True)
    if not follow:
        engine.scheduler._core.take_changes = lambda: (False, [])  # type: ignore[method-assign]
    engine.step()
    exact = True
    for number in range(dice.randint(5, 25)):
        act = dice.randint(0, 9)
        if act < 5:
            tokens = (
                [dice.randint(0, 2)] * BLOCK * 2 + [dice.randint(0, 3)] * BLOCK * dice.randint(0, 3) + [9]
            )
            run(engine, str(number), tokens)
        elif act < 7 and store.blocks:
            for key in dice.sample(sorted(store.blocks), min(len(store.blocks), dice.randint(1, 4))):
                if len(store.blocks[key]) == len(key[1]):
                    store.evict(key)
        elif act == 7:
            engine.step()
            listener.hear(engine.scheduler.take_events())
        elif act == 8 and dice.random() < 0.3:
            exact = False
            dice.choice([store.restart, store.lose_journal])()
        elif dice.random() < 0.3:
            store.hold_saves = not store.hold_saves
        if dice.random() < 0.1:
            store.fail_saves = not store.fail_saves
    store.hold_saves = False
    hear_all(engine, listener)
    assert engine.failures.count == 0
    return listener.known, stored(store), exact


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_listeners_know_what_is_stored_after_any_saves_and_evictions(seed: int) -> None:
    known, there, exact = random_life(seed, follow=True)
    assert known == there if exact else known <= there


def test_who_does_not_follow_the_journal_leaves_listeners_with_what_is_gone() -> None:
    """The control: without what went, the sets differ."""
    lives = [random_life(seed, follow=False) for seed in range(40)]
    assert sum(not known <= there for known, there, _ in lives) > 5


def announcements(most: int) -> tuple[Announcements, CacheGroup]:
    group = full_group()
    return Announcements([group], Counters(), most), group


def announce(of: Announcements, group: CacheGroup, numbers: range) -> list[KVEvent]:
    hashes = [number.to_bytes(16, "big") for number in numbers]
    event: Any = Stored(hashes, None, list(range(len(hashes) * BLOCK)), BLOCK, 0)
    return of.ended([of.begin(group, hashes, event)], True, of.era)


def test_of_too_many_the_oldest_are_taken_back() -> None:
    of, group = announcements(most=1000)
    listener = Listener()
    for first in range(0, 10_000, 50):
        listener.hear(announce(of, group, range(first, first + 50)))
        assert len(of) <= 1000
    assert len(listener.known) == len(of) > 900
    newest = {(0, number.to_bytes(16, "big")) for number in range(9_100, 10_000)}
    assert newest <= listener.known


def test_what_is_remembered_of_saves_is_bounded() -> None:
    of, group = announcements(most=1 << 20)
    announce(of, group, range(3 * RECENT_MAX))
    assert len(of._recent) == RECENT_MAX and len(of) == 3 * RECENT_MAX
    listener = Listener()
    listener.known = {(0, number.to_bytes(16, "big")) for number in range(3 * RECENT_MAX)}
    listener.hear(of.withdraw_all())
    assert listener.known == set()
