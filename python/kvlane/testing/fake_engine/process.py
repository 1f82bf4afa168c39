"""A fake engine as a child process, for tests and benchmarks."""

from __future__ import annotations

import http.client
import json
import select
import signal
import subprocess
import sys
import time
from typing import Any, Final

_START_SECONDS: Final = 30.0
_END_SECONDS: Final = 10.0


class FakeEngine:
    """Runs `python -m kvlane.testing.fake_engine` with these flags while the context lasts.

    It keeps one connection open, over which faults can be lifted that refuse others.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self.url = ""
        """Such as "http://127.0.0.1:8000"."""
        self.process: subprocess.Popen[str]
        self._control: http.client.HTTPConnection

    def __enter__(self) -> FakeEngine:
        command = [sys.executable, "-m", "kvlane.testing.fake_engine", *self._flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self.url = self._ready_line().removeprefix("ready ").strip()
            self._control = http.client.HTTPConnection(self.address, timeout=_START_SECONDS)
            self._control.connect()
        except BaseException:
            self.process.kill()
            self._wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        if self.process.poll() is None:
            # SIGCONT: a test may have stopped it.
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)
        self._wait()

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.removeprefix("http://")

    def log(self, clear: bool = False) -> list[dict[str, Any]]:
        """The requests so far, oldest first."""
        return self._ask("GET", "/log?clear=1" if clear else "/log")

    def faults(self, **wanted: object) -> dict[str, Any]:
        """Replaces the faults by these; none lifts all."""
        return self._ask("POST", "/faults", wanted)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; waits for the end unless it only stops or continues the process."""
        self.process.send_signal(number)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self._wait()

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        self._control.request(method, path, None if body is None else json.dumps(body))
        answer = self._control.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise ValueError(data.decode())
        return json.loads(data)

    def _ready_line(self) -> str:
        out = self.process.stdout
        assert out is not None
        deadline = time.monotonic() + _START_SECONDS
        if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("the fake engine did not start")
        line = out.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"the fake engine did not start; it said {line!r}")
        return line

    def _wait(self) -> None:
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
