"""Other users of the same host: what they put in the place of a daemon is neither told anything nor believed."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from another_user import as_user, become
from patterns import NAMESPACE
from processes import KVLANE, PATIENCE, Daemon, Engine, clean_environment, run_kvlane

from kvlane import _core

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

# Users that a host hardly has, and other ones in each process that runs tests, so that nothing of theirs lies in /tmp.
VICTIM = 20_000 + os.getpid() % 20_000
STRANGER = VICTIM + 20_000
NOBODY = 65534
DEFAULT_FOLDER = Path(f"/tmp/kvlane-{VICTIM}")


class Heard:
    """Every connection that somebody made, and what it said."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def all(self) -> bytes:
        os.set_blocking(self._pipe, False)
        try:
            return os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return b""


@contextmanager
def served_by(uid: int, path: Path) -> Iterator[Heard]:
    """Somebody who listens at a path as a daemon would, and writes down what comes."""
    reading, writing = os.pipe()
    ready, is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(uid)
            os.umask(0)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            os.write(is_ready, b"!")
            while True:
                with listener.accept()[0] as connection:
                    connection.settimeout(1)
                    try:
                        os.write(writing, connection.recv(4096))
                    except TimeoutError:
                        pass
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"!"
        yield Heard(reading)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for pipe in (reading, writing, ready, is_ready):
            os.close(pipe)


@pytest.fixture
def binary(folder: Path) -> Path:
    """The program, where everybody may run it."""
    folder.chmod(0o755)
    copy = folder / "kvlane"
    shutil.copy(KVLANE, copy)
    copy.chmod(0o755)
    return copy


@pytest.fixture
def default_folder() -> Iterator[Path]:
    """The victim's runtime folder, which is not there yet."""

    def clear() -> None:
        if DEFAULT_FOLDER.is_symlink():
            DEFAULT_FOLDER.unlink()
        shutil.rmtree(DEFAULT_FOLDER, ignore_errors=True)

    clear()
    yield DEFAULT_FOLDER
    clear()


def kvlane_as(
    uid: int, binary: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = clean_environment()
    env.pop("XDG_RUNTIME_DIR", None)
    return subprocess.run(
        [binary, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**env, **environment},
        cwd="/",
        user=uid,
        group=uid,
        extra_groups=[],
    )


SERVE = ("serve", "--pool-size", "16mib", "--hugepages", "off", "--http", "off")


def scheduler_refusal(address: str | None = None, daemon_user: str | None = None) -> str:
    scheduler = _core.Scheduler(
        address, "engine", "test", [(NAMESPACE, "n", 16, 0)], 1, daemon_user=daemon_user
    )
    return scheduler.refusal


def worker_reason(address: str | None = None) -> str:
    memory = mmap.mmap(-1, 4096 * 2)
    region = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096, 2, 4096, [0])
    worker = _core.Worker(address, "engine", "test", 0, 1, [(NAMESPACE, b"\4" * 16, [region])])
    reason = worker.reason
    worker.close()
    return reason


def make(owner: int, path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)


@pytest.mark.another_user
def test_a_runtime_folder_that_a_stranger_made_first_is_not_used(default_folder: Path, binary: Path) -> None:
    """Whoever made /tmp/kvlane-UID first was taken for that user's daemon: an engine said who it is, saved its KV cache
    there, and could be answered with anything."""
    make(STRANGER, default_folder, 0o777)
    with served_by(STRANGER, default_folder / "kvlane.sock") as heard:
        told = kvlane_as(VICTIM, binary, "status")
        assert told.returncode != 0
        for word in (str(default_folder), f"user {STRANGER}", f"user {VICTIM}", "XDG_RUNTIME_DIR"):
            assert word in told.stderr, told.stderr
        assert f"user {STRANGER}" in as_user(VICTIM, scheduler_refusal)
        assert f"user {STRANGER}" in as_user(VICTIM, worker_reason)
        assert heard.all() == b"", "nothing was said to the stranger"
    (default_folder / "kvlane.sock").unlink()
    told = kvlane_as(VICTIM, binary, *SERVE)
    assert told.returncode == 1
    for word in (str(default_folder), f"user {STRANGER}", "--listen"):
        assert word in told.stderr, told.stderr
    assert list(default_folder.iterdir()) == [], "and nothing was put there"


@pytest.mark.another_user
def test_a_runtime_folder_behind_a_link_is_not_used(default_folder: Path, folder: Path, binary: Path) -> None:
    elsewhere = folder / "elsewhere"
    make(STRANGER, elsewhere, 0o777)
    default_folder.symlink_to(elsewhere)
    with served_by(STRANGER, elsewhere / "kvlane.sock") as heard:
        told = kvlane_as(VICTIM, binary, "status")
        assert told.returncode != 0 and "symbolic link" in told.stderr, told.stderr
        assert heard.all() == b""


