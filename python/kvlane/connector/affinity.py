"""Keeps kvlane's threads off the worker's processor, and warns of engines that share a processor.

vLLM binds each thread of a CPU worker to a processor before it makes the connector. Threads that are started later
inherit the binding, so kvlane's threads would wait for the one processor on which the worker computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvlane.connector.guard import logger

# vLLM sets one of these, so that the OpenMP library binds a worker's first thread when the library is loaded. Then only
# the parent process still has the processors on which the worker may run.
BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
OUR_THREADS = "kvlane-"
PROC = Path("/proc")

_before_binding: frozenset[int] = frozenset()


def remember() -> None:
    """Called when vLLM loads its plugins, before workers bind their threads."""
    global _before_binding
    if _before_binding:
        return
    with suppress(OSError):
        _before_binding = frozenset(os.sched_getaffinity(0))


def processors() -> set[int]:
    """The processors on which this process may run, without vLLM's binding of its threads."""
    found = set(_before_binding)
    with suppress(OSError):
        for task in PROC.joinpath("self", "task").iterdir():
            with suppress(OSError, ValueError):
                found |= os.sched_getaffinity(int(task.name))
    if any(os.environ.get(name) for name in BINDING_VARIABLES):
        with suppress(OSError):
            found |= os.sched_getaffinity(os.getppid())
    return found


@contextmanager
def unbound() -> Iterator[None]:
    """Starts threads within this context on all processors of the process."""
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, processors() | before)
    except OSError as error:
        # Log: kvlane's threads share processors with the worker; copies may slow it down. Do: allow
        # sched_setaffinity in the container, if that matters.
        logger.info("kvlane: threads cannot start on other processors than the worker's: %s", error)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def bound_processors(pid: int) -> set[int]:
    """Processors to which single threads of a process are bound, without kvlane's own threads."""
    found: set[int] = set()
    with suppress(OSError):
        for task in PROC.joinpath(str(pid), "task").iterdir():
            with suppress(OSError, ValueError):
                allowed = os.sched_getaffinity(int(task.name))
                if len(allowed) == 1 and not _name(task).startswith(OUR_THREADS):
                    found |= allowed
    return found


def _name(task: Path) -> str:
    # The kernel cuts names at 15 bytes, perhaps within a character.
    return task.joinpath("comm").read_text(errors="replace").strip()


def warn_of_shared_processors() -> None:
    """Log each worker of this host with kvlane's connector that is bound to a processor of this worker."""
    own = bound_processors(os.getpid())
    if not own or len(processors()) == 1:
        return
    for process in PROC.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            tasks = process.joinpath("task").iterdir()
            if not any(_name(task).startswith(OUR_THREADS) for task in tasks):
                continue
            both = own & bound_processors(int(process.name))
            if both:
                # Log: two engines compute on one processor, and both are slow. Do: start them with
                # `VLLM_CPU_OMP_THREADS_BIND=nobind`, or give each its own processors.
                logger.warning(
                    "kvlane: this worker and process %s are bound to the same processor (%s), so each waits while the "
                    "other computes: start engines on one host with VLLM_CPU_OMP_THREADS_BIND=nobind, or name "
                    "processors of its own for each",
                    process.name,
                    ", ".join(map(str, sorted(both))),
                )
