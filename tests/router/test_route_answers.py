"""Engines' answers as bytes: what a client gets of them, and what the connection is good for afterwards."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from processes import PATIENCE, until
from routed import COMPLETIONS, LONG, Router, ask, connect, wanted

MODELS = b'{"object": "list", "data": [{"id": "fake"}]}'
OK = b"HTTP/1.1 200 OK\r\n"
Script = Callable[[socket.socket], bool]
"""What happens once a request has come; whether the connection takes another one."""


class Engine:
    """Answers requests that generate as it is told, and knows how many connections they came over."""

    def __init__(self) -> None:
        self.script: Script = says(b"")
        self.connections = 0
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        is_first = True
        with connection:
            while (head := _head(connection)) is not None:
                if head.startswith(b"GET"):
                    length = b"%d" % len(MODELS)
                    connection.sendall(OK + b"content-length: " + length + b"\r\n\r\n" + MODELS)
                    continue
                self.connections += is_first
                self.requests += 1
                is_first = False
                if not self.script(connection):
                    return


def _head(connection: socket.socket) -> bytes | None:
    """The head of the next request; its body is read, too, unless it is long."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        try:
            byte = connection.recv(1)
        except OSError:
            return None
        if not byte:
            return None
        head += byte
    _, _, length = head.lower().partition(b"content-length: ")
    left = int(length.split(b"\r\n")[0] or 0)
    while 0 < left < 1 << 20:
        left -= len(connection.recv(left))
    return head


def says(*pieces: bytes, goes_on: bool = True) -> Script:
    def script(connection: socket.socket) -> bool:
        for piece in pieces:
            connection.sendall(piece)
        return goes_on

    return script


@contextmanager
def before(*flags: str) -> Iterator[tuple[Router, Engine]]:
    engine = Engine()
    serving = threading.Thread(target=engine.serve, daemon=True)
    serving.start()
    with closing(engine), Router("--worker", engine.url, *flags, nodes=1) as router:
        yield router, engine


@pytest.fixture(scope="module")
def routed() -> Iterator[tuple[Router, Engine]]:
    with before() as both:
        yield both


def test_a_body_arrives_however_its_end_is_told(routed: tuple[Router, Engine]) -> None:
    router, engine = routed
    chunks = b"5;note=1\r\nhello\r\n1\r\n \r\n5\r\nworld\r\n0\r\nx-trailer: y\r\n\r\n"
    chunked = OK + b"transfer-encoding: chunked\r\n\r\n" + chunks
    for script, wanted_body in (
        (says(OK + b"content-length: 11\r\n\r\nhello world"), "hello world"),
        (says(OK + b"content-length: 0\r\n\r\n"), ""),
        (says(chunked), "hello world"),
        (says(*[chunked[at : at + 1] for at in range(len(chunked))]), "hello world"),
        (says(OK + b"\r\nhello ", b"world", goes_on=False), "hello world"),
        (says(b"HTTP/1.0 200 OK\r\n\r\nhello world", goes_on=False), "hello world"),
        (says(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK + b"content-length: 2\r\n\r\nhi"), "hi"),
        (says(b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 2\r\n\r\nhi"), "hi"),
    ):
        engine.script = script
        assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, wanted_body)
    engine.script = says(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (204, "")


def test_a_connection_carries_one_answer_after_the_other(routed: tuple[Router, Engine]) -> None:
    router, engine = routed
    clean = OK + b"content-length: 2\r\n\r\nhi"
    for answer, is_kept in (
        (clean, True),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", True),
        (OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi", False),
        # Bytes that nobody has asked for could be taken for the next client's answer.
        (clean + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged", False),
    ):
        engine.script = says(answer)
        ask(router.address, COMPLETIONS, wanted("short"))
        connections = engine.connections
        for _ in range(4):
            assert ask(router.address, COMPLETIONS, wanted("short"))[:2] == (200, "hi")
        assert engine.connections - connections == (0 if is_kept else 4), answer


@pytest.mark.parametrize(
    "answer",
    [
        b"\x16\x03\x01\x00\x05no HTTP",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        OK + b"content-length: 99999999999999999999\r\n\r\nhi",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"a: b\r\n c\r\ncontent-length: 2\r\n\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nhi",
        OK + b"transfer-encoding: chunked\r\n\r\n-2\r\nhi\r\n0\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n2\nhi\n0\n\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 20,
        OK + b"a: " + b"x" * (70 << 10) + b"\r\n\r\n",
        OK + b"content-length: 2\r\n",
    ],
)
def test_nonsense_is_a_502(routed: tuple[Router, Engine], answer: bytes) -> None:
    router, engine = routed
    engine.script = says(OK + b"content-length: 2\r\n\r\nhi")
    until("it is served again", lambda: ask(router.address, COMPLETIONS, wanted("short"))[0] == 200)
    engine.script = says(answer, goes_on=False)
    status, told, _ = ask(router.address, COMPLETIONS, wanted("short"))
    assert (status, told["error"]["code"]) == (502, 502)


@pytest.mark.parametrize("rest", [b"fffffffffffffffff\r\n", b"x", b""])
def test_nonsense_within_an_answer_cuts_it(routed: tuple[Router, Engine], rest: bytes) -> None:
    router, engine = routed
    over = threading.Event()
    begun = OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n"

    def script(connection: socket.socket) -> bool:
        connection.sendall(begun)
        assert over.wait(PATIENCE)
        connection.sendall(rest)
        return False

    engine.script = script
    client = connect(router.address)
    client.request("POST", COMPLETIONS, json.dumps(wanted("short", stream=True)))
    answer = client.getresponse()
    assert answer.read(2) == b"hi", "the first chunk does not wait for the next one"
    over.set()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()


def test_an_engine_may_answer_before_it_has_read_all(routed: tuple[Router, Engine]) -> None:
    router, engine = routed
    engine.script = says(
        b"HTTP/1.1 413 Too Long\r\nconnection: close\r\ncontent-length: 4\r\n\r\nlong", goes_on=False
    )
    assert ask(router.address, COMPLETIONS, wanted(LONG * 2000))[:2] == (413, "long")


def test_a_client_that_does_not_read_keeps_its_engine_from_sending(routed: tuple[Router, Engine]) -> None:
    router, engine = routed
    sent = [0]
    piece = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
    blocked, over = threading.Event(), threading.Event()

    def script(connection: socket.socket) -> bool:
        connection.sendall(OK + b"transfer-encoding: chunked\r\n\r\n")
        connection.settimeout(1.0)
        try:
            while not over.is_set():
                connection.sendall(piece)
                sent[0] += 1
        except TimeoutError:
            blocked.set()
        except OSError:
            pass
        return False

    engine.script = script
    client = connect(router.address)
    client.request("POST", COMPLETIONS, json.dumps(wanted("short", stream=True)))
    try:
        assert blocked.wait(PATIENCE), f"{sent[0]} pieces were taken"
    finally:
        over.set()
        client.close()
    # The kernel's buffers of four sockets, and less than 1 MB in the router.
    assert sent[0] < 1000
