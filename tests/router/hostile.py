"""Clients that attack a router with huge and slow bodies, bad framing, silent connections and half heads, and with
requests that change engines or name their parameters. Each runs in a thread of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle

from routed import CHAT, COMPLETIONS

TIMEOUT_S = 20.0


class Hostile:
    """Threads that attack one router; counts what each attack was answered."""

    def __init__(self, address: str, key: str, body_bytes: int, strangers: int) -> None:
        host, port = address.split(":")
        self._peer = (host, int(port))
        self._key = key
        self._body_bytes = body_bytes
        self._strangers = strangers
        self._over = threading.Event()
        self.answers: dict[str, Counter[str]] = {}
        attacks: dict[str, Callable[[], str]] = {
            "many members": self._many_members,
            "many messages": self._many_messages,
            "nested": self._nested,
            "slow body": self._slow_body,
            "engine parameters": self._engine_parameters,
            "admin path": self._admin_path,
            "bad framing": self._bad_framing,
            "leaves": self._leaves,
            "half-closes": self._half_closes,
        }
        self._threads = [
            threading.Thread(target=self._repeat, args=(name, attack)) for name, attack in attacks.items()
        ]
        self._threads.append(threading.Thread(target=self._hold_strangers))

    def __enter__(self) -> Hostile:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, name: str, attack: Callable[[], str]) -> None:
        seen = self.answers.setdefault(name, Counter())
        while not self._over.is_set():
            try:
                seen[attack()] += 1
            except OSError as error:
                seen[type(error).__name__] += 1
            self._over.wait(0.1)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        with socket.create_connection(self._peer, TIMEOUT_S) as connection:
            yield connection

    def _head(self, path: str, length: int, more: str = "") -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self._peer[0]}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n"
        ).encode()

    def _status(self, connection: socket.socket) -> str:
        """Status of the final answer. An interim one (100) asks whether this client has left."""
        with connection.makefile("rb") as answer:
            line = answer.readline(200)
            while line.startswith(b"HTTP/1.1 100 "):
                answer.readline(200)
                line = answer.readline(200)
        return line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"

    def _send(self, path: str, body: bytes) -> str:
        with self._connection() as connection:
            # A router that refuses early closes before all was sent, but its answer can still be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(self._head(path, len(body), "Connection: close\r\n") + body)
            return self._status(connection)

    def _many_members(self) -> str:
        count = self._body_bytes // 12
        members = b",".join(b'"m%07x":0' % number for number in range(count))
        return self._send(COMPLETIONS, b"{" + members + b"}")

    def _many_messages(self) -> str:
        return self._send(CHAT, b'{"model":"fake","messages":[' + b"0," * (self._body_bytes // 2) + b"0]}")

    def _nested(self) -> str:
        # The last bracket is missing, so the router has to scan all of it, and no engine gets it.
        lists = b",".join([b"[" * 100 + b"]" * 100] * (self._body_bytes // 201))
        return self._send(COMPLETIONS, b'{"model":"fake","max_tokens":1,"prompt":"x","y":[' + lists + b"]")

    def _slow_body(self) -> str:
        with self._connection() as connection:
            connection.sendall(self._head(COMPLETIONS, 1 << 20))
            begun = time.monotonic()
            while not self._over.wait(1.0) and time.monotonic() - begun < 2 * TIMEOUT_S:
                connection.sendall(b" ")
            return "open"

    def _engine_parameters(self) -> str:
        body = {"model": "fake", "prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}
        return self._send(COMPLETIONS, json.dumps(body).encode())

    def _admin_path(self) -> str:
        return self._send("/v1/unload_lora_adapter", b'{"lora_name": "fake"}')

    def _bad_framing(self) -> str:
        body = b'{"model":"fake","prompt":"x","max_tokens":1}'
        head = self._head(COMPLETIONS, len(body))
        with self._connection() as connection:
            connection.sendall(head.replace(b"\r\nHost", b"\nHost") + body)
            return self._status(connection)

    def _leaves(self) -> str:
        body = json.dumps({"model": "fake", "prompt": "leaves", "max_tokens": 2000, "stream": True}).encode()
        with self._connection() as connection:
            connection.sendall(self._head(COMPLETIONS, len(body)) + body)
            return self._status(connection)

    def _half_closes(self) -> str:
        body = b'{"model":"fake","prompt":"x","max_tokens":1}'
        with self._connection() as connection:
            connection.sendall(self._head(COMPLETIONS, len(body)) + body)
            connection.shutdown(socket.SHUT_WR)
            return self._status(connection)

    def _hold_strangers(self) -> None:
        """Keeps this many connections open that say nothing, half a head, or 62 KB of one, and opens them again."""
        seen = self.answers.setdefault("strangers", Counter())
        says = cycle(
            (b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 62_000)
        )
        open_ones: list[socket.socket] = []
        try:
            while not self._over.is_set():
                if len(open_ones) >= self._strangers:
                    open_ones.pop(0).close()
                try:
                    connection = socket.create_connection(self._peer, 1.0)
                    open_ones.append(connection)
                    connection.sendall(next(says))
                    seen["sent"] += 1
                except OSError as error:
                    seen[type(error).__name__] += 1
                self._over.wait(0.005)
        finally:
            for connection in open_ones:
                connection.close()
