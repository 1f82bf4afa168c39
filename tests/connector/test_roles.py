"""Both roles together over the fake store: what is saved is found, what is promised arrives, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes import BLOCK, Engine, FakeWeights, Request, Step, full_group, window_group
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.connector.groups import CacheGroup
from kvlane.connector.jobs import JobEnd, StepJobs
from kvlane.connector.kinds.load import MISS_IS_OLD_SECONDS
from kvlane.connector.weights import Weights
from kvlane.testing import FakeCore

PROMPT = list(range(100, 122))  # 5 full blocks and 2 tokens


def request(name: str = "r", tokens: list[int] | None = None, hash_block: int = BLOCK) -> Request:
    return Request(name, PROMPT if tokens is None else tokens, hash_block)


def check_nothing_held(engine: Engine) -> None:
    assert engine.store.leases == set()
    assert engine.scheduler.saves.pinned_blocks == 0
    assert all(block.ref_cnt == 0 for block in engine.pool.blocks)
    assert not engine.scheduler.has_pending_work()
    assert engine.failures.count == 0


def test_a_prompt_computed_once_is_loaded_by_the_next_engine() -> None:
    store = FakeCore()
    first = Engine(store, engine_id="first", workers=2)
    cold = request()
    assert first.run(cold) == 0
    first.finish(cold)
    assert store.block_count() == 5

    second = Engine(store, engine_id="second", workers=2)
    warm = request()
    assert second.run(warm) == 20
    for index in range(5):
        for rank in range(2):
            block = second.tables["r"][0][index]
            assert second.content(rank, 0, block) == second.value(warm, second.groups[0], index, rank)
    second.finish(warm)
    assert store.block_count() == 5
    check_nothing_held(first)
    check_nothing_held(second)


@pytest.mark.parametrize(("workers", "replicas"), [(4, 4), (4, 2), (3, 3)])
def test_ranks_that_hold_the_same_blocks_store_them_once(workers: int, replicas: int) -> None:
    alone, shared = FakeCore(), FakeCore()
    groups = [full_group(), window_group(1, 2)]
    first = Engine(shared, groups, engine_id="first", workers=workers, replicas=replicas)
    for engine in (Engine(alone, groups), first):
        cold = request()
        assert engine.run(cold) == 0
        engine.finish(cold)
        check_nothing_held(engine)

    def stored(store: FakeCore) -> int:
        return sum(len(data) for data in store.pages[store.boot].values())

    assert stored(shared) == stored(alone) * workers // replicas
    for worker in first.workers:
        counted = worker.take_stats()
        assert counted is not None
        # 64 bytes by three: a byte more or less.
        assert counted["save_bytes"] == pytest.approx(stored(shared) / workers, abs=2 * 5)

    second = Engine(shared, groups, engine_id="second", workers=workers, replicas=replicas)
    warm = request()
    assert second.run(warm) == 20
    for rank in range(workers):
        for index in range(5):
            block = second.tables["r"][0][index]
            assert second.content(rank, 0, block) == second.value(warm, second.groups[0], index, rank)
    second.finish(warm)
    check_nothing_held(second)


def test_at_least_one_token_is_left_to_compute() -> None:
    store = FakeCore()
    engine = Engine(store)
    exact = request(tokens=list(range(12)))
    engine.run(exact)
    engine.finish(exact)
    assert store.block_count() == 3
    again = request("again", tokens=list(range(12)))
    assert engine.run(again) == 11
    engine.finish(again)
    check_nothing_held(engine)


@pytest.mark.parametrize(
    ("groups", "loaded"), [([full_group()], 11), ([full_group(), window_group(1, 2)], 8)]
)
def test_a_whole_prompt_that_is_stored_is_not_saved_again(groups: list[CacheGroup], loaded: int) -> None:
    """Tokens of its last block have to be computed; the block used to be saved again with every hit, and a window's for
    longer than that of full attention."""
    engine = Engine(FakeCore(), groups)
    exact = request(tokens=list(range(12)))
    engine.run(exact)
    engine.finish(exact)
    engine.workers[0].take_stats()
    again = request("again", tokens=list(range(12)))
    assert engine.run(again) == loaded
    engine.finish(again)
    counted = engine.workers[0].take_stats()
    assert counted is not None
    assert "load_jobs" in counted
    assert "save_jobs" not in counted
    check_nothing_held(engine)


def test_a_step_is_told_which_loads_vllm_still_waits_for() -> None:
    store = FakeCore()
    other = Engine(store, engine_id="other")
    other.run(request("stored"))
    engine = Engine(store)
    waiting: Any = request("waiting")
    engine.scheduler.add_request(waiting)
    tokens, _ = engine.scheduler.matched_tokens(waiting, 0)
    assert tokens
    engine.scheduler.allocated(waiting, engine.allocate(waiting, tokens), tokens)
    (job,) = engine.scheduler.loads.under_way
    for status, unplanned in (("WAITING_FOR_REMOTE_KVS", [job]), ("WAITING", []), ("FINISHED_ABORTED", [])):
        waiting.status = SimpleNamespace(name=status)
        jobs = StepJobs()
        engine.scheduler.plan_step(Step(), jobs)
        assert jobs.unplanned == unplanned, status
    del waiting.status
    jobs = StepJobs()
    engine.scheduler.plan_step(Step(), jobs)
    assert jobs.unplanned == [], "a version that does not say is waited for"


def test_asking_again_gives_the_same_answer_and_only_what_is_past_the_local_hit_is_loaded() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)

    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert [engine.scheduler.matched_tokens(warm, 8) for _ in range(3)] == [(12, True)] * 3
    assert len(store.leases) == 1
    blocks = engine.allocate(warm, 20)
    engine.scheduler.allocated(warm, blocks, 12)
    (load,) = engine.scheduler.take_loads()
    assert load.groups is not None
    (_, ids, pages) = load.groups[0]
    assert ids == [block.block_id for block in blocks.blocks[0][2:5]]
    assert len(pages[0]) == 3 * 4


def test_an_answer_that_takes_its_time_delays_nothing_but_its_request() -> None:
    store = FakeCore()
    store.hold_lookups = True
    engine = Engine(store)
    slow = request()
    engine.scheduler.add_request(slow)
    assert engine.scheduler.matched_tokens(slow, 0) == (None, False)
    jobs = StepJobs()
    engine.scheduler.plan_step(Step(), jobs)
    assert not jobs.idle, "a step must not wait for copies while a lookup is out"
    store.release_held()
    assert engine.scheduler.matched_tokens(slow, 0) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "decodes"),
    [({}, 0), ({"a": 1}, 1), ({"a": 1, "b": 1}, 2), ({"a": 1, "b": 2}, 0), ({"a": 7}, 0)],
)
def test_a_step_tells_of_how_many_requests_each_computes_one_token(
    tokens: dict[str, int], decodes: int
) -> None:
    jobs = StepJobs()
    Engine(FakeCore()).scheduler.plan_step(Step(num_scheduled_tokens=tokens), jobs)
    assert jobs.decodes == decodes


def test_a_hit_that_is_not_taken_gives_its_lease_back() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    for way in ("finished", "computed"):
        warm = request(way)
        engine.scheduler.add_request(warm)
        assert engine.scheduler.matched_tokens(warm, 0) == (20, True)
        assert len(store.leases) == 1
        if way == "finished":
            engine.scheduler.request_finished(warm, ([],))
        else:
            engine.scheduler.allocated(warm, engine.allocate(warm, 22), 0)
        assert store.leases == set()


def test_an_aborted_load_is_reported_and_gives_its_lease_back_at_its_end() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    store.hold_loads = True
    warm = request("warm")
    engine.scheduler.add_request(warm)
    engine.scheduler.matched_tokens(warm, 0)
    engine.scheduler.allocated(warm, engine.allocate(warm, 20), 20)
    warm.num_computed_tokens = 20
    assert engine.step() == (set(), set())
    engine.scheduler.request_finished(warm, engine.tables["warm"])
    assert engine.scheduler.has_pending_work(), "the engine must go on stepping"
    assert len(store.leases) == 1, "the pages are still being read"
    assert store.block_count() == 5, "blocks that were not loaded yet are not saved"
    store.release_held()
    assert engine.step() == ({"warm"}, set())
    engine.free(warm)
    check_nothing_held(engine)


def test_blocks_that_were_never_loaded_are_not_saved() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    store.hold_loads = True
    warm = request("warm")
    engine.scheduler.add_request(warm)
    engine.scheduler.matched_tokens(warm, 0)
    engine.scheduler.allocated(warm, engine.allocate(warm, 20), 20)
    warm.num_computed_tokens = 20
    store.restart()
    engine.step()  # the daemon has nothing any more, so all that runs is to be saved again
    engine.scheduler.request_finished(warm, engine.tables["warm"])
    store.release_held()
    assert engine.step() == ({"warm"}, set())
    assert store.block_count() == 0


def test_a_failed_load_is_reported_and_not_promised_again() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    store.fail_loads = True
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 0) == (20, True)
    blocks = engine.allocate(warm, 20)
    engine.scheduler.allocated(warm, blocks, 20)
    assert engine.step() == ({"warm"}, {"warm"})
    assert engine.workers[0].take_failed_blocks() == {block.block_id for block in blocks.blocks[0]}
    assert engine.scheduler.matched_tokens(warm, 0) == (0, False)
    assert store.leases == set()
    assert engine.failures.take() == 1


@pytest.mark.parametrize("empties", [True, False])
def test_a_request_begins_anew_when_the_first_rank_says_that_its_load_failed(empties: bool) -> None:
    """Another rank had released the load, so vLLM took it for done, and gave blocks that had not come their hashes."""
    store = FakeCore()
    engine = Engine(store, [full_group(), window_group(1, 2)], workers=2, empties_failed=empties)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 0) == (20, True)
    tables = engine.allocate(warm, 20)
    engine.scheduler.allocated(warm, tables, 20)
    (load,) = engine.scheduler.take_loads()
    warm.num_computed_tokens, warm.status = 20, SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    assert bool(load.block_ids) is not empties
    engine.scheduler.jobs_ended({load.job: JobEnd(1, ok=False)})
    # vLLM has one load for done now, and the blocks may still be written.
    assert (warm.num_computed_tokens, all(not table for table in tables.blocks)) == (
        0 if empties else 20,
        empties,
    )
    assert sum(block.ref_cnt for block in engine.pool.blocks) == (10 if empties else 20)
    warm.status = SimpleNamespace(name="WAITING")
    if empties:
        assert engine.scheduler.matched_tokens(warm, 0) == (0, False)
    engine.scheduler.jobs_ended({load.job: JobEnd(1, ok=True)})
    assert engine.scheduler.matched_tokens(warm, 0) == (0, False), "it is not promised again"
    if empties:
        assert store.leases == set() and all(block.ref_cnt == 0 for block in engine.pool.blocks)


def test_a_promise_without_a_plan_is_reported_as_failed() -> None:
    engine = Engine(FakeCore())
    stranger = request("stranger")
    engine.scheduler.allocated(stranger, engine.allocate(stranger, 20), 20)
    assert engine.step() == ({"stranger"}, {"stranger"})


def test_a_load_that_the_restarted_daemon_forgot_still_arrives() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    warm = request("warm")
    engine.scheduler.add_request(warm)
    engine.scheduler.matched_tokens(warm, 0)
    store.restart()
    store.down = True
    engine.scheduler.allocated(warm, engine.allocate(warm, 20), 20)
    assert engine.step() == ({"warm"}, set())
    for index, block in enumerate(engine.tables["warm"][0]):
        assert engine.content(0, 0, block) == engine.value(warm, engine.groups[0], index, 0)


@pytest.mark.parametrize("faults", [["restart"], ["restart", "restart"], ["down"], ["down", "restart"]])
@pytest.mark.parametrize("steps", [0, 1, 10])
def test_a_hit_that_waits_for_room_is_promised_only_while_its_daemon_lives(
    faults: list[str], steps: int
) -> None:
    """A request had its hit and waited for room, the daemon was killed, room came: the hit of the former run was
    promised when the workers had let its pool go already, and vLLM ended the request with an error."""
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    waiting = request("waiting")
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    for fault in faults:
        # Others run meanwhile, so steps go on.
        known = engine.scheduler.matched_tokens(waiting, 0)
        for _ in range(steps):
            engine.step()
            assert engine.scheduler.matched_tokens(waiting, 0) == known
        if fault == "restart":
            store.restart()
        store.down = fault == "down"
        engine.step()
        assert engine.scheduler.matched_tokens(waiting, 0) == (0, False), "it is computed"
        if fault == "restart":
            # Meanwhile somebody saves it there, and the request, still without room, hits again.
            other = request(f"other {store.boot.hex()}")
            engine.run(other)
            engine.finish(other)
            engine.now += MISS_IS_OLD_SECONDS
            assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    if faults[-1] == "restart":
        engine.scheduler.allocated(waiting, engine.allocate(waiting, 20), 20)
        assert engine.step() == ({"waiting"}, set())
        waiting.num_computed_tokens = 20
        engine.compute(waiting, 2)
    else:
        engine.scheduler.allocated(waiting, engine.allocate(waiting, 22), 0)
        engine.compute(waiting, 22)
    for index in range(5):
        block = engine.tables["waiting"][0][index]
        assert engine.content(0, 0, block) == engine.value(waiting, engine.groups[0], index, 0)
    engine.finish(waiting)
    engine.step()
    assert engine.failures.count == 0


def test_an_engine_that_made_no_step_for_long_looks_before_it_promises() -> None:
    """While no step comes, a worker lets the pool of a dead daemon go after a minute."""
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    paused = request("paused")
    engine.scheduler.add_request(paused)
    assert engine.scheduler.matched_tokens(paused, 0) == (20, True)
    ticks = []
    engine.scheduler._core.tick = lambda: ticks.append(engine.now)
    assert engine.scheduler.matched_tokens(paused, 0) == (20, True)
    assert not ticks, "steps look often enough"
    engine.now += 60
    assert engine.scheduler.matched_tokens(paused, 0) == (20, True)
    assert ticks == [engine.now]


def test_a_restarted_daemon_fills_up_with_what_runs() -> None:
    store = FakeCore()
    engine = Engine(store)
    long = request()
    engine.run(long)
    assert store.block_count() == 5
    store.restart()
    assert store.block_count() == 0
    long.all_token_ids.append(7)
    engine.compute(long, 1)
    assert store.block_count() == 5
    engine.finish(long)
    engine.step()
    check_nothing_held(engine)


def test_what_only_the_engine_has_is_saved_too() -> None:
    store = FakeCore()
    engine = Engine(store)
    store.down = True
    cold = request("cold")
    engine.run(cold)
    store.down = False
    # The engine's own cache holds 5 blocks, the daemon none.
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 20) == (0, False)
    engine.tables["warm"] = tuple(list(ids) for ids in engine.tables["cold"])
    engine.pool.touch([engine.pool.blocks[each] for each in engine.tables["warm"][0]])
    warm.num_computed_tokens = 20
    engine.compute(warm, 2)
    assert store.block_count() == 5


def test_blocks_stay_pinned_until_every_rank_has_copied_them() -> None:
    store = FakeCore()
    engine = Engine(store, workers=3)
    store.hold_saves = True
    cold = request()
    engine.run(cold)
    table = list(engine.tables["r"][0])
    engine.finish(cold)
    assert [engine.pool.blocks[each].ref_cnt for each in table[:5]] == [1] * 5
    assert engine.pool.freed == [table[5]], "the tail block is not full, nobody copies it"
    assert engine.scheduler.has_pending_work()
    assert engine.scheduler.free_blocks_soon()
    engine.now += 60
    assert not engine.scheduler.free_blocks_soon(), (
        "a save that hangs must not keep the engine from preempting"
    )

    store.release_held()
    engine.workers[0].poll()
    engine.workers[1].poll()
    for worker in engine.workers[:2]:
        engine.scheduler.jobs_ended(worker.take_ended())
    assert engine.scheduler.saves.pinned_blocks == 5
    engine.step()
    assert engine.scheduler.saves.pinned_blocks == 0
    assert engine.pool.freed[1:] == table[4::-1], "the end of a prompt is reused first"
    assert store.block_count() == 5


def test_saves_pin_a_bounded_share_and_catch_up() -> None:
    store = FakeCore()
    store.hold_saves = True
    engine = Engine(store, blocks=32, settings={"kvlane.max_pinned_share": 0.25})
    long = request(tokens=list(range(80)))
    engine.scheduler.add_request(long)
    engine.scheduler.matched_tokens(long, 0)
    engine.compute(long, 79)
    assert engine.scheduler.saves.pinned_blocks == 8
    store.release_held()
    for _ in range(4):
        engine.step({"r": 0})
    assert store.block_count() == 19
    assert engine.scheduler.take_stats() is not None


def test_what_cannot_be_pinned_at_the_end_is_counted() -> None:
    store = FakeCore()
    store.hold_saves = True
    engine = Engine(store, blocks=32, settings={"kvlane.max_pinned_share": 0.25})
    long = request(tokens=list(range(80)))
    engine.scheduler.add_request(long)
    engine.scheduler.matched_tokens(long, 0)
    engine.compute(long, 80)
    engine.finish(long)
    stats = engine.scheduler.take_stats()
    assert stats is not None and stats["skipped_blocks"] == 19 - 8
    store.release_held()
    engine.step()
    check_nothing_held(engine)


@pytest.mark.parametrize(("save_decode", "stored"), [(True, 4), (False, 2)])
def test_generated_blocks_are_saved_if_wanted(save_decode: bool, stored: int) -> None:
    store = FakeCore()
    engine = Engine(store, settings={"kvlane.save_decode": save_decode})
    growing = request(tokens=list(range(10)))
    engine.run(growing)
    for token in range(8):
        growing.all_token_ids.append(token)
        engine.compute(growing, 1)
    engine.finish(growing)
    engine.step()
    assert store.block_count() == stored
    check_nothing_held(engine)


def test_the_last_sampled_token_is_not_taken_for_computed() -> None:
    """Async scheduling counts tokens as computed whose step is still to come."""
    store = FakeCore()
    engine = Engine(store)
    ending = request(tokens=list(range(11)))
    engine.run(ending)
    ending.all_token_ids.append(1)
    engine.allocate(ending, 12)
    ending.num_computed_tokens = 12
    engine.finish(ending)
    engine.step()
    assert store.block_count() == 2
    check_nothing_held(engine)


def test_a_window_is_loaded_without_what_fell_out_of_it() -> None:
    groups = [full_group(0), window_group(1, window_blocks=2)]
    store = FakeCore()
    engine = Engine(store, groups)
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    assert store.block_count() == 10
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 0) == (20, True)
    blocks = engine.allocate(warm, 20)
    for index in range(3):
        blocks.blocks[1][index] = engine.pool.blocks[0]  # as vLLM does
    engine.scheduler.allocated(warm, blocks, 20)
    loads = engine.scheduler.take_loads()
    assert loads[0].groups is not None
    assert [len(ids) for _, ids, _ in loads[0].groups] == [5, 2]
    engine.scheduler.loads.to_send += loads
    assert engine.step() == ({"warm"}, set())
    for group in groups:
        for index in range(5):
            block = blocks.blocks[group.index][index]
            if not block.is_null:
                assert engine.content(0, group.index, block.block_id) == engine.value(warm, group, index, 0)
    assert store.leases == set()


def test_a_hit_with_a_window_that_the_engine_shortens_is_refused() -> None:
    store = FakeCore()
    engine = Engine(store, [full_group(0), window_group(1, window_blocks=2)])
    cold = request("cold")
    engine.run(cold)
    engine.finish(cold)
    warm = request("warm")
    engine.scheduler.add_request(warm)
    engine.scheduler.matched_tokens(warm, 0)
    engine.scheduler.allocated(warm, engine.allocate(warm, 12), 12)
    assert engine.step() == ({"warm"}, {"warm"})
    assert store.leases == set()


def test_groups_of_different_block_size_share_one_prompt() -> None:
    groups = [full_group(0, 8), window_group(1, window_blocks=3, tokens_per_block=4)]
    store = FakeCore()
    engine = Engine(store, groups, hash_block=4)
    cold = request("cold", tokens=list(range(30)))
    engine.run(cold)
    engine.finish(cold)
    assert store.block_count() == 3 + 7
    warm = request("warm", tokens=list(range(30)))
    assert engine.run(warm) == 24
    engine.finish(warm)
    engine.step()
    check_nothing_held(engine)


def test_a_large_block_is_known_by_all_of_its_tokens() -> None:
    engine = Engine(FakeCore(), [full_group(0, 8)], hash_block=4)
    engine.run(request("one", tokens=list(range(30))))
    assert engine.run(request("equal up to the middle", tokens=[*range(12), *range(50, 68)])) == 8


def test_null_and_reused_blocks_are_not_saved() -> None:
    store = FakeCore()
    engine = Engine(store, [full_group(0), window_group(1, window_blocks=2)])
    cold = request()
    engine.scheduler.add_request(cold)
    engine.scheduler.matched_tokens(cold, 0)
    engine.allocate(cold, 20)
    table = engine.tables["r"][1]
    engine.pool.free_blocks([engine.pool.blocks[table[0]]])
    table[0] = 0
    # Versions before 0.30 do not show the table: this one is stale, block 1's id was given to another prompt.
    state = engine.scheduler.requests["r"]
    for group, ids in enumerate(engine.tables["r"]):
        for index, block in enumerate(ids):
            engine.pool.blocks[block].block_hash = cold.block_hashes[index] + group.to_bytes(4, "big")
    engine.pool.blocks[table[1]].block_hash = b"x" * 32 + b"\0\0\0\1"
    state.block_ids = [list(ids) for ids in engine.tables["r"]]
    output = Step({"r": 20})
    jobs = StepJobs()
    engine.scheduler.plan_step(output, jobs)
    by_group: dict[int, list[int]] = {}
    for group, _, _, ids in jobs.saves[0].groups:
        by_group.setdefault(group, []).extend(ids)
    assert by_group[0] == engine.tables["r"][0]
    assert by_group[1] == table[2:]


@pytest.mark.parametrize("table_is_shown", [False, True])
def test_a_state_is_saved_only_under_the_hash_that_vllm_gave_its_block(table_is_shown: bool) -> None:
    """A table's block may hold a state of a token inside it, or of another prompt's end."""
    engine = Engine(FakeCore(), [full_group(0), replace(window_group(1, window_blocks=1), kind="mamba")])
    cold = request()
    engine.scheduler.add_request(cold)
    engine.scheduler.matched_tokens(cold, 0)
    engine.allocate(cold, 20)
    table = engine.tables["r"][1]
    assert len(table) >= 4
    hashes = {1: b"x" * 32, 2: cold.block_hashes[2]}
    for index, block in enumerate(table):
        given = hashes.get(index)
        engine.pool.blocks[block].block_hash = None if given is None else given + b"\0\0\0\1"
    saves, state = engine.scheduler.saves, engine.scheduler.requests["r"]
    saves.add(state, 20, engine.tables["r"], tables_are_exact=table_is_shown, wait=True)
    job = saves.take_job(0.0)
    assert job is not None
    assert [ids for group, _, _, ids in job.groups if group == 1] == [[table[2]]]


def test_tables_are_followed_through_the_schedulers_messages() -> None:
    engine = Engine(FakeCore())
    followed = request()
    engine.scheduler.add_request(followed)

    def cached(ids: Any, resumed: set[str]) -> SimpleNamespace:
        return SimpleNamespace(req_ids=["r"], new_block_ids=[ids], resumed_req_ids=resumed)

    plan = engine.scheduler.plan_step
    plan(Step(scheduled_new_reqs=[SimpleNamespace(req_id="r", block_ids=([3, 4],))]), StepJobs())
    plan(Step(scheduled_cached_reqs=cached(([5],), set())), StepJobs())
    plan(Step(scheduled_cached_reqs=cached(None, set())), StepJobs())
    assert engine.scheduler.requests["r"].block_ids == [[3, 4, 5]]
    plan(Step(scheduled_cached_reqs=cached(([8, 9],), {"r"})), StepJobs())
    assert engine.scheduler.requests["r"].block_ids == [[8, 9]]


def test_a_preempted_request_is_looked_up_again_with_what_it_generated() -> None:
    store = FakeCore()
    engine = Engine(store)
    growing = request(tokens=list(range(10)))
    engine.run(growing)
    for token in range(8):
        growing.all_token_ids.append(token)
        engine.compute(growing, 1)
    engine.free(growing)
    growing.num_computed_tokens = 0
    assert engine.scheduler.matched_tokens(growing, 0) == (16, True)


def test_an_old_miss_is_asked_again() -> None:
    store = FakeCore()
    engine = Engine(store)
    waiting = request("waiting")
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (0, False)
    other = Engine(store, engine_id="other")
    other.run(request("same"))
    assert engine.scheduler.matched_tokens(waiting, 0) == (0, False)
    engine.now += 1.5
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)


def test_a_request_that_reads_no_cache_is_not_looked_up() -> None:
    store = FakeCore()
    engine = Engine(store)
    engine.run(request("cold"))
    reader = request("logprobs")
    reader.skip_reading_prefix_cache = True
    engine.scheduler.add_request(reader)
    assert engine.scheduler.matched_tokens(reader, 0) == (0, False)
    assert store.leases == set()


def reset(engine: Engine) -> None:
    """What vLLM does once nothing runs: its own cache first, then the connector's."""
    assert engine.pool.reset_prefix_cache()
    engine.scheduler.reset()


