"""`kvlane route` before workers: what passes, what is changed, and where requests go."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from processes import KVLANE, PATIENCE, until
from routed import CHAT, COMPLETIONS, LONG, Router, ask, chat, connect, routed, text_of, wanted, words_of

OWN_ID = re.compile(r"kvlane-[0-9a-f]{12}-[0-9a-z]+-w0")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answers_are_the_engines_own(path: str) -> None:
    body = chat(max_tokens=7) if path == CHAT else wanted(max_tokens=7)
    with routed([], []) as (router, engines):
        _, direct, _ = ask(engines[0].address, path, body)
        status, whole, headers = ask(router.address, path, body)
        assert (status, whole["choices"], headers["content-type"]) == (
            200,
            direct["choices"],
            "application/json",
        )
        _, stream, headers = ask(router.address, path, {**body, "stream": True})
        assert words_of(stream) == text_of(direct)
        assert headers["content-type"].startswith("text/event-stream")


def test_bodies_and_headers_pass_but_the_clients_id_does_not() -> None:
    body = b'{ "model":"fake" ,\n"prompt": "h\\u00e9",  "max_tokens":1, "unknown": 1e2}'
    given = {
        "Authorization": "Bearer sk-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Mine": "a",
        # vLLM's P2P NCCL connector would take addresses from it, and connect to them.
        "X-Request-Id": "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_mine",
        "X-Data-Parallel-Rank": "7",
        "Connection": "x-secret, keep-alive",
        "X-Secret": "of this connection",
    }
    with routed([]) as (router, (engine,)):
        _, _, headers = ask(router.address, COMPLETIONS, body, given)
        assert headers["x-request-id"] == given["X-Request-Id"]
        (seen,) = engine.log()
        assert seen["body"].encode() == body
        assert (seen["headers"]["authorization"], seen["headers"]["x-mine"]) == ("Bearer sk-1", "a")
        assert seen["headers"]["traceparent"] == given["traceparent"]
        assert OWN_ID.fullmatch(seen["id"]), seen["id"]
        assert not {"x-secret", "x-data-parallel-rank"} & set(seen["headers"])
        _, _, headers = ask(router.address, COMPLETIONS, body)
        assert seen["id"] != engine.log()[1]["id"]
        assert headers["x-request-id"] == engine.log()[1]["id"].removesuffix("-w0")


def test_a_conversation_stays_where_it_began_and_others_go_elsewhere() -> None:
    with routed([], [], []) as (router, engines):
        for turn in range(4):
            for name in "abc":
                ask(
                    router.address,
                    COMPLETIONS,
                    wanted(f"{name}: " + LONG + "more " * turn * 100, max_tokens=1),
                )
        begins = [{json.loads(seen["body"])["prompt"][0] for seen in engine.log()} for engine in engines]
        assert sorted(map(sorted, begins)) == [["a"], ["b"], ["c"]]
        assert all(seen["cached_tokens"] > 400 for engine in engines for seen in engine.log()[1:])


@pytest.mark.parametrize("policy", ["random", "round-robin", "power-of-two", "least-loaded"])
def test_other_policies_spread_requests(policy: str) -> None:
    with routed([], [], flags=("--policy", policy)) as (router, engines):
        for _ in range(40):
            ask(router.address, COMPLETIONS, wanted(max_tokens=1))
        counts = [len(engine.log()) for engine in engines]
        assert sum(counts) == 40 and min(counts) > 5, counts


def test_each_model_has_its_nodes_and_adapters_appear() -> None:
    with routed(["--model", "one", "--model", "both"], ["--model", "two", "--model", "both"]) as (
        router,
        engines,
    ):
        for model in ("one", "two", "both", "both"):
            assert ask(router.address, COMPLETIONS, wanted(model=model))[0] == 200
        assert [seen["status"] for engine in engines for seen in engine.log()] == [200] * 4
        _, models, _ = ask(router.address, "/v1/models")
        assert [each["id"] for each in models["data"]] == ["both", "one", "two"]
        assert all(each["max_model_len"] for each in models["data"])
        status, answer, _ = ask(router.address, COMPLETIONS, wanted(model="tuned"))
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", 404)
        assert "tuned" in answer["error"]["message"]
        ask(engines[1].address, "/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": "/x"})
        until(
            "the adapter is there", lambda: ask(router.address, COMPLETIONS, wanted(model="tuned"))[0] == 200
        )


def test_other_paths_go_to_one_node_as_they_are() -> None:
    with routed([], []) as (router, _):
        status, answer, _ = ask(router.address, "/v1/embeddings", {"model": "fake", "input": "text"})
        assert (status, len(answer["data"])) == (200, 1)
        assert ask(router.address, "/health")[0] == 200
        assert ask(router.address, "/nowhere")[0] == 404
        # Engines decode paths: this one would have an id of the client's own in its body.
        for path in ("/v1/%72esponses", "/v1//completions", "/v1/x/../completions"):
            assert ask(router.address, path, wanted())[0] == 404
        assert ask(router.address, COMPLETIONS)[0] == 404
        assert ask(router.address, "/metrics")[0] == 404, "the engines' own are not for clients"


class Recording(BaseHTTPRequestHandler):
    """A server that has one model and keeps the bodies that it is sent."""

    bodies: ClassVar[list[bytes]] = []

    def do_GET(self) -> None:
        self._answer(b'{"object": "list", "data": [{"id": "fake"}]}')

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_a_response_has_its_id_in_the_body_and_it_is_the_routers() -> None:
    """Of /v1/responses vLLM takes the id out of the body, and not out of the header: a client could name addresses
    there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recording)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Router("--worker", f"http://127.0.0.1:{server.server_port}", nodes=1) as router:
            body = {"model": "fake", "input": "hello", "request_id": "___prefill_addr_10.0.0.1:1___mine"}
            assert ask(router.address, "/v1/responses", body)[0] == 200
    finally:
        server.shutdown()
        server.server_close()
    (sent,) = map(json.loads, Recording.bodies)
    assert OWN_ID.fullmatch(sent["request_id"].removeprefix("resp_")), sent
    assert {**sent, "request_id": body["request_id"]} == body


