"""Both halves of direct hand-offs in the scheduler role, with an agent that the test plays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import BLOCK, Engine, Pool, Request, full_group

from kvlane.connector.direct import Direct
from kvlane.connector.direct_order import Order
from kvlane.connector.direct_request import Lending
from kvlane.connector.groups import CacheGroup
from kvlane.connector.kinds.direct_land import STUCK_SECONDS, LandDirect
from kvlane.connector.kinds.direct_offer import Computed, OfferDirect, RankGone
from kvlane.connector.known_weights import PATIENCE_SECONDS
from kvlane.connector.prefill_rate import SECONDS_MIN
from kvlane.testing import FakeCore

OWN = "127.0.0.1:7200"
PEER = "127.0.0.1:7100"
BLOCK_BYTES = 1000
NAME = "handoff"
ID = Lending(NAME).id
TOKENS = 82
WHOLE = TOKENS // BLOCK
ALL = WHOLE + 1


class LandingPool(Pool):
    """With what landing needs of vLLM's: the queue of free blocks, and hashes."""

    @property
    def free_block_queue(self) -> Any:
        free: list[Any] = [block for block in self.blocks if block.ref_cnt == 0 and not block.is_null]
        chain = [SimpleNamespace(), *free, SimpleNamespace(next_free_block=None)]
        for one, following in itertools.pairwise(chain):
            one.next_free_block = following
        return SimpleNamespace(fake_free_list_head=chain[0])

    def evict_blocks(self, ids: set[int]) -> None:
        for number in ids:
            self.blocks[number].block_hash = None

    def cache_full_blocks(self, *, request: Any, blocks: Any, num_cached_blocks: int, **rest: Any) -> None:
        for number in range(num_cached_blocks, rest["num_full_blocks"]):
            assert blocks[number].block_hash is None
            blocks[number].block_hash = request.block_hashes[number]


class Agent:
    """What the core's agent was told, and what the test has it answer."""

    address = OWN

    def __init__(self) -> None:
        self.lendings: list[bytes] = []
        self.held: set[bytes] = set()
        self.unwanted: set[bytes] = set()
        self.wanted: set[bytes] = set()
        self.given_up: list[bytes] = []
        self.free: list[bytes] = []
        self.landings: dict[bytes, tuple[int, int]] = {}
        self.budgets: dict[bytes, float] = {}
        self.waited: list[float] = []
        self.room: dict[bytes, list[int]] = {}
        self.standings: dict[bytes, Any] = {}
        self.ends_at_once = True
        self.closed = False

    def begin_lending(self, lending: bytes, content: bytes) -> bool:
        self.lendings.append(lending)
        return True

    def hold_lending(self, lending: bytes) -> None:
        self.held.add(lending)

    def release_lending(self, lending: bytes) -> None:
        self.held.remove(lending)

    def lending_progress(self, lending: bytes, ahead: int, computed: int) -> bool:
        return lending not in self.unwanted

    def give_up_lending(self, lending: bytes) -> None:
        self.given_up.append(lending)

    def end_oldest_unwanted_lending(self, but: bytes) -> bytes | None:
        for lending in self.lendings:
            if lending != but and lending not in self.wanted and lending not in self.unwanted:
                self.unwanted.add(lending)
                self.free.append(lending)
                return lending
        return None

    def take_free_lendings(self) -> list[bytes]:
        free, self.free = self.free, []
        return free

    def begin_landing(
        self,
        landing: bytes,
        peer: str,
        content: bytes,
        first: int,
        end: int,
        patience: float,
        budget: float,
    ) -> bool:
        self.landings[landing] = (first, end)
        self.budgets[landing] = budget / 1e3
        self.standings[landing] = (None, "", first, [])
        return True

    def give_room(self, landing: bytes, blocks: list[int]) -> None:
        self.room.setdefault(landing, []).extend(blocks)

    def live_landings(self) -> list[bytes]:
        return [landing for landing, standing in self.standings.items() if standing[0] is None]

    def standing(self, landing: bytes) -> Any:
        return self.standings.get(landing)

    def give_landing_up(self, landing: bytes) -> None:
        self.given_up.append(landing)
        if self.ends_at_once:
            self.end(landing, "given_up", self.landings[landing][0], [])

    def end(self, landing: bytes, word: str, end_block: int, hashes: list[tuple[int, bytes]]) -> None:
        self.standings[landing] = (word, f"it is {word}", end_block, hashes)

    def forget_landing(self, landing: bytes) -> None:
        assert self.standings.pop(landing)[0] is not None, "it may still be written"

    def wait_over(self, landing: bytes, timeout_ms: float) -> bool:
        return self.standings[landing][0] is not None

    def wait_for_end(self, timeout_ms: float) -> bool:
        self.waited.append(timeout_ms)
        return False

    def end_all(self, timeout_ms: float) -> bool:
        for landing, standing in list(self.standings.items()):
            if standing[0] is None:
                self.end(landing, "given_up", self.landings[landing][0], [])
        self.free += [lending for lending in self.lendings if lending not in self.free]
        return True

    def close(self) -> None:
        self.closed = True