def hits(engine: Engine, name: str) -> int:
    """Tokens of the prompt that a new request finds, and saves nothing of."""
    asking = request(name)
    engine.scheduler.add_request(asking)
    for _ in range(3):
        tokens, _ = engine.scheduler.matched_tokens(asking, 0)
        if tokens is not None:
            engine.scheduler.forget_request(name)
            return tokens
        engine.step()
    raise AssertionError("a request waits for ever")


def computed_by(engine: Engine, name: str) -> None:
    """A request that is computed from its beginning, and saved."""
    one = request(name)
    engine.scheduler.add_request(one)
    assert engine.scheduler.matched_tokens(one, 0) == (0, False)
    engine.scheduler.allocated(one, engine.allocate(one, one.num_tokens), 0)
    engine.compute(one, one.num_tokens)
    engine.finish(one)
    engine.step()


def test_weights_that_were_changed_are_told_apart_and_nobody_loses_a_block() -> None:
    """After a change of weights and a reset, the new weights' blocks went into the files' namespace: a fresh engine
    answered wrongly. And the reset dropped what engines with the old weights shared."""
    store = FakeCore()
    trained, other = Engine(store, engine_id="trained"), Engine(store, engine_id="other")
    computed_by(trained, "first")
    assert store.block_count() == 5
    trained.weights.present = "life 1"
    reset(trained)
    assert store.block_count() == 5
    assert hits(trained, "asking") == 0, "they belong to other weights"
    computed_by(trained, "second")
    assert store.block_count() == 10
    assert hits(trained, "again") == 20, "its own"
    assert hits(other, "asking") == 20, "those of the first weights"
    assert hits(Engine(store, engine_id="fresh"), "asking") == 20
    assert store.block_count() == 10

    # Changed again: neither of the two.
    trained.weights.present = "life 2"
    reset(trained)
    assert hits(trained, "third") == 0
    # And back, as sleep and wake-up leave them.
    for label in ("life 1", ""):
        trained.weights.present = label
        reset(trained)
        assert hits(trained, f"back to {label}") == 20


