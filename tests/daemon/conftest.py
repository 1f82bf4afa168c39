"""Fixtures: a folder for sockets, and daemons and engines that are gone when the test is."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from another_user import pytest_pyfunc_call  # noqa: F401 - a hook
from network_hosts import MarkedTests
from processes import Daemon, Engine

# Tests that run under nohup must not hand it on: a daemon that inherits SIGHUP ignored goes on when it gets one.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(MarkedTests())


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since the path of a socket has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kvlane-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make_daemon(folder: Path, cleanup: ExitStack) -> Callable[..., Daemon]:
    def make(*flags: str, **options: Any) -> Daemon:
        daemon = Daemon(folder, *flags, **options)
        cleanup.callback(daemon.kill)
        daemon.start()
        return daemon

    return make


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon()


@pytest.fixture
def make_engine(cleanup: ExitStack) -> Callable[..., Engine]:
    """Called with the daemon and the engine's id."""

    def make(daemon: Daemon, name: str, **options: Any) -> Engine:
        engine = Engine(daemon.address, name, **options)
        cleanup.callback(engine.kill)
        return engine

    return make