class World:
    """An engine with direct hand-offs."""

    groups: Sequence[CacheGroup] = (full_group(),)
    pool_of: Callable[[int], LandingPool] = LandingPool

    def __init__(self, blocks: int = 400, steps_at_once: int = 1, /, **settings: Any) -> None:
        self.store = FakeCore()
        self.engine = Engine(
            self.store,
            list(self.groups),
            blocks=blocks,
            settings={"kvlane.direct": "on", **settings},
            steps_at_once=steps_at_once,
        )
        self.pool = self.pool_of(blocks)
        self.engine.pool = self.pool
        side = self.engine.scheduler
        self.agent = Agent()
        parsed = self.engine.scheduler._shared.settings
        self.direct = Direct(parsed, Order(self.engine.groups, True), b"n" * 16, (1, 1), BLOCK_BYTES)
        self.direct.agent = cast("Any", self.agent)
        self.direct.peers = cast("Any", SimpleNamespace(allows=lambda address: address == PEER))
        side._shared.direct = self.direct
        side.pins.bind(self.pool, side.before_pool_reset, side.pool_was_reset)
        self.side = side
        (self.land,) = (kind for kind in side.kinds if isinstance(kind, LandDirect))
        (self.offer,) = (kind for kind in side.kinds if isinstance(kind, OfferDirect))

    def request(self, name: str = "d", tokens: int = TOKENS, handoff: str = NAME, first: int = 0) -> Request:
        params = {"kvlane": {"handoff": handoff, "peer": PEER}}
        request = Request(name, list(range(first, first + tokens)), transfer=params)
        self.side.add_request(request)
        return request

    def store_beginning(self, blocks: int) -> None:
        """The daemon has so many blocks of `request()`'s beginning, from another engine."""
        other = Engine(self.store, engine_id="other")
        request = Request("stored", list(range(blocks * BLOCK + 1)))
        other.run(request)
        other.finish(request)
        assert self.store.block_count() == blocks and not self.store.leases

    def cached(self, request: Request) -> list[int]:
        """The blocks that hold the prompt's beginning in the engine's own cache."""
        found = [self.pool.get_cached_block(each, [0]) for each in request.block_hashes]
        return [blocks[0].block_id for blocks in found if blocks]

    def waits(self, request: Request, local: int = 0) -> bool:
        return self.side.matched_tokens(request, local) == (None, False)

    def step(self) -> None:
        self.engine.step()

    def hash(self, request: Request, block: int) -> tuple[int, bytes]:
        state = self.side.requests[request.request_id]
        hashes = self.side._shared.hashes
        if (block + 1) * BLOCK > request.num_prompt_tokens:
            return block, hashes.of_rest(state, block * BLOCK)
        own = hashes.ending_at(state, (block + 1) * BLOCK)
        assert own is not None
        return block, own

    def references(self) -> int:
        return sum(block.ref_cnt for block in self.pool.blocks)