def test_engines_whose_weights_have_one_name_share() -> None:
    store = FakeCore()
    engines = [Engine(store, engine_id=f"engine {number}") for number in range(3)]
    for engine in engines[:2]:
        engine.weights.present = "version step-120"
        reset(engine)
    assert hits(engines[0], "asking") == 0
    computed_by(engines[0], "first")
    assert hits(engines[1], "asking") == 20
    assert hits(engines[2], "asking") == 0, "it has the first weights"
    later = Engine(store, engine_id="later", settings={"kvlane.weights_version": "step-120"})
    assert hits(later, "asking") == 20
    reset(later)
    assert hits(later, "again") == 20, "its weights are still those"


def test_a_rank_that_cannot_tell_its_weights_shares_with_nobody() -> None:
    store = FakeCore()
    engine = Engine(store, workers=2)
    computed_by(engine, "first")
    engine.workers[1].weights = None
    reset(engine)
    assert hits(engine, "asking") == 0
    reset(engine)
    assert hits(engine, "asking again") == 0


def test_ranks_of_which_some_were_trained_find_their_blocks_again() -> None:
    store = FakeCore()
    engine = Engine(store, workers=2)
    computed_by(engine, "first")
    trained = FakeWeights()
    trained.present = "life 1"
    engine.workers[1].weights = cast("Weights", trained)
    reset(engine)
    assert hits(engine, "asking") == 0
    computed_by(engine, "second")
    reset(engine)
    assert hits(engine, "asking again") == 20, "they are the same"
    assert hits(Engine(store, workers=2, engine_id="other"), "asking") == 20, "of the first weights"
    trained.present = ""
    reset(engine)
    assert hits(engine, "back") == 20


