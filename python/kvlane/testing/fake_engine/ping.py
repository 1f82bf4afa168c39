"""An engine's pings to a router, as vLLM's P2P NCCL connector sends them."""

from __future__ import annotations

import asyncio

from kvlane.testing.fake_engine import msgpack_encoder, zeromq


def message(role: str, http_address: str, zmq_address: str) -> bytes:
    return msgpack_encoder.encode({"type": role, "http_address": http_address, "zmq_address": zmq_address})


class Pinger:
    """Sends every few seconds which engine this is. An unreachable router misses pings; the engine does not wait."""

    def __init__(self, router: str, role: str, http_address: str, zmq_address: str, seconds: float) -> None:
        zmq = zeromq.load()
        self._zmq = zmq
        self._seconds = seconds
        self._message = message(role, http_address, zmq_address)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, zmq_address.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{router}")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sends the first ping, and the others from the running event loop."""
        try:
            self._socket.send(self._message, self._zmq.NOBLOCK)
        except self._zmq.Again:
            pass  # the router is away and the queue is full
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.start)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()