def test_what_lands_whole_is_the_engines_own_cache_and_its_last_tokens_are_copied() -> None:
    world = World()
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.agent.landings == {ID: (0, ALL)}
    assert len(world.agent.room[ID]) == ALL
    assert world.references() == ALL and world.waits(request)
    world.agent.end(ID, "landed", ALL, [world.hash(request, WHOLE - 1), world.hash(request, WHOLE)])
    world.step()
    cached = [world.pool.get_cached_block(each, [0]) for each in request.block_hashes]
    assert [found[0].block_id for found in cached if found] == world.agent.room[ID][:WHOLE]
    local = WHOLE * BLOCK
    rest = TOKENS - 1 - local
    assert world.side.matched_tokens(request, local) == (rest, False)
    own = world.engine.allocate(request, TOKENS)
    world.side.allocated(request, own, rest)
    # Only the copy's source is held, for two steps.
    held = world.references() - ALL
    assert held == 1
    world.step()
    assert world.references() - ALL == 1
    world.step()
    assert world.references() == ALL, "the request's own"


@pytest.mark.parametrize("how", ["goes on", "is reset"])
def test_where_steps_overlap_nothing_lands_in_a_copys_source_before_its_step_is_over(how: str) -> None:
    world = World(400, 2)
    request = world.request()
    assert world.waits(request)
    world.step()
    world.agent.end(ID, "landed", ALL, [world.hash(request, WHOLE - 1), world.hash(request, WHOLE)])
    world.step()
    local = WHOLE * BLOCK
    assert world.side.matched_tokens(request, local) == (TOKENS - 1 - local, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), TOKENS - 1 - local)
    source = world.pool.blocks[world.agent.room[ID][-1]]
    held = source.ref_cnt
    world.step()  # plans the step that copies
    if how == "is reset":
        world.engine.free(request)
        assert world.pool.reset_prefix_cache()
        assert source.ref_cnt == 0
    other = world.request("e", handoff="other", first=1000)
    assert world.waits(other)
    world.step()
    if how == "is reset":
        assert Lending("other").id not in world.agent.room
        world.step()
    else:
        assert source.ref_cnt == held
        world.step()
        assert source.ref_cnt == held - 1
    assert len(world.agent.room[Lending("other").id]) == ALL


def test_a_prompt_whose_beginning_the_engine_has_is_asked_for_from_there() -> None:
    world = World()
    request = world.request()
    own = world.pool.blocks[5:9]
    for block, block_hash in zip(own, request.block_hashes, strict=False):
        block.block_hash = block_hash
    world.waits(request)
    world.step()
    assert world.agent.landings == {ID: (4, ALL)}
    assert all(block.ref_cnt == 1 for block in own), "it is there at the end"
    assert not {block.block_id for block in own} & set(world.agent.room[ID])


STORED = 4


@pytest.mark.parametrize("first", ["load", "landing"])
def test_what_the_daemon_has_of_the_beginning_is_loaded_while_the_rest_lands(first: str) -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.store.hold_loads = True
    world.step()
    assert world.agent.landings == {ID: (STORED, ALL)}
    assert len(world.agent.room[ID]) == ALL - STORED
    world.step()
    if first == "load":
        world.store.release_held()
        world.step()
    hashes = [world.hash(request, WHOLE - 1), world.hash(request, WHOLE)]
    world.engine.now += 1.5
    world.agent.end(ID, "landed", ALL, hashes)
    world.step()
    if first == "landing":
        assert world.waits(request) and not world.cached(request)
        world.store.release_held()
        world.step()
        world.step()
    cached = world.cached(request)
    assert len(cached) == WHOLE and cached[STORED:] == world.agent.room[ID][: WHOLE - STORED]
    group = full_group()
    right = [world.engine.value(request, group, block, 0) for block in range(STORED)]
    assert [world.engine.content(0, 0, block) for block in cached[:STORED]] == right
    local = WHOLE * BLOCK
    assert world.side.matched_tokens(request, local) == (TOKENS - 1 - local, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), TOKENS - 1 - local)
    stats = world.side.take_stats()
    assert stats is not None and "direct_fallbacks" not in stats
    assert stats["direct_loaded_tokens"] == stats["hit_tokens"] == STORED * BLOCK
    assert (stats["direct_landed"], stats["direct_landed_tokens"]) == (1, TOKENS - STORED * BLOCK)
    assert stats["direct_wait_seconds"] == pytest.approx(1.5)
    world.step()
    world.step()
    assert world.references() == ALL, "the request's own"
    assert not world.store.leases