def test_a_reset_that_vllm_refuses_leaves_old_blocks_to_nobody() -> None:
    """vLLM resets the connector although its own cache still holds the old weights' blocks. A request that hit them
    there had them saved under the new weights' name. And the next prompt waited two seconds for the workers' word of
    their weights, which nobody asks them for until a reset succeeds."""
    store = FakeCore()
    engine = Engine(store)
    running = request("running", tokens=list(range(40, 62)))
    engine.run(running)
    held = request("held")
    engine.run(held)
    before = store.block_count()
    store.restart()
    engine.step()
    engine.weights.present = "version step-2"
    assert not engine.pool.reset_prefix_cache(), "requests run"
    engine.scheduler.reset()
    # The first blocks of it are in vLLM's own cache, from before.
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 16) == (0, False)
    engine.tables["warm"] = tuple(list(ids) for ids in engine.tables["held"])
    engine.pool.touch([engine.pool.blocks[each] for each in engine.tables["warm"][0]])
    warm.num_computed_tokens = 20
    engine.compute(warm, 2)
    for each in (warm, held, running):
        engine.finish(each)
    engine.step()
    assert store.block_count() == 0 < before
    # From a reset that succeeds on it goes its way.
    reset(engine)
    assert hits(engine, "asking") == 0
    computed_by(engine, "new")
    named = Engine(store, engine_id="named", settings={"kvlane.weights_version": "step-2"})
    assert hits(named, "asking") == 20


