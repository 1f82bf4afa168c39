"""A poll waits for its answer without letting the interpreter go, but not for long."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from processes import Daemon

from kvlane import _core

MINUTE_US = 60_000_000


@pytest.fixture
def no_switches() -> Iterator[None]:
    """The interpreter changes hands only where it is let go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_switches")
def test_another_thread_runs_only_during_a_long_wait(daemon: Daemon) -> None:
    scheduler = _core.Scheduler(
        daemon.address, "engine", "test", [(bytes(16), "group", 16, 0)], 1, lookup_timeout_ms=600_000
    )
    assert scheduler.connected
    held = threading.Lock()
    held.acquire()
    turns: list[str] = []

    def take_a_turn() -> None:
        with held:
            turns.append("had one")
            # Only now there can be an answer.
            daemon.signal(signal.SIGCONT)

    other = threading.Thread(target=take_a_turn)
    other.start()
    daemon.signal(signal.SIGSTOP)
    scheduler.lookup_start("request", [[bytes(16)]], 16)
    held.release()
    for _ in range(20):
        assert scheduler.lookup_poll("request", 300) is None
    assert turns == []
    assert scheduler.lookup_poll("request", MINUTE_US) is not None
    assert turns == ["had one"]
    other.join()
    scheduler.close()
