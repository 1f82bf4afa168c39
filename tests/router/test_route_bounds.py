"""Costs that clients and strangers can cause a router: memory, other clients' time, and connections."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from busy import stretched
from processes import PATIENCE, until
from routed import CHAT, COMPLETIONS, Router, ask, chat, routed, wanted

MB = 1 << 20
MODELS = b'{"object": "list", "data": [{"id": "fake"}]}'
ANSWER = b'{"choices": []}'
KEY = {"Authorization": "Bearer secret"}


class Engine:
    """Reads requests without keeping them. Answers at once, or not before it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.taken = 0
        self.answer: tuple[int, bytes] = (200, ANSWER)
        """Status and body of the answer to a POST."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.answers.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb", buffering=65536) as stream:
            try:
                while request := stream.readline():
                    left = 0
                    while (line := stream.readline().lower()) not in (b"\r\n", b""):
                        if line.startswith(b"content-length:"):
                            left = int(line.partition(b":")[2])
                    while left > 0 and (piece := stream.read(min(left, 65536))):
                        left -= len(piece)
                    is_post = request.startswith(b"POST")
                    if is_post:
                        self.taken += 1
                        self.answers.wait()
                    status, body = self.answer if is_post else (200, MODELS)
                    head = b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
                    connection.sendall(head + body)
            except OSError:
                return


@contextmanager
def before(*flags: str) -> Iterator[tuple[Router, Engine]]:
    with closing(Engine()) as engine, Router("--worker", engine.url, *flags, nodes=1) as router:
        yield router, engine


def memory(router: Router, name: str) -> int:
    """VmRSS or VmHWM of the router, in bytes."""
    text = Path(f"/proc/{router.process.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def filled(head: bytes, piece: bytes, tail: bytes, size: int = 58 * MB) -> bytes:
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


def members(count: int) -> bytes:
    named = b",".join(b'"%d":0' % number for number in range(count))
    return b'{"model":"fake",' + named + b"}"


def big(kind: str, size: int = 58 * MB) -> tuple[str, bytes]:
    """Path and body of that kind. Each byte of the body is work for a reader."""
    begin = b'{"model":"fake",'
    return {
        "messages": (CHAT, filled(begin + b'"messages":[', b"0,", b"0]}", size)),
        "members": (COMPLETIONS, members(size // 12)),
        "nested": (COMPLETIONS, filled(begin + b'"prompt":"x","a":[', b"[],", b"[]]}", size)),
        "token ids": (COMPLETIONS, filled(begin + b'"prompt":[', b"1,", b"1]}", size)),
        "text": (COMPLETIONS, filled(begin + b'"prompt":"', "é".encode(), b'"}', size)),
        "letters": (COMPLETIONS, filled(begin + b'"prompt":"', b"x", b'"}', size)),
        "escapes": (COMPLETIONS, filled(begin + b'"prompt":"', b"\\n", b'"}', size)),
        "space": (COMPLETIONS, filled(begin + b'"prompt":[', b" ", b"1]}", size)),
        "tools": (CHAT, filled(begin + b'"messages":[{}],"tools":[', b"{},", b"{}]}", size)),
        "model": (COMPLETIONS, filled(b'{"prompt":"x","model":"', b"m", b'"}', size)),
        "name": (COMPLETIONS, filled(begin + b'"prompt":"x","\\n', b"n", b'":1}', size)),
    }[kind]


def test_a_chat_of_more_messages_than_any_engine_takes_is_refused() -> None:
    with routed([]) as (router, (engine,)):
        for count, status in [(65_536, 200), (65_537, 400)]:
            body = {**chat(), "messages": [{"role": "user", "content": "x"}, *[0] * (count - 1)]}
            found, answer, _ = ask(router.address, CHAT, body)
            # The engine itself takes no numbers for messages.
            assert ("more than 65536 messages" in str(answer)) == (status == 400), (found, answer)
        assert len(engine.log()) == 1


def test_a_body_of_more_members_than_any_engine_takes_is_refused() -> None:
    with routed([]) as (router, (engine,)):
        for count, status in [(1022, 200), (1023, 400)]:
            found, answer, _ = ask(router.address, COMPLETIONS, members(count)[:-1] + b',"prompt":"x"}')
            assert (found, "more than 1024 members" in str(answer)) == (status, status == 400), answer
        found, answer, _ = ask(router.address, COMPLETIONS, {"m" * 1025: 0, **wanted("x")})
        assert found == 400 and "longer than 1024 bytes" in answer["error"]["message"]
        found, answer, _ = ask(router.address, COMPLETIONS, {**wanted("x"), "model": "m" * 1100})
        assert (found, answer["error"]["param"]) == (400, "model")
        assert len(engine.log()) == 1


@pytest.mark.parametrize("kind", ["messages", "members"])
def test_three_bodies_of_60_mb_cost_the_memory_of_three_bodies(kind: str) -> None:
    """Three of zeros for messages cost 3.1 GB until their answers began; four of small members 1.85 GB."""
    path, body = big(kind, 60 * MB)
    with before() as (router, engine):
        engine.answers.clear()
        with ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(closing(connect(router)))
                post(connection, path, body)
                assert connection.getresponse().status == 400
        assert memory(router, "VmHWM") < 250 * MB


def connect(router: Router) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(router.address, timeout=120)


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body, {"Content-Type": "application/json"})


def test_the_most_memory_that_a_default_router_can_be_made_to_hold() -> None:
    """docs/security.md states this number. Bodies whose answers do not begin fill --max-bodies."""
    # The ranges of their messages take eight times the memory of these bodies.
    many = filled(b'{"model":"fake","messages":[', b"0,", b"0]}", 131_000)
    requests = [big("letters", 60 * MB)] * 4 + [(CHAT, many)] * 800
    with before() as (router, engine):
        at_rest = memory(router, "VmRSS")
        engine.answers.clear()
        statuses: list[int] = []

        def send(path: str, body: bytes) -> None:
            with closing(connect(router)) as connection:
                try:
                    post(connection, path, body)
                    statuses.append(connection.getresponse().status)
                except OSError:
                    # The router refuses it before all of it was sent.
                    statuses.append(503)

        senders = [threading.Thread(target=send, args=request, daemon=True) for request in requests]
        [each.start() for each in senders]
        for _ in range(4):
            with suppress(AssertionError):
                until("all are held or refused", lambda: engine.taken + len(statuses) == len(senders))
        held, most = metric(router, "kvlane_route_body_bytes"), memory(router, "VmHWM")
        engine.answers.set()
        [each.join(PATIENCE) for each in senders]
        until("all is given back", lambda: metric(router, "kvlane_route_body_bytes") == 0)
        stayed = memory(router, "VmRSS") - at_rest
        print(f"at rest {at_rest / MB:.0f} MiB, counted {held / MB:.0f}, most {most / MB:.0f}, ", end="")
        print(f"{stayed / MB:.0f} stayed; {statuses.count(503)} refused, {statuses.count(200)} served")
        assert held > 900 * MB, "the attack fills the budget"
        assert most < 1300 * MB


def test_refusals_that_clients_do_not_read_count() -> None:
    """An engine's refusals of 8 MB went to clients that read nothing. The router held them, and counted none."""
    with before() as (router, engine), ExitStack() as held:
        engine.answer = (429, b"x" * (8 * MB))
        at_rest = metric(router, "kvlane_route_body_bytes")
        for _ in range(4):
            connection = held.enter_context(closing(connect(router)))
            post(connection, COMPLETIONS, json.dumps(wanted("x")).encode())
        until("all four count", lambda: metric(router, "kvlane_route_body_bytes") - at_rest >= 32 * MB)
        held.close()
        until("none counts", lambda: metric(router, "kvlane_route_body_bytes") == at_rest)


