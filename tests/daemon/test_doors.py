"""Where others reach the daemon: its Unix socket, TCP and HTTP. Who may do what there is told in docs/security.md."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from patterns import NAMESPACE
from ports import free_port
from processes import Daemon, Engine, run_kvlane, until
from wire import (
    BYE,
    DONE,
    ENGINE_OPENED,
    GET_STATUS,
    HELLO,
    OPEN_ENGINE,
    POOL_MAPPED,
    REFUSED,
    REGISTER_WORKER,
    SCHEDULER,
    STATUS,
    WELCOME,
    WORKER,
    WORKER_REGISTERED,
    Wire,
    field,
    group,
    hello,
    refusal,
    region,
    register,
    worker_group,
)

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
    # Sessions from before go on, and a new session finds their blocks.
    assert engine.call("check", prompt="p", count=5)["blocks"] == 5
    other = make_engine(in_folder, "b")
    assert other.wait_connected()["boot"] == boot
    assert other.call("check", prompt="p", count=5)["blocks"] == 5
    until("health", lambda: _health(in_folder)[0] == 200)
    in_folder.log.wait_for("socket was gone")
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
    # Strangers may ask: paths and users are in the log only.
    assert body["reasons"] == ["socket unreachable: see the daemon's log"]
    in_folder.log.wait_for("engines cannot connect")
    folder.unlink()
    until("health", lambda: _health(in_folder)[0] == 200)
    assert in_folder.status()["blocks"] == 0
    told = [line for line in in_folder.log.text().splitlines() if "engines cannot connect" in line]
    assert str(in_folder.path) in told[0]
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
        assert body["status"] == "engines cannot connect"
        in_folder.log.wait_for("another daemon")
        assert in_folder.path.stat().st_ino == inode
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(in_folder.path))
    # The socket is a file that a dead daemon left behind.
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


def test_without_being_told_nobody_listens_on_tcp(folder: Path, cleanup: ExitStack) -> None:
    """A port for status only was open on every host, whether or not anybody used it."""
    daemon = Daemon(folder, environment={"XDG_RUNTIME_DIR": str(folder)})
    cleanup.callback(daemon.kill)
    daemon.start_with("--pool-size", "8mib", "--http", "off", "--hugepages", "off")
    inodes = {link[8:-1] for link in _links(daemon.pid) if link.startswith("socket:[")}
    tables = [Path(f"/proc/{daemon.pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    sockets = {line.split()[9] for table in tables for line in table.splitlines()[1:]}
    assert not inodes & sockets
    assert (folder / "kvlane/kvlane.sock").is_socket()


def _links(pid: int) -> list[str]:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(link))
    return links


def test_who_has_proven_nothing_gets_little_and_not_for_long(make_daemon: MakeDaemon) -> None:
    port = free_port()
    make_daemon("--listen", f"127.0.0.1:{port}")
    at = ("127.0.0.1", port)
    with Wire(at) as wire:
        wire.socket.sendall(struct.pack("<I", 4097))
        kind, answer = wire.reply()
        assert kind == REFUSED
        assert "4096" in refusal(answer)[1]
        wire.wait_closed()
    # A byte now and then does not help.
    with Wire(at) as wire:
        began = time.monotonic()
        wire.socket.settimeout(0.1)
        for byte in itertools.chain(struct.pack("<I", 4000), itertools.repeat(0)):
            assert time.monotonic() - began < 30, "it is not cut off"
            try:
                wire.socket.sendall(bytes([byte]))
                if not wire.socket.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    # A greeting proves nothing either.
    with Wire(at) as wire:
        assert wire.ask(HELLO, hello())[0] == WELCOME
        assert wire.ask(GET_STATUS)[0] == STATUS
        wire.socket.sendall(struct.pack("<I", 60 << 20))
        assert wire.reply()[0] == REFUSED
        wire.wait_closed()
    with Wire(at) as wire:
        assert wire.ask(HELLO, hello())[0] == WELCOME
        wire.wait_closed()


class _Hostile:
    """Keeps so many connections open, of each kind in turn, and opens another one for each that the daemon closes."""

    COUNT = 1024

    def __init__(self, tcp: int, http: int) -> None:
        frame = struct.pack("<I", 60 << 20)
        self.kinds = [
            (tcp, b""),
            (tcp, frame + bytes(1 << 20)),
            (tcp, frame[:3]),
            (http, b""),
            (http, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "),
            (http, b"GET /metrics HTTP/1.1\r\nX-Long: " + bytes([0x61]) * (300 << 10)),
        ]
        self.opened = 0
        self.sockets: list[socket.socket] = []
        self.stop = threading.Event()
        self.all_opened = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Hostile:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()
        for each in self.sockets:
            each.close()

    def _open(self) -> socket.socket:
        port, words = self.kinds[self.opened % len(self.kinds)]
        self.opened += 1
        each = socket.socket()
        try:
            each.settimeout(5)
            each.connect(("127.0.0.1", port))
            each.settimeout(0.2)
            each.sendall(words)
        except OSError:
            pass  # it was closed, or the daemon takes no more
        each.setblocking(False)
        return each

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def _is_closed(self, each: socket.socket) -> bool:
        try:
            return each.recv(65536) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _run(self) -> None:
        while not self.stop.is_set():
            for at, each in enumerate(self.sockets):
                if self.stop.is_set():
                    return
                if self._is_closed(each):
                    each.close()
                    self.sockets[at] = self._open()
            while len(self.sockets) < self.COUNT and not self.stop.is_set():
                self.sockets.append(self._open())
            self.all_opened.set()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _resident(daemon: Daemon) -> int:
    """Bytes of memory, the pool's among them."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


