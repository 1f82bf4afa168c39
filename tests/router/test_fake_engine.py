"""A fake engine as a router meets it: a real process on the loopback interface."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from processes import PATIENCE, until

from kvlane.testing.fake_engine import FakeEngine

PROMPT = "Tell me of the sea. " * 20
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as started:
        yield started


def ask(
    engine: FakeEngine, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """The status and the answer over a connection of its own; JSON is read."""
    connection = http.client.HTTPConnection(engine.address, timeout=PATIENCE)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        answer = connection.getresponse()
        read = answer.read()
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.status, json.loads(read) if read and is_json else read.decode()
    finally:
        connection.close()


def wanted(path: str, prompt: str = PROMPT, **more: object) -> dict[str, Any]:
    if path == CHAT:
        half = len(prompt) // 2
        parts = [{"type": "text", "text": prompt[half:]}]
        messages = [{"role": "system", "content": prompt[:half]}, {"role": "user", "content": parts}]
        return {"model": "fake", "messages": messages, **more}
    return {"model": "fake", "prompt": prompt, **more}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream without its end, which must be there."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def words(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return choice["delta"]["content"] if "delta" in choice else choice["text"]


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_what_the_whole_answer_says(engine: FakeEngine, path: str):
    status, whole = ask(engine, path, wanted(path, max_tokens=5))
    assert status == 200
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 5, 105)
    assert re.fullmatch(r"(w\d{3} ){5}", text_of(whole))
    options = {"include_usage": True}
    _, streamed = ask(engine, path, wanted(path, max_tokens=5, stream=True, stream_options=options))
    *said, last = events(streamed)
    assert "".join(words(each) for each in said) == text_of(whole)
    assert last["choices"] == []
    assert last["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 96}}
    assert [each["choices"][0]["finish_reason"] for each in said][-2:] == [None, "length"]
    assert len(said) == (6 if path == CHAT else 5)


def test_both_paths_and_every_engine_say_the_same(engine: FakeEngine):
    with FakeEngine() as other:
        said = {
            text_of(ask(each, path, wanted(path, ignore_eos=True))[1])
            for each in (engine, other)
            for path in (COMPLETIONS, CHAT)
        }
    assert len(said) == 1
    assert len(said.pop().split()) == 16


def test_an_engine_that_takes_its_time_says_the_same(engine: FakeEngine):
    flags = ["--prefill-tokens-per-second", "10000", "--ttft-ms", "5", "--itl-ms", "2"]
    _, expected = ask(engine, COMPLETIONS, wanted(COMPLETIONS))
    with FakeEngine(*flags) as slow:
        _, whole = ask(slow, COMPLETIONS, wanted(COMPLETIONS))
        _, streamed = ask(slow, CHAT, wanted(CHAT, stream=True))
        assert text_of(whole) == "".join(words(each) for each in events(streamed)) == text_of(expected)
        # The second found all but the last block of the prompt, so its log tells the tokens that cost nothing.
        assert [(each["chunks"], each["cached_tokens"]) for each in slow.log()] == [(1, 0), (16, 96)]


def test_token_ids_are_the_text_that_they_stand_for(engine: FakeEngine):
    _, tokens = ask(engine, "/tokenize", {"model": "fake", "prompt": PROMPT + "."})
    assert tokens["count"] == 101
    _, by_ids = ask(engine, COMPLETIONS, {"model": "fake", "prompt": tokens["tokens"]})
    _, by_text = ask(engine, COMPLETIONS, wanted(COMPLETIONS, PROMPT + "."))
    assert by_ids["choices"] == by_text["choices"]


def test_a_chunked_request_in_pieces_and_several_on_one_connection(engine: FakeEngine):
    body = json.dumps(wanted(COMPLETIONS, max_tokens=2)).encode()
    connection = http.client.HTTPConnection(engine.address, timeout=PATIENCE)
    said = []
    for _ in range(3):
        pieces = (body[at : at + 7] for at in range(0, len(body), 7))
        connection.request("POST", COMPLETIONS, pieces, encode_chunked=True)
        said.append(json.loads(connection.getresponse().read())["choices"])
    connection.close()
    assert said[0] == said[1] == said[2]


def test_two_requests_sent_at_once_are_answered_in_order(engine: FakeEngine):
    host, port = engine.address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        peer.sendall(b"GET /version HTTP/1.1\r\n\r\nGET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n")
        read = b"".join(iter(lambda: peer.recv(65536), b""))
    assert [int(each) for each in re.findall(rb"HTTP/1.1 (\d+)", read)] == [200, 404]


@pytest.mark.parametrize("sent", [b"no request\r\n\r\n", b"POST /log HTTP/1.1\r\ncontent-length: -1\r\n\r\n"])
def test_bytes_that_are_no_http_are_refused(engine: FakeEngine, sent: bytes):
    host, port = engine.address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        peer.sendall(sent)
        assert b"".join(iter(lambda: peer.recv(65536), b"")).startswith(b"HTTP/1.1 400 ")


def test_cached_tokens_grow_when_a_conversation_goes_on(engine: FakeEngine):
    prompt, cached = PROMPT, []
    for _ in range(3):
        _, answer = ask(engine, COMPLETIONS, wanted(COMPLETIONS, prompt))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt += text_of(answer) + "And then? "
    # 400 bytes, 80 of the answer, 10 of the question: whole blocks of 64 bytes are found again, also of answers.
    assert cached == [0, 112, 128]
    _, other = ask(engine, COMPLETIONS, wanted(COMPLETIONS, "x" + PROMPT))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_wrong_requests_get_openai_errors(engine: FakeEngine):
    status, answer = ask(engine, CHAT, {**wanted(CHAT), "model": "unknown"})
    assert status == 404
    message = answer["error"].pop("message")
    assert "unknown" in message
    assert answer == {"error": {"type": "NotFoundError", "param": "model", "code": 404}}
    for path, body in [
        (CHAT, b"{broken"),
        (CHAT, b"[" * 100_000),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": []}'),
        (COMPLETIONS, b'{"prompt": ""}'),
        (COMPLETIONS, b'{"prompt": [-1]}'),
        (COMPLETIONS, b'{"prompt": "x", "max_tokens": 0}'),
        (COMPLETIONS, b'{"prompt": "x", "max_tokens": 1000000}'),
    ]:
        status, answer = ask(engine, path, body)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
    assert ask(engine, "/nowhere")[0] == 404
    assert ask(engine, COMPLETIONS)[0] == 405


def test_health_version_models_and_embeddings():
    with FakeEngine("--model", "one", "--model", "two", "--max-model-len", "1000") as engine:
        assert ask(engine, "/health") == (200, "")
        assert ask(engine, "/version")[0] == 200
        _, models = ask(engine, "/v1/models")
        assert [(each["id"], each["max_model_len"]) for each in models["data"]] == [
            ("one", 1000),
            ("two", 1000),
        ]
        status, answer = ask(engine, "/v1/embeddings", {"model": "two", "input": ["some text", "more"]})
        assert (status, len(answer["data"]), answer["usage"]["prompt_tokens"]) == (200, 2, 4)


def test_adapters_come_and_go_and_have_a_cache_of_their_own(engine: FakeEngine):
    adapter = {"lora_name": "tuned", "lora_path": "/models/tuned"}
    assert ask(engine, COMPLETIONS, {**wanted(COMPLETIONS), "model": "tuned"})[0] == 404
    assert ask(engine, "/v1/load_lora_adapter", adapter)[0] == 200
    assert ask(engine, "/v1/load_lora_adapter", adapter)[0] == 400
    _, models = ask(engine, "/v1/models")
    assert [(each["id"], each["parent"]) for each in models["data"]] == [("fake", None), ("tuned", "fake")]
    _, base = ask(engine, COMPLETIONS, wanted(COMPLETIONS))
    _, tuned = ask(engine, COMPLETIONS, {**wanted(COMPLETIONS), "model": "tuned"})
    assert tuned["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert text_of(tuned) != text_of(base)
    assert ask(engine, "/v1/unload_lora_adapter", {"lora_name": "tuned"})[0] == 200
    assert ask(engine, "/v1/unload_lora_adapter", {"lora_name": "tuned"})[0] == 404


def metrics(engine: FakeEngine) -> dict[str, float]:
    _, text = ask(engine, "/metrics")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r'(vllm:\w+)\{engine="0",model_name="fake"\} (\S+)', row) for row in rows]
    return {match[1]: float(match[2]) for match in found if match}


def test_metrics_count_tokens_and_those_who_wait():
    with FakeEngine("--max-num-seqs", "1", "--cache-blocks", "100", "--itl-ms", "60000") as engine:
        peers = [http.client.HTTPConnection(engine.address, timeout=PATIENCE) for _ in range(2)]
        for peer in peers:
            peer.request("POST", COMPLETIONS, json.dumps(wanted(COMPLETIONS, stream=True)))
            assert peer.getresponse().status == 200
        shown = metrics(engine)
        assert shown["vllm:num_requests_running"] == 1
        assert shown["vllm:num_requests_waiting"] == 1
        assert shown["vllm:kv_cache_usage_perc"] == 0.07
        assert shown["vllm:prompt_tokens_total"] == 200
        assert shown["vllm:generation_tokens_total"] == 1
        for peer in peers:
            assert peer.sock is not None
            peer.sock.shutdown(socket.SHUT_RDWR)
            peer.close()
        until("both are aborted", lambda: [each["state"] for each in engine.log()] == ["aborted"] * 2)
        assert metrics(engine)["vllm:num_requests_running"] == 0
        assert metrics(engine)["vllm:num_requests_waiting"] == 0


def test_the_log_tells_of_each_request(engine: FakeEngine):
    ask(
        engine,
        COMPLETIONS,
        wanted(COMPLETIONS, max_tokens=3, stream=True),
        {"X-Request-Id": "first", "X-A": "b"},
    )
    ask(engine, COMPLETIONS, wanted(COMPLETIONS, "x" * 70_000), {"X-Request-Id": "second"})
    first, second = engine.log()
    assert (first["id"], first["path"], first["headers"]["x-a"]) == ("first", COMPLETIONS, "b")
    assert json.loads(first["body"]) == wanted(COMPLETIONS, max_tokens=3, stream=True)
    assert (first["state"], first["leg"], first["chunks"], first["status"]) == ("done", "whole", 3, 200)
    assert first["arrived"] <= first["first_chunk"] <= first["ended"]
    assert (second["body"], second["prompt_tokens"]) == (None, 17_500)
    assert len(engine.log(clear=True)) == 2
    assert engine.log() == []


def test_it_ends_cleanly_amid_a_request():
    with FakeEngine("--ttft-ms", "60000") as engine:
        connection = http.client.HTTPConnection(engine.address, timeout=PATIENCE)
        connection.request("POST", COMPLETIONS, json.dumps(wanted(COMPLETIONS)))
        until("the request is there", engine.log)
        engine.kill(signal.SIGTERM)
        assert engine.process.returncode == 0
        connection.close()