def metric(router: Router, name: str) -> int:
    _, page, _ = ask(router.admin, "/metrics")
    return int(next(line for line in page.splitlines() if line.startswith(name + " ")).split()[1])


@pytest.mark.parametrize(
    "kind",
    ["messages", "members", "nested", "token ids", "text", "space", "tools", "model", "name"],
)
def test_beside_58_mb_of_anything_other_clients_do_not_wait(kind: str) -> None:
    """The router scanned such a body in one go, and other clients waited for 10.9 and 14.3 s."""
    path, body = big(kind)
    with before() as (router, _):

        def send() -> None:
            # The router may refuse a body that is too long before all of it was sent.
            with closing(connect(router)) as connection, suppress(BrokenPipeError, ConnectionResetError):
                post(connection, path, body)
                connection.getresponse().read()

        sender = threading.Thread(target=send)
        sender.start()
        waited = []
        while sender.is_alive():
            begun = time.monotonic()
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
            waited.append(time.monotonic() - begun)
        waited.sort()
        print(f"{kind}: {len(waited)} requests, most {waited[-1] * 1e3:.0f} ms")
        assert waited[-1] < stretched(1), "another client waited"


def open_files(wanted_files: int) -> int:
    """Connections that this process and the router may have each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(wanted_files, most - 1000)


@contextmanager
def strangers(address: str, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    host, port = address.split(":")
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            peer = socket.create_connection((host, int(port)), timeout=PATIENCE)
            # Closed by a reset: thousands of ports that rest for a minute would be missed by other tests.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            opened.append(peer)
            try:
                peer.sendall(sent)
            except OSError:
                continue  # the router has closed it
        yield opened
    finally:
        for peer in opened:
            peer.close()


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Half: "
STRANGERS = {
    "nothing": b"",
    "half a head": HALF,
    "62 KB of head": HALF + b"x" * 62_000,
    "a head and half a body": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n{",
    "a wrong key": HALF + b"x\r\nAuthorization: Bearer wrong\r\nContent-Length: 9999\r\n\r\n{",
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_10000_strangers_do_not_keep_out_a_client_with_a_key(kind: str, tmp_path: Path) -> None:
    """Strangers held all connections for 75 s each: none of 7 clients with a key was served. 861 MB stayed."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    count = open_files(10_000)
    flags = ("--api-key-file", str(keys), "--max-connections", str(count), "--threads", "2")
    with before(*flags) as (router, _):
        assert ask(router.address, COMPLETIONS, wanted("short"), KEY)[0] == 200
        at_rest = memory(router, "VmRSS")
        with strangers(router.address, count, STRANGERS[kind]):
            # Connections are accepted in their order: all strangers have been, once this is answered.
            begun = time.monotonic()
            assert ask(router.address, "/health")[0] == 200
            print(f"{kind}: all are accepted {time.monotonic() - begun:.2f} s after the last came; ", end="")
            waited = []
            for _ in range(7):
                begun = time.monotonic()
                status, answer, _ = ask(router.address, COMPLETIONS, wanted("short"), KEY)
                assert status == 200, answer
                waited.append(time.monotonic() - begun)
        most = memory(router, "VmHWM")
        until("they are gone", lambda: metric(router, "kvlane_route_connections") == 0)
        stayed = memory(router, "VmRSS") - at_rest
        print(f"{count} strangers, at most {max(waited) * 1e3:.0f} ms, ", end="")
        print(f"memory at most {(most - at_rest) / MB:.0f} MiB more, {stayed / MB:.0f} MiB stayed")
        assert max(waited) < stretched(1)
        assert most < at_rest + 200 * MB
        assert stayed < 100 * MB


