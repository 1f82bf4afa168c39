"""Ports for servers of tests, chosen before the server binds them."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ephemeral ports, so no connection of another test, and no bind to port 0, takes one meanwhile.
FIRST, EACH, PROCESSES = 12_000, 2_000, 8
_next = itertools.count(os.getpid() * 37)


def free_port() -> int:
    """A free TCP port of loopback. Processes of pytest-xdist choose from ports of their own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    for _ in range(EACH):
        port = FIRST + worker * EACH + next(_next) % EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"none of {EACH} ports is free")


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]
