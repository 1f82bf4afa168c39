"""The SSD tier in turns with its peers: `kvlane bench ssd`, with fio and NIXL's POSIX plugin beside it.

    python bench/ssd/peers.py PATH --rounds 8

Its flags are those of `kvlane bench ssd`. With `--phase JSON` it is a process of NIXL, which does one phase and prints
what it took.
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from kvlane.bench import extra, report, ssd
from kvlane.bench.memory import Memory
from kvlane.bench.ssd import Peer, Phase

NIXL_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_TIMEOUT_S = 600


def nixl_module() -> str | None:
    """The NIXL package that is installed."""
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
    if phase.op == "read":
        command.append("--readonly")
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
    """Figures of NIXL in a process of its own, because it crashes when it is unloaded."""
    command = [sys.executable, str(Path(__file__).resolve()), "--phase", json.dumps(asdict(phase))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    try:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        raise OSError(f"NIXL failed: {(done.stderr or done.stdout).strip()[-500:]}") from None


def _nixl_here(phase: Phase) -> dict[str, float]:
    """Handles of one block each, made before; as many are posted as the depth says, and asked until they are done."""
    api: Any = importlib.import_module(f"{nixl_module()}._api")
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


def _be_nixl(asked: dict[str, Any]) -> NoReturn:
    """Do one phase in this process, print the result, and end without unloading NIXL, which crashes there."""
    status = 1
    try:
        answers = os.fdopen(os.dup(1), "w")
        # Libraries print what they like to stdout.
        os.dup2(2, 1)
        phase = Phase(paths=tuple(asked.pop("paths")), **asked)
        answers.write(json.dumps(_nixl_here(phase)) + "\n")
        answers.flush()
        status = 0
    except Exception as error:  # noqa: BLE001
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


PEERS = {
    "fio": Peer(
        does=fio,
        missing=lambda: None if shutil.which("fio") else "there is no such program",
        install="apt-get install fio",
        p99_goal=1.2,
    ),
    "nixl": Peer(
        does=nixl,
        missing=lambda: None if nixl_module() else "there is no NIXL beside this Python",
        install="pip install --no-deps nixl-cu12==1.5.1 numpy",
        has_huge_pages=True,
    ),
}
NOTE = (
    "The peers verify nothing; their CPU is that of a whole process, too. fio: io_uring, one job; NIXL: the POSIX "
    "plugin as it comes, a handle for each block, asked all the time, its memory in pages as the pool's."
)


def main(words: list[str]) -> int:
    """Measure, or be a process of NIXL."""
    if words[:1] == ["--phase"]:
        _be_nixl(json.loads(words[1]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ssd.add_arguments(parser, PEERS)
    arguments = parser.parse_args(words)
    if lacks := extra.lacks():
        sys.exit(lacks)
    return ssd.run(arguments, PEERS, NOTE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
