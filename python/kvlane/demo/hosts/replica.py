"""A replica of the index as a process of one of the hosts."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvlane.bench.processes import beside_python


class Replica:
    """A `kvlane index`. Daemons dial it until it answers, so nothing waits for its start."""

    def __init__(self, address: str, flags: Sequence[str], log: Path, inside: Sequence[str]) -> None:
        """`address` is HOST:PORT; `inside` is as for `kvlane.demo.processes.Engine`."""
        self.address = address
        self._command = [
            *inside,
            beside_python("kvlane"),
            "index",
            "--listen",
            address,
            "--http",
            "off",
            *flags,
        ]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None, "the replica does not run"
        self._process.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Ends it in good order, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None