@pytest.mark.another_user
def test_a_runtime_folder_that_others_may_enter_is_not_used(default_folder: Path, binary: Path) -> None:
    make(VICTIM, default_folder, 0o755)
    for arguments in (("status",), SERVE):
        told = kvlane_as(VICTIM, binary, *arguments)
        assert told.returncode != 0
        assert f"chmod 700 {default_folder}" in told.stderr, told.stderr


@pytest.mark.another_user
def test_a_session_folder_of_another_user_is_not_used(folder: Path, binary: Path) -> None:
    """As `sudo` leaves it in the environment."""
    runtime = folder / "runtime"
    make(STRANGER, runtime, 0o777)
    make(VICTIM, runtime / "kvlane", 0o700)
    told = kvlane_as(VICTIM, binary, *SERVE, XDG_RUNTIME_DIR=str(runtime))
    assert told.returncode == 1
    assert str(runtime) in told.stderr and f"user {STRANGER}" in told.stderr, told.stderr


@pytest.mark.another_user
def test_a_daemon_makes_its_folder_and_its_tools_find_it(default_folder: Path, binary: Path) -> None:
    """The control of the tests above."""
    environment = clean_environment()
    environment.pop("XDG_RUNTIME_DIR", None)
    daemon = subprocess.Popen(
        [binary, *SERVE], stderr=subprocess.PIPE, text=True, cwd="/", env=environment, user=VICTIM, group=VICTIM,
        extra_groups=[],
    )  # fmt: skip
    try:
        assert daemon.stderr is not None
        assert any("ready after" in line for line in daemon.stderr)
        made = default_folder.lstat()
        assert (made.st_uid, made.st_mode & 0o777) == (VICTIM, 0o700)
        told = kvlane_as(VICTIM, binary, "status")
        assert told.returncode == 0, told.stderr
        # Root comes to it by its address, and has to say whose daemon it means.
        address = f"unix:{default_folder}/kvlane.sock"
        assert run_kvlane("status", "--addr", address).returncode != 0
        assert run_kvlane("status", "--addr", address, "--daemon-user", str(VICTIM)).returncode == 0
    finally:
        daemon.kill()
        daemon.wait(PATIENCE)


@pytest.mark.another_user
def test_whose_daemon_it_is_is_looked_at_before_anything_is_said(folder: Path, binary: Path) -> None:
    """A folder that was named is used whoever it belongs to, as containers share them: the kernel says who listens."""
    shared = folder / "shared"
    make(STRANGER, shared, 0o777)
    path = shared / "kvlane.sock"
    address = f"unix:{path}"
    with served_by(STRANGER, path) as heard:
        told = kvlane_as(VICTIM, binary, "status", "--addr", address)
        assert told.returncode != 0
        for word in (address, f"user {STRANGER}", f"user {VICTIM}", "--daemon-user", "kvlane.daemon_user"):
            assert word in told.stderr, told.stderr
        for call in (scheduler_refusal, worker_reason):
            assert f"user {STRANGER}" in as_user(VICTIM, lambda call=call: call(address))
        assert f"user {STRANGER}" in kvlane_as(VICTIM, binary, "doctor", "--addr", address).stdout
        assert kvlane_as(VICTIM, binary, "drop", "00", "--addr", address).returncode != 0
        assert heard.all() == b"", "nothing was said to the stranger"
        # Named, the stranger is spoken to.
        told = kvlane_as(VICTIM, binary, "status", "--addr", address, "--daemon-user", str(STRANGER))
        assert told.returncode != 0
        assert heard.all() != b""
        as_user(VICTIM, lambda: scheduler_refusal(address, str(STRANGER)))
        assert heard.all() != b""
        as_user(VICTIM, lambda: scheduler_refusal(address), {"KVLANE_DAEMON_USER": str(STRANGER)})
        assert heard.all() != b""
        as_user(VICTIM, lambda: scheduler_refusal(address, "nobody"), {"KVLANE_DAEMON_USER": str(STRANGER)})
        assert heard.all() == b"", "what the engine's configuration says comes first"


def test_a_user_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="'no such user'"):
        scheduler_refusal("unix:/nonexistent/kvlane.sock", "no such user")
    told = run_kvlane("status", "--daemon-user", "no such user")
    assert told.returncode != 0 and "'no such user'" in told.stderr


@pytest.mark.another_user
def test_root_uses_the_daemon_of_the_user_that_it_names(
    make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path, binary: Path
) -> None:
    """By its name, as in kvlane.daemon_user; and a root engine that names nobody does not save its cache there."""
    os.chown(folder, NOBODY, NOBODY)
    daemon = make_daemon(binary=binary, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
    engine = make_engine(daemon, "a", daemon_user="nobody")
    engine.wait_connected()
    assert engine.call("save", prompt="p", count=2)["blocks"] == 2
    alone = make_engine(daemon, "b")
    state: dict[str, Any] = alone.call("state")
    assert not state["worker"] and not state["scheduler"]
    assert f"user {NOBODY}" in state["reason"] and f"user {NOBODY}" in state["refusal"]
    assert not alone.call("save", prompt="q", count=2)["ok"]
