"""Prefill and decode legs at a fake engine."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from kvlane.testing.fake_engine import FakeEngine

PROMPT = "Tell me of the sea. " * 20
PREFILL = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1, "stream": False}
ID = "___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_0123abcd"


def ask(
    engine: FakeEngine, chat: bool = False, request_id: str = "r1", **more: object
) -> tuple[int, dict[str, Any]]:
    body: dict[str, Any] = {"model": "fake", **more}
    if chat:
        body["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        body["prompt"] = PROMPT
    connection = http.client.HTTPConnection(engine.address, timeout=30)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection.request("POST", path, json.dumps(body), {"X-Request-Id": request_id})
    answer = connection.getresponse()
    read = json.loads(answer.read())
    connection.close()
    return answer.status, read


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_kvlane_legs_name_engine_run_daemon_and_tokens():
    with (
        FakeEngine("--pairs", "kvlane", "--engine-id", "p0") as prefill,
        FakeEngine("--pairs", "kvlane") as decode,
    ):
        status, answer = ask(prefill, **PREFILL)
        params = answer["kv_transfer_params"]
        named = params["kvlane"]
        assert set(params) == {"kvlane"}
        assert (status, named["engine"], named["tokens"]) == (200, "p0", 100)
        assert int(named["run"], 16) != int(named["daemon"], 16)
        assert answer["usage"]["completion_tokens"] == 1
        _, again = ask(prefill, **PREFILL)
        assert again["kv_transfer_params"]["kvlane"]["run"] == named["run"]

        named["tokens"] = 70
        _, decoded = ask(decode, kv_transfer_params=params, max_tokens=4)
        assert cached(decoded) == 70
        assert decoded["choices"][0]["text"].startswith(answer["choices"][0]["text"])
        assert decoded["kv_transfer_params"] is None
        assert [each["leg"] for each in prefill.log() + decode.log()] == ["prefill", "prefill", "decode"]


@pytest.mark.parametrize("chat", [False, True])
def test_nixl_legs_name_blocks_and_where_they_are(chat: bool):
    with (
        FakeEngine("--pairs", "nixl", "--engine-id", "p0") as prefill,
        FakeEngine("--pairs", "nixl") as decode,
    ):
        status, answer = ask(prefill, chat, **PREFILL)
        assert (status, answer["kv_transfer_params"]) == (
            200,
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "p0",
                "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "remote_request_id": "chatcmpl-r1" if chat else "cmpl-r1",
            },
        )
        _, decoded = ask(decode, chat, kv_transfer_params=answer["kv_transfer_params"])
        assert cached(decoded) == 99
        assert decode.log()[0]["leg"] == "decode"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"stream": True}, "streamed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"n": 2}, "n must"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 0}, "logprobs"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_completion_tokens": 64}, "max_tokens"),
    ],
    ids=str,
)
def test_a_prefill_leg_that_was_not_stripped_is_refused(more: dict[str, Any], named: str):
    with FakeEngine("--pairs", "nixl") as engine:
        status, answer = ask(engine, True, **{**PREFILL, **more})
        assert status == 400
        assert named in answer["error"]["message"]
        assert engine.log()[0]["status"] == 400
        # A whole request may have what a prefill leg may not.
        assert ask(engine, True, **{**PREFILL, **more, "stream": False, "kv_transfer_params": None})[0] == 200


@pytest.mark.parametrize("form", ["kvlane", "nixl"])
def test_a_decode_leg_without_its_prefill_is_refused(form: str):
    with FakeEngine("--pairs", form) as engine:
        assert ask(engine, kv_transfer_params={"do_remote_prefill": True})[0] == 400


def test_an_engine_without_pairs_takes_every_request_as_a_whole():
    with FakeEngine() as engine:
        status, answer = ask(engine, **{**PREFILL, "max_tokens": 5})
        assert (status, answer["kv_transfer_params"], answer["usage"]["completion_tokens"]) == (200, None, 5)
        assert engine.log()[0]["leg"] == "whole"


def test_p2p_nccl_legs_are_told_by_the_id():
    flags = ["--pairs", "p2p-nccl", "--zmq-address"]
    with FakeEngine(*flags, "10.0.0.1:21001") as prefill, FakeEngine(*flags, "10.0.0.2:22001") as decode:
        status, answer = ask(prefill, request_id=ID, max_tokens=1)
        assert (status, answer["kv_transfer_params"]) == (200, None)
        _, decoded = ask(decode, request_id=ID, max_tokens=8)
        assert cached(decoded) == 99
        assert [(each["id"], each["leg"]) for each in prefill.log() + decode.log()] == [
            (ID, "prefill"),
            (ID, "decode"),
        ]
        assert ask(prefill, request_id=ID, max_tokens=2)[0] == 400
        assert ask(prefill, request_id=ID.replace("21001", "9"), max_tokens=1)[0] == 400
        assert ask(prefill, request_id="plain", max_tokens=1)[0] == 400
