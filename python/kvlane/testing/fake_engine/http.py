"""HTTP/1.1 for a fake engine: a small parser on asyncio.Protocol, and the bytes of answers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol as Interface

MOST_HEAD_BYTES = 1 << 20
MOST_BODY_BYTES = 1 << 28
LAST_CHUNK = b"0\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HEADS: dict[tuple[int, str], bytes] = {}


@dataclass
class HttpRequest:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Headers by name in lower case; repeated ones are joined by a comma."""
    body: bytes


class Handler(Interface):
    """Answers requests."""

    def connected(self, connection: Connection) -> bool:
        """False closes the connection at once."""
        ...

    def handle(self, connection: Connection, request: HttpRequest) -> None: ...


class BadHttp(ValueError):
    """Received bytes that are no request."""


def answer(
    status: int, body: bytes, kind: str = "application/json", extra: str = "", length: int | None = None
) -> bytes:
    """The bytes of an answer. `length` says another Content-Length than the body has."""
    head = _HEADS.get((status, kind))
    if head is None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {kind}\r\ncontent-length: ".encode()
        _HEADS[status, kind] = head
    size = len(body) if length is None else length
    return b"%s%d\r\n%s\r\n%s" % (head, size, extra.encode(), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One connection: requests are handled one after the other."""

    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self._handler = handler
        self._open = open_connections
        self._received = bytearray()
        self._busy = False
        self._close_after = False
        self._sent_continue = False
        self.transport: asyncio.Transport
        self.on_lost: Callable[[], None] | None = None
        """Called if the peer leaves before its answer has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._open.add(self)
        if not self._handler.connected(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._busy:
            self._next_requests()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def end(self, close: bool = False) -> None:
        """The answer is complete: the connection takes its next request, or is closed."""
        self._busy = False
        self.on_lost = None
        if close or self._close_after:
            self.transport.close()
        elif self._received:
            asyncio.get_running_loop().call_soon(self._next_requests)

    def close_when_answered(self) -> None:
        """Closes after this answer, which does not say so."""
        self._close_after = True

    def reset(self) -> None:
        """Resets the connection instead of sending the rest."""
        raw = self.transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _next_requests(self) -> None:
        if self._busy or not self._received or self.transport.is_closing():
            return
        try:
            request = self._parse()
        except BadHttp as error:
            self.write(answer(400, str(error).encode(), "text/plain", "connection: close\r\n"))
            self.transport.close()
            return
        if request is not None:
            self._busy = True
            self._sent_continue = False
            self._handler.handle(self, request)

    def _parse(self) -> HttpRequest | None:
        """The next request, taken off the received bytes; None if it is not all there."""
        received = self._received
        end = received.find(b"\r\n\r\n")
        if end < 0:
            if len(received) > MOST_HEAD_BYTES:
                raise BadHttp("The head of the request is too long.")
            return None
        first, *lines = received[:end].decode("latin-1").split("\r\n")
        try:
            method, target, version = first.split(" ")
        except ValueError:
            raise BadHttp("The request has no request line.") from None
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadHttp("A header has no colon.")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        found = self._body(headers, end + 4)
        if found is None:
            if headers.get("expect", "").lower() == "100-continue" and not self._sent_continue:
                self._sent_continue = True
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return None
        body, taken = found
        del received[:taken]
        wish = headers.get("connection", "").lower()
        self._close_after = "close" in wish or (version == "HTTP/1.0" and "keep-alive" not in wish)
        path, _, query = target.partition("?")
        return HttpRequest(method, path, query, headers, body)

    def _body(self, headers: dict[str, str], start: int) -> tuple[bytes, int] | None:
        """The body that starts there, and where it ends."""
        received = self._received
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return _chunked(received, start)
        text = headers.get("content-length", "0")
        if not (text.isascii() and text.isdigit()) or int(text) > MOST_BODY_BYTES:
            raise BadHttp(f"Content-Length cannot be {text!r}.")
        end = start + int(text)
        return None if len(received) < end else (bytes(received[start:end]), end)


def _chunked(received: bytearray, at: int) -> tuple[bytes, int] | None:
    """A chunked body and where it ends; None if it is not all there."""
    parts: list[bytes] = []
    while True:
        line_end = received.find(b"\r\n", at)
        if line_end < 0:
            return None
        try:
            size = int(received[at:line_end].split(b";")[0], 16)
        except ValueError:
            raise BadHttp("A chunk has no size.") from None
        if not 0 <= size <= MOST_BODY_BYTES:
            raise BadHttp("A chunk is too large.")
        at = line_end + 2
        if size == 0:
            break
        if len(received) < at + size + 2:
            return None
        parts.append(bytes(received[at : at + size]))
        at += size + 2
    while True:  # trailers, up to an empty line
        line_end = received.find(b"\r\n", at)
        if line_end < 0:
            return None
        if line_end == at:
            return b"".join(parts), at + 2
        at = line_end + 2
