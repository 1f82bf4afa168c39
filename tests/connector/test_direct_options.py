"""The options that users of vLLM's P2P NCCL connector know: `send_type` and `kv_buffer_size`."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK, Request, full_group
from test_direct import ALL, BLOCK_BYTES, ID, TOKENS, WHOLE, World, filled, lending

from kvlane.connector.assemble import build_direct
from kvlane.connector.direct_request import Lending
from kvlane.connector.groups import block_bytes
from kvlane.connector.settings import Settings

ON = {"kvlane.direct": "on"}


TLS = {"kvlane.direct.tls_certificate": "c", "kvlane.direct.tls_key": "k", "kvlane.direct.tls_authority": "a"}


def test_the_files_of_tls_belong_together_and_go_through_sockets() -> None:
    assert Settings.parse(ON).tls_files() is None
    assert Settings.parse({**ON, **TLS}).tls_files() == ("c", "k", "a")
    for missing in TLS:
        with pytest.raises(ValueError, match="give all three or none"):
            Settings.parse({**ON, **{key: value for key, value in TLS.items() if key != missing}})
    for transport in ("cma", "cuda"):
        with pytest.raises(ValueError, match="TLS cannot encrypt it"):
            Settings.parse({**ON, **TLS, "kvlane.direct.transport": transport})


def test_with_get_a_prompt_is_offered_in_the_step_that_completes_it() -> None:
    world = World(send_type="get")
    request, told = lending(world), filled(world)
    world.engine.compute(request, 50)
    assert told == [] and world.references() == 2 * 12 + 1, "what is computed is pinned"
    assert not world.side.take_stats().get("direct_offered_blocks")  # pyright: ignore
    world.engine.compute(request, TOKENS - 50)
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, 12), (12, 8), (20, 1)]
    assert [block for each in told for block in each.blocks] == world.engine.tables["p"][0]
    assert [each.hash for each in told] == [world.hash(request, block)[1] for block in (11, WHOLE - 1, WHOLE)]
    assert world.side.take_stats()["direct_offered_blocks"] == ALL  # pyright: ignore
    world.side.request_finished(request, world.engine.tables["p"])
    world.engine.free(request)
    assert world.agent.given_up == []
    world.agent.free = [ID]
    world.step()
    assert world.references() == 0


def test_with_get_and_a_drafter_a_prompt_is_offered_with_its_last_whole_block() -> None:
    """Its last tokens, which fill no block, are not handed over: nothing waits for them."""
    world = World(send_type="GET")
    world.direct.order.hands_over_rests = False
    request, told = lending(world), filled(world)
    world.engine.compute(request, TOKENS - 1)
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, WHOLE)]
    world.engine.compute(request, 1)
    assert len(told) == 1


def test_with_get_a_prompt_that_ends_half_way_is_told_to_nobody() -> None:
    world = World(send_type="GET")
    request, told = lending(world), filled(world)
    world.engine.compute(request, 50)
    world.side.request_finished(request, world.engine.tables["p"])
    world.engine.free(request)
    world.agent.free = [ID]
    world.step()
    assert told == [] and world.agent.given_up == [ID] and world.references() == 0


@pytest.mark.parametrize("send_type", ["GET", "PUT", "PUT_ASYNC"])
@pytest.mark.parametrize(("blocks", "fits"), [(ALL, True), (ALL - 1, False), (0.01, False)])
def test_kv_buffer_size_bounds_what_is_pinned_for_others_with_get_alone(
    send_type: str, blocks: float, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(send_type=send_type, kv_buffer_size=str(blocks * BLOCK_BYTES))
    request, told = lending(world), filled(world)
    world.engine.compute(request, TOKENS)
    if fits or send_type != "GET":
        assert sum(len(each.blocks) for each in told) == ALL and world.agent.given_up == []
    else:
        assert told == [] and world.agent.given_up == [ID] and world.references() == ALL
        (said,) = said_of(caplog)
        assert "more blocks than kv_buffer_size allows would be pinned" in said


def test_kv_buffer_size_bounds_what_is_pinned_for_all_prompts_together() -> None:
    world = World(send_type="GET", kv_buffer_size=(ALL + 5) * BLOCK_BYTES)
    first = lending(world)
    world.engine.compute(first, TOKENS)
    world.agent.wanted.add(ID)
    params = {"do_remote_decode": True, "kvlane": {"handoff": "second"}}
    second = Request("second", list(range(TOKENS)), transfer=params)
    world.side.add_request(second)
    world.engine.compute(second, 5 * BLOCK)
    assert world.agent.given_up == []
    world.engine.compute(second, BLOCK)
    assert world.agent.given_up == [Lending("second").id]


def test_prompts_land_in_as_many_bytes_as_kv_buffer_size_says() -> None:
    world = World(kv_buffer_size=f"{30 * BLOCK_BYTES + 999}")
    requests = [world.request(f"d{number}", handoff=f"d{number}") for number in range(3)]
    for request in requests:
        assert world.waits(request)
    world.step()
    assert [len(world.agent.room.get(Lending(f"d{number}").id, [])) for number in range(3)] == [
        ALL,
        30 - ALL,
        0,
    ]


def test_however_large_kv_buffer_size_is_prompts_do_not_land_in_all_blocks() -> None:
    """Each prompt that has landed takes a block more to go on: without one the engine would stand still."""
    world = World(100, kv_buffer_size="8e9")
    for number in range(6):
        assert world.waits(world.request(f"d{number}", handoff=f"d{number}"))
    world.step()
    assert sum(len(room) for room in world.agent.room.values()) == 50


def test_a_long_prompt_lands_in_more_than_a_tenth_of_all_blocks_when_it_is_the_first() -> None:
    """With a tenth for all, no prompt landed that takes more."""
    world = World(200)
    names = [Lending(f"d{number}").id for number in range(3)]
    short, long, last = (
        world.request(f"d{number}", tokens, f"d{number}")
        for number, tokens in enumerate([16 * BLOCK, 70 * BLOCK, 20 * BLOCK])
    )
    for request in (short, long, last):
        assert world.waits(request)
    world.step()
    room = world.agent.room
    assert [len(room.get(name, [])) for name in names] == [16, 4, 0]
    world.agent.end(names[0], "landed", 16, [world.hash(short, 15)])
    world.step()
    assert [len(room.get(name, [])) for name in names] == [16, 70, 0], "it is the first now, and others wait"
    world.agent.end(names[1], "landed", 70, [world.hash(long, 69)])
    world.step()
    world.side.matched_tokens(long, 69 * BLOCK)
    world.side.allocated(long, world.engine.allocate(long, 70 * BLOCK), 0)
    world.side.matched_tokens(short, 15 * BLOCK)
    world.side.allocated(short, world.engine.allocate(short, 16 * BLOCK), 0)
    world.step()
    assert len(room[names[2]]) == 20


@pytest.mark.parametrize(
    ("blocks", "buffer"), [(2 * (ALL - 1), None), (40 * ALL, f"{(ALL - 1) * BLOCK_BYTES}")]
)
def test_a_prompt_that_is_larger_than_the_room_for_it_is_computed_at_once(
    blocks: int, buffer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It waited for room that never came, half a minute without any progress. No daemon runs that could take it."""
    world = World(blocks, **({"kv_buffer_size": buffer} if buffer else {}))
    world.store.down = True
    request = world.request()
    world.waits(request)
    world.step()
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.agent.landings == {} and world.references() == 0
    (said,) = said_of(caplog)
    assert "more blocks than a prompt may land in" in said


