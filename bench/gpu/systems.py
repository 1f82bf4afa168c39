"""The systems of the comparison: how each is turned on in vLLM, and the servers that some of them need."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

START_PATIENCE_S = 300.0
LMCACHE_PORT, LMCACHE_HTTP_PORT = 5555, 8081
# vLLM takes the compute functions of `model` over its own calls, and hashes prompts alike in all processes.
ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class System:
    """A KV cache beside vLLM."""

    name: str
    what: str
    connector: Callable[[int, Path], str]
    """vLLM's kv_transfer_config, for a cache of so many bytes, and a folder for sockets."""
    server: Callable[[int, Path], list[str]] | None = None
    is_up: Callable[[Path], bool] = lambda folder: True
    package: str = "vllm"


def _config(connector: str, module: str | None, extra: dict[str, object]) -> str:
    config: dict[str, object] = {"kv_connector": connector, "kv_role": "kv_both"}
    if module:
        config["kv_connector_module_path"] = module
    if extra:
        config["kv_connector_extra_config"] = extra
    return json.dumps(config)


def _libpython() -> str:
    """Where the interpreter's shared library is: a server that embeds Python needs it."""
    folder, triple = sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("MULTIARCH") or ""
    known = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return ":".join(path for path in [*known, folder, f"{folder}/{triple}"] if path)


def kvlane_address(folder: Path) -> str:
    """The address of the daemon whose socket is in this folder."""
    return f"unix:{folder / 'kvlane.sock'}"


def _kvlane_answers(folder: Path) -> bool:
    command = ["kvlane", "status", "--addr", kvlane_address(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _http_answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def kvlane_with(name: str, keys: dict[str, object]) -> System:
    """An engine with further keys, on the daemon of the system `kvlane`. It finds only its own blocks."""

    def connector(size: int, folder: Path) -> str:
        own: dict[str, object] = {"kvlane.address": kvlane_address(folder), "kvlane.namespace": name}
        return _config("KVLaneConnector", "kvlane.connector", own | keys)

    return System(name, f"kvlane with {json.dumps(keys)}", connector, package="kvlane")


SYSTEMS = {
    system.name: system
    for system in (
        System("none", "vLLM without a connector", lambda size, folder: ""),
        System(
            "kvlane",
            "kvlane, its daemon started before",
            lambda size, folder: _config(
                "KVLaneConnector", "kvlane.connector", {"kvlane.address": kvlane_address(folder)}
            ),
            lambda size, folder: [
                "kvlane",
                "serve",
                "--pool-size",
                str(size),
                "--listen",
                kvlane_address(folder),
                "--http",
                "off",
            ],
            _kvlane_answers,
            package="kvlane",
        ),
        System(
            "pegaflow",
            "PegaFlow, its server started before",
            lambda size, folder: _config("PegaKVConnector", "pegaflow.connector", {}),
            lambda size, folder: [
                sys.executable,
                "-m",
                "pegaflow._server",
                "--pool-size",
                f"{size // 10**9}gb",
            ],
            lambda folder: _http_answers("http://127.0.0.1:9091/health"),
            package="pegaflow-llm-cu13",
        ),
        System(
            "offload",
            "vLLM's own OffloadingConnector",
            lambda size, folder: _config(
                "OffloadingConnector", None, {"cpu_bytes_to_use": size, "block_size": 64}
            ),
        ),
        # Both with LMCache's own chunks of 256 tokens; what a prompt has behind its last whole chunk is computed.
        System(
            "lmcache",
            "LMCache in the engine's own processes",
            lambda size, folder: _config(
                "LMCacheConnectorV1",
                None,
                {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": size / 2**30},
            ),
            package="lmcache",
        ),
        System(
            "lmcache-mp",
            "LMCache, its server started before",
            lambda size, folder: _config(
                "LMCacheMPConnector",
                None,
                {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": LMCACHE_PORT},
            ),
            lambda size, folder: [
                sys.executable,
                "-m",
                "lmcache.v1.multiprocess.http_server",
                "--host",
                "127.0.0.1",
                "--port",
                str(LMCACHE_PORT),
                "--http-host",
                "127.0.0.1",
                "--http-port",
                str(LMCACHE_HTTP_PORT),
                "--l1-size-gb",
                str(size / 2**30),
                # All of its memory is there before the first prompt, as kvlane's.
                "--no-l1-use-lazy",
                # A GPU is read and written by the server; on a CPU the engine copies into shared memory.
                "--supported-transfer-mode",
                "auto",
                "--eviction-policy",
                "LRU",
            ],
            lambda folder: _http_answers(f"http://127.0.0.1:{LMCACHE_HTTP_PORT}/healthcheck"),
            package="lmcache",
        ),
    )
}


@contextmanager
def running(system: System, size: int, folder: Path, log: Path) -> Iterator[None]:
    """The system's server, if it has one; ready when this begins, gone when it ends."""
    if system.server is None:
        yield
        return
    with log.open("wb") as written:
        server = subprocess.Popen(
            system.server(size, folder),
            stdout=written,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LD_LIBRARY_PATH": _libpython()},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_PATIENCE_S
        while not system.is_up(folder):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server of {system.name} does not start; see {log}")
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def plan(names: Iterable[str], size: int, folder: Path) -> str:
    """The text of `--dry-run`: the command line of each system's server, and vLLM's flag."""
    lines = []
    for system in (SYSTEMS[name] for name in names):
        try:
            there = f"{system.package} {version(system.package)}"
        except PackageNotFoundError:
            there = f"{system.package} is not installed"
        server = shlex.join(system.server(size, folder)) if system.server else "none"
        connector = system.connector(size, folder)
        flag = shlex.join(["--kv-transfer-config", connector]) if connector else "none"
        lines += [
            f"{system.name}: {system.what}; {there}",
            f"    server: {server}",
            f"    vllm serve: {flag}",
        ]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """The versions of the packages that took part, if they are installed."""
    found = {}
    for package in {"torch", "nixl", *(system.package for system in SYSTEMS.values())}:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