def test_a_hit_of_a_run_that_was_left_is_not_promised_when_the_scheduler_is_back() -> None:
    """The workers were told that no load of that run follows, so they may have let its pool go."""
    store = FakeCore()
    engine = Engine(store)
    computed_by(engine, "cold")
    waiting = request("waiting")
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    (lease,) = store.leases
    store.down = True
    engine.step()
    store.down = False
    engine.step()
    assert store.leases == set()
    engine.now += MISS_IS_OLD_SECONDS
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    assert store.leases and lease not in store.leases, "it was looked up again"


def test_what_a_reset_gave_up_is_saved_when_it_is_computed_again() -> None:
    store = FakeCore()
    store.hold_saves = True
    engine = Engine(store)
    running = request("running")
    engine.run(running)
    engine.free(running)  # preempted
    assert engine.pool.reset_prefix_cache()
    store.release_held()
    running.num_computed_tokens = 0
    assert engine.scheduler.matched_tokens(running, 0) == (0, False)
    engine.compute(running, running.num_tokens)
    engine.step()
    assert store.block_count() == 5


def test_weights_are_looked_at_when_requests_run_again_and_not_before() -> None:
    """Between the reset and the first request the trainer may still write."""
    store = FakeCore()
    engine = Engine(store)
    computed_by(engine, "first")
    reset(engine)
    engine.step()
    engine.weights.present = "life 1"
    assert hits(engine, "asking") == 0