def test_an_engines_own_refusal_passes_as_it_is() -> None:
    with routed([]) as (router, (engine,)):
        body = wanted(max_tokens=0)
        assert ask(router.address, COMPLETIONS, body)[:2] == ask(engine.address, COMPLETIONS, body)[:2]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"model": "fake", "prompt": "x"', 400, "byte 31"),
        (b"[1]", 400, "not an object"),
        (b'{"model": "fake", "model": "other", "prompt": "x"}', 400, '"model" twice'),
        (b'{"model": ' + b"[" * 90_000, 400, "128 levels"),
        (b'{"model": "\xff"}', 400, "not UTF-8 from byte 11"),
        (b'{"model": 7, "prompt": "x"}', 400, "model is no string"),
        (
            b'{"model": "fake", "prompt": "x", "kv_transfer_params": {"remote_host": "10.0.0.1"}}',
            400,
            "kv_transfer_params",
        ),
        (b'{"model": "fake", "prompt": "' + b"x" * 200_000 + b'"}', 413, "100000 bytes"),
    ],
)
def test_what_no_engine_could_take_is_refused_with_its_reason(body: bytes, status: int, says: str) -> None:
    with routed([], flags=("--max-body", "100000")) as (router, (engine,)):
        found, answer, _ = ask(router.address, COMPLETIONS, body)
        assert found == answer["error"]["code"] == status
        assert says in answer["error"]["message"]
        assert engine.log() == []
        assert ask(router.address, COMPLETIONS, wanted())[0] == 200


