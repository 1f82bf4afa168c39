"""Both halves of direct hand-offs in the scheduler role, for a model with three kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import BLOCK, Request, full_group, window_group
from test_direct import ID, LandingPool, World, filled, lending

from kvlane.connector.groups import CHUNKS, STATE

TOKENS = 82
FULL, WINDOW, STATES = full_group(0), window_group(1, 3), replace(window_group(2, 1, 2 * BLOCK), kind=STATE)
HANDED = 80
WHOLE = HANDED // BLOCK
# All of full attention, three blocks of the window, one state.
ALL = WHOLE + 3 + 1


class PoolOfGroups(LandingPool):
    """With vLLM's hashes, which name the group."""

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        (group,) = groups
        return super().get_cached_block(block_hash + group.to_bytes(4, "big"), groups)

    def cache_full_blocks(self, *, request: Any, blocks: Any, num_cached_blocks: int, **rest: Any) -> None:
        scale = rest["block_size"] // BLOCK
        for number in range(num_cached_blocks, rest["num_full_blocks"]):
            assert blocks[number].block_hash is None and not blocks[number].is_null
            raw = request.block_hashes[(number + 1) * scale - 1]
            blocks[number].block_hash = raw + rest["kv_cache_group_id"].to_bytes(4, "big")

    def cached(self, request: Request) -> list[list[int]]:
        """For each group, the prompt's blocks that are found."""
        return [
            [
                block
                for block in range(TOKENS // size)
                if self.get_cached_block(request.block_hashes[(block + 1) * size // BLOCK - 1], [group])
            ]
            for group, size in enumerate((BLOCK, BLOCK, 2 * BLOCK))
        ]


class Hybrid(World):
    groups = (FULL, WINDOW, STATES)
    pool_of = PoolOfGroups


class Windowed(Hybrid):
    groups = (FULL, WINDOW)


class InChunks(Hybrid):
    groups = (FULL, replace(window_group(1, 4), kind=CHUNKS, window=16))


def last_hashes(made: World, request: Request) -> list[tuple[int, bytes]]:
    """The hashes that a prefill engine sends: of each group's last block."""
    ends = made.hash(request, WHOLE - 1)[1]
    return [(place - 1, ends) for place in (WHOLE, WHOLE + 3, ALL)]


def test_what_lands_becomes_the_cache_of_each_group() -> None:
    made = Hybrid()
    pool: Any = made.pool
    request = made.request()
    assert made.waits(request)
    made.step()
    assert made.agent.landings == {ID: (0, ALL)} and len(made.agent.room[ID]) == ALL
    made.agent.end(ID, "landed", ALL, last_hashes(made, request))
    made.step()
    assert pool.cached(request) == [list(range(WHOLE)), [17, 18, 19], [9]]
    held = [pool.blocks[block].block_hash is not None for block in made.agent.room[ID]]
    assert all(held)
    # The engine computes the rest of the last block itself.
    assert made.side.matched_tokens(request, HANDED) == (0, False)
    made.side.allocated(request, made.engine.allocate(request, TOKENS), 0)
    own = sum(len(ids) for ids in made.engine.tables["d"])
    assert made.references() == own
    stats = made.side.take_stats()
    assert stats is not None and (stats["direct_landed"], stats["direct_landed_tokens"]) == (1, HANDED)


def test_blocks_that_a_step_fills_with_zeros_are_not_landed_in() -> None:
    """A request that was preempted in the same step had them, and vLLM zeroes them all the same."""
    made = Hybrid()
    first = [block.block_id for block in made.pool.blocks if not block.is_null][:2]
    request = made.request()
    assert made.waits(request)
    plan = made.side.plan_step

    def with_zeros(output: Any, jobs: Any) -> None:
        output.new_block_ids_to_zero = first
        plan(output, jobs)

    made.side.plan_step = with_zeros
    made.step()
    assert len(made.agent.room[ID]) == ALL and not {*first} & {*made.agent.room[ID]}


def test_a_prompt_that_the_engine_has_is_not_asked_for() -> None:
    """Its chunk is over where hits end, so there is nothing beside full attention. vLLM has not asked for it yet."""
    made = InChunks()
    request = made.request()
    for block, block_hash in zip(made.pool.blocks[1:], request.block_hashes, strict=False):
        block.block_hash = block_hash + (0).to_bytes(4, "big")
    made.step()
    assert made.agent.landings == {} and made.references() == 0
    stats = made.side.take_stats()
    assert stats is None or not stats.get("direct_fallbacks")


@pytest.mark.parametrize("missing", ["window", "state", "hash of the window", "hash of the state"])
def test_if_one_group_does_not_arrive_none_is_used(missing: str) -> None:
    made = Hybrid()
    pool: Any = made.pool
    request = made.request()
    assert made.waits(request)
    made.step()
    hashes = last_hashes(made, request)
    if missing.startswith("hash"):
        place = {"hash of the window": 1, "hash of the state": 2}[missing]
        hashes[place] = (hashes[place][0], b"x" * 16)
        made.agent.end(ID, "landed", ALL, hashes)
    else:
        arrived = {"window": WHOLE + 2, "state": WHOLE + 3}[missing]
        made.agent.end(ID, "peer_lost", arrived, [each for each in hashes if each[0] < arrived])
    made.step()
    assert pool.cached(request) == [[], [], []]
    assert made.references() == 0
    stats = made.side.take_stats()
    assert stats is not None and stats["direct_fallbacks"] == 1 and not stats.get("direct_landed")


def test_of_what_the_daemon_has_full_attention_is_loaded_and_the_rest_is_asked_for() -> None:
    made = Windowed()
    other = Request("stored", list(range(18)))
    made.engine.run(other)
    made.engine.finish(other)
    made.step()
    pool: Any = made.pool
    assert made.references() == 0
    request = made.request()
    assert made.waits(request)
    made.step()
    # A hit has 16 of 18 tokens.
    assert made.agent.landings == {ID: (4, WHOLE + 3)}
    made.agent.end(ID, "landed", WHOLE + 3, last_hashes(made, request)[:2])
    for _ in range(3):
        made.step()
    assert pool.cached(request)[:2] == [list(range(WHOLE)), [17, 18, 19]]
    full = [pool.get_cached_block(each, [0])[0].block_id for each in request.block_hashes]
    right = [made.engine.value(request, FULL, block, 0) for block in range(4)]
    assert [made.engine.content(0, 0, block) for block in full[:4]] == right


def test_windows_and_states_are_told_of_once_their_boundary_is_computed() -> None:
    made = Hybrid()
    request, told = lending(made, tokens=TOKENS), filled(made)
    made.engine.compute(request, 50)
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, 12)]
    made.engine.allocate(request, HANDED)
    full, window, states = made.engine.tables["p"]
    hash_of_state = request.block_hashes[19] + (2).to_bytes(4, "big")
    made.pool.blocks[states[9]].block_hash = hash_of_state
    # The window has moved on, and vLLM has freed what fell out of it.
    window[:10] = [0] * 10
    made.engine.compute(request, HANDED - 50)
    blocks = [(each.first_block, each.blocks) for each in told[1:]]
    assert blocks == [(12, full[12:20]), (20, window[17:20]), (23, states[9:10])]
    ends = made.hash(request, 19)[1]
    assert [each.hash for each in told[1:]] == [ends] * 3
    made.engine.compute(request, TOKENS - HANDED)
    assert len(told) == 4
    made.side.request_finished(request, made.engine.tables["p"])
    assert made.agent.given_up == []


@pytest.mark.parametrize("gone", ["window", "state"])
def test_what_vllm_has_not_kept_there_is_not_handed_over(gone: str) -> None:
    made = Hybrid()
    request, told = lending(made, tokens=TOKENS), filled(made)
    made.engine.allocate(request, HANDED)
    _, window, states = made.engine.tables["p"]
    if gone == "window":
        made.pool.blocks[states[9]].block_hash = request.block_hashes[19] + (2).to_bytes(4, "big")
        window[17] = 0
    made.engine.compute(request, HANDED)
    assert told == [] and made.agent.given_up == [ID]
    stats = made.side.take_stats()
    assert stats is not None and stats["direct_not_offered"] == 1


def test_a_prompt_without_room_waits_and_does_not_overflow() -> None:
    made = Hybrid()
    pool: Any = made.pool
    taken = [block for block in pool.blocks if not block.is_null][: -ALL // 2]
    pool.touch(taken)
    request = made.request()
    assert made.waits(request)
    made.engine.step({"another": 1})
    made.agent.standings[ID] = (None, "", WHOLE, last_hashes(made, request)[:1])
    made.engine.step({"another": 1})
    made.engine.now += 1.0
    made.engine.step({"another": 1})
    stats = made.side.take_stats()
    assert stats is None or not stats.get("direct_overflows")
    pool.free_blocks(taken)
    made.step()
    assert len(made.agent.room[ID]) == ALL