def test_a_request_does_not_wait_for_ever_for_word_of_the_weights() -> None:
    store = FakeCore()
    engine = Engine(store)
    computed_by(engine, "first")
    reset(engine)
    engine.now += 3600  # it slept
    waiting = request("waiting")
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (None, False)
    engine.now += 3
    assert engine.scheduler.matched_tokens(waiting, 0) == (0, False)


def test_what_runs_through_a_reset_belongs_to_no_weights() -> None:
    store = FakeCore()
    engine = Engine(store, [full_group(0), window_group(1, 2)])
    running = request("running")
    engine.run(running)
    assert store.block_count() == 10
    waiting = request("waiting")
    engine.scheduler.add_request(waiting)
    assert engine.scheduler.matched_tokens(waiting, 0) == (20, True)
    engine.weights.present = "life 1"
    engine.scheduler.reset()
    assert store.leases == set()
    # The running request began with the old weights.
    running.all_token_ids += range(8)
    engine.compute(running, 8)
    engine.step()
    assert store.block_count() == 10
    # Preempted, it starts over with the new ones.
    engine.free(running)
    running.num_computed_tokens = 0
    assert engine.scheduler.matched_tokens(running, 0) == (0, False)
    engine.compute(running, running.num_tokens)
    assert store.block_count() == 10 + 14


