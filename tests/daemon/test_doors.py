"""Where others reach the daemon: its Unix socket, TCP and HTTP. Who may do what there is told in docs/security.md."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Daemon, Engine, until

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


# The socket's file.


@pytest.fixture
def in_folder(folder: Path, cleanup: ExitStack) -> Daemon:
    """A daemon whose socket lies in a folder that a test may take away."""
    daemon = Daemon(folder / "run")
    cleanup.callback(daemon.kill)
    daemon.start()
    return daemon


def _health(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    code, body = daemon.http("/health")
    return code, json.loads(body)


def test_a_terminal_that_is_closed_ends_the_daemon_as_sigterm_does(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    """SIGHUP used to kill it at once: saves under way were lost, and its socket stayed behind."""
    engine = make_engine(daemon, "a", blocks=2048, piece_bytes=4096)
    engine.call("fill", prompt="p", count=2048)
    engine.send("save", prompt="p", count=2048, fill=False)
    until("a save under way", lambda: daemon.status()["blocks"] + daemon.status()["claimed_blocks"] > 0)
    daemon.signal(signal.SIGHUP)
    assert daemon.process is not None
    assert daemon.process.wait(30) == 0
    end = engine.answer()
    assert (end["ok"], end["blocks"]) == (True, 2048), end
    assert not daemon.path.exists()


def test_under_nohup_it_goes_on_when_the_terminal_is_closed(make_daemon: MakeDaemon) -> None:
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    daemon = make_daemon(**ignore)
    daemon.signal(signal.SIGHUP)
    # A signal that ended it would do so before a later one is looked at.
    assert daemon.status()["blocks"] == 0
    assert daemon.stop() == 0
    assert daemon.process is not None and daemon.process.returncode == 0


def test_a_socket_whose_folder_was_removed_is_made_again(in_folder: Daemon, make_engine: MakeEngine) -> None:
    """systemd removes /run/user/UID when its user logs out. The daemon went on, /health said ok, and no engine found it
    ever again."""
    engine = make_engine(in_folder, "a")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="p", count=5)["blocks"] == 5
    in_folder.settle()
    shutil.rmtree(in_folder.path.parent)
    until("a new socket", lambda: in_folder.path.is_socket())
    assert in_folder.path.parent.stat().st_mode & 0o777 == 0o700
    until("its mode", lambda: in_folder.path.stat().st_mode & 0o777 == 0o600)
    # Who was connected stays so, and who comes now finds what was there.
    assert engine.call("check", prompt="p", count=5)["blocks"] == 5
    other = make_engine(in_folder, "b")
    assert other.wait_connected()["boot"] == boot
    assert other.call("check", prompt="p", count=5)["blocks"] == 5
    until("health", lambda: _health(in_folder)[0] == 200)
    in_folder.log.wait_for("the socket was gone")
    # Once more, and then the end: the newest one is removed.
    in_folder.path.unlink()
    until("another new socket", lambda: in_folder.path.is_socket())
    assert in_folder.stop() == 0
    assert not in_folder.path.exists()


def test_health_says_that_the_socket_cannot_be_made_again(in_folder: Daemon) -> None:
    folder = in_folder.path.parent
    shutil.rmtree(folder)
    folder.write_text("something else")
    _, body = until("trouble", lambda: (found := _health(in_folder))[0] == 503 and found)
    assert body["status"] == "engines cannot connect"
    (reason,) = body["reasons"]
    assert str(in_folder.path) in reason
    in_folder.log.wait_for("engines cannot connect")
    folder.unlink()
    until("health", lambda: _health(in_folder)[0] == 200)
    assert in_folder.status()["blocks"] == 0
    told = [line for line in in_folder.log.text().splitlines() if "engines cannot connect" in line]
    assert len(told) == 1, "once for each change"


def test_another_daemon_at_its_socket_is_left_alone(in_folder: Daemon, folder: Path) -> None:
    """Two daemons that take the socket from each other would be worse than one that says what is wrong."""
    elsewhere = folder / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(elsewhere))
        other.listen()
        inode = elsewhere.stat().st_ino
        os.replace(elsewhere, in_folder.path)
        _, body = until("trouble", lambda: (found := _health(in_folder))[0] == 503 and found)
        assert "another daemon" in body["reasons"][0]
        assert in_folder.path.stat().st_ino == inode
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(in_folder.path))
    # Nobody serves it any more: it is a file that a dead daemon left behind.
    until("health", lambda: _health(in_folder)[0] == 200)
    assert in_folder.status()["blocks"] == 0
