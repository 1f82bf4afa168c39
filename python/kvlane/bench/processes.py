"""Processes that a benchmark or the demo starts for itself on loopback: `vllm serve` and `kvlane serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 600
# An engine on a machine without a GPU runs on all its cores.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # gives /reset_prefix_cache
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def own_daemon(pool_size: str, logs: Path) -> Iterator[str]:
    """A `kvlane serve` on a socket of its own; its address. Stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        address = f"unix:{folder}/kvlane.sock"
        port = free_port()
        command = [beside_python("kvlane"), "serve", "--listen", address, "--http", f"127.0.0.1:{port}"]
        command += ["--pool-size", pool_size]
        with _process(command, dict(os.environ), logs / "kvlane.log") as process:
            wait_for_health(f"http://127.0.0.1:{port}", process, logs / "kvlane.log")
            yield address


@contextmanager
def own_engine(model: str, connector: dict[str, Any] | None, extra: list[str], logs: Path) -> Iterator[str]:
    """A `vllm serve` on loopback, with or without a connector; its base URL. Stopped at the end."""
    port = free_port()
    command = [
        beside_python("vllm"),
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-enable-log-requests",
    ]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    log = logs / ("vllm-kvlane.log" if connector else "vllm.log")
    with _process([*command, *extra], {**_ENGINE_ENVIRONMENT, **os.environ}, log) as process:
        wait_for_health(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"


def connector_config(address: str, **settings: Any) -> dict[str, Any]:
    """vLLM's kv_transfer_config that makes an engine use the daemon at `address`; see `connector/settings.py`."""
    return {
        "kv_connector": "KVLaneConnector",
        "kv_connector_module_path": "kvlane.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvlane.address": address,
            **{f"kvlane.{name}": value for name, value in settings.items()},
        },
    }


def beside_python(name: str) -> str:
    """The program beside this Python, else the one on PATH. SystemExit with a sentence if there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"there is no {name} beside {sys.executable} nor on PATH")
    return found


def free_port() -> int:
    """A free TCP port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        # A group of its own, because vLLM's children must end with it.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def wait_for_health(base_url: str, process: subprocess.Popen[Any], log: Path) -> None:
    """Return when `base_url`/health answers. SystemExit if the process ends or the time is over."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(base_url + "/health", timeout=5):
                return
        except OSError:  # also urllib's own errors
            pass
        if process.poll() is not None:
            sys.exit(f"{base_url} ended with status {process.returncode} before it was ready; see {log}")
        if time.monotonic() > deadline:
            sys.exit(f"{base_url} was not healthy within {_START_TIMEOUT_S} s; see {log}")
        time.sleep(0.2)