def test_clients_with_a_key_that_ask_nothing_make_room_for_one_that_does(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--max-connections", "20")
    with before(*flags) as (router, _), ExitStack() as stack:
        idle = [stack.enter_context(closing(connect(router))) for _ in range(20)]
        for each in idle:
            each.request("POST", COMPLETIONS, json.dumps(wanted("short")), KEY)
            assert each.getresponse().read() == ANSWER
        begun = time.monotonic()
        with strangers(router.address, 5, b""):
            assert ask(router.address, COMPLETIONS, wanted("short"), KEY)[0] == 200
        assert time.monotonic() - begun < stretched(1)
        assert metric(router, "kvlane_route_connections_displaced_total") >= 5


def test_a_head_has_to_come_within_ten_seconds() -> None:
    """A client that sent a byte now and then held a connection for 75 s, and again for each request."""
    with before() as (router, _):
        host, port = router.address.split(":")
        with closing(connect(router)) as kept:
            kept.request("POST", COMPLETIONS, json.dumps(wanted("short")))
            assert kept.getresponse().read() == ANSWER
            first = socket.create_connection((host, int(port)))
            begun, most = time.monotonic(), stretched(14)
            with first:
                ended: dict[str, float] = {}
                peers = {"first": first, "second": kept.sock}
                for byte in HALF:
                    for name, peer in peers.items():
                        if name not in ended:
                            peer.settimeout(0.5)
                            try:
                                peer.send(bytes([byte]))
                                if peer.recv(1) == b"":
                                    ended[name] = time.monotonic() - begun
                            except TimeoutError:
                                pass
                            except OSError:
                                ended[name] = time.monotonic() - begun
                    if len(ended) == 2 or time.monotonic() - begun > most:
                        break
        assert set(ended) == {"first", "second"}, ended
        assert all(9 < after < most for after in ended.values()), ended
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200


def test_a_stranger_s_long_head_is_refused_and_a_client_s_is_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    long = {"X-Long": "x" * 30_000}
    with before("--api-key-file", str(keys)) as (router, _):
        assert ask(router.address, "/health", None, long)[0] == 431
        assert ask(router.address, "/v1/models", None, {**KEY, **long})[0] == 200
        assert ask(router.address, "/v1/models", None, {**long, **KEY})[0] == 431, "the key has to come first"
        with closing(connect(router)) as connection:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert (answer.status, answer.getheader("connection")) == (200, "close")
    with before() as (router, _):
        assert ask(router.address, "/v1/models", None, long)[0] == 200, "without keys all are clients"
