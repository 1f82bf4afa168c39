"""Threads that put load on programs until a day's soak is over, and a gate at which they wait."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

# To find the cause of a growth, leave parts out: KVLANE_TEST_WITHOUT=ssd,fresh.
PARTS = ("clients", "fresh", "kills", "namespaces", "pages", "recordings", "ssd", "traces")
WITHOUT = frozenset(filter(None, os.environ.get("KVLANE_TEST_WITHOUT", "").split(",")))
assert WITHOUT.issubset(PARTS), f"KVLANE_TEST_WITHOUT takes {','.join(PARTS)}"


def has(part: str) -> bool:
    assert part in PARTS
    return part not in WITHOUT


# All threads reach the gate within a round, of which the longest waits for an engine to start.
GATE_PATIENCE_S = 90.0


class Gate:
    """Loads pass it between two rounds. While it is closed, they wait there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members = 0
        self._waiting = 0
        self._is_closed = False
        self.is_over = False

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """A load that passes from now on."""
        with self._changed:
            self._members += 1
        try:
            yield
        finally:
            with self._changed:
                self._members -= 1
                self._changed.notify_all()

    def passes(self) -> bool:
        """Waits while the gate is closed. False once the soak is over."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_closed or self.is_over)
            self._waiting -= 1
            return not self.is_over

    def waits(self, seconds: float) -> bool:
        """Passes again and again for so long. False once the soak is over."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            if not self.passes():
                return False
            time.sleep(min(0.2, left))
        return not self.is_over

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Closes, and waits until all loads wait."""
        with self._changed:
            self._is_closed = True
            all_wait = self._changed.wait_for(lambda: self._waiting == self._members, GATE_PATIENCE_S)
            waiting, members = self._waiting, self._members
        try:
            assert all_wait, f"{waiting} of {members} loads came to the gate within {GATE_PATIENCE_S:.0f} s"
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class Loads:
    """The threads, and the numbers of all that they did."""

    def __init__(self, seed: int) -> None:
        self.gate = Gate()
        self.failures: list[str] = []
        self._dice = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, run: Callable[[random.Random], None]) -> None:
        """Runs it in a thread, with dice of its own. A failure is kept."""
        dice = random.Random(self._dice.getrandbits(64))

        def guarded() -> None:
            with self.gate.member():
                try:
                    run(dice)
                except Exception as error:  # noqa: BLE001 - told to the test, which fails
                    self.failures.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()

    def count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def end(self) -> None:
        """Waits until all have ended, for a bounded time."""
        self.gate.end()
        ends = time.monotonic() + GATE_PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.failures.append("a load does not end")