@pytest.mark.usefixtures("many_descriptors")
def test_a_thousand_hostile_connections_cost_little_and_engines_work(
    make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path
) -> None:
    """Over the port that was open by default 1,022 idle connections kept all engines out, and one that announced 60 MB
    held so much for ever. Idle HTTP connections did the same to descriptors."""
    port = free_port()
    # As a login shell has it: what engines need must not depend on a larger limit.
    few = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 2048))}
    daemon = make_daemon("--listen", f"127.0.0.1:{port}", **few)
    make_engine(daemon, "warm").call("save", prompt="w", count=5)
    assert daemon.http("/metrics")[0] == 200
    before = _resident(daemon)
    most = 0
    with _Hostile(port, daemon.port) as hostile:
        assert hostile.all_opened.wait(60), "a daemon that does not accept is no better"
        for turn in range(8):
            engine = make_engine(daemon, f"engine-{turn}")
            engine.wait_connected()
            assert engine.call("save", prompt=f"p{turn}", count=20)["blocks"] == 20
            daemon.settle()
            assert engine.call("check", prompt=f"p{turn}", count=20)["blocks"] == 20
            assert len(_links(daemon.pid)) < 512
            assert hostile.is_alive(), "else the rest of the test shows nothing"
            most = max(most, _resident(daemon))
            engine.close()
    print(f"{hostile.opened} connections; {(most - before) / 1e6:.1f} MB more")
    assert most - before <= 32 << 20, f"{(most - before) >> 20} MiB"
    until("the pages to come back", lambda: _answers(daemon))
    turned_away = [line for line in daemon.http("/metrics")[1].splitlines() if "turned_away_total{" in line]
    assert len(turned_away) == 2
    assert all(float(line.split()[-1]) > 0 for line in turned_away), turned_away
    assert run_kvlane("status", "--addr", f"127.0.0.1:{port}").returncode == 0


def test_ten_thousand_engines_with_namespaces_of_their_own_are_served_one_after_the_other(
    daemon: Daemon,
) -> None:
    """The daemon knew 4,096 namespaces in its life, and refused every new one until somebody restarted it."""
    before = 0
    for number in range(10_000):
        namespace = number.to_bytes(16, "little")
        with Wire(daemon.path) as scheduler, Wire(daemon.path) as worker:
            for wire, role in ((scheduler, SCHEDULER), (worker, WORKER)):
                assert wire.ask(HELLO, hello(role, f"engine-{number}", namespace))[0] == WELCOME
            opened = scheduler.ask(OPEN_ENGINE, group(namespace) + field(2, 1))
            assert opened[0] == ENGINE_OPENED, opened
            registered = worker.ask(REGISTER_WORKER, register(worker_group(region(), namespace=namespace)))
            assert registered[0] == WORKER_REGISTERED, registered
            assert worker.ask(POOL_MAPPED)[0] == DONE
            assert scheduler.ask(BYE)[0] == worker.ask(BYE)[0] == DONE
        if number == 1000:
            assert "kvlane_namespace_blocks" in daemon.http("/metrics")[1]
            before = _resident(daemon)
    assert len(daemon.status()["namespaces"]) <= 4096
    page = daemon.http("/metrics")[1]
    assert page.count("kvlane_namespace_blocks{") <= 4096
    assert _resident(daemon) - before <= 32 << 20


def test_a_hundred_engines_at_once_share_a_few_heaps(daemon: Daemon, cleanup: ExitStack) -> None:
    """The C library gave each session's thread a heap of its own, and what one freed was of no use to the others."""
    for number in range(100):
        namespace = number.to_bytes(16, "little")
        wire = cleanup.enter_context(Wire(daemon.path))
        assert wire.ask(HELLO, hello(SCHEDULER, f"engine-{number}", namespace))[0] == WELCOME
        assert wire.ask(OPEN_ENGINE, group(namespace) + field(2, 1))[0] == ENGINE_OPENED
    # glibc reserves a heap at a multiple of 64 MiB, and makes its beginning writable. The first heap lies elsewhere.
    ranges = [line.split() for line in Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()]
    writable = [int(words[0].split("-")[0], 16) for words in ranges if words[1] == "rw-p" and words[4] == "0"]
    heaps = [start for start in writable if start % (64 << 20) == 0]
    assert 1 <= len(heaps) <= 3, [hex(start) for start in heaps]


def _answers(daemon: Daemon) -> bool:
    try:
        return daemon.http("/health")[0] == 200
    except OSError:
        return False
