"""Many engines that look up at the same time, each in its own rhythm, whatever the daemon does."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kvlane import _core
from kvlane.bench import report
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory

NOTE = (
    "each asks at fixed times with a random phase (an open loop); a lookup's time counts from the call, or from when "
    "it was due where the one before was still under way; the lone session asks at the rate of one of the many."
)
_BLOCK_BYTES = 4096
_SAVED_BLOCK_BYTES = 64 << 10
_SAVED_BLOCKS = 64

# Seconds of a lookup, and whether it found the whole prompt.
_Lookup = tuple[float, bool]


@dataclass(frozen=True)
class Load:
    """The number of users, their rate, and the duration."""

    address: str
    blocks: int
    sessions: int
    rate: float
    processes: int
    seconds: float
    pool_bytes: int


def measure(load: Load) -> tuple[list[Figure], dict[str, Any]]:
    """One session, all sessions, all sessions while another process saves into a full pool; one session again."""
    lone = [_phase(load, 1)]
    many = _phase(load, load.sessions)
    with saver(load.address, load.pool_bytes) as saved:
        many_saving = _phase(load, load.sessions)
        saved_blocks = saved()
    lone.append(_phase(load, 1))
    one = report.summary(value for phase in lone for value in phase["latencies"])
    together = report.summary(many["latencies"])
    saving = report.summary(many_saving["latencies"])
    name = f"{load.sessions} sessions, {load.rate:.0f}/s"
    figures = [
        Figure("one session, p99", one["p99"] * 1e6, "us"),
        Figure(f"{name}, p99", together["p99"] * 1e6, "us"),
        Figure(f"{name}, p99 / one session's", together["p99"] / one["p99"], at_most=4.0),
        Figure(
            f"{name}, saves and evictions: lookups of an evicted prompt",
            100 * many_saving["incomplete"] / len(many_saving["latencies"]),
            "%",
        ),
        Figure(f"{name}, saves and evictions, p99", saving["p99"] * 1e6, "us"),
        Figure(f"{name}, saves and evictions, p99 / one session's", saving["p99"] / one["p99"], at_most=4.0),
    ]
    details = {
        "one": one,
        "many": together,
        "many_while_saving": saving,
        "lookups": {
            "one": sum(len(phase["latencies"]) for phase in lone),
            "many": len(many["latencies"]),
            "many_while_saving": len(many_saving["latencies"]),
        },
        "incomplete": {"many": many["incomplete"], "many_while_saving": many_saving["incomplete"]},
        "blocks_saved_meanwhile": saved_blocks,
        "saved_block_bytes": _SAVED_BLOCK_BYTES,
        "late_ms": {"many": many["late"] * 1e3, "many_while_saving": many_saving["late"] * 1e3},
    }
    return figures, details


def _phase(load: Load, sessions: int) -> dict[str, Any]:
    """Latencies in seconds of all lookups of that many sessions, and how late the most delayed lookup began."""
    context = multiprocessing.get_context("spawn")
    processes = min(load.processes, sessions)
    interval = load.sessions / load.rate
    pipes, children = [], []
    for index in range(processes):
        mine = [number for number in range(sessions) if number % processes == index]
        near, far = context.Pipe()
        child = context.Process(target=_client, args=(far, load, mine, interval), daemon=True)
        child.start()
        far.close()
        pipes.append(near)
        children.append(child)
    try:
        for pipe in pipes:
            assert pipe.recv() == "ready"
        start = time.monotonic() + 0.2
        for pipe in pipes:
            pipe.send(start)
        results = [pipe.recv() for pipe in pipes]
    finally:
        for child in children:
            child.terminate()
            child.join()
    asked = [lookup for found, _ in results for lookup in found]
    return {
        "latencies": [seconds for seconds, _ in asked],
        "incomplete": sum(not complete for _, complete in asked),
        "late": max(late for _, late in results),
    }


def _client(pipe: Connection, load: Load, numbers: list[int], interval: float) -> None:
    """A process with some of the sessions, one thread each."""
    hashes = block_hashes("sessions", load.blocks)
    memory = Memory(_BLOCK_BYTES * load.blocks)
    engines = [
        Engine(load.address, f"session-{number}", block_bytes=_BLOCK_BYTES, memory=memory)
        for number in numbers
    ]
    engines[0].save(hashes, range(load.blocks))
    held: list[_core.Hit] = []
    for engine in engines:
        # Until the blocks are visible and the engine is ready; also warms the code.
        while (hit := engine.lookup(hashes)).tokens < load.blocks * TOKENS_PER_BLOCK:
            engine.release(hit)
            if hit.tokens == 0:
                # Others' saves have evicted the prompt before the first lease.
                engines[0].save(hashes, range(load.blocks))
        # The lease is held until the session's first lookup, so that nothing is evicted before the start.
        held.append(hit)
    pipe.send("ready")
    start = pipe.recv()
    found: list[tuple[list[_Lookup], float]] = []

    def ask(engine: Engine, number: int, hit: _core.Hit) -> None:
        first = start + random.Random(number).random() * interval
        found.append(_ask(engine, hashes, hit, first, interval, load.seconds))

    threads = [
        threading.Thread(target=ask, args=session) for session in zip(engines, numbers, held, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads), "a session failed"
    for engine in engines:
        engine.close()
    pipe.send(([lookup for lookups, _ in found for lookup in lookups], max(late for _, late in found)))


def _ask(
    engine: Engine, hashes: list[bytes], held: _core.Hit, first: float, interval: float, seconds: float
) -> tuple[list[_Lookup], float]:
    lookups: list[_Lookup] = []
    latest = ended = 0.0
    for number in range(round(seconds / interval)):
        due = first + number * interval
        pause = due - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        start = time.monotonic()
        latest = max(latest, start - due)
        hit = engine.lookup(hashes)
        end = time.monotonic()
        complete = hit.tokens == len(hashes) * TOKENS_PER_BLOCK
        lookups.append((end - (due if ended > due else start), complete))
        ended = end
        if number == 0:
            engine.release(held)
        engine.release(hit)
    return lookups, latest


@contextmanager
def saver(address: str, pool_bytes: int) -> Iterator[Any]:
    """A process that keeps saving new blocks into a full pool. Yields a function that ends it and returns the blocks
    saved."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=_save_until_stopped, args=(far, address, pool_bytes), daemon=True)
    child.start()
    far.close()
    assert near.recv() == "full"

    def end() -> int:
        near.send("stop")
        saved = near.recv()
        child.join()
        return saved

    try:
        yield end
    finally:
        child.kill()


def _save_until_stopped(pipe: Connection, address: str, pool_bytes: int) -> None:
    engine = Engine(
        address,
        "saver",
        block_bytes=_SAVED_BLOCK_BYTES,
        memory=Memory(_SAVED_BLOCK_BYTES * _SAVED_BLOCKS),
    )
    saved = job = 0
    reported_full = False
    while not pipe.poll():
        finished = engine.save(block_hashes(f"saver-{job}", _SAVED_BLOCKS), range(_SAVED_BLOCKS))
        job += 1
        saved += finished.blocks
        # From here on each save evicts.
        if not reported_full and saved * _SAVED_BLOCK_BYTES > pool_bytes * 2:
            reported_full = True
            saved = 0
            pipe.send("full")
    pipe.recv()
    engine.close()
    pipe.send(saved)
