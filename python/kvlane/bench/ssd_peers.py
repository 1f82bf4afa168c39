"""What `kvlane bench ssd` compares with: fio, and NIXL's POSIX plugin in a process of its own.

As a program it is that process: it does one phase, {"op": ..., ...} as its argument, and prints the result.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.memory import Memory

NIXL_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
INSTALL = {
    "fio": "apt-get install fio",
    "nixl": "pip install --no-deps nixl-cu12==1.5.1 numpy",
}
_TIMEOUT_S = 600


@dataclass(frozen=True)
class Phase:
    """Blocks that are read, in an order without pattern, or written one behind the other; `depth` at once."""

    op: str
    paths: tuple[str, ...]
    file_bytes: int
    """Of each file."""
    block_bytes: int
    count: int
    depth: int
    huge: bool
    """Whether a peer has its memory in huge pages, where it can be told so."""
    first: int = 0
    """Of writes: the block of each file with which they begin."""


def missing(name: str) -> str | None:
    """Why this peer cannot be measured here; None if it can."""
    if name == "fio":
        return None if shutil.which("fio") else "there is no such program"
    if name == "nixl":
        return None if _nixl_module() else "there is no NIXL beside this Python"
    return None


def _nixl_module() -> str | None:
    return next((name for name in NIXL_MODULES if importlib.util.find_spec(name)), None)


def fio(phase: Phase) -> dict[str, float]:
    """By io_uring, direct, in one job that takes the files in turns, checking nothing."""
    command = [
        "fio",
        "--name=kvlane",
        f"--filename={':'.join(path.replace(':', chr(92) + ':') for path in phase.paths)}",
        f"--filesize={phase.file_bytes}",
        f"--rw={'randread' if phase.op == 'read' else 'write'}",
        f"--bs={phase.block_bytes}",
        f"--io_size={phase.count * phase.block_bytes}",
        f"--iodepth={phase.depth}",
        "--ioengine=io_uring",
        "--direct=1",
        "--norandommap",
        "--lat_percentiles=1",
        "--fallocate=none",
        "--output-format=json",
        f"--offset={phase.first * phase.block_bytes}",
    ]
    if phase.huge and _reserved_huge_bytes() >= phase.depth * phase.block_bytes:
        command.append("--mem=shmhuge")
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    try:
        # Notes may stand before it.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if done.returncode or job["error"]:
            raise ValueError
    except (ValueError, LookupError):
        raise OSError(f"fio failed: {(done.stderr or done.stdout).strip()[-500:]}") from None
    part = job[phase.op]
    seconds = part["runtime"] / 1e3
    return {
        "gb_per_s": part["io_bytes"] / seconds / 1e9,
        "p50_us": part["lat_ns"]["percentile"]["50.000000"] / 1e3,
        "p99_us": part["lat_ns"]["percentile"]["99.000000"] / 1e3,
        "cpu_s_per_gb": (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds / (part["io_bytes"] / 1e9),
    }


def _reserved_huge_bytes() -> int:
    """Huge pages that are reserved (`vm.nr_hugepages`) and free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    return values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0) << 10


def nixl(phase: Phase) -> dict[str, float]:
    """Of a new process: NIXL crashes where it is unloaded."""
    command = [sys.executable, "-m", "kvlane.bench.ssd_peers", json.dumps(asdict(phase))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    try:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise OSError(f"NIXL failed: {(done.stderr or done.stdout).strip()[-500:]}") from None


def _nixl_here(phase: Phase) -> dict[str, float]:
    """Handles of one block each, made before; as many are posted as the depth says, and asked until they are done."""
    api: Any = importlib.import_module(f"{_nixl_module()}._api")
    name = f"kvlane-bench-{os.getpid()}"
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("POSIX", {})
    memory = Memory(phase.depth * phase.block_bytes, huge=phase.huge)
    memory.fill(1)
    flags = (os.O_RDONLY if phase.op == "read" else os.O_WRONLY) | os.O_DIRECT
    files = [os.open(path, flags) for path in phase.paths]
    agent.register_memory([(memory.address, memory.size, 0, "")], "DRAM")
    agent.register_memory([(0, phase.file_bytes, file, "") for file in files], "FILE")
    handles: list[list[Any]] = [[] for _ in range(phase.depth)]
    for number, (file, offset) in enumerate(_places(phase, files)):
        slot = number % phase.depth
        near = agent.get_xfer_descs(
            [(memory.address + slot * phase.block_bytes, phase.block_bytes, 0)], "DRAM"
        )
        far = agent.get_xfer_descs([(offset, phase.block_bytes, file)], "FILE")
        handles[slot].append(agent.initialize_xfer(phase.op.upper(), near, far, name))
    for each in handles:
        each.reverse()
    latencies: list[float] = []
    flying: dict[int, tuple[Any, float]] = {}

    def post(slot: int) -> None:
        if handles[slot]:
            handle, at = handles[slot].pop(), time.perf_counter()
            if agent.transfer(handle) == "ERR":
                raise OSError("NIXL did not take a transfer")
            flying[slot] = (handle, at)

    used = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    for slot in range(phase.depth):
        post(slot)
    while flying:
        for slot, (handle, at) in list(flying.items()):
            state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise OSError(f"NIXL's {phase.op} failed")
            if state == "DONE":
                latencies.append(time.perf_counter() - at)
                del flying[slot]
                post(slot)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    gb = phase.count * phase.block_bytes / 1e9
    times = report.summary(latencies)
    return {
        "gb_per_s": gb / seconds,
        "p50_us": times["p50"] * 1e6,
        "p99_us": times["p99"] * 1e6,
        "cpu_s_per_gb": (after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime) / gb,
    }


def _places(phase: Phase, files: Sequence[int]) -> list[tuple[int, int]]:
    """File and offset of each block: the files in turns."""
    source, blocks = random.Random(1), phase.file_bytes // phase.block_bytes
    of = [
        source.randrange(blocks) if phase.op == "read" else (phase.first + number // len(files)) % blocks
        for number in range(phase.count)
    ]
    return [(files[number % len(files)], block * phase.block_bytes) for number, block in enumerate(of)]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    status = 1
    try:
        answers = os.fdopen(os.dup(1), "w")
        # Libraries print what they like to stdout.
        os.dup2(2, 1)
        answers.write(json.dumps(_nixl_here(Phase(**asked | {"paths": tuple(asked["paths"])}))) + "\n")
        answers.flush()
        status = 0
    except Exception as error:  # noqa: BLE001
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # NIXL crashes when it is unloaded.
        os._exit(status)