def test_a_reset_is_not_in_the_way_of_saves_and_they_do_not_end_in_the_cache() -> None:
    """vLLM resets its own cache before it tells the connector, and raised because saves held blocks."""
    store = FakeCore()
    store.hold_saves = True
    engine = Engine(store)
    old = request("old")
    engine.run(old)
    engine.finish(old)
    assert engine.scheduler.has_pending_work()
    reset(engine)
    assert engine.scheduler.saves.pinned_blocks == 0
    assert not engine.scheduler.has_pending_work(), "a paused engine makes no step for it"
    # The blocks get other content before the worker gets to read them.
    for block in range(1, 6):
        engine.fill(0, 0, block, 255)
    store.release_held()
    engine.step()
    assert store.block_count() == 0
    assert hits(engine, "new") == 0
    computed_by(engine, "newer")
    assert hits(engine, "newest") == 20
    check_nothing_held(engine)


def test_where_the_daemon_does_not_confirm_or_others_hold_blocks_nothing_is_given_up() -> None:
    store = FakeCore()
    engine = Engine(store)
    running = request("running")
    engine.run(running)
    store.hold_saves = True
    old = request("old", tokens=list(range(40, 62)))
    engine.run(old)
    engine.finish(old)
    assert not engine.pool.reset_prefix_cache(), "a request runs"
    engine.finish(running)
    store.silent = True
    assert not engine.pool.reset_prefix_cache(), "the daemon may still read the blocks"
    assert engine.scheduler.saves.pinned_blocks == 5
    store.release_held()
    engine.step()
    assert store.block_count() == 10, "they were saved after all"
    assert engine.pool.reset_prefix_cache()


def test_a_load_under_way_keeps_its_blocks_through_a_reset() -> None:
    store = FakeCore()
    engine = Engine(store)
    computed_by(engine, "cold")
    store.hold_loads = True
    warm = request("warm")
    engine.scheduler.add_request(warm)
    assert engine.scheduler.matched_tokens(warm, 0) == (20, True)
    engine.scheduler.allocated(warm, engine.allocate(warm, 20), 20)
    engine.step()
    # Aborted; vLLM's own references go.
    engine.scheduler.forget_request("warm")
    engine.free(warm)
    assert not engine.pool.reset_prefix_cache(), "its blocks are still written"
    store.release_held()
    engine.step()
    assert engine.pool.reset_prefix_cache()
    check_nothing_held(engine)


def test_without_a_daemon_nothing_is_pinned_and_nothing_promised() -> None:
    store = FakeCore()
    store.down = True
    engine = Engine(store)
    alone = request()
    assert engine.run(alone) == 0
    engine.finish(alone)
    check_nothing_held(engine)


