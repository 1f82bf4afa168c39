"""Logs a fake engine's newest requests, for tests to read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

MOST_REQUESTS = 10_000
MOST_BODY_BYTES = 64 * 1024


@dataclass(slots=True)
class Entry:
    """One request that generates."""

    id: str
    path: str
    headers: dict[str, str]
    body: bytes | None
    """None from 64 kB on."""
    arrived: float
    """Seconds since 1970, as all times here."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    leg: str = "whole"
    state: str = "running"
    """running, done, or aborted: its client went, or a fault cut it off."""
    status: int | None = None
    chunks: int = 0
    """Tokens sent as events of a stream, or 1 for an answer in one piece."""
    first_chunk: float | None = None
    ended: float | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "path": self.path,
            "headers": self.headers,
            "body": None if self.body is None else self.body.decode(errors="replace"),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "leg": self.leg,
            "state": self.state,
            "status": self.status,
            "chunks": self.chunks,
            "arrived": self.arrived,
            "first_chunk": self.first_chunk,
            "ended": self.ended,
        }


class Log:
    """The newest requests, oldest first."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=MOST_REQUESTS)

    def add(self, path: str, headers: dict[str, str], body: bytes, now: float) -> Entry:
        kept = body if len(body) < MOST_BODY_BYTES else None
        entry = Entry(headers.get("x-request-id", ""), path, headers, kept, now)
        self._entries.append(entry)
        return entry

    def shown(self) -> list[dict[str, Any]]:
        return [entry.shown() for entry in self._entries]

    def clear(self) -> None:
        self._entries.clear()
