"""The life of a request that generates: from the engine's queue to its last token."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

from kvlane.testing.fake_engine import answers, http, kv_events
from kvlane.testing.fake_engine.log import Entry
from kvlane.testing.fake_engine.metrics import Counters
from kvlane.testing.fake_engine.model import Begun, EngineModel, block_hashes
from kvlane.testing.fake_engine.pairs import Leg
from kvlane.testing.fake_engine.requests import TOKEN_BYTES, Asked, token_ids

EXIT_CODE = 3
"""The exit status of a process that the fault exit_at_chunk ends."""
_BROKEN_CHUNK = b"400\r\ndata: "
_MISSING_BYTES = 100


@dataclass
class Damage:
    """The faults of one answer."""

    die_at: int | None = None
    exit_at: int | None = None
    bad_length: bool = False


@dataclass(eq=False, slots=True)
class Generation:
    """One request."""

    connection: http.Connection
    asked: Asked
    entry: Entry
    leg: Leg
    chat: bool
    request_id: str
    model: str
    adapter: str | None
    transfer: dict[str, Any] | None
    damage: Damage
    blocks: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    stream: answers.Stream | None = None
    head_sent: bool = False
    sent: int = 0
    first_token_at: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Engine:
    """Carries out what the model decides."""

    def __init__(self, model: EngineModel, publisher: kv_events.Publisher | None) -> None:
        self.model = model
        self.counters = Counters()
        self._publisher = publisher
        self._block_bytes = model.block_size * TOKEN_BYTES
        self._loop = asyncio.get_running_loop()
        self._advancing = False
        self._again = False
        self._wake: asyncio.TimerHandle | None = None

    def submit(self, generation: Generation) -> None:
        """Starts a request; its answer goes to its connection."""
        asked = generation.asked
        generation.blocks = block_hashes(asked.prompt, self._block_bytes, hash(generation.adapter))
        generation.words = answers.words(generation.model, asked.prompt, asked.max_tokens)
        generation.connection.on_lost = lambda: self._abort(generation)
        if asked.stream:
            generation.stream = answers.Stream(
                generation.chat, generation.request_id, generation.model, asked.choices
            )
        self.counters.prompt_tokens += asked.prompt_tokens
        self.model.submit(
            generation,
            generation.blocks,
            asked.prompt_tokens,
            generation.leg.remote_tokens,
            self._loop.time(),
        )
        self._advance()
        # vLLM sends the head of a stream when it accepts the request, before there is a token.
        if generation.stream is not None and not generation.head_sent and generation.entry.state == "running":
            generation.head_sent = True
            generation.connection.write(http.STREAM_HEAD)

    def clear_cache(self) -> None:
        self.model.cache.clear()
        if self._publisher is not None:
            self._publisher.publish([kv_events.cleared()])

    def _advance(self) -> None:
        # A request that ends at once lets the next begin: a loop, not a recursion.
        self._again = True
        if self._advancing:
            return
        self._advancing = True
        while self._again:
            self._again = False
            for begun in self.model.advance(self._loop.time()):
                self._begin(begun)
        self._advancing = False
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        at = self.model.wake_at()
        if at is not None:
            self._wake = self._loop.call_at(at, self._advance)

    def _begin(self, begun: Begun) -> None:
        generation = begun.key
        assert isinstance(generation, Generation)
        generation.entry.cached_tokens = begun.cached_tokens
        generation.first_token_at = begun.first_token_at
        self._publish(generation, generation.blocks, begun)
        at = begun.first_token_at
        if generation.stream is None:
            at += self.model.latencies.itl * (generation.asked.max_tokens - 1)
        self._tick_at(generation, at)

    def _tick_at(self, generation: Generation, at: float) -> None:
        if at <= self._loop.time():
            self._tick(generation)
        else:
            generation.timer = self._loop.call_at(at, self._tick, generation)

    def _tick(self, generation: Generation) -> None:
        if generation.stream is None:
            self._answer_whole(generation)
            return
        itl, most = self.model.latencies.itl, generation.asked.max_tokens
        late = self._loop.time() - generation.first_token_at
        due = most if itl <= 0 else min(most, 1 + max(0, int(late / itl + 1e-6)))
        self._send_tokens(generation, generation.stream, due)
        if generation.entry.state == "running":
            self._tick_at(generation, generation.first_token_at + itl * generation.sent)

    def _send_tokens(self, generation: Generation, stream: answers.Stream, due: int) -> None:
        """Sends the tokens up to `due`, and the end after the last."""
        damage, words, most = generation.damage, generation.words, generation.asked.max_tokens
        stop = min((at for at in (damage.die_at, damage.exit_at) if at is not None), default=None)
        until = due if stop is None else min(due, stop)
        parts: list[bytes] = []
        if not generation.head_sent:
            generation.head_sent = True
            parts.append(http.STREAM_HEAD)
        if generation.sent == 0:
            generation.entry.first_chunk = time.time()
            opening = stream.opening()
            if opening:
                parts.append(http.chunk(opening))
        parts += [
            http.chunk(stream.token(words[position], position == most - 1))
            for position in range(generation.sent, until)
        ]
        self.counters.generation_tokens += max(0, until - generation.sent)
        generation.sent = generation.entry.chunks = max(generation.sent, until)
        if stop is not None and generation.sent >= stop:
            generation.connection.write(b"".join(parts))
            self._break_off(generation)
        elif generation.sent < most:
            generation.connection.write(b"".join(parts))
        elif damage.bad_length:
            generation.connection.write(b"".join(parts) + _BROKEN_CHUNK)
            self._finish(generation, "aborted", close=True)
        else:
            used = self._usage(generation) if generation.asked.include_usage else None
            parts.append(http.chunk(stream.ending(used, generation.transfer)))
            parts.append(http.LAST_CHUNK)
            generation.connection.write(b"".join(parts))
            self._finish(generation, "done")

    def _answer_whole(self, generation: Generation) -> None:
        damage, asked = generation.damage, generation.asked
        body = answers.whole(
            generation.chat,
            generation.request_id,
            generation.model,
            "".join(generation.words),
            asked.choices,
            self._usage(generation),
            generation.transfer,
        )
        length = len(body) + _MISSING_BYTES if damage.bad_length else None
        data = http.answer(200, body, length=length)
        if damage.die_at is not None or damage.exit_at is not None:
            if damage.die_at != 0 and damage.exit_at != 0:
                generation.connection.write(data[: len(data) // 2])
            self._break_off(generation)
            return
        generation.connection.write(data)
        generation.entry.first_chunk = time.time()
        generation.entry.chunks = 1
        self.counters.generation_tokens += asked.max_tokens
        self._finish(generation, "aborted" if damage.bad_length else "done", close=damage.bad_length)

    def _break_off(self, generation: Generation) -> None:
        if generation.damage.exit_at is not None:
            os._exit(EXIT_CODE)
        connection = generation.connection
        self._finish(generation, "aborted")
        connection.reset()

    def _abort(self, generation: Generation) -> None:
        if generation.timer is not None:
            generation.timer.cancel()
        self._end_entry(generation.entry, "aborted")
        self._leave(generation)

    def _finish(self, generation: Generation, state: str, close: bool = False) -> None:
        self._end_entry(generation.entry, state)
        generation.entry.status = 200
        said = generation.asked.prompt + "".join(generation.words).encode()
        blocks = block_hashes(said, self._block_bytes, hash(generation.adapter), generation.blocks)
        if len(blocks) > len(generation.blocks):
            change = self.model.cache.insert(blocks)
            self._publish(generation, blocks, Begun(generation, 0, 0.0, change), said)
        generation.connection.end(close)
        self._leave(generation)

    def _leave(self, generation: Generation) -> None:
        self.model.leave(generation, self._loop.time())
        self._advance()

    def _end_entry(self, entry: Entry, state: str) -> None:
        entry.state = state
        entry.ended = time.time()

    def _usage(self, generation: Generation) -> dict[str, Any]:
        entry = generation.entry
        return answers.usage(
            entry.prompt_tokens, entry.cached_tokens, generation.asked.max_tokens * generation.asked.choices
        )

    def _publish(
        self, generation: Generation, blocks: list[int], begun: Begun, text: bytes | None = None
    ) -> None:
        """Publishes the new blocks, one event for each run of them, and the evicted ones."""
        if self._publisher is None:
            return
        data = generation.asked.prompt if text is None else text
        events: list[dict[str, Any]] = []
        new = begun.change.stored
        start = 0
        while start < len(new):
            end = start + 1
            while end < len(new) and new[end] == new[end - 1] + 1:
                end += 1
            first, last = new[start], new[end - 1] + 1
            ids = token_ids(data[first * self._block_bytes : last * self._block_bytes])
            parent = blocks[first - 1] if first else None
            events.append(
                kv_events.stored(blocks[first:last], parent, ids, self.model.block_size, generation.adapter)
            )
            start = end
        if begun.change.removed:
            events.append(kv_events.removed(begun.change.removed))
        if events:
            self._publisher.publish(events)
