"""A poll waits for its answer without letting the interpreter go, but not for long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from processes import Daemon

from kvlane import _core

TRIES = 20


class Counter:
    """A Python thread that counts whenever it has the interpreter."""

    def __init__(self) -> None:
        self.count = 0
        self.stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.stopped:
            self.count += 1

    def stop(self) -> None:
        self.stopped = True
        self._thread.join()


@pytest.fixture
def counter() -> Iterator[Counter]:
    made = Counter()
    yield made
    made.stop()


def test_another_thread_runs_only_during_a_long_wait(daemon: Daemon, counter: Counter) -> None:
    scheduler = _core.Scheduler(
        daemon.address, "engine", "test", [(bytes(16), "group", 16, 0)], 1, lookup_timeout_ms=600_000
    )
    assert scheduler.connected
    daemon.signal(signal.SIGSTOP)
    scheduler.lookup_start("request", [[bytes(16)]], 16)

    def turns(wait_us: int) -> int:
        """In how many of some polls without an answer the other thread had a turn."""
        found = 0
        for _ in range(TRIES):
            before = counter.count
            assert scheduler.lookup_poll("request", wait_us) is None
            found += counter.count != before
        return found

    # The interpreter also changes hands between two lines of Python, every 5 ms or more.
    assert turns(300) <= TRIES / 2
    assert turns(10_000) == TRIES
    daemon.signal(signal.SIGCONT)
    scheduler.close()
