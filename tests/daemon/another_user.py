"""Tests that need a second user: as root they become one; else they run once more in a user namespace, as its root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Most seconds of a child of another user.
SECONDS = 60
# The child's user is from the range of ids that /etc/subuid gives to this user, which newuidmap maps.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--map-auto", "--"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked so in a process of its own, where this one is not root's."""
    if pyfuncitem.get_closest_marker("another_user") is None or os.geteuid() == 0:
        return None
    if (why := _refusal()) is not None:
        pytest.skip(
            f"needs another user: be root, or have newuidmap, a range in /etc/subuid and util-linux 2.38 ({why})"
        )
    test = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", pyfuncitem.nodeid]
    done = subprocess.run(
        [*NAMESPACE, *test],
        cwd=Path(str(pyfuncitem.config.rootpath)),
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True


def _refusal() -> str | None:
    """Why there is no such namespace here."""
    try:
        done = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def as_user(uid: int, call: Callable[[], str], environment: dict[str, str] | None = None) -> str:
    """What a child of that user answers."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(SECONDS)
            os.environ.pop("XDG_RUNTIME_DIR", None)
            os.environ.update(environment or {})
            become(uid)
            os.write(writing, call().encode())
        except BaseException as error:  # noqa: BLE001 - the parent reads it
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said
