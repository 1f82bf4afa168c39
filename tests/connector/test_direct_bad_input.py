"""What requests get wrong about direct hand-offs: each is told in one sentence, and the prompt is computed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import BLOCK, Request
from test_direct import ALL, NAME, OWN, PEER, TOKENS, World, filled

from kvlane.connector import direct_peers
from kvlane.connector.direct_peers import Peers, publish

TOLD = "a prompt that another engine was to hand over is computed here"
NOT_OFFERED = "a prompt is not handed over directly"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Beside this engine there is one at PEER, and those of a network are named."""
    monkeypatch.setattr(direct_peers._core, "runtime_folder", lambda: tmp_path)
    publish(PEER, os.getpid())
    publish(OWN, os.getppid())
    made = World()
    made.direct.peers = Peers(["10.0.0.0/8", "fd00::/16"])
    return made


def asked(world: World, params: object, name: str = "d", tokens: int = TOKENS, **more: Any) -> Request:
    # Another prompt each, of which nothing is stored.
    first = 1000 * len(name)
    request = Request(name, list(range(first, first + tokens)), transfer=params)
    for key, value in more.items():
        setattr(request, key, value)
    world.side.add_request(request)
    return request


def is_computed(world: World, request: Request) -> None:
    """From its arrival to its end, and nothing of it is held."""
    for _ in range(2):
        assert world.side.matched_tokens(request, 0) == (0, False)
        world.step()
    world.side.allocated(request, world.engine.allocate(request, request.num_tokens), 0)
    world.engine.compute(request, request.num_tokens)
    world.side.request_finished(request, world.engine.tables[request.request_id])
    world.engine.free(request)
    world.agent.free = list(world.agent.lendings)
    world.step()
    assert world.agent.landings == {} and world.references() == 0
    assert world.engine.failures.count == 0


