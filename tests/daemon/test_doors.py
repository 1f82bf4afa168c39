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
from patterns import NAMESPACE
from processes import Daemon, Engine, free_port, run_kvlane, until

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


# HTTP.


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/status"),
        ("GET", "/admin/sessions"),
        ("GET", "/admin/namespaces"),
        ("DELETE", "/admin/namespaces/" + NAMESPACE.hex()),
        ("POST", "/metrics"),
        ("DELETE", "/health"),
    ],
)
def test_over_http_nothing_is_listed_or_changed(
    daemon: Daemon, make_engine: MakeEngine, method: str, path: str
) -> None:
    """Any user of the host, and any container with its network, listed engines with their pids, and deleted what they
    had saved."""
    engine = make_engine(daemon, "secret-engine")
    engine.call("save", prompt="p", count=5)
    daemon.settle()
    code, body = daemon.http(path, method)
    assert code in (404, 405), body
    assert engine.call("check", prompt="p", count=5)["blocks"] == 5
    for page in ("/health", "/metrics"):
        code, body = daemon.http(page)
        assert code == 200
        assert "secret-engine" not in body


def test_a_web_page_cannot_ask_under_a_name_of_its_own(make_daemon: MakeDaemon) -> None:
    """By DNS rebinding a page's name resolves to 127.0.0.1, and the browser takes the daemon for the page's server."""
    daemon = make_daemon("--http-host", "metrics.example", "--http-host", "kvlane")
    for path in ("/health", "/metrics", "/"):
        code, body = daemon.http(path, Host="evil.example")
        assert code == 421, body
        assert "--http-host evil.example" in json.loads(body)["error"]
    for host in (
        "127.0.0.1",
        f"localhost:{daemon.port}",
        "[::1]:80",
        "10.0.0.7:9091",
        "metrics.example:80",
        "KVLANE",
    ):
        assert daemon.http("/metrics", Host=host)[0] == 200, host
    with socket.create_connection(("127.0.0.1", daemon.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"names no host" in answer


# TCP.


def test_status_over_tcp_leaves_out_who_uses_the_daemon(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    """Over TCP nobody proves who they are. They were told every engine, its pid, and the namespaces of all models."""
    port = free_port()
    daemon = make_daemon("--listen", f"127.0.0.1:{port}")
    engine = make_engine(daemon, "secret-engine")
    engine.call("save", prompt="p", count=5)
    daemon.settle()
    told = run_kvlane("status", "--addr", f"127.0.0.1:{port}")
    assert told.returncode == 0, told.stderr
    assert "5, 0 leased" in told.stdout
    assert "over the Unix socket only" in told.stdout
    status = json.loads(run_kvlane("status", "--json", "--addr", f"127.0.0.1:{port}").stdout)
    assert (status["sessions"], status["namespaces"], status["blocks"]) == ([], [], 5)
    text = told.stdout + json.dumps(status)
    for secret in ("secret-engine", str(engine.pid), NAMESPACE.hex(), "pattern"):
        assert secret not in text
    assert "secret-engine" in run_kvlane("status", "--addr", daemon.address).stdout