def test_with_less_than_one_block_nothing_lands_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(kv_buffer_size="1e1")
    for name in ("one", "two"):
        request = world.request(name, handoff=name)
        assert world.side.matched_tokens(request, 0) == (0, False)
    world.step()
    assert world.agent.landings == {} and world.references() == 0
    (said,) = said_of(caplog)
    assert "kv_buffer_size is 10 bytes, and one block takes 1000" in said
    assert world.side.take_stats()["direct_fallbacks"] == 2  # pyright: ignore


def said_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


@pytest.mark.parametrize(("send_type", "times"), [("PUT", 1), ("PUT_ASYNC", 0), ("GET", 0)])
def test_that_put_does_the_same_as_put_async_is_said_once(
    send_type: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings.parse({**ON, "send_type": send_type, "kv_buffer_size": 2000})
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    transfer = SimpleNamespace(kv_connector_extra_config=ON, kv_role="kv_both")
    config: Any = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, kv_transfer_config=transfer
    )
    direct = build_direct(config, caches([3000], num_blocks=3), [full_group()], [b"n"], settings)
    assert direct is not None and direct.landing_blocks(100) == 2
    assert direct.offers_at_once == (send_type == "GET")
    assert len([said for said in said_of(caplog) if "does the same here as PUT_ASYNC" in said]) == times


def caches(sizes: list[int], num_blocks: int, **more: Any) -> Any:
    tensors = [SimpleNamespace(size=size, **more) for size in sizes]
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace())]
    return SimpleNamespace(kv_cache_tensors=tensors, num_blocks=num_blocks, kv_cache_groups=groups)


def test_the_bytes_of_a_block_are_those_of_all_layers() -> None:
    assert block_bytes(caches([1000, 1000, 500], 5, shared_by=["a"], block_stride=0)) == 500
    packed = caches([2500, 2500, 2500], 5, shared_by=["a"], block_stride=500)
    assert block_bytes(packed) == 500, "all lie in the same memory"
    assert block_bytes(caches([2500, 2500], 5, layers=["a"], block_stride=500)) == 500
