"""Daemons and engines as child processes that a test may kill and stop."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from ports import free_port

from kvlane import _core

KVLANE = Path(shutil.which("kvlane") or Path(sys.executable).with_name("kvlane"))
ENGINE = Path(__file__).with_name("engine_process.py")
PATIENCE = 30.0


def until(what: str, condition: Callable[[], Any]) -> Any:
    """Waits for the state of another process, which sends no event. Answers what the condition answered."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s"
        time.sleep(0.005)


def send_signal(pid: int, number: signal.Signals) -> None:
    """A stop is over when every thread has stopped: until then one on another core goes on."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        until("every thread has stopped", lambda: all(state in "TtZ" for state in _thread_states(pid)))


def _thread_states(pid: int) -> list[str]:
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            states.append((task / "stat").read_text().rpartition(") ")[2][0])
        except OSError:
            continue  # the thread ended
    return states


def clean_environment(**more: str) -> dict[str, str]:
    """Without KVLANE_ settings of the machine."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("KVLANE_")}, **more}


def run_kvlane(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("env", clean_environment())
    return subprocess.run(
        [KVLANE, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False, **options
    )


class _Lines:
    """What a process writes, line by line, as it comes."""

    def __init__(self, stream: IO[str]) -> None:
        self.seen: list[str] = []
        self.changed = threading.Condition()
        self.ended = False
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self.changed:
                    self.seen.append(line)
                    self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def text(self) -> str:
        with self.changed:
            return "".join(self.seen)

    def rest(self) -> str:
        """All of it, once the process has ended."""
        self.thread.join(PATIENCE)
        return self.text()

    def wait_for(self, part: str) -> str:
        def found() -> list[str]:
            return [line for line in self.seen if part in line]

        with self.changed:
            self.changed.wait_for(lambda: found() or self.ended, PATIENCE)
            assert found(), f"no line with '{part}' in:\n{''.join(self.seen)}"
            return found()[0]


class ServiceManager:
    """Hears that a daemon serves, by the protocol of sd_notify(3). Any user may reach its abstract name. A daemon in
    another network namespace needs a path instead."""

    def __init__(self, path: Path | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if path is not None:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            self.address = str(path)
            return
        # The kernel chooses a name that nobody has.
        self._socket.bind("")
        name = self._socket.getsockname()
        self.address = "@" + name[1:].decode()

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def heard(self) -> list[str]:
        """The next thing that was told."""
        self._socket.settimeout(PATIENCE)
        return self._socket.recv(4096).decode().splitlines()

    def is_ready(self, process: subprocess.Popen[Any]) -> bool:
        """Waits until the process says so; False where it ends before."""
        pidfd = os.pidfd_open(process.pid)
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                left = deadline - time.monotonic()
                assert left > 0, f"not ready within {PATIENCE:.0f} s"
                told, _, _ = select.select([self._socket, pidfd], [], [], left)
                if self._socket in told:
                    if b"READY=1" in self._socket.recv(4096).splitlines():
                        return True
                elif pidfd in told:
                    return False
        finally:
            os.close(pidfd)


def _handles(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


class Index:
    """`kvlane index`. Can be started again after it ended, at the same address."""

    def __init__(self, *flags: str) -> None:
        self.address, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.flags = flags
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Waits until it serves."""
        with ServiceManager() as manager:
            self.process = subprocess.Popen(
                [KVLANE, "index", "--listen", self.address, "--http", self.http, *self.flags],
                stderr=subprocess.PIPE,
                text=True,
                env=clean_environment(NOTIFY_SOCKET=manager.address),
            )
            assert self.process.stderr is not None
            self.log = _Lines(self.process.stderr)
            if not manager.is_ready(self.process):
                self.process.wait(PATIENCE)
                raise AssertionError(f"the index ended before it served:\n{self.log.rest()}")

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
            return answer.read().decode()

    def owners(self) -> list[dict[str, Any]]:
        return json.loads(self.page("/owners"))

    def blocks(self) -> list[int]:
        """What each owner has that it follows."""
        return [owner["blocks"] for owner in self.owners() if owner["state"] == "following"]

    def metric(self, name: str) -> int:
        (line,) = [line for line in self.page("/metrics").splitlines() if line.startswith(f"{name} ")]
        return int(float(line.split()[1]))

    def stop(self) -> int:
        """Asks it to end, and answers the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)


class Daemon:
    """`kvlane serve` on a socket in `folder`. Can be started again after it ended, at the same place."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        pool: str = "64mib",
        http: str | None = None,
        binary: Path = KVLANE,
        environment: dict[str, str] | None = None,
        inside: Sequence[str] = (),
        **popen: Any,
    ) -> None:
        self.inside = inside
        """A command that starts the daemon in another network namespace."""
        self.path = folder / "kvlane.sock"
        self.address = f"unix:{self.path}"
        self.port = free_port()
        self.http_at = http or f"127.0.0.1:{self.port}"
        self.flags = flags
        self.pool = pool
        self.binary = binary
        self.environment = environment or {}
        self.popen = popen
        # Whom tools have to name, where the tests run as another user.
        self.user = str(popen["user"]) if "user" in popen else None
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Waits until it serves."""
        self.start_with(
            *("--pool-size", self.pool, "--listen", self.address, "--http", self.http_at),
            *("--hugepages", "off", *self.flags),
        )

    def start_with(self, *flags: str) -> None:
        """With no flags but these. Waits as a service manager does, since the log may be told to say nothing."""
        with ServiceManager(self.path.with_name("notify.sock") if self.inside else None) as manager:
            self.process = subprocess.Popen(
                [*self.inside, self.binary, "serve", *flags],
                stderr=subprocess.PIPE,
                text=True,
                env=clean_environment(**self.environment, NOTIFY_SOCKET=manager.address),
                **self.popen,
            )
            assert self.process.stderr is not None
            self.log = _Lines(self.process.stderr)
            if not manager.is_ready(self.process):
                self.process.wait(PATIENCE)
                raise AssertionError(f"the daemon ended before it served:\n{self.log.rest()}")
        until("SIGTERM is handled", lambda: _handles(self.pid, signal.SIGTERM))

    def ready_line(self) -> str:
        """What its log says of itself once it serves, if it logs at level info."""
        return self.log.wait_for("ready after")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def stop(self) -> int:
        """Asks it to end, and answers the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)

    def restart(self) -> None:
        self.kill()
        self.start()

    def status(self) -> dict[str, Any]:
        tool = _core.Tool(self.address, 10_000.0, self.user)
        try:
            return tool.status()
        finally:
            tool.close()

    def drop(self, namespace: bytes) -> None:
        tool = _core.Tool(self.address, 10_000.0)
        tool.drop_namespaces([namespace])
        tool.close()

    def settle(self) -> None:
        tool = _core.Tool(self.address, 10_000.0, self.user)
        tool.settle(20_000)
        tool.close()

    def engines(self) -> list[dict[str, Any]]:
        """Sessions without those of tools."""
        return [session for session in self.status()["sessions"] if session["role"] != "tool"]

    def wait_unused(self) -> dict[str, Any]:
        """Waits until nothing is leased or claimed."""

        def unused() -> dict[str, Any] | None:
            status = self.status()
            return status if status["leased_blocks"] == status["claimed_blocks"] == 0 else None

        return until("no lease and no claim", unused)

    def http(
        self, path: str, method: str = "GET", host: str = "127.0.0.1", **headers: str
    ) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{host}:{self.port}{path}", method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


class EngineError(Exception):
    """What went wrong in an engine's process."""


class Engine:
    """An `engine_process.py` of some Python; its options are the keyword arguments."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        python: str | Path = sys.executable,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, ENGINE, address, name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment() if environment is None else environment,
        )
        self.started = self.answer()

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineError(f"{self.name} ended with {self.process.wait(PATIENCE)}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer["answer"]

    def call(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def wait_connected(self, boot: str | None = None) -> dict[str, Any]:
        def connected() -> dict[str, Any] | None:
            state = self.call("state")
            there = state["worker"] and state["scheduler"] and state["boot"] != boot
            return state if there else None

        return until(f"{self.name} is connected", connected)

    def signal(self, number: signal.Signals) -> None:
        send_signal(self.pid, number)

    def close(self) -> None:
        self.call("close")
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
