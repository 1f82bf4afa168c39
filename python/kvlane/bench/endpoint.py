"""The endpoint under test: one that runs already, or a `vllm serve` and a `kvlane serve` of our own on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
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

import aiohttp

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")
_START_TIMEOUT_S = 600
# An engine asked for on a machine without GPU runs on all its cores.
_ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # gives /reset_prefix_cache
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Endpoint:
    """An OpenAI endpoint by its base URL, without /v1."""

    def __init__(self, base_url: str, api_key: str = "") -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def first_model(self) -> str:
        """The model that the endpoint names first."""
        models = json.loads(await self._text("GET", "/v1/models"))["data"]
        return models[0]["id"]

    async def counters(self) -> dict[str, float]:
        """Prometheus samples of /metrics, labels summed up, without `_total`; empty where there is no such page."""
        try:
            page = await self._text("GET", "/metrics")
        except (aiohttp.ClientError, ValueError):
            return {}
        samples: dict[str, float] = {}
        for line in page.splitlines():
            if found := _SAMPLE.match(line):
                name = found[1].removesuffix("_total")
                samples[name] = samples.get(name, 0.0) + float(found[2])
        return samples

    async def reset_prefix_cache(self, timeout_s: float = 60.0) -> bool:
        """Empty the engine's own prefix cache, so that hits come from outside. False where that is not offered.

        vLLM refuses while blocks are in use, which they are until they are saved: hence asked again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = await self._text("POST", "/reset_prefix_cache")
            except (aiohttp.ClientError, ValueError):
                return False
            # vLLM up to 0.28 answers with an empty page.
            if not answer.strip() or json.loads(answer).get("success", True):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)

    async def _text(self, method: str, path: str) -> str:
        limits = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=limits, headers=self._headers) as session,
            session.request(method, self.base_url + path) as response,
        ):
            if response.status != 200:
                raise ValueError(f"{method} {self.base_url}{path} answered status {response.status}")
            return await response.text()


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
    """The program of this environment, else the one on PATH. SystemExit with a sentence if there is none."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"there is no {name} beside {sys.executable} nor on PATH")
    return found


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as sink:
        # Its own group: vLLM's children must end with it.
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
