"""Prefill and decode engines behind `kvlane route`: what each leg is asked, and what happens when one fails."""

from __future__ import annotations

import json
import re
import signal
import socket
from typing import Any

import pytest
from processes import until
from routed import CHAT, COMPLETIONS, LONG, ask, chat, connect, routed, text_of, wanted, words_of

from kvlane.testing.fake_engine import FakeEngine

KVLANE_PAIR = ["--pairs", "kvlane"]
NIXL_PAIR = ["--pairs", "nixl"]


@pytest.mark.parametrize("pair", [KVLANE_PAIR, NIXL_PAIR])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_long_prompt_is_prefilled_apart_and_answered_the_same(
    pair: list[str], path: str, is_stream: bool
) -> None:
    more: dict[str, Any] = {"max_tokens": 9, "n": 1, "min_tokens": 3}
    body = chat(**more) if path == CHAT else wanted(**more)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}} if is_stream else body
    # The pair is asked through the router, and an engine that knows nothing of it is the control.
    with FakeEngine() as alone, routed(pair, pair, roles="pd") as (router, (prefill, decode)):
        _, expected, _ = ask(alone.address, path, body)
        _, answer, _ = ask(router.address, path, streamed)
        said = words_of(answer) if is_stream else text_of(answer)
        assert said == text_of(expected)
        (first,), (second,) = prefill.log(), decode.log()
        assert (first["leg"], second["leg"], first["status"], second["status"]) == (
            "prefill",
            "decode",
            200,
            200,
        )
        assert re.fullmatch(r"kvlane-.*-p0", first["id"]) and re.fullmatch(r"kvlane-.*-d0", second["id"])
        assert second["cached_tokens"] >= second["prompt_tokens"] - 16, (
            "what was handed over is not computed again"
        )
        leg = json.loads(second["body"])
        assert {name: value for name, value in leg.items() if name != "kv_transfer_params"} == streamed


def test_short_and_cached_prompts_stay_on_the_decode_engine() -> None:
    with routed(KVLANE_PAIR, KVLANE_PAIR, roles="pd") as (router, (prefill, decode)):
        ask(router.address, COMPLETIONS, wanted("short"))
        assert ([seen["leg"] for seen in prefill.log()], [seen["leg"] for seen in decode.log()]) == (
            [],
            ["whole"],
        )
        ask(router.address, COMPLETIONS, wanted(LONG))
        ask(router.address, COMPLETIONS, wanted(LONG + "and a little more"))
        assert [seen["leg"] for seen in prefill.log()] == ["prefill"]
        assert [seen["leg"] for seen in decode.log()] == ["whole", "decode", "whole"]


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_what_vllm_keeps_from_its_prefix_cache_stays_on_one(more: dict[str, object]) -> None:
    with routed(KVLANE_PAIR, KVLANE_PAIR, roles="pd") as (router, (prefill, decode)):
        assert ask(router.address, COMPLETIONS, wanted(LONG, **more))[0] == 200
        assert (prefill.log(), [seen["leg"] for seen in decode.log()]) == ([], ["whole"])


def test_every_pair_occurs() -> None:
    with routed(*[KVLANE_PAIR] * 7, roles="pppppdd", flags=("--policy", "round-robin")) as (router, engines):
        for number in range(40):
            assert ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG, max_tokens=1))[0] == 200
        number_of = {seen["id"][:-3]: at for at, engine in enumerate(engines[:5]) for seen in engine.log()}
        pairs = {
            (number_of[seen["id"][:-3]], at) for at, engine in enumerate(engines[5:]) for seen in engine.log()
        }
        assert len(pairs) == 10


@pytest.mark.parametrize("fault", [{"status": 500}, {"refuse": True}, {"die_at_chunk": 0}])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_another_engine_of_the_role_steps_in(role: str, fault: dict[str, object]) -> None:
    with routed(*[KVLANE_PAIR] * 4, roles="ppdd", flags=("--policy", "round-robin")) as (router, engines):
        bad = engines[0 if role == "prefill" else 2]
        bad.faults(**fault)
        for number in range(6):
            status, answer, _ = ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG))
            assert status == 200, answer
        legs = [seen["leg"] for engine in engines for seen in engine.log() if engine is not bad]
        assert legs.count("prefill") >= 6 and legs.count("decode") == 6, (
            "no prompt was computed where it is decoded"
        )
        bad.faults()


