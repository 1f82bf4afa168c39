"""Runs `vllm serve` for each engine, and `kvlane route` before them. The daemon is the other demo's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvlane.bench.processes import beside_python
from kvlane.demo.pd.asking import MODEL_NAME, AskFailed, is_healthy, page
from kvlane.demo.pd.plan import BLOCK_TOKENS, Node, Plan
from kvlane.demo.processes import Daemon, ProcessFailed, close_all

START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 15.0
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


class ServedEngine:
    """One `vllm serve` with kvlane's connector, all its processes in a group of their own."""

    def __init__(
        self,
        node: Node,
        model: str,
        connector: Mapping[str, object],
        log: Path,
        threads: int,
        max_tokens: int,
        kv_cache: int,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        dtype: str = "float32",
    ) -> None:
        """`connector`: vLLM's kv_transfer_config. `flags` and `environment`: further ones of `vllm serve`."""
        self.node = node
        self.log = log
        self._is_asked = False
        command = [beside_python("vllm"), "serve", model, "--host", "127.0.0.1", "--port", str(node.port)]
        command += ["--served-model-name", MODEL_NAME, "--dtype", dtype]
        command += [] if node.gpu is not None else ["--enforce-eager"]
        command += ["--max-model-len", str(max_tokens), "--block-size", str(BLOCK_TOKENS)]
        command += ["--max-num-seqs", "16", "--kv-cache-memory-bytes", str(kv_cache)]
        command += ["--no-enable-log-requests", "--kv-transfer-config", json.dumps(connector), *flags]
        offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={
                    **os.environ,
                    **_ENVIRONMENT,
                    **offline,
                    **_device_variables(node, threads),
                    **(environment or {}),
                },
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether it answers. Raises ProcessFailed where it has ended."""
        status = self._process.poll()
        if status is not None:
            raise ProcessFailed(f"engine {self.node.name} ended with status {status}; see {self.log}")
        return is_healthy(self.node.url)

    def processes(self) -> list[int]:
        """The ids of all its processes."""
        return _group(self._process.pid)

    def memory(self) -> int:
        """Bytes of its processes; shared memory is counted in parts."""
        return sum(_proportional(pid) for pid in self.processes())

    def pause(self) -> None:
        """SIGSTOP to all its processes."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all its processes."""
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """CPU seconds that its processes have used."""
        return sum(_cpu_seconds(pid) for pid in self.processes())

    def ask_to_end(self) -> None:
        """SIGTERM, once: vLLM then removes what it has in /dev/shm."""
        if not self._is_asked:
            self._is_asked = True
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all its processes, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Ends it, if it still runs: in good order if that does not take long."""
        if self._process.poll() is None:
            self.ask_to_end()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
        # vLLM's workers may outlive it.
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass


class Router:
    """`kvlane route` before the engines of a plan."""

    def __init__(
        self,
        plan: Plan,
        log: Path,
        socket: Path,
        settings: str = "",
        handoffs: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: further ones, as TOML. `handoffs`: where each prefill engine hands over directly, by its name;
        None: the engines hand over through their daemon."""
        self._plan = plan
        self._socket = socket
        self._handoffs = handoffs
        self.log = log
        command = [beside_python("kvlane"), "route", "--listen", f"127.0.0.1:{plan.router_port}"]
        command += ["--admin", f"127.0.0.1:{plan.admin_port}", "--socket", str(socket)]
        if handoffs is None:
            for node in plan.engines:
                command += [f"--{node.role}", node.url]
        else:
            settings += "".join(_direct_node(node, handoffs) for node in plan.engines)
        if settings:
            config = log.with_name("route.toml")
            config.write_text(settings)
            command += ["--config", str(config)]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def add(self, node: Node) -> None:
        """Make an engine known to it, by `kvlane route add`. Raises ProcessFailed."""
        command = [beside_python("kvlane"), "route", "add", node.url, "--role", node.role]
        if self._handoffs is not None:
            command += ["--connector", "direct", "--handoff", self._handoffs[node.name]]
        try:
            said = subprocess.run(
                [*command, "--socket", str(self._socket)],
                capture_output=True,
                text=True,
                check=False,
                timeout=_END_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ProcessFailed(f"kvlane route add {node.url}: no answer; see {self.log}") from error
        if said.returncode != 0:
            raise ProcessFailed(f"kvlane route add {node.url}: {said.stderr.strip()}")

    def states(self) -> dict[str, str]:
        """The state of each engine, ready or suspect, by name. Raises ProcessFailed if the router has ended."""
        if self._process.poll() is not None:
            raise ProcessFailed(f"kvlane route ended with status {self._process.returncode}; see {self.log}")
        try:
            nodes = page(self._plan.admin_url, "/nodes")["nodes"]
        except AskFailed:
            return {}
        return {self._plan.name_of(node["node"]): node["state"] for node in nodes}

    def requests(self, node: Node) -> int:
        """Requests of the router that are in flight at this engine."""
        nodes = page(self._plan.admin_url, "/nodes")["nodes"]
        return sum(each["requests"] for each in nodes if each["node"] == node.url)

    def close(self) -> None:
        """End it in good order, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _direct_node(node: Node, handoffs: Mapping[str, str]) -> str:
    """The node's part of the router's file."""
    lines = ["[[node]]", f'url = "{node.url}"', f'role = "{node.role}"', 'connector = "direct"']
    if node.role == "prefill":
        lines.append(f'handoff = "{handoffs[node.name]}"')
    return "\n".join(lines) + "\n"


def wait_until(what: str, holds: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
    """Polls until the condition holds, because other processes send no event when they are ready. Raises
    ProcessFailed."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise ProcessFailed(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.05)


def end_all(processes: Iterable[ServedEngine | Router | Daemon]) -> None:
    """Ends them all, even if one of them fails to end or Ctrl-C comes again meanwhile."""
    asked_to_end = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in asked_to_end]
    processes = list(processes)
    try:
        for process in processes:
            if isinstance(process, ServedEngine):
                process.ask_to_end()  # all at once, then one after the other
        close_all(processes)
    finally:
        for number, handler in zip(asked_to_end, before, strict=True):
            signal.signal(number, handler)


def _device_variables(node: Node, threads: int) -> dict[str, str]:
    if node.gpu is not None:
        # FlashInfer's sampler is compiled at its first use, which needs a whole CUDA toolkit.
        return {"CUDA_VISIBLE_DEVICES": node.gpu, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


def _group(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
