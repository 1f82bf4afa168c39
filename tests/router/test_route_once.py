"""Engines' connections that end around a request: it is never lost, and no engine runs it twice in silence."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from processes import PATIENCE
from routed import COMPLETIONS, Router, ask, wanted
from test_route_answers import OK, Engine, Script, says

HI = OK + b"content-length: 2\r\n\r\nhi"
# The engine that was not chosen for longest comes first.
TURNS = ("--policy", "round-robin")


@contextmanager
def before(count: int) -> Iterator[tuple[Router, list[Engine]]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(Engine())) for _ in range(count)]
        for engine in engines:
            threading.Thread(target=engine.serve, daemon=True).start()
        named = [word for engine in engines for word in ("--worker", engine.url)]
        yield stack.enter_context(Router(*named, *TURNS, nodes=count)), engines


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def closes(connection: socket.socket) -> bool:
    return False


def resets(connection: socket.socket) -> bool:
    reset(connection)
    return False


@pytest.mark.parametrize("end", [closes, resets])
def test_a_request_that_an_engine_took_over_a_kept_connection_goes_to_another_engine(end: Script) -> None:
    """The request went to the same engine again, uncounted, because the engine had just closed the kept connection."""
    with before(2) as (router, (bad, good)):
        bad.script = good.script = says(HI)
        for _ in range(2):
            assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
        assert (bad.requests, good.requests) == (1, 1), "both have a kept connection"
        bad.script = end
        assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
        assert (bad.requests, good.requests) == (2, 2), "the engine that took it did not get it again"
        (failures,) = [
            node["condition"]["failures"]
            for node in ask(router.admin, "/nodes")[1]["nodes"]
            if node["node"] == bad.url
        ]
        assert failures == 1, "it counts"


def test_where_no_other_engine_is_left_a_request_that_was_taken_fails() -> None:
    with before(1) as (router, (engine,)):
        engine.script = says(HI)
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
        engine.script = closes
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 502
        assert engine.requests == 2


def test_an_idle_connection_that_the_engine_closes_as_the_request_comes_costs_nobody_a_request() -> None:
    """uvicorn closes after 5 s. The kernel resets the connection, because the request is there and was not read."""
    closed_unread = [0]

    def script(connection: socket.socket) -> bool:
        connection.sendall(HI)
        # The next request is in the kernel, and is not read: closing resets the connection.
        readable, _, _ = select.select([connection], [], [], PATIENCE)
        closed_unread[0] += bool(readable)
        return False

    with before(1) as (router, (engine,)):
        engine.script = script
        assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
        for number in range(1, 20):
            assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
            assert closed_unread[0] == number
        assert engine.requests == 20, "each was read once"
        assert sum("may run it twice" in line for line in router.lines) == 19, "not in silence"
        engine.script = says(HI, goes_on=False)
        for _ in range(20):
            assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")


CHUNKED = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


CUT = {
    "length, nothing": OK + b"content-length: 100\r\n\r\n",
    "chunked, nothing": CHUNKED,
    "chunked, a size": CHUNKED + b"10\r\n",
    "no length, nothing": OK + b"\r\n",
    "HTTP/1.0, nothing": b"HTTP/1.0 200 OK\r\n\r\n",
    "length, half": OK + b"content-length: 100\r\n\r\n" + b"x" * 50,
    "chunked, one chunk": CHUNKED + b"2\r\nhi\r\n",
    "chunked, no end": CHUNKED + b"2\r\nhi\r\n0\r\n",
}


@pytest.mark.parametrize("answer", CUT.values(), ids=CUT.keys())
def test_a_200_that_is_cut_before_its_first_byte_reaches_the_client_is_another_engines(answer: bytes) -> None:
    """The router had the first bytes, the client none: it got an empty reply, or an empty 200."""

    def script(connection: socket.socket) -> bool:
        # Head, body and end come in one segment.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(answer)
        return False

    with before(2) as (router, (bad, good)):
        bad.script, good.script = script, says(HI)
        for _ in range(4):
            assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
        assert bad.requests >= 1, "the control: it was asked"
