"""`vllm serve` as a process of its own, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from busy import stretched
from stores import DaemonStore

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
START_SECONDS = 400.0
ANSWER_SECONDS = 120.0
BLOCK = 32


class Daemon(DaemonStore):
    """A daemon that can also be stopped, and tells who is connected."""

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def sessions(self, role: str) -> list[dict[str, Any]]:
        return [session for session in self._tool.status()["sessions"] if session["role"] == role]


class ReservedPort:
    """A port that nothing else on this host gets until it is closed. vLLM binds it beside this socket, on which nobody
    listens: both allow it by SO_REUSEADDR."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


class ServedEngine:
    """An engine with kvlane's connector, or what `transfer` says. Starts at once; `wait` returns when it answers."""

    def __init__(
        self,
        model: Path,
        address: str,
        log: Path,
        *arguments: str,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        port: ReservedPort | None = None,
    ) -> None:
        self._port = port or ReservedPort()
        self.url = f"http://127.0.0.1:{self._port.number}"
        self.log = log
        transfer = transfer or {
            "kv_connector": "KVLaneConnector",
            "kv_connector_module_path": "kvlane.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "kvlane.address": address,
                # A lookup that is out of time is a miss.
                "kvlane.lookup_timeout_ms": 1e3 * stretched(0.25),
            },
        }
        command = ["vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(self._port.number)]
        command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--block-size", str(BLOCK), "--enforce-eager", "--num-gpu-blocks-override", "200"]
        command += ["--kv-transfer-config", json.dumps(transfer), *arguments]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                ended = self.process.poll()
                assert ended is None, f"vllm serve ended with {ended}:\n{self.tail()}"
                assert time.monotonic() < deadline, f"not up after {START_SECONDS} s:\n{self.tail()}"
                try:  # its end would come first; there is no event for its being up
                    self.process.wait(0.5)
                except subprocess.TimeoutExpired:
                    pass

    def complete(self, prompt: list[int], tokens: int = 16) -> list[int]:
        """The tokens of the answer."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            return list(json.load(reply)["choices"][0]["token_ids"])

    def reset_prefix_cache(self) -> None:
        """Empties the engine's own cache, so that only kvlane's is left."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            assert reply.status == 200

    def metric(self, name: str) -> float:
        """The sum of a counter over its labels."""
        total = 0.0
        for line in self._get("/metrics").decode().splitlines():
            bare = line.partition("{")[0].partition(" ")[0]
            if bare in (name, f"{name}_total"):
                total += float(line.rpartition(" ")[2])
        return total

    def kill(self) -> None:
        """kill -9 of the whole engine."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        # vLLM's workers may outlive it.
        self.kill()
        self._port.close()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def complaints(self) -> list[str]:
        """Lines of the log that tell of an exception."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "Traceback" in line]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_SECONDS) as reply:
            return bytes(reply.read())


def wait_for(what: str, holds: Any, seconds: float = ANSWER_SECONDS) -> None:
    """Asks until something holds that another process does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
