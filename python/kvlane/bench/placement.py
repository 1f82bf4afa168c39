"""The cores on which the two sides of a measurement run. Where the kernel puts them decides half of a round trip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def placements() -> dict[str, tuple[set[int], set[int]]]:
    """The cores of the asking side and of the other one."""
    first, *others = sorted(os.sched_getaffinity(0))
    apart = {"two cores": ({first}, {others[0]})} if others else {}
    return {**apart, "one core": ({first}, {first})}


@contextmanager
def pinned(process: int, cores: set[int]) -> Iterator[None]:
    """Binds all threads of a process to these cores, and the threads that they start."""
    before = os.sched_getaffinity(process)
    _pin(process, cores)
    try:
        yield
    finally:
        _pin(process, before)


def _pin(process: int, cores: set[int]) -> None:
    for thread in os.listdir(f"/proc/{process}/task"):
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