def the_sentence(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    said = record.getMessage()
    assert len(said) < 400
    return said


def lands(handoff: object = NAME, peer: object = PEER) -> dict[str, object]:
    return {"kvlane": {"handoff": handoff, "peer": peer}}


def test_the_control_is_asked_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for name, peer in (("one", PEER), ("two", "10.1.1.1:7100"), ("three", "[fd00::1]:7100")):
        assert world.waits(asked(world, lands(name, peer), name))
    world.step()
    assert len(world.agent.landings) == 3 and not caplog.records


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        ("127.0.0.1", "'127.0.0.1' is no engine of this user"),
        ("10.1.1.1", "'10.1.1.1' is no engine of this user"),
        ("10.1.1.1:", "'10.1.1.1:' is no engine of this user"),
        ("10.1.1.1:-1", "'10.1.1.1:-1' is no engine of this user"),
        ("10.1.1.1:\u0663", "is no engine of this user"),
        ("fd00::1", "'fd00::1' is no engine of this user"),
        ("[::1]:7100", "'[::1]:7100' is no engine of this user"),
        ("[fd00::1%eth0]:7100", "'[fd00::1%eth0]:7100' is no engine of this user"),
        ("[fd00::1", "is no engine of this user"),
        ("localhost:7100", "is no engine of this user"),
        ("\ud800\n:7100", "is no engine of this user"),
        (OWN, f"'{OWN}' is this engine itself"),
    ],
)
def test_a_peer_that_is_none(world: World, peer: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    is_computed(world, asked(world, lands(peer=peer)))
    said = the_sentence(caplog)
    assert TOLD in said and why in said
    assert world.side.take_stats()["direct_fallbacks"] == 1  # pyright: ignore


def test_a_peer_that_the_agent_does_not_understand(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It was told as too many hand-offs."""

    def refuse(*_: object) -> bool:
        raise ValueError("'[10.1.1.1]:7100' is no HOST:PORT: nothing was found")

    world.agent.begin_landing = cast("Any", refuse)
    request = asked(world, lands(peer="[10.1.1.1]:7100"))
    assert world.waits(request)
    world.step()
    is_computed(world, request)
    assert "since '[10.1.1.1]:7100' is no HOST:PORT: nothing was found." in the_sentence(caplog)


@pytest.mark.parametrize(
    "params",
    [
        lands("x" * 10_000),
        lands(peer="1" * 10_000),
        lands(peer=None),
        lands(peer=7100),
        lands(peer=-1),
        lands(peer={"host": "127.0.0.1", "port": 7100}),
        lands(-1),
        lands(None),
        lands(True),
        lands([NAME]),
        lands(NAME + "\n"),
        {"kvlane": {"handoff": NAME}},
        {"kvlane": -1},
        {"kvlane": [lands()]},
        {"kvlane": "x" * 10_000},
    ],
    ids=lambda params: repr(params)[:60],
)
def test_nonsense(world: World, params: object, caplog: pytest.LogCaptureFixture) -> None:
    is_computed(world, asked(world, params))
    # Messages of the other kinds of hand-off are not checked here.
    (said,) = (each.getMessage() for each in caplog.records if NOT_OFFERED in each.getMessage())
    assert "it makes no sense: " in said and len(said) < 400


@pytest.mark.parametrize(
    "params", [None, {}, [], "x", -1, {"kvlane": None}, {"kvlane": {}}, {"kvlane": {"peer": PEER}}]
)
def test_what_says_nothing_is_nothing(world: World, params: object, caplog: pytest.LogCaptureFixture) -> None:
    is_computed(world, asked(world, params))
    assert not caplog.records


class Lora:
    """An adapter of which no file is there, so nobody knows what it holds."""

    lora_name = "adapter"
    lora_path = "/nowhere/adapter"
    lora_int_id = 1


ABOUT_THE_REQUEST: dict[str, tuple[dict[str, Any], str]] = {
    "under a block": ({"tokens": BLOCK - 1}, "it has less than 64 tokens"),
    "short": ({"tokens": 63}, "it has less than 64 tokens"),
    "prompt_logprobs": ({"skip_reading_prefix_cache": True}, "it asks for no cache"),
    "LoRA": ({"lora_request": Lora()}, "the content of its blocks has no certain identity"),
}


@pytest.mark.parametrize("case", ABOUT_THE_REQUEST)
def test_a_prompt_that_cannot_land(world: World, case: str, caplog: pytest.LogCaptureFixture) -> None:
    request, why = ABOUT_THE_REQUEST[case]
    for name in ("one", "other"):
        is_computed(world, asked(world, lands(name), name, **request))
    (said,) = (each.getMessage() for each in caplog.records if TOLD in each.getMessage())
    assert why in said
    assert world.side.take_stats()["direct_fallbacks"] == 2  # pyright: ignore


def test_an_engine_without_prefix_caching_lands_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request("d", list(range(TOKENS)), hash_block=1000, transfer=lands())
    world.side.add_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert "since vLLM's prefix caching is off" in the_sentence(caplog)


@pytest.mark.parametrize("case", ["prompt_logprobs", "LoRA"])
def test_a_prompt_that_cannot_be_offered(world: World, case: str, caplog: pytest.LogCaptureFixture) -> None:
    request, _ = ABOUT_THE_REQUEST[case]
    told = filled(world)
    for name in ("one", "other"):
        params = {"do_remote_decode": True, "kvlane": {"handoff": name}}
        is_computed(world, asked(world, params, name, **request))
    assert told == [] and world.agent.lendings == []
    (said,) = (each.getMessage() for each in caplog.records if NOT_OFFERED in each.getMessage())
    assert "the content of its blocks has no certain identity, or it asks for no cache" in said
    assert world.side.take_stats()["direct_not_offered"] == 2  # pyright: ignore


def test_a_prompt_under_a_block_is_offered_with_its_rest(world: World) -> None:
    """The engine that goes on computes it: nobody asks, and the lease ends."""
    told = filled(world)
    params = {"do_remote_decode": True, "kvlane": {"handoff": NAME}}
    is_computed(world, asked(world, params, tokens=BLOCK - 1))
    assert [(each.first_block, len(each.blocks)) for each in told] == [(0, 1)]


def test_an_id_that_another_request_has_is_computed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first, second = asked(world, lands(), "first"), asked(world, lands(), "second")
    assert world.waits(first)
    assert world.side.matched_tokens(second, 0) == (0, False)
    world.step()
    assert world.references() == ALL
    assert "or its id is another's" in the_sentence(caplog)
