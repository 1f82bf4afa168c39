"""A real vLLM tells its listeners of the blocks that a small daemon keeps, and of those that it had to evict."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, InProcessEngine, engines, prompt
from stores import DaemonStore

from kvlane.connector import events

pytestmark = pytest.mark.old_vllm

WAIT_SECONDS = 60
PROMPTS = 14


class SmallStore(DaemonStore):
    """Room for some 60 blocks of the tiny model."""

    POOL_BYTES = 8 << 20


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[SmallStore]:
    made = SmallStore(tmp_path)
    yield made
    made.close()


class Listener:
    """A subscriber of vLLM's KV events: which blocks lie in host memory, as a plain set says."""

    def __init__(self, folder: Path) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected: Any = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        # Again and again, until the engine publishes there.
        self.endpoint = f"ipc://{folder}/events"
        self._socket.connect(self.endpoint)
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._messages = 0
        self.known: set[Any] = set()
        self.removed: list[Any] = []
        self.deaf: set[Any] = set()
        """Of one that does not hear what goes."""

    def wait_connected(self) -> None:
        """Until the engine's publisher has this subscriber: earlier events are lost."""
        assert self._connected.poll(WAIT_SECONDS * 1000), "no publisher"

    def hear(self) -> None:
        """All that has come by now."""
        while self._socket.poll(10):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._messages, "an event was lost"
            self._messages += 1
            for event in self._decode(payload).events:
                kind, medium = type(event).__name__, getattr(event, "medium", None)
                if kind == "BlockStored" and medium == "CPU":
                    self.known.update(event.block_hashes)
                    self.deaf.update(event.block_hashes)
                elif kind == "BlockRemoved" and medium == "CPU":
                    assert self.known >= set(event.block_hashes), "what was never announced is taken back"
                    self.known.difference_update(event.block_hashes)
                    self.removed += event.block_hashes

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)


def found(engine: InProcessEngine, chains: list[list[tuple[bytes, Any]]]) -> set[Any]:
    """What lookups find of these prompts: (hash, what listeners call it) of their blocks."""
    core: Any = engine.connector._scheduler._core
    there: set[Any] = set()
    for chain in chains:
        hit = core.lookup([[raw for raw, _ in chain]], len(chain) * BLOCK)
        if hit.tokens:
            core.release(hit.boot, hit.lease)
        there.update(told for _, told in chain[: hit.tokens // BLOCK])
    return there


def test_listeners_hear_of_exactly_the_blocks_that_were_evicted(
    small_store: SmallStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[list[tuple[bytes, Any]]] = []
    make_event = events.blocks_stored

    def remember(group: Any, request: Any, parent: Any, hashes: list[bytes], first: int) -> Any:
        event = make_event(group, request, parent, hashes, first)
        if first == 0:
            chains.append([])
        chains[-1] += zip(hashes, event.block_hashes, strict=True)
        return event

    monkeypatch.setattr(events, "blocks_stored", remember)
    listener = Listener(tmp_path)
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": listener.endpoint,
    }
    with engines(small_store.address) as start:
        engine = start(model, kv_events_config=published)
        listener.wait_connected()
        for seed in range(PROMPTS):
            engine.generate(prompt(seed), 2)
            engine.drain()
        small_store.settle()
        there = found(engine, chains)
        deadline = time.monotonic() + WAIT_SECONDS
        while listener.known != there and time.monotonic() < deadline:
            # The daemon is asked in steps, every 100 ms. A prompt below one block saves nothing.
            engine.generate([5, 6, 7], 2)
            listener.hear()
        assert listener.known == there == found(engine, chains)
        saved = sum(map(len, chains))
        assert saved == PROMPTS * (300 // BLOCK)
        # Each of them came once and went once at most.
        assert len(listener.removed) == len(set(listener.removed)) == saved - len(there)
        assert len(there) == small_store.block_count() and len(listener.removed) > 20
        assert listener.deaf != there, "without what went, the sets would be equal too"

        # A daemon that starts anew has nothing.
        small_store.restart()
        while listener.known and time.monotonic() < deadline:
            engine.generate([5, 6, 7], 2)
            listener.hear()
        assert listener.known == set()
        assert engine.errors() == 0
    listener.close()
