"""A replica of a cluster's index, as a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvlane.bench.processes import beside_python


class Replica:
    """A `kvlane index`. Daemons dial it until it answers, so nothing waits for its start."""

    def __init__(
        self, address: str, flags: Sequence[str], inside: Sequence[str], log: Path | None = None
    ) -> None:
        """`address` is HOST:PORT, `inside` a command that starts another one on its host. Without `log` it writes to
        stderr."""
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
        assert self._process is None, "the replica runs already"
        if self._log is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
            return
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

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
