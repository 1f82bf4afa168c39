"""Where a client's request ends, and whether its client is still there.

Bytes that could be read in two ways are refused. A client that closes its sending side gets its answer. One that leaves
ends its request."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path

import pytest
from busy import stretched
from processes import PATIENCE, until
from routed import COMPLETIONS, ask, routed, text_of, wanted

BODY = json.dumps(wanted("short", max_tokens=2)).encode()
GOOD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(*lines: bytes, body: bytes = BODY, end: bytes = b"\r\n") -> bytes:
    return b"POST /v1/completions HTTP/1.1" + end + b"".join(line + end for line in lines) + b"\r\n" + body


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def answers(address: str, sent: bytes) -> bytes:
    """All bytes until the router closes the connection."""
    with connected(address) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


LENGTH = b"Content-Length: %d" % len(BODY)
HOST = b"Host: 127.0.0.1"


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(post(HOST, LENGTH, end=b"\n"), id="lines-without-cr"),
        pytest.param(post(HOST + b"\nX: y", LENGTH), id="one-line-without-cr"),
        pytest.param(b"\n" + post(HOST, LENGTH), id="empty-line-without-cr"),
        pytest.param(post(HOST, LENGTH, LENGTH), id="two-equal-lengths"),
        pytest.param(post(HOST, LENGTH, b"Content-Length: 1"), id="two-lengths"),
        pytest.param(post(HOST, LENGTH + b", %d" % len(BODY)), id="list-of-lengths"),
        pytest.param(post(HOST, b"Content-Length: +%d" % len(BODY)), id="signed-length"),
        pytest.param(post(HOST, b"Content-Length : %d" % len(BODY)), id="space-before-colon"),
        pytest.param(post(HOST, b"X: y\r\n Content-Length: 1", LENGTH), id="folded-line"),
        pytest.param(post(HOST, b"X: a\rb", LENGTH), id="cr-alone"),
        pytest.param(post(HOST, b"Transfer-Encoding: gzip, chunked", body=CHUNKED), id="gzip-and-chunked"),
        pytest.param(post(HOST, b"Transfer-Encoding: chunked, chunked", body=CHUNKED), id="chunked-twice"),
        pytest.param(
            post(HOST, b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked", body=CHUNKED),
            id="two-encodings",
        ),
        pytest.param(
            post(HOST, LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED), id="length-and-chunked"
        ),
        pytest.param(
            post(HOST, b"Transfer-Encoding: chunked", body=CHUNKED.replace(b"\r\n", b"\n", 1)),
            id="chunk-without-cr",
        ),
        pytest.param(post(HOST, b"Transfer-Encoding: chunked", body=b" " + CHUNKED), id="space-before-chunk"),
    ],
)
@pytest.mark.parametrize("before", [b"", GOOD], ids=["alone", "pipelined"])
def test_a_request_that_two_readers_read_in_two_ways_is_refused_and_its_connection_closed(
    before: bytes, sent: bytes
) -> None:
    with routed([]) as (router, (engine,)):
        smuggled = GOOD.replace(b"short", b"SMUGG")
        came = answers(router.address, before + sent + smuggled)
        assert came.count(b"HTTP/1.1 200 ") == bool(before), came
        assert came.count(b"HTTP/1.1 400 ") == 1 and came.count(b"HTTP/1.1 ") == bool(before) + 1, came
        assert len(engine.log()) == bool(before), "neither it nor what follows it reaches an engine"
        # Another client notices nothing.
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200


def test_what_is_refused_hears_why() -> None:
    with routed([]) as (router, _):
        came = answers(router.address, post(HOST, LENGTH, end=b"\n"))
        head, body = came.split(b"\r\n\r\n")
        assert json.loads(body)["error"]["message"] == "a line of the request's head ends without CR"
        assert b"\r\nconnection: close" in head.lower()


def test_requests_in_chunks_and_many_on_one_connection_are_served() -> None:
    with routed([]) as (router, (engine,)), connected(router.address) as client:
        chunked = post(HOST, b"transfer-encoding: CHUNKED", body=CHUNKED)
        client.sendall((GOOD + b"\r\n" + chunked) * 3)
        came = b""
        while came.count(b"HTTP/1.1 200 OK\r\n") < 6:
            came += client.recv(1 << 16)
        assert len(engine.log()) == 6


def half_closed(address: str, sent: bytes) -> bytes:
    with connected(address) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(is_stream: bool) -> None:
    """`nc -N` and many scripts close their side; the router took them for gone and answered nothing."""
    with routed(["--ttft-ms", "300"]) as (router, (engine,)):
        _, expected, _ = ask(engine.address, COMPLETIONS, wanted("short", max_tokens=5))
        body = json.dumps(wanted("short", max_tokens=5, stream=is_stream)).encode()
        came = half_closed(router.address, post(HOST, b"Content-Length: %d" % len(body), body=body))
        assert came.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"), came
        assert (b"data: [DONE]" in came) == is_stream
        if not is_stream:
            answer = json.loads(came.split(b"\r\n\r\n")[2])
            assert text_of(answer) == text_of(expected)
        assert [seen["state"] for seen in engine.log()] == ["done"] * 2


def test_pythons_client_reads_the_answer_behind_what_asks_whether_it_is_there() -> None:
    with routed(["--ttft-ms", "300"]) as (router, _):
        connection = http.client.HTTPConnection(router.address, timeout=PATIENCE)
        connection.request("POST", COMPLETIONS, BODY)
        connection.sock.shutdown(socket.SHUT_WR)
        answer = connection.getresponse()
        assert answer.status == 200 and text_of(json.loads(answer.read()))


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_request_in_the_engine(is_stream: bool, is_reset: bool) -> None:
    """All forty requests end within 0.2 s on an idle machine, even if the router cannot tell at once who left."""
    with routed(["--ttft-ms", "100" if is_stream else "20000", "--itl-ms", "20"]) as (router, (engine,)):
        body = json.dumps(wanted("short", max_tokens=200, stream=is_stream)).encode()
        late: list[float] = []
        for number in range(40):
            client = connected(router.address)
            client.sendall(post(HOST, b"Content-Length: %d" % len(body), body=body))
            if is_stream and number % 2:
                assert client.recv(1 << 16)
            until("it runs", lambda number=number: len(engine.log()) == number + 1)
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            left = time.monotonic()
            client.close()
            until("it has ended", lambda number=number: engine.log()[number]["state"] != "running")
            late.append(time.monotonic() - left)
        assert {seen["state"] for seen in engine.log()} == {"aborted"}
        assert sorted(late)[-2] < stretched(0.2), late


def test_a_client_of_http_1_0_that_closes_its_sending_side_has_left() -> None:
    """An HTTP/1.0 client knows no interim answers, so the router cannot find out whether it has left."""
    with routed(["--ttft-ms", "20000"]) as (router, (engine,)):
        sent = GOOD.replace(b"HTTP/1.1", b"HTTP/1.0")
        assert half_closed(router.address, sent) == b""
        until("nothing of it runs", lambda: all(seen["state"] == "aborted" for seen in engine.log()))


def test_the_page_says_what_a_half_closed_client_gets() -> None:
    page = (Path(__file__).parents[2] / "docs/router-reference.md").read_text()
    assert "shutdown(SHUT_WR)" in page and "100 Continue" in page