def raw(address: str, sent: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        peer.sendall(sent)
        return b"".join(iter(lambda: peer.recv(65536), b""))


def test_what_is_no_http_is_refused_and_no_second_request_hides_in_a_first() -> None:
    with routed([]) as (router, (engine,)):
        hidden = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        two_lengths = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(hidden))
        # The body ends where its chunks end, and the connection with it: servers differ in what they would read on.
        answer = raw(
            router.address, b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + two_lengths + hidden
        )
        assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 400 ")
        for order in (1, -1):
            body = json.dumps(wanted("short")).encode()
            lengths = [b"Content-Length: 7\r\n", b"Transfer-Encoding: chunked\r\n"][::order]
            chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            answer = raw(router.address, head + b"".join(lengths) + b"\r\n" + chunks + hidden)
            assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 400 ")
            assert b"both Content-Length and Transfer-Encoding" in answer
            assert engine.log() == []
            ending = b"Connection: close\r\n"
            alone = raw(router.address, head + ending + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
            assert alone.startswith(b"HTTP/1.1 200 "), "the control: chunks alone are served"
            engine.log(clear=True)
        assert raw(router.address, b"\x00\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        many = b"".join(b"X-%d: y\r\n" % number for number in range(5000))
        assert raw(router.address, b"GET /health HTTP/1.1\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431 ")
        assert engine.log() == []
        assert ask(router.address, COMPLETIONS, wanted())[0] == 200


def test_all_bodies_together_are_bounded() -> None:
    """Each client of ten thousand may send a body of 64 MB: all of them would take what no machine has."""
    with routed([], flags=("--max-bodies", "100kb")) as (router, (engine,)):
        host, port = router.address.split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 90001\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as slow:
            slow.sendall(head + b"x" * 90_000)

            def is_held() -> bool:
                _, page, _ = ask(router.admin, "/metrics")
                return "kvlane_route_body_bytes 90000" in page

            until("the first body is held", is_held)
            status, answer, headers = ask(router.address, COMPLETIONS, wanted("y" * 20_000))
            assert (status, headers["retry-after"]) == (503, "1"), answer
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
        until("its place is free", lambda: ask(router.address, COMPLETIONS, wanted("y" * 20_000))[0] == 200)
        assert len(engine.log()) == 2


def test_sigterm_lets_what_is_under_way_end() -> None:
    with routed(["--itl-ms", "50"]) as (router, (engine,)):
        connection = connect(router.address)
        connection.request("POST", COMPLETIONS, json.dumps(wanted(max_tokens=20, stream=True)))
        answer = connection.getresponse()
        router.process.send_signal(signal.SIGTERM)
        assert words_of(answer.read().decode()).split()
        router.process.wait(PATIENCE)
        assert router.process.returncode == 0
        assert [seen["state"] for seen in engine.log()] == ["done"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--worker http://127.0.0.1:8100 --worker http://127.0.0.1:8101",
            "2 workers, 0 prefill and 0 decode",
        ),
        (
            "--prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200",
            "0 workers, 1 prefill and 1 decode",
        ),
    ],
)
def test_it_takes_what_the_page_tells_it(flags: str, says: str) -> None:
    assert f"kvlane route {flags}\n" in (Path(__file__).parents[2] / "docs/routing.md").read_text()
    with Router(*flags.split(), nodes=0) as router:
        assert any(says in line for line in router.lines)


def test_many_clients_at_once_are_all_served() -> None:
    with routed([], [], flags=("--threads", "2")) as (router, engines):
        statuses: list[int] = []

        def client() -> None:
            connection = connect(router.address)
            for _ in range(20):
                connection.request("POST", COMPLETIONS, json.dumps(wanted("short", stream=True)))
                answer = connection.getresponse()
                words_of(answer.read().decode())
                statuses.append(answer.status)
            connection.close()

        clients = [threading.Thread(target=client) for _ in range(20)]
        [each.start() for each in clients]
        [each.join() for each in clients]
        assert Counter(statuses) == {200: 400}
        ids = [seen["id"] for engine in engines for seen in engine.log()]
        assert len(set(ids)) == 400
        assert min(len(engine.log()) for engine in engines) > 100


def test_beyond_the_host_it_wants_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    keys.chmod(0o600)
    with routed([], flags=("--api-key-file", str(keys))) as (router, (engine,)):
        for shown, status in [
            (None, 401),
            ("Bearer no", 401),
            ("second", 401),
            ("Bearer second", 200),
            ("Bearer first", 200),
        ]:
            headers = {} if shown is None else {"Authorization": shown}
            found, answer, _ = ask(router.address, COMPLETIONS, wanted(), headers)
            assert found == status, (shown, answer)
        assert ask(router.address, "/v1/models")[0] == 401
        assert ask(router.address, "/health")[0] == 200
        assert len(engine.log()) == 2
        # With one of them an engine could ask as a client.
        assert not any("authorization" in seen["headers"] for seen in engine.log())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no engine is named"),
        (["--prefill", "http://127.0.0.1:1"], "--prefill without --decode"),
        (["--worker", "https://127.0.0.1:1"], "https://127.0.0.1:1"),
        (["--worker", "http://127.0.0.1:1", "--policy", "fastest"], "least-work"),
        (["--worker", "http://127.0.0.1:1", "--listen", "0.0.0.0:0"], "--api-key-file"),
        (["--worker", "http://127.0.0.1:1", "--first-byte-timeout", "0"], "--first-byte-timeout 0"),
        (["--worker", "http://127.0.0.1:1", "--api-key-file", "/nowhere"], "/nowhere"),
    ],
)
def test_flags_that_cannot_be_are_refused_with_what_to_do(flags: list[str], says: str) -> None:
    run = subprocess.run(
        [str(KVLANE), "route", *flags], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.returncode != 0
    assert says in run.stderr, run.stderr
