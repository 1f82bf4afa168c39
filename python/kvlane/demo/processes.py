"""The demo's processes: engines that obey JSON lines, and the daemon. All can be killed like any process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvlane.bench.processes import beside_python, connector_config, free_port, wait_for_health
from kvlane.demo.device import Setup

_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # The scheduler and the worker in the one process that the demo kills and looks into.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class ProcessFailed(Exception):
    """A process of the demo ended, hung, or refused a command."""


class Engine:
    """One vLLM with the connector. Its commands are those of `kvlane.demo.engine`."""

    def __init__(
        self, name: str, model: Path, address: str, logs: Path, setup: Setup, inside: Sequence[str] = ()
    ) -> None:
        """`inside` is a command that starts another one elsewhere, such as in another network namespace."""
        self.name = name
        self.log = logs / f"engine-{name}.log"
        self._asked = 0
        self._received = b""
        command = [*inside, sys.executable, "-m", "kvlane.demo.engine", "--model", str(model)]
        command += ["--device", setup.device, "--dtype", setup.shape.dtype]
        command += ["--max-tokens", str(setup.max_tokens), "--kv-cache-bytes", str(setup.kv_cache_bytes)]
        # Two engines on two cores may keep the daemon off the CPU for longer than a lookup may take by default; that
        # would be a miss, which is right, but not what the demo is to show.
        connector = connector_config(address, lookup_timeout_ms=5000.0)
        command += ["--connector", json.dumps(connector)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENGINE_ENVIRONMENT, **_device_environment(setup.device)},
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 300) -> None:
        """Waits until the model is loaded."""
        message = self._next_message(timeout_s)
        if message.get("event") != "ready":
            raise ProcessFailed(f"engine {self.name} began with {message} instead of saying that it is ready")

    def start(self, op: str, **arguments: Any) -> int:
        """Sends a command and returns its number without waiting."""
        assert self._process.stdin is not None
        self._asked += 1
        line = json.dumps({"id": self._asked, "op": op, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ProcessFailed(f"engine {self.name} has ended; see {self.log}") from error
        return self._asked

    def wait_first_token(self, number: int) -> None:
        """Waits until a request of that `generate` has its first token."""
        while True:
            message = self._next_message()
            if "event" not in message:
                raise ProcessFailed(
                    f"engine {self.name} answered command {number} without a first token: {message}"
                )
            if message["event"] == "first_token" and message["id"] == number:
                return

    def result(self, number: int) -> dict[str, Any]:
        """Waits for the answer to a command."""
        while True:
            message = self._next_message()
            if "event" in message:
                continue
            if message["id"] != number:
                raise ProcessFailed(f"engine {self.name} answered command {message['id']}, not {number}")
            if not message["ok"]:
                raise ProcessFailed(f"engine {self.name} could not do command {number}: {message['error']}")
            return message

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        return self.result(self.start(op, **arguments))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def exceptions(self) -> list[str]:
        """Lines of its log that show an exception."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if "Traceback (most recent call last)" in line or " ERROR " in line]

    def _next_message(self, timeout_s: float = 180) -> dict[str, Any]:
        """The next line. Waits on the pipe itself: a hung engine differs from a slow one only in the time."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise ProcessFailed(f"engine {self.name} said nothing for {timeout_s} s; see {self.log}")
                received = os.read(self._process.stdout.fileno(), 1 << 20)
                if not received:
                    status = self._process.wait()
                    raise ProcessFailed(f"engine {self.name} ended with status {status}; see {self.log}")
                self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


def _device_environment(device: str) -> dict[str, str]:
    if device == "cuda":
        # FlashInfer's sampler is compiled at its first use, which needs a whole CUDA toolkit.
        return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


class Daemon:
    """A `kvlane serve`, with an SSD tier of the pool's size unless told otherwise; can be ended and started again at
    the same address."""

    def __init__(
        self,
        folder: Path,
        pool_size: str,
        logs: Path,
        gpu: str = "off",
        ssd: bool = True,
        flags: tuple[str, ...] = (),
        name: str = "kvlane",
        inside: Sequence[str] = (),
    ) -> None:
        """`inside` is as for `Engine`."""
        self.address = f"unix:{folder}/kvlane.sock"
        self.log = logs / f"{name}.log"
        self._inside = inside
        self._http = f"127.0.0.1:{free_port()}"
        self._pool_size = pool_size
        self._ssd = ("--ssd", f"{folder}/blocks:{pool_size}") if ssd else ()
        self.flags = flags
        """Further ones, for the next start."""
        self._gpu = gpu
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        assert self._process is None, "the daemon runs already"
        command = [*self._inside, beside_python("kvlane"), "serve", "--listen", self.address]
        # Over HTTP it is not reached elsewhere.
        command += ["--http", "off" if self._inside else self._http]
        command += ["--pool-size", self._pool_size, "--gpu", self._gpu, *self._ssd, *self.flags]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if self._inside:
            self._wait_for_socket()
        else:
            wait_for_health(f"http://{self._http}", self._process, self.log)

    def _wait_for_socket(self, timeout_s: float = 60) -> None:
        from kvlane._core import Tool

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                Tool(self.address, 1000.0).close()
                return
            except (ConnectionError, TimeoutError) as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise ProcessFailed(f"the daemon does not answer; see {self.log}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self._process is not None, "the daemon does not run"
        self._process.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        """Ends it in good order, if it still runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None


class Closes(Protocol):
    """A process or a group of processes that can be ended."""

    def close(self) -> None:
        """End it, if it still runs."""
        ...


def close_all(processes: Iterable[Closes]) -> None:
    """Ends them all, even if one of them fails to end."""
    for process in processes:
        try:
            process.close()
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"could not end a process of the demo: {error}", file=sys.stderr)
