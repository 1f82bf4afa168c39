"""A small real vLLM in a process of its own, with or without the connector, commanded by JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Scheduler and worker in this one process: its CPU time is the engine's.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
TOKENS_PER_BLOCK = 32


class VllmProcess:
    """The commands are those of `kvlane.demo.engine`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._asked = 0
        self.pid = process.pid

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        assert self._process.stdin is not None
        self._asked += 1
        self._process.stdin.write(json.dumps({"id": self._asked, "op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        message = self.next_message()
        while "event" in message:
            message = self.next_message()
        if not message["ok"]:
            sys.exit(f"vLLM could not {op}: {message['error']}; see {self._log}")
        return message

    def next_message(self) -> dict[str, Any]:
        """The next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vLLM ended with status {self._process.wait()}; see {self._log}")
        return json.loads(line)


@contextmanager
def running(
    model: Path, log: Path, *, connector: dict[str, Any] | None, threads: int
) -> Iterator[VllmProcess]:
    """A vLLM that is ready; killed at the end."""
    command = [sys.executable, "-m", "kvlane.demo.engine", "--model", str(model)]
    command += ["--block-size", str(TOKENS_PER_BLOCK), "--kv-cache-bytes", str(256 << 20)]
    if connector is not None:
        command += ["--connector", json.dumps(connector)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env={**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        try:
            engine = VllmProcess(process, log)
            message = engine.next_message()
            assert message == {"event": "ready"}, message
            yield engine
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tiny_model(out: Path) -> Path:
    """The demo's smallest model, built if it does not exist yet."""
    try:
        from kvlane.demo.model import TINY, build_model

        return build_model(out / "models" / "tiny", TINY)
    except ImportError as error:
        sys.exit(f"this benchmark runs a real vLLM, and there is none beside this Python: {error}")


def connector(address: str) -> dict[str, Any]:
    """vLLM's kv_transfer_config, with timeouts long enough for a busy machine."""
    from kvlane.bench.processes import connector_config

    config = connector_config(address)
    config["kv_connector_extra_config"]["kvlane.lookup_timeout_ms"] = 5000.0
    return config
