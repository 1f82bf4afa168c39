"""A `kvlane serve` of a benchmark's own, on a socket in a temporary folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlane import _core

_START_TIMEOUT_S = 120


@dataclass(frozen=True)
class Daemon:
    """A running daemon."""

    address: str
    pid: int
    tool: _core.Tool

    @property
    def page_size(self) -> str:
        """The pool's page size for people: "4 kB", "2 MB (transparent)"."""
        return str(self.tool.status()["page_size"])

    @property
    def blocks(self) -> int:
        """Blocks in the index."""
        blocks = self.tool.status()["blocks"]
        assert isinstance(blocks, int)
        return blocks

    def settle(self, timeout_ms: int = 120_000) -> None:
        """Return when everything that was saved is visible."""
        self.tool.settle(timeout_ms)


@contextmanager
def running(
    pool_bytes: int,
    *flags: str,
    address: str | None = None,
    inside: Sequence[str] = (),
    own_session: bool = False,
) -> Iterator[Daemon]:
    """A daemon that answers; stopped at the end. `address` puts it on a socket of the caller's. `inside` is a command
    that starts another one elsewhere, such as in another network namespace. `own_session`: the kernel may divide
    processors among sessions, and a service has one of its own."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        address = address or f"unix:{folder}/kvlane.sock"
        log = Path(folder) / "kvlane.log"
        command = [*inside, _program(), "serve", "--listen", address, "--http", "off"]
        command += ["--pool-size", str(pool_bytes)]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command, "--log", "warn", *flags],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=own_session,
            )
        try:
            tool = _connected(address, process, log)
            yield Daemon(address, process.pid, tool)
            tool.close()
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _connected(address: str, process: subprocess.Popen[bytes], log: Path) -> _core.Tool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            return _core.Tool(address, timeout_ms=5_000)
        except (ConnectionError, TimeoutError) as error:
            if process.poll() is not None:
                sys.exit(f"kvlane serve ended with status {process.returncode}: {log.read_text().strip()}")
            if time.monotonic() > deadline:
                sys.exit(f"kvlane serve did not answer within {_START_TIMEOUT_S} s: {error}")
        time.sleep(0.01)


def _program() -> str:
    beside = Path(sys.executable).with_name("kvlane")
    found = str(beside) if beside.exists() else shutil.which("kvlane")
    if found is None:
        sys.exit(f"there is no kvlane beside {sys.executable} nor on PATH")
    return found


def cpu_seconds(pid: int, thread: str = "") -> float:
    """CPU time of a process, threads that ended included; with a name, of its living threads of that name."""
    if not thread:
        # clock_getcpuclockid(3): the complement of the pid, and 2 for what the scheduler counts (nanoseconds).
        return time.clock_gettime((~pid << 3) | 2)
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == thread:
                total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue  # the thread ended
    return total / 1e9