def test_with_no_prefill_engine_left_the_decode_engine_serves_alone() -> None:
    with routed(KVLANE_PAIR, KVLANE_PAIR, roles="pd") as (router, (prefill, decode)):
        prefill.kill(signal.SIGKILL)
        for number in range(5):
            assert ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG))[0] == 200
        assert [seen["leg"] for seen in decode.log()] == ["whole"] * 5


def test_with_no_decode_engine_left_the_prefill_engine_serves_alone() -> None:
    with routed(KVLANE_PAIR, KVLANE_PAIR, roles="pd") as (router, (prefill, decode)):
        decode.kill(signal.SIGKILL)
        for number in range(5):
            assert ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG))[0] == 200
        assert [seen["leg"] for seen in prefill.log()].count("whole") == 5


def test_a_refusal_of_the_request_itself_by_the_prefill_engine_is_the_answer() -> None:
    with routed([*KVLANE_PAIR, "--max-model-len", "200"], KVLANE_PAIR, roles="pd") as (
        router,
        (prefill, decode),
    ):
        status, answer, _ = ask(router.address, COMPLETIONS, wanted())
        assert (status, answer["error"]["code"]) == (400, 400)
        assert decode.log() == []
        assert len(prefill.log()) == 1


def test_a_client_that_leaves_ends_the_leg_that_runs() -> None:
    slow = [*KVLANE_PAIR, "--prefill-tokens-per-second", "100"]
    with routed(slow, [*KVLANE_PAIR, "--itl-ms", "50"], roles="pd") as (router, (prefill, decode)):
        connection = connect(router.address)
        connection.request("POST", COMPLETIONS, json.dumps(wanted()))
        until("the prefill leg runs", lambda: [seen["state"] for seen in prefill.log()] == ["running"])
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        until("it is aborted", lambda: [seen["state"] for seen in prefill.log()] == ["aborted"])
        assert decode.log() == []
    with routed(KVLANE_PAIR, [*KVLANE_PAIR, "--itl-ms", "50"], roles="pd") as (router, (_, decode)):
        connection = connect(router.address)
        connection.request("POST", COMPLETIONS, json.dumps(wanted(max_tokens=1000, stream=True)))
        until("the decode leg runs", lambda: [seen["state"] for seen in decode.log()] == ["running"])
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        until("it is aborted", lambda: [seen["state"] for seen in decode.log()] == ["aborted"])


def test_where_nothing_is_handed_over_the_decode_engine_serves_alone_and_pairs_come_back() -> None:
    """With the daemon away each prompt was prefilled twice, and the log named a wrong cause."""
    with routed(KVLANE_PAIR, KVLANE_PAIR, roles="pd") as (router, (prefill, decode)):
        prefill.faults(hand_nothing_over=True)

        def serve(number: int) -> str:
            assert ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG, max_tokens=1))[0] == 200
            return decode.log()[-1]["leg"]

        legs = [serve(number) for number in range(13)]
        assert legs == ["whole"] * 13
        assert len(prefill.log()) == 3, "three prompts were prefilled twice, and no more"
        (line,) = until("the log says it", lambda: [each for each in router.lines if "in a row" in each])
        assert f"prefill node {prefill.url} handed nothing over 3 times in a row" in line
        assert "sending whole requests to decode nodes, next probe in 10 s" in line
        why = ask(router.admin, "/decisions?limit=1")[1]["decisions"][0]["why"]
        assert why == "prefill nodes hand nothing over, decode node prefills"
        nodes = {node["node"]: node["condition"] for node in ask(router.admin, "/nodes")[1]["nodes"]}
        assert nodes[prefill.url]["without_hand_off"] == 3 and nodes[prefill.url]["probe_in_ms"] <= 10_000
        stopped = f'kvlane_route_node_hand_offs_stopped{{node="{prefill.url}",role="prefill"}} 1'
        assert stopped in ask(router.admin, "/metrics")[1]
        prefill.faults()
        numbers = iter(range(100, 100_000))
        until("a probe finds that it hands over again", lambda: serve(next(numbers)) == "decode")
        assert len(prefill.log()) == 4, "no other prompt was sent there"
        assert serve(99) == "decode"
        until("the log says it", lambda: any("hands over again" in each for each in router.lines))


def test_an_engine_that_hands_nothing_over_still_gets_its_request_served() -> None:
    with routed(["--pairs", "none"], ["--pairs", "none"], roles="pd") as (router, (prefill, decode)):
        assert ask(router.address, COMPLETIONS, wanted())[0] == 200
        assert "kv_transfer_params" not in json.loads(decode.log()[0]["body"])
        assert len(prefill.log()) == 1
