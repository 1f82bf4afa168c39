"""What an engine's log and the daemon's say of each other: a line for each change.

An engine without the cache runs on as if nothing were wrong, so the log is where its operator finds out.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_process import DEFAULTS, EngineProcess
from processes import PATIENCE, Daemon, Engine, until

from kvlane import _core
from kvlane.connector import core_log
from kvlane.connector.guard import logger

MakeDaemon = Callable[..., Daemon]


def _connected(engine: EngineProcess) -> bool:
    state = engine.state()
    return state["worker"] and state["scheduler"]


class Lines(logging.Handler):
    """What comes to vLLM's logger, in the order of its coming."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: queue.Queue[logging.LogRecord] = queue.Queue()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.coming.put(record)

    def wait_for(self, who: str, part: str) -> logging.LogRecord:
        while True:
            try:
                record = self.coming.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"no line of {who} with '{part}' in {self.seen}") from None
            self.seen.append(record.getMessage())
            if who in self.seen[-1] and part in self.seen[-1]:
                return record


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def engine(folder: Path, lines: Lines) -> Iterator[EngineProcess]:
    """In this process, whose logging can be seen; without a daemon at first."""
    address = f"unix:{folder}/kvlane.sock"
    core_log.start(_core)
    engine = EngineProcess(address, "logged", DEFAULTS)
    yield engine
    engine.worker.close()
    assert engine.scheduler is not None
    engine.scheduler.close()


def test_an_engine_tells_each_change_once(
    folder: Path, engine: EngineProcess, lines: Lines, make_daemon: MakeDaemon
) -> None:
    """The crates' warnings used to reach nobody: an engine without a daemon, or cut off from it, logged no line."""
    for who in ("rank 0", "the scheduler"):
        absent = lines.wait_for(who, "no kvlane daemon answers at unix:")
        assert absent.levelno == logging.WARNING
        assert "The engine computes without the cache" in absent.getMessage()

    daemon = make_daemon()
    connected = lines.wait_for("rank 0", "is connected to")
    assert connected.levelno == logging.INFO
    for part in (
        daemon.address,
        "kvlane 0.1.0",
        "a pool of 0.1 GB",
        "saves by process_vm (process_vm works)",
    ):
        assert part in connected.getMessage()
    until("the engine is connected", lambda: _connected(engine))
    lines.wait_for("the scheduler", "is connected to")

    daemon.kill()
    lost = lines.wait_for("rank 0", "lost the daemon at")
    assert lost.levelno == logging.WARNING
    assert not engine.state()["scheduler"]
    lines.wait_for("the scheduler", "lost the daemon at")

    daemon.start()
    lines.wait_for("rank 0", "is back at")
    until("the engine is connected", lambda: _connected(engine))
    back = lines.wait_for("the scheduler", "is back at")
    assert " s: kvlane 0.1.0" in back.getMessage()
    for part in ("is connected to", "lost the daemon", "is back at", "no kvlane daemon answers"):
        told = [line for line in lines.seen if part in line]
        assert len(told) == 2, f"once by the worker and once by the scheduler: {lines.seen}"


def test_a_refused_engine_says_why_and_so_does_the_daemon(
    daemon: Daemon, make_engine: Callable[..., Engine], engine: EngineProcess, lines: Lines
) -> None:
    """The daemon, too, kept its refusals to itself: an operator saw an engine that never connects, and no reason."""
    until("the engine is connected", lambda: _connected(engine))
    taken = make_engine(daemon, "logged")
    state = taken.call("state")
    assert not state["worker"]
    daemon.log.wait_for("CONFLICT")
    told = [line for line in daemon.log.text().splitlines() if "refused" in line and "CONFLICT" in line]
    assert len(told) == 1, "once a peer and kind, however often it asks"
    assert f"process {state['pid']} of user" in told[0]
