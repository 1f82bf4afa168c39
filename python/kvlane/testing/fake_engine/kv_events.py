"""KV events as vLLM publishes them: ZeroMQ PUB of (topic, sequence, msgpack), and a ROUTER that replays them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from kvlane.testing.fake_engine import msgpack_encoder, zeromq

MOST_BUFFERED = 10_000
END = (-1).to_bytes(8, "big", signed=True)
_UINT64 = (1 << 64) - 1


def batch(events: list[dict[str, Any]], as_maps: bool, now: float) -> bytes:
    """`[ts, [events], dp_rank]`. An event's first item is its "type"; as an array its names are left out."""
    shown = events if as_maps else [list(event.values()) for event in events]
    return msgpack_encoder.encode([now, shown, 0])


def stored(
    hashes: list[int], parent: int | None, token_ids: list[int], block_size: int, adapter: str | None
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [each & _UINT64 for each in hashes],
        "parent_block_hash": None if parent is None else parent & _UINT64,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": adapter,
    }


def removed(hashes: list[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [each & _UINT64 for each in hashes], "medium": "GPU"}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


class Publisher:
    """Publishes batches, and replays the newest ones on request."""

    def __init__(self, host: str, port: int, replay_port: int | None, topic: str, as_maps: bool) -> None:
        zmq = zeromq.load()
        self._zmq = zmq
        self._topic = topic.encode()
        self._as_maps = as_maps
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=MOST_BUFFERED)
        self._events = zmq.Context.instance().socket(zmq.PUB)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.bind(f"tcp://{host}:{port}")
        self._replay: Any = None
        if replay_port is not None:
            self._replay = zmq.Context.instance().socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, 0)
            self._replay.setsockopt(zmq.SNDHWM, 0)
            self._replay.bind(f"tcp://{host}:{replay_port}")

    def start(self) -> None:
        """Answers replay requests from the running event loop."""
        if self._replay is not None:
            asyncio.get_running_loop().add_reader(self._replay.getsockopt(self._zmq.FD), self._answer_replays)
            self._answer_replays()

    def publish(self, events: list[dict[str, Any]]) -> None:
        payload = batch(events, self._as_maps, time.time())
        self._buffer.append((self._sequence, payload))
        self._events.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    def close(self) -> None:
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.getsockopt(self._zmq.FD))
            self._replay.close()
        self._events.close()

    def _answer_replays(self) -> None:
        # ZeroMQ's descriptor signals a change once, so this reads all messages.
        while self._replay.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN:
            frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            if len(frames) not in (2, 3) or len(frames[-1]) != 8:
                continue
            client, first = frames[0], int.from_bytes(frames[-1], "big")
            for sequence, payload in self._buffer:
                if sequence >= first:
                    self._replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", END, b""))
