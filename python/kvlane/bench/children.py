"""Processes of a benchmark: each does what lines of JSON on stdin say, {"do": METHOD, ...}, and answers each on stdout
by {"value": ...} or {"error": TEXT}."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_ANSWER_TIMEOUT_S = 300
_PR_SET_PDEATHSIG = 1


class Failed(SystemExit):
    """A process failed; the text says how. Unless a caller handles it, the benchmark ends with this text."""


class Child:
    """A child process, as the benchmark sees it."""

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        not_inherited: tuple[str, ...] = (),
        inside: Sequence[str] = (),
    ) -> None:
        """`program`: what this Python runs; its last word is the process's name. Variables that begin with one of
        `not_inherited` reach the child through `environment` only. `inside` is a command that starts another one
        elsewhere, such as in another network namespace."""
        self._name = program[-1]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(not_inherited)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*inside, sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**inherited, **environment},
            # Ctrl-C reaches only the benchmark, which then ends each child with all that it has started.
            start_new_session=True,
        )
        self.pid = self._process.pid

    def ask(self, do: str, **facts: Any) -> Any:
        """Sends a command and returns the answer. `Failed` if the child fails."""
        self.tell(do, **facts)
        return self.answer(do)

    def tell(self, do: str, **facts: Any) -> None:
        """Sends a command; `answer` waits for its end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps({"do": do, **facts}) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended(do) from None

    def answer(self, do: str) -> Any:
        """Waits for the child's answer to the command `do`."""
        assert self._process.stdout is not None
        try:
            if not select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)[0]:
                raise Failed(f"{self._name}, {do}: no answer within {_ANSWER_TIMEOUT_S} s")
            answer = json.loads(self._process.stdout.readline())
        except ValueError:
            raise self._ended(do) from None
        if "error" in answer:
            raise Failed(f"{self._name}, {do}: {answer['error']}")
        return answer["value"]

    def _ended(self, do: str) -> Failed:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        return Failed(f"{self._name}, {do}: the process ended: {said[-2000:]}")

    def signal(self, number: int) -> None:
        """Sends the child a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Kills the child with all that it has started, and waits; this ends a stopped process too."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                pass


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_commands(side: object, prepare: Callable[[dict[str, Any]], None] = lambda command: None) -> None:
    """Calls the methods of `side` that stdin names, until it ends. `prepare` converts their arguments from JSON."""
    # Without this, a stopped process would stay when the benchmark is killed.
    end_with_parent()
    # Libraries may print to stdout, so answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        method = getattr(side, command.pop("do"))
        prepare(command)
        try:
            answer = {"value": method(**command)}
        # Any error is an answer, and the benchmark ends with its text.
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
