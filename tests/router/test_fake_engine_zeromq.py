"""What a fake engine says over ZeroMQ: P2P NCCL pings and KV events; and the msgpack that both are."""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from ports import free_ports

from kvlane.testing.fake_engine import FakeEngine, msgpack_encoder, zeromq

PATIENCE_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
)


@given(values)
def test_the_encoder_writes_what_msgpack_writes(value: Any):
    assert msgpack_encoder.encode(value) == msgpack.packb(value)


@pytest.mark.parametrize(
    "value",
    [
        *(edge + step for edge in (1 << 7, 1 << 8, 1 << 16, 1 << 32) for step in (-1, 0)),
        *(-edge - step for edge in (1 << 5, 1 << 7, 1 << 15, 1 << 31) for step in (0, 1)),
        *(kind * size for kind in ("x", b"x", [0]) for size in (15, 16, 31, 32, 255, 256, 65535, 65536)),
        *({str(key): key for key in range(size)} for size in (15, 16, 65535, 65536)),
    ],
    ids=lambda value: f"{type(value).__name__}-{value if isinstance(value, int) else len(value)}",
)
def test_the_encoder_at_the_edges_of_lengths(value: Any):
    assert msgpack_encoder.encode(value) == msgpack.packb(value)


def test_the_encoder_refuses_what_it_cannot_write():
    for value in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(OverflowError):
            msgpack_encoder.encode(value)
    with pytest.raises(TypeError):
        msgpack_encoder.encode(object())


def test_without_pyzmq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SystemExit, match=r"pip install .*pyzmq"):
        zeromq.load()


def complete(engine: FakeEngine, prompt: str, model: str = "fake") -> None:
    connection = http.client.HTTPConnection(engine.address, timeout=30)
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1})
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()


def test_pings_name_the_engine():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        flags = ["--ping-router", f"127.0.0.1:{port}", "--role", "P", "--zmq-address", "127.0.0.1:7777"]
        with FakeEngine(*flags, "--ping-seconds", "0.05") as engine:
            for _ in range(2):
                identity, message = router.recv_multipart()
                assert identity == b"127.0.0.1:7777"
                assert msgpack.unpackb(message) == {
                    "type": "P",
                    "http_address": engine.address,
                    "zmq_address": "127.0.0.1:7777",
                }


class Subscriber:
    """Receives the KV events of an engine."""

    def __init__(self, context: zmq.Context, port: int, replay_port: int) -> None:
        self.events = context.socket(zmq.SUB)
        self.replays = context.socket(zmq.DEALER)
        for each in (self.events, self.replays):
            each.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
            each.setsockopt(zmq.LINGER, 0)
        self.events.subscribe(b"")
        self.events.connect(f"tcp://127.0.0.1:{port}")
        self.replays.connect(f"tcp://127.0.0.1:{replay_port}")

    def batch(self) -> tuple[int, list[Any]]:
        topic, sequence, payload = self.events.recv_multipart()
        assert topic == b""
        time, events, rank = msgpack.unpackb(payload)
        assert isinstance(time, float)
        assert rank == 0
        return int.from_bytes(sequence, "big"), events

    def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            empty, sequence, payload = self.replays.recv_multipart()
            assert empty == b""
            if sequence == END:
                return batches
            batches.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)[1]))

    def close(self) -> None:
        self.events.close()
        self.replays.close()


def wait_for_subscription(engine: FakeEngine, subscriber: Subscriber) -> None:
    """PUB drops what nobody has subscribed to yet: publish until something arrives, then read up to the last."""
    for _ in range(1000):
        connection = http.client.HTTPConnection(engine.address, timeout=30)
        connection.request("POST", "/reset_prefix_cache", "")
        assert connection.getresponse().status == 200
        connection.close()
        if subscriber.events.poll(20):
            break
    last = subscriber.replay(0)[-1][0]
    while subscriber.batch()[0] != last:
        pass


@pytest.mark.parametrize("as_maps", [False, True])
def test_events_tell_what_the_cache_stores_evicts_and_clears(as_maps: bool):
    events_port, replay_port = free_ports(2)
    flags = ["--kv-events-port", str(events_port), "--kv-replay-port", str(replay_port)]
    flags += ["--cache-blocks", "2", *(["--kv-events-maps"] if as_maps else [])]

    def fields(event: Any) -> list[Any]:
        return list(event.values()) if as_maps else event

    with zmq.Context() as context, FakeEngine(*flags) as engine:
        subscriber = Subscriber(context, events_port, replay_port)
        try:
            wait_for_subscription(engine, subscriber)
            text = "abcd" * 32
            complete(engine, text + "x")
            first, [event] = subscriber.batch()
            if as_maps:
                assert event["type"] == "BlockStored"
            name, hashes, parent, ids, size, lora, medium, adapter = fields(event)
            assert (name, parent, size, lora, medium, adapter) == (
                "BlockStored",
                None,
                16,
                None,
                "GPU",
                None,
            )
            assert len(hashes) == 2
            assert ids == [int.from_bytes(b"abcd", "little")] * 32

            # The second block of another prompt with the same start takes the place of the old second one.
            complete(engine, text[:64] + "efgh" * 16 + "x")
            second, changes = subscriber.batch()
            assert second == first + 1
            stored, removed = (fields(each) for each in changes)
            assert stored[0] == "BlockStored"
            assert stored[2] == hashes[0]
            assert removed == ["BlockRemoved", [hashes[1]], "GPU"]

            assert [number for number, _ in subscriber.replay(first)] == [first, second]
            assert subscriber.replay(second) == [(second, changes)]
            assert subscriber.replay(second + 1) == []
            assert fields(subscriber.replay(0)[0][1][0]) == ["AllBlocksCleared"]
        finally:
            subscriber.close()
