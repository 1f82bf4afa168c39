"""Ten thousand streams at once, a chunk a second each: through `kvlane route`, and without it as a control.

An engine in one process and a client in another, both a loop over epoll, so that they cope on the cores that they
share with the router. The engine writes into each chunk when it sent it; the client says how long each was on its way.
Used by route_peers.py --streams.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import resource
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from typing import Any

PERIOD_S = 1.0
OPENED_A_SECOND = 1000
DESCRIPTORS_BESIDES = 200
MODELS = b'{"object": "list", "data": [{"id": "fake", "object": "model"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LISTENERS = 2


def measured(address: str, streams: int, chunks: int) -> dict[str, Any]:
    """Opens that many streams of so many chunks; delays are those of chunks that were sent while all were open."""
    raise_descriptor_limit(streams)
    received, opened_at, ended = _Client(address, streams, chunks).run()
    last_start = max(opened_at)
    counted = [late for at, late in received if at >= last_start]
    cuts = statistics.quantiles(counted, n=1000)
    return {
        "streams": streams,
        "lost_streams": streams - ended,
        "lost_chunks": streams * chunks - len(received),
        "chunks_counted": len(counted),
        "delay_ms": {"p50": cuts[499] * 1e3, "p99": cuts[989] * 1e3, "p99.9": cuts[998] * 1e3},
    }


@contextmanager
def engine(streams: int) -> Iterator[list[str]]:
    """The addresses of an engine that answers every request with a stream of `max_tokens` chunks."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
            for _ in range(LISTENERS)
        ]
        over = multiprocessing.Event()
        process = multiprocessing.Process(target=_serve, args=(listeners, streams, over), daemon=True)
        process.start()
        try:
            yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        finally:
            over.set()
            process.join(10)


def raise_descriptor_limit(streams: int) -> None:
    """For this process and its children. A connection takes one descriptor at each end, and two in the router."""
    wanted = 2 * streams + DESCRIPTORS_BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
    except (ValueError, OSError):
        message = (
            f"{streams} streams need {wanted} open files, and the limit is {hard}: raise it (ulimit -Hn)"
        )
        raise SystemExit(message) from None


def memory_mb(pid: int) -> float:
    """The most that a process has had in memory, in MB."""
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


class _Stream:
    """One request that the engine answers."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.chunks = 0
        self.sent = 0


def _serve(listeners: list[socket.socket], streams: int, over: Event) -> None:
    raise_descriptor_limit(streams)
    poll = select.epoll()
    listening = {each.fileno(): each for each in listeners}
    for each in listeners:
        each.setblocking(False)
        poll.register(each.fileno(), select.EPOLLIN)
    clients: dict[int, _Stream] = {}
    due: deque[tuple[float, _Stream]] = deque()
    while not over.is_set():
        now = time.monotonic()
        wait = min(0.2, max(0.0, due[0][0] - now)) if due else 0.2
        for number, _ in poll.poll(wait):
            if number in listening:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        connection, _ = listening[number].accept()
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        clients[connection.fileno()] = _Stream(connection)
                        poll.register(connection.fileno(), select.EPOLLIN)
                continue
            stream = clients[number]
            try:
                data = stream.connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                poll.unregister(number)
                del clients[number]
                stream.connection.close()
            elif _is_asked(stream, data):
                stream.sent = 0
                due.append((time.monotonic(), stream))
        now = time.monotonic()
        while due and due[0][0] <= now:
            at, stream = due.popleft()
            if _send(stream):
                due.append((at + PERIOD_S, stream))


def _is_asked(stream: _Stream, data: bytes) -> bool:
    """Whether a whole request for a stream is there now; others are answered."""
    stream.received += data
    head, found, body = stream.received.partition(b"\r\n\r\n")
    if not found:
        return False
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    if len(body) < int(length or 0):
        return False
    stream.received = b""
    if head.startswith(b"GET"):
        stream.connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(MODELS), MODELS))
        return False
    stream.chunks = json.loads(body)["max_tokens"]
    return True


def _send(stream: _Stream) -> bool:
    """Sends the next chunk; whether another one follows."""
    event = b"data: %d %d\n\n" % (stream.sent, time.monotonic_ns())
    data = b"%x\r\n%s\r\n" % (len(event), event)
    if stream.sent == 0:
        data = HEAD + data
    stream.sent += 1
    is_last = stream.sent == stream.chunks
    with contextlib.suppress(OSError):
        stream.connection.send(data + b"0\r\n\r\n" if is_last else data)
    return not is_last and stream.connection.fileno() >= 0


class _Client:
    """All clients, in one loop."""

    def __init__(self, address: str, streams: int, chunks: int) -> None:
        host, _, port = address.partition(":")
        self._to = (host, int(port))
        self._streams, self._chunks = streams, chunks
        body = json.dumps(
            {"model": "fake", "prompt": "streams", "stream": True, "max_tokens": chunks}
        ).encode()
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        self._open: dict[int, socket.socket] = {}
        self._rest: dict[int, bytes] = {}
        self._next: dict[int, int] = {}
        self.received: list[tuple[float, float]] = []
        self.first: list[float] = []
        self.ended = 0

    def run(self) -> tuple[list[tuple[float, float]], list[float], int]:
        poll = select.epoll()
        started = time.monotonic()
        begun = 0
        give_up = started + self._streams / OPENED_A_SECOND + (self._chunks + 30) * PERIOD_S
        while (begun < self._streams or self._open) and time.monotonic() < give_up:
            allowed = min(self._streams, int((time.monotonic() - started) * OPENED_A_SECOND) + 1)
            for _ in range(min(allowed - begun, 50)):
                client = socket.create_connection(self._to)
                client.sendall(self._request)
                client.setblocking(False)
                self._open[client.fileno()] = client
                poll.register(client.fileno(), select.EPOLLIN)
                begun += 1
            for number, _ in poll.poll(0.001 if begun < self._streams else 0.2):
                self._read(number)
                if number not in self._open:
                    continue
        for client in self._open.values():
            client.close()
        return self.received, self.first or [started], self.ended

    def _read(self, number: int) -> None:
        client = self._open[number]
        try:
            data = client.recv(65536)
        except OSError:
            data = b""
        now = time.monotonic_ns()
        text = self._rest.pop(number, b"") + data
        lines = text.split(b"\n")
        for line in lines[:-1]:
            if line.startswith(b"data: "):
                order, at = line[6:].split()
                expected = self._next.get(number, 0)
                if int(order) != expected:
                    raise SystemExit(f"chunk {expected} of a stream is missing: {order.decode()} came")
                if expected == 0:
                    self.first.append(now / 1e9)
                self._next[number] = expected + 1
                self.received.append((int(at) / 1e9, (now - int(at)) / 1e9))
        if not data or lines[-1].endswith(b"0\r") or text.endswith(b"0\r\n\r\n"):
            self.ended += bool(data) and self._next.get(number) == self._chunks
            self._next.pop(number, None)
            del self._open[number]
            client.close()
        elif lines[-1]:
            self._rest[number] = lines[-1]
