"""Time limits that an idle machine keeps, and that the load of a busy one stretches."""

from __future__ import annotations

import time

# Turns of the calibration loop, and what they take on an idle machine. A slower machine gets proportionally more time.
TURNS = 300_000
IDLE_S = 0.025
# A machine that is busier than this fails its tests.
LOAD_MAX = 10.0


def load() -> float:
    """How much longer than on an idle machine the calibration loop takes now."""
    begun, word = time.perf_counter(), 1
    for _ in range(TURNS):
        word = word * 31 & 0xFFFF
    return min(LOAD_MAX, max(1.0, (time.perf_counter() - begun) / IDLE_S))


AT_START = load()


def stretched(limit: float) -> float:
    """The limit times the load, as it was at the start of the run or as it is now, whichever is more."""
    return limit * max(AT_START, load())
