"""A bare round trip over a Unix socket, with which lookups are compared."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvlane import _bench


def ping_pong(peer: socket.socket, size: int) -> float:
    """Seconds of one blocking round trip of `size` bytes each way."""
    message = bytes(size)
    start = time.perf_counter()
    peer.sendall(message)
    answer = peer.recv(size, socket.MSG_WAITALL)
    seconds = time.perf_counter() - start
    assert len(answer) == size, f"{len(answer)} bytes came back and not {size}"
    return seconds


@contextmanager
def echo_process(size: int, cores: set[int] | None, *, in_rust: bool) -> Iterator[socket.socket]:
    """A process, on `cores` if given, at the other end of a socket that sends messages of `size` bytes back."""
    near, far = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            near.close()
            if cores is not None:
                os.sched_setaffinity(0, cores)
            if in_rust:
                _bench.echo(far.fileno(), size)
            else:
                while message := far.recv(size, socket.MSG_WAITALL):
                    far.sendall(message)
            status = 0
        finally:
            os._exit(status)
    far.close()
    try:
        yield near
    finally:
        near.close()
        # A later child may hold a copy of our end, so closing it may not be enough.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
