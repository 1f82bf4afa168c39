"""Prompts without room in the decode engine go through a few of its blocks into the daemon's pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, Request, full_group
from test_direct import ALL, BLOCK_BYTES, TOKENS, WHOLE, World

from kvlane.connector.direct_request import Lending
from kvlane.connector.kinds.direct_land import STILL_SECONDS
from kvlane.connector.kinds.direct_landing import BLOCKS_FOR_RUNNING
from kvlane.connector.kinds.direct_overflow import PAUSE_SECONDS, WAIT_FOR_SHARE_SECONDS
from kvlane.connector.prefill_rate import SECONDS_MIN

# Of 120 blocks 12 are for landings, and prompts that overflow go through 6.
BLOCKS = 120
THROUGH = 6


class Full(World):
    """An engine whose running request leaves few blocks free, and a prefill engine that has computed whole prompts."""

    def __init__(self, free: int = 15, **settings: Any) -> None:
        super().__init__(BLOCKS, 1, **settings)
        self.running = Request("running", list(range(5000, 5000 + (BLOCKS - 1 - free) * BLOCK)))
        self.side.add_request(self.running)
        self.engine.allocate(self.running, self.running.num_tokens)
        self.prompts: dict[bytes, Request] = {}
        self.postponed: list[tuple[bytes, float, bool]] = []
        agent: Any = self.agent
        agent.postpone_landing = lambda *arguments: self.postponed.append(arguments)

    def prompt(self, name: str = "d", tokens: int = TOKENS, first: int = 0) -> Request:
        request = self.request(name, tokens, handoff=name, first=first)
        self.prompts[Lending(name).id] = request
        return request

    def read(self, blocks: int = ALL) -> None:
        """The prefill engine offers so many blocks of each prompt, and what has room is read."""
        group = full_group()
        for landing, request in self.prompts.items():
            standing = self.agent.standings.get(landing)
            if standing is None or standing[0] is not None:
                continue
            first, end = self.agent.landings[landing]
            room = self.agent.room.get(landing, [])
            arrived = min(first + len(room), blocks, end)
            for block in range(standing[2], arrived):
                if (block + 1) * BLOCK <= request.num_prompt_tokens:
                    value = self.engine.value(request, group, block, 0)
                    self.engine.fill(0, 0, room[block - first], value)
            hashes = [self.hash(request, block) for block in {min(WHOLE, blocks) - 1, blocks - 1}]
            self.agent.standings[landing] = (None, "", arrived, hashes)
            if arrived == end:
                self.agent.end(landing, "landed", end, hashes)

    def step(self) -> None:
        """A step in which the running request generates."""
        self.engine.step({"running": 1} if "running" in self.side.requests else {})

    def steps(self, blocks: int = ALL, count: int = 30) -> None:
        for _ in range(count):
            self.read(blocks)
            self.step()

    def end_running(self) -> None:
        self.engine.finish(self.running)

    def loads(self, request: Request) -> int:
        """The request is admitted. Loads what it was promised, compares each block, and gives the number of tokens."""
        tokens, is_async = self.side.matched_tokens(request, 0)
        if not tokens:
            return 0
        assert is_async
        group = full_group()
        free = [block for block in self.pool.blocks if block.ref_cnt == 0 and not block.is_null]
        table = free[: -(-tokens // BLOCK)]
        self.pool.touch(table)
        self.engine.tables[request.request_id] = ([block.block_id for block in table],)
        own: Any = SimpleNamespace(blocks=(table,))
        self.side.allocated(request, own, tokens)
        loaded, failed = self.engine.step()
        assert loaded == {request.request_id} and not failed
        for index, block in enumerate(own.blocks[0]):
            right = self.engine.value(request, group, index, 0)
            assert self.engine.content(0, 0, block.block_id) == right, f"block {index}"
        return tokens

    def stats(self) -> dict[str, float]:
        return self.side.take_stats() or {}


def test_a_prompt_without_room_goes_through_few_blocks_into_the_daemons_pool_and_is_loaded_from_there() -> (
    None
):
    world = Full()
    request = world.prompt()
    assert world.waits(request)
    world.step()
    most = 0
    for _ in range(30):
        world.read()
        assert world.waits(request) or world.store.leases
        world.step()
        most = max(most, world.references() - (BLOCKS - 1 - 15))
    assert world.store.block_count() == WHOLE
    assert most <= 15, "it had all blocks that the first landing may have, and no more"
    assert world.references() == BLOCKS - 1 - 15, "it holds no block while it waits"
    assert len(world.store.leases) == 1, "the daemon keeps it meanwhile"
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK
    stats = world.stats()
    assert (stats["direct_overflows"], stats["direct_overflowed_tokens"]) == (1, WHOLE * BLOCK)
    assert "direct_fallbacks" not in stats
    world.step()
    assert not world.store.leases and not world.land._landings


def test_a_byte_that_is_wrong_in_the_pool_is_loaded() -> None:
    """The control of the test before."""
    world = Full()
    request = world.prompt()
    world.step()
    world.steps()
    assert world.store.corrupt() == WHOLE
    world.end_running()
    with pytest.raises(AssertionError, match="block 0"):
        world.loads(request)


def test_many_prompts_go_through_the_same_few_blocks_one_after_the_other() -> None:
    world = Full(free=8)
    requests = [world.prompt(f"d{number}", first=1000 * number) for number in range(12)]
    world.step()
    world.steps(count=200)
    assert world.store.block_count() == 12 * WHOLE and len(world.store.leases) == 12
    world.end_running()
    assert [world.loads(request) for request in requests[:3]] == 3 * [WHOLE * BLOCK]
    assert "direct_fallbacks" not in world.stats()


def test_running_requests_keep_some_free_blocks() -> None:
    world = Full(free=BLOCKS_FOR_RUNNING + 2)
    first, second = world.prompt("first"), world.prompt("second", first=1000)
    world.step()
    world.steps(count=3)
    while world.agent.room.get(Lending("second").id) is None:
        world.read()
        world.step()
        overflowing = [each for each in world.land._landings.values() if each.overflow is not None]
        if len(overflowing) == 2:
            assert world.pool.get_num_free_blocks() >= BLOCKS_FOR_RUNNING
    assert world.waits(first) and world.waits(second)


def test_a_prompt_holds_no_blocks_while_it_waits_for_more_and_lets_no_later_one_pass() -> None:
    """It held what was free, so vLLM preempted running requests: their next tokens came 15 s late."""
    world = Full()
    world.store.down = True
    first = world.prompt("first")
    short = world.prompt("short", tokens=64, first=1000)
    world.steps(blocks=16, count=5)
    assert not world.agent.room and world.pool.get_num_free_blocks() == 15
    world.side.forget_request(first.request_id)
    world.steps(blocks=16, count=5)
    # Twelve blocks are for landings, and the first one in line may have more.
    assert not world.agent.room
    world.engine.free(world.running)
    world.steps(blocks=16, count=5)
    assert len(world.agent.room[Lending("short").id]) == 16
    assert not world.waits(short)


def test_a_prompt_that_never_fits_into_the_room_for_landings_overflows() -> None:
    world = Full(free=15, kv_buffer_size=f"{(ALL - 1) * BLOCK_BYTES}")
    request = world.prompt()
    world.step()
    assert not world.agent.room, "it would never have room for all"
    world.steps()
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK


def test_what_the_engine_has_of_the_beginning_is_saved_too() -> None:
    world = Full()
    request = world.prompt()
    free = [block for block in world.pool.blocks if block.ref_cnt == 0 and not block.is_null]
    for number, block in enumerate(free[:3]):
        block.block_hash = request.block_hashes[number]
        world.engine.fill(0, 0, block.block_id, world.engine.value(request, full_group(), number, 0))
    world.step()
    assert world.agent.landings[Lending("d").id] == (3, ALL)
    world.steps()
    assert world.store.block_count() == WHOLE
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK


def test_what_the_daemon_has_of_the_beginning_is_not_saved_again() -> None:
    world = Full()
    world.store_beginning(4)
    request = world.prompt()
    world.waits(request)
    world.step()
    assert world.agent.landings[Lending("d").id] == (4, ALL)
    world.step()
    world.steps()
    saved = world.engine.workers[0].take_stats() or {}
    assert (saved["save_blocks"], saved.get("present_blocks", 0)) == (WHOLE - 4, 0)
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK


def test_a_prompt_that_overflows_may_take_longer_than_computing_it_but_not_longer_than_its_patience() -> None:
    world = Full()
    world.prompt()
    world.step()
    world.store.hold_saves = True
    world.steps(count=3)
    assert world.postponed[-1] == (Lending("d").id, SECONDS_MIN * 1e3, True)
    (landed,) = world.land._landings.values()
    until = landed.until
    world.engine.now += 1.0
    world.step()
    assert landed.until > until
    world.engine.now += 1000
    world.step()
    assert world.engine.now > landed.until


@pytest.mark.parametrize("at", ["in its READs", "in its saves", "in its lookup", "when it is stored"])
def test_an_abort_leaves_nothing_behind(at: str) -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.store.hold_saves = at == "in its saves"
    world.store.hold_lookups = at == "in its lookup"
    world.steps(count=2 if at == "in its READs" else 30)
    world.side.forget_request(request.request_id)
    world.store.release_held()
    world.steps(count=5)
    assert world.references() == BLOCKS - 1 - 15
    assert not world.store.leases and not world.land._landings


@pytest.mark.parametrize("at", ["in its READs", "in its saves", "when it is stored"])
def test_if_the_daemon_goes_the_prompt_is_computed(at: str) -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.store.hold_saves = at == "in its saves"
    world.steps(count=2 if at == "in its READs" else 30)
    world.store.down = True
    world.store.release_held()
    world.steps(count=5)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.references() == BLOCKS - 1 - 15


def test_if_the_daemon_hangs_the_prompt_is_computed_and_the_log_names_the_daemon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.store.hold_saves = True
    world.steps(count=5)
    world.agent.end(Lending("d").id, "peer_lost", world.agent.standings[Lending("d").id][2], [])
    world.steps(count=3)
    world.engine.now += 60
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert "the daemon does not answer" in caplog.text
    world.store.release_held()
    world.steps(count=3)
    assert world.references() == BLOCKS - 1 - 15 and not world.land._landings


def test_if_the_daemon_restarts_the_prompt_is_computed() -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.steps()
    world.store.restart()
    world.step()
    for _ in range(3):
        world.side.matched_tokens(request, 0)
        world.step()
    assert world.side.matched_tokens(request, 0) == (0, False)


def test_after_the_daemon_has_not_kept_a_prompt_others_wait_for_a_while() -> None:
    """Its pool may be full of blocks that others use. Reading prompts for it would be in vain."""
    world = Full()
    world.store.fail_saves = True
    request = world.prompt()
    world.step()
    world.steps()
    assert world.side.matched_tokens(request, 0) == (0, False)
    world.side.allocated(request, world.engine.allocate(request, 0), 0)
    world.store.fail_saves = False
    other = world.prompt("other", first=1000)
    world.steps()
    assert world.waits(other) and not world.store.leases
    stats = world.stats()
    assert (stats["direct_overflows"], stats["direct_fallbacks"]) == (1, 1)
    world.engine.now += PAUSE_SECONDS
    world.steps()
    assert world.store.leases and world.stats()["direct_overflows"] == 1


def test_prompts_take_at_most_a_share_of_the_daemons_pool() -> None:
    world = Full()
    # A quarter of it is two prompts.
    world.store.pool_bytes = 4 * 2 * ALL * BLOCK_BYTES
    requests = [world.prompt(f"d{number}", first=1000 * number) for number in range(3)]
    world.step()
    world.steps(count=60)
    assert len(world.store.leases) == 2
    world.end_running()
    for request in requests[:2]:
        assert world.loads(request) == WHOLE * BLOCK
        world.side.forget_request(request.request_id)
        world.engine.free(request)
    world.steps(count=60)
    # The third has its turn.
    assert not world.waits(requests[2]) and "direct_fallbacks" not in world.stats()


def test_if_the_prefill_engine_is_lost_what_was_saved_is_used() -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.steps(blocks=WHOLE - 2, count=10)
    arrived = world.store.block_count()
    assert arrived >= THROUGH
    world.agent.end(Lending("d").id, "peer_lost", WHOLE - 2, [world.hash(request, WHOLE - 3)])
    world.steps(count=5)
    assert world.store.block_count() == WHOLE - 2
    world.end_running()
    assert world.loads(request) == (WHOLE - 2) * BLOCK
    assert world.stats()["direct_fallbacks"] == 1


def test_other_content_is_not_saved() -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.steps(count=1)
    landing = Lending("d").id
    room = len(world.agent.room[landing])
    assert room
    world.agent.standings[landing] = (None, "", room, [(WHOLE - 1, b"x" * 16)])
    for _ in range(5):
        world.step()
    assert world.store.block_count() == 0
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.stats()["direct_fallbacks"] == 1


def test_nothing_is_saved_that_no_hash_proves() -> None:
    world = Full()
    world.prompt()
    world.step()
    world.steps(count=1)
    landing = Lending("d").id
    room = len(world.agent.room[landing])
    assert room
    world.agent.standings[landing] = (None, "", room, [])
    for _ in range(5):
        world.step()
    assert world.store.block_count() == 0


def test_a_reset_amid_an_overflow_succeeds_and_nothing_from_before_is_used() -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.steps(count=3)
    world.engine.free(world.running)
    assert world.pool.reset_prefix_cache()
    assert world.references() == 0
    world.side.forget_request("running")
    for _ in range(3):
        world.side.matched_tokens(request, 0)
        world.engine.step()
    assert not world.waits(request)


def test_samples_of_one_prompt_find_it_in_the_pool() -> None:
    world = Full()
    first = world.prompt("d")
    second = world.request("second", handoff="d")
    assert world.waits(first) and world.waits(second)
    world.step()
    world.steps()
    assert world.store.leases
    assert world.side.matched_tokens(second, 0) == (WHOLE * BLOCK, True)
    assert world.side.matched_tokens(first, 0) == (WHOLE * BLOCK, True)


def test_a_running_request_without_a_block_gets_those_of_an_overflow() -> None:
    world = Full()
    request = world.prompt()
    world.step()
    world.steps(count=1)
    world.step()
    before = world.pool.get_num_free_blocks()
    assert world.side.free_blocks_soon()
    assert world.pool.get_num_free_blocks() > before
    world.steps(count=3)
    assert not world.waits(request)


def test_blocks_of_an_overflow_do_not_keep_a_request_from_starting() -> None:
    """Nothing runs, and a request waits for blocks: it gets them before the next turn of a prompt that overflows."""
    world = Full()
    world.prompt("d")
    world.prompt("e", first=1000)
    world.step()
    world.steps(count=3)
    world.end_running()
    world.side.add_request(Request("plain", list(range(9000, 9000 + 100 * BLOCK))))
    overflowing = [each for each in world.land._landings.values() if each.overflow is not None]
    assert any(each.taken for each in overflowing)
    for _ in range(10):
        world.read()
        world.engine.step()
    assert overflowing and not any(each.taken for each in overflowing)
    given = {landing: len(room) for landing, room in world.agent.room.items()}
    world.engine.step()
    assert given == {landing: len(room) for landing, room in world.agent.room.items()}


def test_a_prompt_that_was_not_handed_over_is_looked_up_again() -> None:
    """A prefill engine with GET unpins prompts beyond its buffer. If both engines share a daemon, it has them."""
    world = Full()
    request = world.prompt()
    assert world.waits(request)
    world.step()
    world.store_beginning(WHOLE)
    world.agent.end(Lending("d").id, "ended", 0, [])
    world.step()
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK


def test_a_prompt_that_neither_engine_nor_pool_has_space_for_is_computed_at_once() -> None:
    """It waited for a minute, and the prefill engine computed it for nobody."""
    world = Full(kv_buffer_size=f"{(ALL - 1) * BLOCK_BYTES}")
    world.store.pool_bytes = 4 * (ALL - 1) * BLOCK_BYTES
    request = world.prompt()
    world.step()
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert not world.agent.landings


def test_a_prompt_that_waits_for_others_to_leave_the_pool_keeps_its_budget() -> None:
    world = Full()
    world.store.pool_bytes = 4 * ALL * BLOCK_BYTES
    first, second = world.prompt("first"), world.prompt("second", first=1000)
    world.step()
    world.steps()
    assert world.store.leases and world.waits(second) and first
    assert all(landing == Lending("first").id for landing, _, _ in world.postponed)


def test_a_prefill_engine_that_is_slow_does_not_keep_others_from_overflowing() -> None:
    """A prompt of which only the beginning was offered held all blocks that there are for this."""
    world = Full()
    slow, quick = world.prompt("slow"), world.prompt("quick", first=1000)
    world.step()
    landing = Lending("slow").id
    for _ in range(30):
        world.read()
        # Two blocks of the one are offered, and never more.
        room = len(world.agent.room.get(landing, []))
        hashes = [world.hash(slow, 1)]
        world.agent.standings[landing] = (None, "", min(2, room), hashes)
        world.step()
        world.engine.now += 0.1
    assert world.store.leases and not world.waits(quick)
    assert len(world.agent.room[landing]) == 2 and world.waits(slow)


def test_blocks_that_come_free_for_a_running_request_are_not_taken_again_at_once() -> None:
    world = Full(free=6)
    for number in range(4):
        world.prompt(f"d{number}", first=1000 * number)
    world.step()
    world.steps(count=1)
    world.step()
    given = {landing: len(room) for landing, room in world.agent.room.items()}
    assert world.side.free_blocks_soon()
    world.step()
    assert given == {landing: len(room) for landing, room in world.agent.room.items()}
    world.steps(count=2)
    assert given != {landing: len(room) for landing, room in world.agent.room.items()}


def test_a_running_request_waits_for_saves_rather_than_for_the_end_of_a_prompt_that_overflows() -> None:
    world = Full()
    world.prompt()
    world.step()
    world.store.hold_saves = True
    world.steps(count=3)
    assert world.side.free_blocks_soon() and not world.agent.given_up


def test_where_only_the_share_of_landings_is_taken_a_prompt_waits_a_moment() -> None:
    """Prompts that have landed are admitted in the next step, and then there is room for it."""
    world = Full(free=90)
    first, second = (
        world.prompt(f"d{number}", tokens=30 * BLOCK, first=1000 * number) for number in range(2)
    )
    world.step()
    # The first one has room, and is not computed to its end.
    world.steps(blocks=20, count=5)
    assert len(world.agent.room[Lending("d0").id]) == 30 and Lending("d1").id not in world.agent.room
    assert "direct_overflows" not in world.stats() and world.waits(first) and world.waits(second)
    world.engine.now += WAIT_FOR_SHARE_SECONDS
    world.steps(blocks=20, count=1)
    assert world.stats()["direct_overflows"] == 1


def test_what_may_be_pinned_at_once_is_saved_at_once() -> None:
    """With a small `max_pinned_share` nothing was saved, because all that had arrived could not be pinned together."""
    settings: dict[str, Any] = {"kvlane.max_pinned_share": 0.02}
    world = Full(**settings)
    request = world.prompt()
    world.step()
    world.steps(count=60)
    world.end_running()
    assert world.loads(request) == WHOLE * BLOCK


@pytest.mark.parametrize("at", ["in its READs", "after them"])
def test_a_prompt_of_which_little_comes_is_counted_once(at: str) -> None:
    world = Full()
    world.prompt()
    world.step()
    world.steps(blocks=WHOLE - 2, count=2)
    if at == "in its READs":
        world.store.down = True
    else:
        world.store.fail_saves = True
        world.agent.end(Lending("d").id, "peer_lost", 3, [])
    world.steps(count=10)
    assert world.stats()["direct_fallbacks"] == 1


def test_landed_prompts_do_not_hold_what_the_first_one_in_the_queue_needs() -> None:
    """vLLM asks for no request behind one without room. The landed ones behind it held their blocks for ever."""
    world = Full(free=40)
    landed = world.prompt("landed", tokens=12 * BLOCK * 2, first=1000)
    world.end_running()
    world.engine.step()
    for _ in range(3):
        world.read(blocks=24)
        world.engine.step()
    assert not world.waits(landed) and world.references() == 24
    world.side.add_request(Request("first", list(range(9000, 9000 + 110 * BLOCK))))
    world.engine.step()
    assert world.references() == 24
    world.engine.now += STILL_SECONDS
    world.engine.step()
    assert world.references() == 0


def test_behind_a_prompt_that_waits_in_the_pool_others_overflow_too() -> None:
    """They would take the blocks that it needs. There was room for them, so they neither landed nor overflowed."""
    world = Full(free=20)
    first = world.prompt("first")
    world.step()
    world.steps()
    assert world.store.leases and not world.waits(first)
    short = world.prompt("short", tokens=64, first=1000)
    world.steps(blocks=16)
    assert world.stats()["direct_overflows"] == 2
    assert len(world.store.leases) == 2 and not world.waits(short)