def test_what_the_daemon_has_is_used_when_the_other_engine_is_lost() -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.step()
    world.step()
    world.agent.end(ID, "peer_lost", STORED, [])
    world.step()
    assert len(world.cached(request)) == STORED
    assert world.side.matched_tokens(request, STORED * BLOCK) == (0, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert world.references() == ALL and not world.store.leases


def test_where_the_beginning_does_not_come_nothing_behind_it_is_used() -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.store.fail_loads = True
    world.step()
    world.agent.end(ID, "landed", ALL, [world.hash(request, WHOLE - 1), world.hash(request, WHOLE)])
    world.step()
    world.step()
    assert not world.cached(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert world.references() == ALL and not world.store.leases
    stats = world.side.take_stats()
    assert stats is not None and stats["direct_fallbacks"] == 1
    assert not stats.get("direct_landed") and not stats.get("direct_landed_tokens")


@pytest.mark.parametrize("what", ["an abort", "a running request without a block"])
def test_blocks_are_not_used_otherwise_before_their_load_is_over(what: str) -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.store.hold_loads = True
    world.step()
    world.step()
    if what == "an abort":
        world.side.forget_request(request.request_id)
    else:
        assert world.side.free_blocks_soon()
    assert not world.cached(request)
    assert world.references() >= STORED and world.side.has_pending_work()
    assert not world.pool.reset_prefix_cache(), "as with each load"
    world.store.release_held()
    world.step()
    world.step()
    if what != "an abort":
        world.side.forget_request(request.request_id)
    assert world.references() == 0 and not world.store.leases
    assert world.pool.reset_prefix_cache() and not world.side.has_pending_work()


def test_a_prompt_of_which_the_daemon_has_all_but_a_little_is_loaded_and_computed() -> None:
    world = World()
    world.store_beginning(8)
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.side.matched_tokens(request, 0) == (8 * BLOCK, True)
    assert not world.agent.landings


def test_the_other_engine_is_asked_at_once_where_the_daemon_does_not_answer() -> None:
    world = World()
    world.store_beginning(STORED)
    world.store.hold_lookups = True
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.agent.landings == {ID: (0, ALL)}
    world.agent.end(ID, "landed", ALL, [world.hash(request, WHOLE)])
    world.store.release_held()
    world.step()
    assert len(world.cached(request)) == WHOLE
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert not world.store.leases


def fill_room(world: World, request: Request) -> None:
    """What the other engine has computed comes into the room that it was given."""
    first, end = world.agent.landings[ID]
    for block, target in zip(range(first, end), world.agent.room[ID], strict=True):
        if (block + 1) * BLOCK <= request.num_prompt_tokens:
            world.engine.fill(0, 0, target, world.engine.value(request, full_group(), block, 0))


@pytest.mark.parametrize("why", ["its own beginning", "watched blocks"])
def test_the_other_engine_is_asked_from_where_the_loaded_blocks_end(why: str) -> None:
    """Of the blocks that were free some were the prompt's own beginning, or may not be taken: fewer were loaded than
    the other engine was told, and all of its blocks were taken for later ones."""
    world = World(600)
    world.store_beginning(12)
    tokens = 162
    request = world.request(tokens=tokens)
    keep = set(range(310, 316))
    if why == "its own beginning":
        for number in range(4):
            block = world.pool.blocks[300 + number]
            block.block_hash = request.block_hashes[number]
            world.engine.fill(0, 0, 300 + number, world.engine.value(request, full_group(), number, 0))
            keep.add(block.block_id)
    else:
        cast("Any", world.pool)._reuse_watchers = {312: None, 314: None}
    others = [block for block in world.pool.blocks if block.block_id not in keep and not block.is_null]
    world.pool.touch(others)
    assert world.waits(request)
    world.step()
    first, _ = world.agent.landings[ID]
    assert first == (10 if why == "its own beginning" else 4)
    world.pool.free_blocks(others)
    world.step()
    world.step()
    fill_room(world, request)
    whole = tokens // BLOCK
    hashes = [world.hash(request, whole - 1), world.hash(request, whole)]
    world.agent.end(ID, "landed", whole + 1, hashes)
    world.step()
    cached = world.cached(request)
    right = [world.engine.value(request, full_group(), number, 0) for number in range(whole)]
    assert [world.engine.content(0, 0, block) for block in cached] == right


@pytest.mark.parametrize("where", ["the lookup", "the load"])
def test_an_error_on_the_way_to_the_daemon_costs_no_block_and_no_lease(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.store_beginning(STORED)
    other, request = world.request("other", handoff="other", first=5000), world.request()
    own = world.pool.blocks[50:52]
    world.pool.touch(own)
    for block, block_hash in zip(own, request.block_hashes, strict=False):
        block.block_hash = block_hash
    before = [block.ref_cnt for block in world.pool.blocks]

    def fail(*arguments: object) -> None:
        raise ValueError("no")

    name = "tokens_found" if where == "the lookup" else "load_into"
    monkeypatch.setattr(world.land._loads, name, fail)
    assert world.waits(request) and world.waits(other)
    world.step()
    world.step()
    for each in (request, other):
        world.side.forget_request(each.request_id)
    world.step()
    assert [block.ref_cnt for block in world.pool.blocks] == before and not world.store.leases
    assert world.side.take_stats()["errors"] >= 1  # pyright: ignore


def test_a_beginning_of_before_a_reset_that_vllm_refused_is_not_used() -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.store.hold_loads = True
    world.step()
    world.step()
    assert not world.pool.reset_prefix_cache(), "as with each load"
    world.side.reset()
    world.store.release_held()
    world.step()
    world.agent.end(ID, "landed", ALL, [(WHOLE, b"x" * 16)])
    world.step()
    assert not world.cached(request)


def test_a_reset_ends_a_load_that_no_worker_knows_of() -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.side.has_pending_work() and world.references()
    assert world.pool.reset_prefix_cache()
    assert world.references() == 0 and not world.store.leases
    world.step()
    assert not world.side.has_pending_work() and not world.cached(request)


def test_another_sample_is_not_promised_what_did_not_come() -> None:
    world = World()
    world.store_beginning(STORED)
    one, other = world.request(), world.request("other")
    assert world.waits(one) and world.waits(other)
    world.store.fail_loads = True
    world.step()
    world.step()
    world.agent.end(ID, "peer_lost", STORED, [])
    world.step()
    assert [world.side.matched_tokens(each, 0) for each in (one, other)] == [(0, False), (0, False)]


def test_a_running_request_does_not_wait_for_blocks_of_a_load() -> None:
    """All that the landing has by then is written by its load."""
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    others = [block for block in world.pool.blocks[STORED + 1 :] if not block.is_null]
    world.pool.touch(others)
    assert world.waits(request)
    world.store.hold_loads = True
    world.step()
    assert world.agent.landings == {ID: (STORED, ALL)} and not world.pool.get_num_free_blocks()
    assert not world.side.free_blocks_soon() and not world.agent.given_up
    world.pool.free_blocks(others)
    world.step()
    world.pool.touch([block for block in world.pool.blocks if not block.ref_cnt and not block.is_null])
    assert world.side.free_blocks_soon()
    assert world.pool.get_num_free_blocks() == ALL - STORED


def test_a_prompt_that_has_landed_is_not_looked_up_again() -> None:
    world = World()
    world.store_beginning(STORED)
    request = world.request()
    world.direct.order.hands_over_rests = False
    assert world.waits(request)
    world.step()
    world.step()
    world.agent.end(ID, "landed", WHOLE, [world.hash(request, WHOLE - 1)])
    world.step()
    world.store.hold_lookups = True
    assert world.side.matched_tokens(request, WHOLE * BLOCK) == (0, False)


def test_no_more_is_loaded_than_prompts_may_land_in_at_once() -> None:
    """Of 240 blocks 24: the first prompt has 21, the second the rest."""
    world = World(240)
    world.store_beginning(STORED)
    requests = [world.request(name, handoff=name) for name in ("one", "other")]
    assert all(world.waits(request) for request in requests)
    world.step()
    assert [world.agent.landings[Lending(name).id] for name in ("one", "other")] == [(STORED, ALL), (3, ALL)]
    assert world.references() == 24 + STORED + 3, "its load holds a block too"


@pytest.mark.parametrize("what", ["other hashes", "no hash"])
def test_what_is_other_content_is_not_used(what: str) -> None:
    world = World()
    request = world.request()
    world.waits(request)
    world.step()
    hashes = [(WHOLE - 1, b"x" * 16)] if what == "other hashes" else []
    world.agent.end(ID, "landed", ALL, hashes)
    world.step()
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert not any(block.block_hash for block in world.pool.blocks)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert world.references() == ALL
    assert world.side.take_stats()["direct_fallbacks"] == 1  # pyright: ignore


@pytest.mark.parametrize(("landed", "with_hash", "used"), [(7, 6, 7), (9, 6, 7), (9, None, 0)])
def test_what_has_landed_of_a_hand_off_that_failed_is_used_as_far_as_its_hashes_go(
    landed: int, with_hash: int | None, used: int
) -> None:
    """A hash comes with the last block of a step's chunk: what lies behind it may be of any prompt."""
    world = World()
    request = world.request()
    world.waits(request)
    world.step()
    hashes = [] if with_hash is None else [world.hash(request, with_hash)]
    world.agent.end(ID, "peer_lost", landed, hashes)
    world.step()
    assert sum(block.block_hash is not None for block in world.pool.blocks) == used
    assert world.side.matched_tokens(request, used * BLOCK) == (0, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert world.references() == ALL
    assert world.side.take_stats()["direct_fallbacks"] == 1  # pyright: ignore


def test_a_hand_off_without_the_hash_of_its_end_is_used_as_far_as_it_is_known() -> None:
    world = World()
    request = world.request()
    world.waits(request)
    world.step()
    world.agent.end(ID, "landed", ALL, [world.hash(request, 6)])
    world.step()
    assert sum(block.block_hash is not None for block in world.pool.blocks) == 7
    assert world.side.matched_tokens(request, WHOLE * BLOCK) == (0, False)
    stats = world.side.take_stats()
    assert stats["direct_fallbacks"] == 1 and not stats.get("direct_landed")  # pyright: ignore


def test_a_rank_that_does_not_answer_holds_its_blocks_and_not_the_request() -> None:
    world = World()
    world.agent.ends_at_once = False
    request = world.request()
    assert world.waits(request)
    world.step()
    world.engine.now += SECONDS_MIN + STUCK_SECONDS - 0.1
    assert world.waits(request)
    world.engine.now += 0.2
    assert world.side.matched_tokens(request, 0) == (0, False)
    world.side.allocated(request, world.engine.allocate(request, TOKENS), 0)
    assert world.references() == 2 * ALL, "they may still be written"
    world.agent.end(ID, "given_up", 0, [])
    world.step()
    assert world.references() == ALL


def test_at_most_a_tenth_of_the_engines_blocks_is_landed_in_at_once() -> None:
    world = World(300)
    requests = [world.request(f"d{number}", handoff=f"d{number}") for number in range(3)]
    for request in requests:
        assert world.waits(request)
    world.step()
    assert sum(len(room) for room in world.agent.room.values()) == 30
    first = requests[0]
    world.agent.end(Lending("d0").id, "landed", ALL, [world.hash(first, WHOLE)])
    world.step()
    world.side.matched_tokens(first, WHOLE * BLOCK)
    world.side.allocated(first, world.engine.allocate(first, TOKENS), 0)
    world.step()
    assert sum(len(room) for room in world.agent.room.values()) > 30, "there is room again"


@pytest.mark.parametrize("how", ["it lands", "the first is aborted", "a rank does not answer"])
def test_a_second_sample_of_a_prompt_waits_for_the_first_ones_hand_off(how: str) -> None:
    world = World()
    first, second = world.request("first"), world.request("second")
    assert world.waits(first) and world.waits(second)
    world.step()
    assert world.waits(second)
    assert world.agent.landings == {ID: (0, ALL)}
    if how == "it lands":
        world.agent.end(ID, "landed", ALL, [world.hash(first, WHOLE)])
    elif how == "the first is aborted":
        world.side.forget_request("first")
    else:
        world.engine.now += SECONDS_MIN + STUCK_SECONDS + 0.1
    world.step()
    assert world.side.matched_tokens(second, 0) == (0, False)
    assert not world.land._with
    assert not (world.side.take_stats() or {}).get("direct_fallbacks")


def test_another_prompt_with_the_same_id_does_not_wait_for_it() -> None:
    world = World()
    first, second = world.request("first"), world.request("second", TOKENS - BLOCK)
    assert world.waits(first)
    assert world.side.matched_tokens(second, 0) == (0, False)
    world.side.forget_request("second")
    assert world.waits(first)
    assert (world.side.take_stats() or {})["direct_fallbacks"] == 1


def test_a_running_request_without_a_block_gets_those_of_the_youngest_landing() -> None:
    world = World()
    older, younger = world.request("older"), world.request("younger", handoff="y")
    assert world.waits(older) and world.waits(younger)
    world.step()
    assert world.side.free_blocks_soon()
    assert world.agent.given_up == [Lending("y").id]
    assert world.references() == ALL and world.waits(older) and not world.waits(younger)
    # One that does not end in time frees nothing: to say so would stop the engine.
    world.agent.ends_at_once = False
    assert not world.side.free_blocks_soon()


def test_a_reset_ends_all_and_succeeds() -> None:
    world = World()
    assert world.waits(world.request())
    world.step()
    lending = Request("p", list(range(TOKENS)), transfer={"do_remote_decode": True})
    world.side.add_request(lending)
    world.engine.compute(lending, TOKENS)
    world.side.request_finished(lending, world.engine.tables["p"])
    world.engine.free(lending)
    assert world.references() == 2 * ALL
    assert world.pool.reset_prefix_cache()
    assert world.references() == 0


def test_an_engine_whose_caches_go_away_waits_for_nothing_and_holds_nothing() -> None:
    world = World()
    request = world.request()
    assert world.waits(request)
    world.step()
    lending = Request("p", list(range(TOKENS)), transfer={"do_remote_decode": True})
    world.side.add_request(lending)
    world.engine.compute(lending, TOKENS)
    world.side.request_finished(lending, world.engine.tables["p"])
    world.engine.free(lending)
    world.side.reported({"direct": RankGone().merge(RankGone())})
    assert world.agent.closed
    assert not world.waits(request)
    world.step()
    assert world.references() == 0
    assert not world.waits(world.request("later", handoff="later"))


# The engine that computes


def lending(world: World, name: str = "p", tokens: int = TOKENS, handoff: str = NAME) -> Request:
    params = {"do_remote_decode": True, "kvlane": {"handoff": handoff}}
    request = Request(name, list(range(tokens)), transfer=params)
    world.side.add_request(request)
    return request


def filled(world: World) -> list[Computed]:
    """What the workers are told in the steps of a test."""
    told: list[Computed] = []
    (worker,) = world.engine.workers
    bind = worker.bind

    def bind_and_tell(jobs: Any) -> None:
        told.extend(jobs.others.get("direct", ()))
        bind(jobs)

    worker.bind = bind_and_tell
    return told


def test_blocks_are_told_as_they_are_filled_and_pinned_until_nobody_reads_them() -> None:
    world = World()
    request, told = lending(world), filled(world)
    world.engine.compute(request, 50)
    world.engine.compute(request, TOKENS - 50)
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, 12), (12, 8), (20, 1)]
    assert told[1].hash == world.hash(request, WHOLE - 1)[1] and told[2].hash == world.hash(request, WHOLE)[1]
    answer = world.side.request_finished(request, world.engine.tables["p"])
    assert answer is not None
    assert cast("dict[str, Any]", answer["kvlane"])["peer"] == OWN
    world.engine.free(request)
    world.step()
    assert world.references() == ALL
    world.agent.free = [ID]
    world.side.add_request(Request("next", [1, 2, 3]))
    assert world.references() == 0, "before anything is allocated for the next request"


def test_a_prompt_that_ends_half_way_or_pins_too_much_is_given_up() -> None:
    world = World()
    request = lending(world)
    world.engine.compute(request, 50)
    world.side.request_finished(request, world.engine.tables["p"])
    assert world.agent.given_up == [ID]
    small = World(50, **{"kvlane.max_pinned_share": 0.4})
    request = lending(small)
    small.engine.compute(request, TOKENS)
    assert small.agent.given_up == [ID]
    assert small.side.take_stats()["direct_not_offered"] == 1  # pyright: ignore


@pytest.mark.parametrize("is_wanted", [True, False])
def test_where_no_more_may_be_pinned_what_nobody_has_wanted_goes_first(is_wanted: bool) -> None:
    world = World(100, **{"kvlane.max_pinned_share": 0.4})
    first, second = lending(world, "first"), lending(world, "second", handoff="second")
    ids = [ID, Lending("second").id]
    if is_wanted:
        world.agent.wanted.add(ids[0])
    for request in (first, second):
        world.engine.compute(request, TOKENS)
        world.side.request_finished(request, world.engine.tables[request.request_id])
        world.engine.free(request)
    assert world.agent.given_up == ([ids[1]] if is_wanted else [])
    assert world.references() == ALL, "of one of them"
    assert (ids[0] in world.agent.unwanted) == (not is_wanted)
    world.agent.free += ids
    world.step()
    assert world.references() == 0


def test_what_nobody_wants_any_more_is_not_pinned_further() -> None:
    world = World()
    request = lending(world)
    world.engine.compute(request, 50)
    world.agent.unwanted.add(ID)
    world.engine.compute(request, TOKENS - 50)
    world.engine.free(request)
    assert world.references() == 12


def test_a_leg_after_a_reset_begins_when_the_weights_are_known() -> None:
    world = World()
    known = world.side._shared.weights
    assert world.pool.reset_prefix_cache()
    world.side.reset()
    request = lending(world)
    assert not known.are_known and world.agent.lendings == []
    world.engine.compute(request, 50)
    assert known.are_known, "the workers have answered in this step"
    told = filled(world)
    world.engine.compute(request, TOKENS - 50)
    assert world.agent.lendings == [ID]
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, WHOLE), (WHOLE, 1)]