def test_a_worker_without_memory_reports_every_job() -> None:
    store = FakeCore()
    engine = Engine(store)
    cold = request("cold")
    engine.run(cold)
    warm = request("warm")
    engine.scheduler.add_request(warm)
    engine.scheduler.matched_tokens(warm, 0)
    store.hold_loads = store.hold_saves = True
    engine.scheduler.allocated(warm, engine.allocate(warm, 20), 20)
    engine.step()
    engine.workers[0].detach()  # sleep mode
    engine.scheduler.jobs_ended(engine.workers[0].take_ended())
    assert engine.workers[0].take_loaded() == ({"warm"}, {"warm"})
    assert store.leases == set()
    late = request("late", tokens=list(range(9)))
    engine.run(late)
    assert engine.scheduler.saves.pinned_blocks == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_sequence_of_events_loads_right_bytes_and_leaks_nothing(seed: int) -> None:
    """Requests with shared beginnings come, wait, run, are aborted; the store is down, restarted, held, fails."""
    rng = random.Random(seed)
    store = FakeCore()
    groups = [full_group(0)] if rng.random() < 0.5 else [full_group(0), window_group(1, 2)]
    engine = Engine(store, groups, workers=rng.choice([1, 2]), blocks=4000)
    live: dict[str, Request] = {}
    loading: dict[str, int] = {}

    def check_loaded(names: set[str], failed: set[str]) -> None:
        for name in names:
            end = loading.pop(name)
            if name not in live:
                engine.free(gone.pop(name))
                continue
            asked = live[name]
            if name in failed:
                asked.num_computed_tokens = 0
                continue
            for group, ids in zip(groups, engine.tables[name], strict=True):
                first = 0 if not group.window_blocks else max(0, end // BLOCK - group.window_blocks)
                for index in range(first, end // BLOCK):
                    for rank in range(len(engine.workers)):
                        got = engine.content(rank, group.index, ids[index])
                        assert got == engine.value(asked, group, index, rank)

    gone: dict[str, Request] = {}
    for number in range(60):
        event = rng.choice(
            ["new", "new", "schedule", "schedule", "schedule", "finish", "step", "fault", "decode"]
        )
        idle = [name for name in live if name not in loading]
        if event == "new":
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4))] * BLOCK
            made = Request(f"r{number}", tokens + list(range(rng.randrange(BLOCK * 2))))
            if made.num_tokens:
                live[made.request_id] = made
                engine.scheduler.add_request(made)
        elif event == "schedule" and idle:
            asked = live[rng.choice(idle)]
            if asked.num_computed_tokens == 0:
                if asked.request_id in engine.tables:
                    engine.free(asked)
                tokens, _ = engine.scheduler.matched_tokens(asked, 0)
                if tokens is None:
                    continue
                engine.scheduler.allocated(asked, engine.allocate(asked, tokens or asked.num_tokens), tokens)
                if tokens:
                    asked.num_computed_tokens = loading[asked.request_id] = tokens
                    check_loaded(*engine.step())
                    continue
            if asked.num_computed_tokens < asked.num_tokens:
                chunk = rng.randint(1, asked.num_tokens - asked.num_computed_tokens)
                asked_tokens = asked.num_computed_tokens + chunk
                engine.allocate(asked, asked_tokens)
                for group, ids in zip(groups, engine.tables[asked.request_id], strict=True):
                    for index in range(min(asked_tokens // BLOCK, len(asked.block_hashes))):
                        for rank in range(len(engine.workers)):
                            value = engine.value(asked, group, index, rank)
                            engine.fill(rank, group.index, ids[index], value)
                check_loaded(*engine.step({asked.request_id: chunk}))
                asked.num_computed_tokens += chunk
        elif event == "decode" and idle:
            asked = live[rng.choice(idle)]
            if asked.num_computed_tokens == asked.num_tokens:
                asked.all_token_ids.append(rng.randrange(2))
        elif event == "finish" and live:
            name = rng.choice(list(live))
            ended = live.pop(name)
            engine.scheduler.request_finished(ended, engine.tables.get(name, tuple([] for _ in groups)))
            if name in loading:
                gone[name] = ended
            elif name in engine.tables:
                engine.free(ended)
        elif event == "fault":
            fault = rng.choice(["down", "up", "restart", "hold", "release", "fail", "heal", "reset", "later"])
            if fault in ("down", "up"):
                store.down = fault == "down"
            elif fault == "restart":
                store.restart()
            elif fault == "hold":
                store.hold_loads = rng.random() < 0.5
                store.hold_saves = rng.random() < 0.5
                store.hold_lookups = rng.random() < 0.5
            elif fault == "release":
                store.release_held()
            elif fault in ("fail", "heal"):
                store.fail_loads = store.fail_saves = fault == "fail"
            elif fault == "reset":
                engine.scheduler.reset()
            else:
                engine.now += 2
        else:
            check_loaded(*engine.step())

    store.down = store.fail_loads = store.fail_saves = False
    store.release_held()
    check_loaded(*engine.step())
    check_loaded(*engine.step())
    for name, ended in list(live.items()):
        engine.scheduler.request_finished(ended, engine.tables.get(name, tuple([] for _ in groups)))
        if name in engine.tables:
            engine.free(ended)
    check_loaded(*engine.step())
    check_loaded(*engine.step())
    engine.failures.take()
    check_nothing_held(engine)