def test_a_request_that_ends_before_the_weights_are_known_is_not_handed_over() -> None:
    world = World()
    world.side.reset()
    request = lending(world)
    world.side.request_finished(request, ([],))
    world.step()
    assert world.agent.lendings == []
    assert world.side.take_stats()["direct_not_offered"] == 1  # pyright: ignore


@pytest.mark.parametrize("answers", [True, False])
def test_a_prompt_after_a_reset_is_asked_for_when_the_weights_are_known_or_computed(answers: bool) -> None:
    world = World()
    assert world.pool.reset_prefix_cache()
    world.side.reset()
    if not answers:
        world.side._shared.weights.answer = lambda report: False  # pyright: ignore
    request = world.request()
    assert world.waits(request)
    world.step()
    assert world.agent.landings == {}
    if answers:
        assert world.waits(request)
        world.step()
        assert list(world.agent.landings) == [ID]
        return
    world.engine.now += PATIENCE_SECONDS
    world.step()
    assert not world.waits(request) and world.agent.landings == {}
    assert world.side.take_stats()["direct_fallbacks"] == 1  # pyright: ignore


def test_an_engine_without_prefix_caching_offers_nothing() -> None:
    world = World()
    request = Request("p", list(range(TOKENS)), hash_block=1000, transfer={"do_remote_decode": True})
    world.side.add_request(request)
    assert world.agent.lendings == []
