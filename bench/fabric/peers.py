"""kvlane.fabric in turns with its peers: `kvlane bench fabric`, with NIXL, Mooncake and iperf3 beside it.

    python bench/fabric/peers.py --rounds 5 --tls

Its flags are those of `kvlane bench fabric`. With `--side NAME` it is a process of a peer, which the benchmark starts.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy

from kvlane.bench import extra, fabric
from kvlane.bench.children import end_with_parent
from kvlane.bench.fabric import BARE, MIB, Field, Goal, System
from kvlane.bench.fabric_sides import SIDES, Cell, Operation, Side, be
from kvlane.bench.memory import GpuMemory, allocate

NIXL_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
# In the environment of a side: its near agent has a progress thread too.
NIXL_NEAR_THREAD = "KVLANE_BENCH_NIXL_NEAR_THREAD"
# How to get them.
INSTALL = {
    "nixl": "pip install --no-deps nixl-cu12==1.5.1 numpy; for the memory of GPUs nixl-cu12 or nixl-cu13, and torch",
    "mooncake": "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1; apt-get install libibverbs1 libnuma1",
    "iperf3": "apt-get install iperf3",
}
# So much goes through one run of iperf3.
_STREAM_BYTES = 1 << 30


class Nixl(Side):
    """NIXL agents with the UCX backend. Which transport UCX takes is up to the environment."""

    def open(self, size: int, memory: str = "host", **options: Any) -> None:
        """Allocates memory of the host, all of it touched, or of a GPU."""
        self.memory = allocate(size, memory)
        self.kind, self.device = "DRAM", 0
        if isinstance(self.memory, GpuMemory):
            self.kind, self.device = "VRAM", int(memory.removeprefix("cuda:"))
            # UCX finds no GPU in a thread without a context; the second call makes it.
            torch: Any = importlib.import_module("torch")
            torch.cuda.set_device(self.device)
            torch.cuda.synchronize()
        self.start(**options)

    def start(self, near: bool, **_: Any) -> None:
        """An agent with the region registered."""
        api: Any = importlib.import_module(f"{nixl_module()}._api")
        # Between hosts' memory it is fastest so; a far agent without a progress thread would not answer.
        has_thread = not near or NIXL_NEAR_THREAD in os.environ
        settings = api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"])
        self.agent = api.nixl_agent(f"kvlane-bench-{os.getpid()}", settings)
        self.page_lists: list[Any] = []
        self.agent.register_memory([(self.memory.address, self.memory.size, self.device, "")], self.kind)

    def listen(self) -> str:
        """The agent's metadata and where its region is."""
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps([metadata, self.memory.address, self.device])

    def connect(self, address: str) -> None:
        """Connects to the other agent by its metadata."""
        metadata, self.remote, self.remote_device = json.loads(address)
        name: Any = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.name = name.decode() if isinstance(name, bytes) else name

    def operation(self, op: str, cell: Cell) -> Operation:
        """Post a handle that is made before and ask until it is done."""
        handles = [self._paged(op, cell)] if cell.pages > 1 else self._contiguous(op, cell)
        transfer, state_of = self.agent.transfer, self.agent.check_xfer_state

        def operate(number: int) -> None:
            handle = handles[number % len(handles)]
            state = transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise OSError(f"NIXL's {op} failed")
                state = state_of(handle)

        return operate

    def _contiguous(self, op: str, cell: Cell) -> list[Any]:
        def at(address: int, device: int) -> Any:
            return self.agent.get_xfer_descs([(address, cell.bytes, device)], self.kind)

        return [
            self.agent.initialize_xfer(
                op.upper(),
                at(self.memory.address + offset, self.device),
                at(self.remote + offset, self.remote_device),
                self.name,
            )
            for offset in cell.offsets(self.memory.size)
        ]

    def _paged(self, op: str, cell: Cell) -> Any:
        def pages(address: int, device: int) -> list[tuple[int, int, int]]:
            length = cell.page_bytes
            return [(address + page * length, length, device) for page in range(cell.pages)]

        near_pages, far_pages = (
            pages(self.memory.address, self.device),
            pages(self.remote, self.remote_device),
        )
        lists = (
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", near_pages, self.kind),
            self.agent.prep_xfer_dlist(self.name, far_pages, self.kind),
        )
        # Their destructors release them, also in the hands of a transfer.
        self.page_lists.append(lists)
        near = numpy.array(cell.order(True), dtype=numpy.int32)
        far = numpy.array(cell.order(False), dtype=numpy.int32)
        return self.agent.make_prepped_xfer(op.upper(), lists[0], near, lists[1], far)


@cache
def nixl_module() -> str | None:
    """The NIXL package that is installed."""
    return next((name for name in NIXL_MODULES if importlib.util.find_spec(name)), None)


class Mooncake(Side):
    """Mooncake's Transfer Engine over TCP, which finds its peer by an address. Its queues are up to the environment."""

    def start(self, **_: Any) -> None:
        """An engine with the region registered."""
        self.engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        self._demand("start", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self._demand("register memory", self.engine.register_memory(self.memory.address, self.memory.size))

    def listen(self) -> str:
        """The engine's address and where its region is."""
        return json.dumps([f"127.0.0.1:{self.engine.get_rpc_port()}", self.memory.address])

    def connect(self, address: str) -> None:
        """Takes the other engine's address; the first operation connects."""
        self.target, self.remote = json.loads(address)

    def operation(self, op: str, cell: Cell) -> Operation:
        """One call, which returns when all of it is done."""
        target, demand = self.target, self._demand
        if cell.pages > 1:
            what = f"{op} {cell.pages} pages"
            move_pages = getattr(self.engine, f"batch_transfer_sync_{op}")
            near = [self.memory.address + page * cell.page_bytes for page in cell.order(True)]
            far = [self.remote + page * cell.page_bytes for page in cell.order(False)]
            lengths = [cell.page_bytes] * cell.pages
            return lambda _: demand(what, move_pages(target, near, far, lengths))
        what = f"{op} {cell.bytes} bytes"
        move = getattr(self.engine, f"transfer_sync_{op}")
        offsets = cell.offsets(self.memory.size)
        pairs = [(self.memory.address + offset, self.remote + offset) for offset in offsets]
        return lambda number: demand(what, move(target, *pairs[number % len(pairs)], cell.bytes))

    def _demand(self, what: str, status: int) -> None:
        if status:
            raise OSError(f"Mooncake was to {what} and answered {status}")


class Iperf3(Side):
    """The program of that name, both sides of it: one stream, of which it tells nothing but the rate."""

    is_both = True
    patterns = ("stream",)

    def open(self, size: int, **options: Any) -> None:
        """It has memory of its own."""

    def once(self, op: str, cell: Cell) -> None:
        """Nothing stays connected."""

    def measure(self, op: str, cell: Cell, warm_up: int, count: int) -> dict[str, float]:
        """The rate at which one run receives; `cell.bytes` go into each call of the socket."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        server = ["iperf3", "-s", "-1", "-p", port, "--bind", "127.0.0.1", "--forceflush"]
        client = [
            "iperf3",
            "-c",
            "127.0.0.1",
            "-p",
            port,
            "--json",
            "-l",
            str(cell.bytes),
            "-n",
            str(_STREAM_BYTES),
        ]
        with subprocess.Popen(
            server, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
        ) as listener:
            assert listener.stdout is not None
            while not (line := listener.stdout.readline()).startswith("Server listening"):
                if not line:
                    raise OSError("iperf3 ended before it listened")
            try:
                said = subprocess.run(
                    client + (["-R"] if op == "read" else []),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    preexec_fn=end_with_parent,
                ).stdout
            finally:
                listener.kill()
        result = json.loads(said)
        if "error" in result:
            raise OSError(f"iperf3: {result['error']}")
        return {"gb_per_s": result["end"]["sum_received"]["bits_per_second"] / 8e9}


def missing(name: str) -> str | None:
    """Why the system of this name cannot be measured here; None if it can."""
    if name == "nixl":
        return None if nixl_module() else "there is no NIXL beside this Python"
    if name == "mooncake":
        return _mooncake_missing()
    return "there is no such program" if name == "iperf3" and not shutil.which("iperf3") else None


@cache
def _mooncake_missing() -> str | None:
    if not importlib.util.find_spec("mooncake"):
        return "there is no Mooncake beside this Python"
    # Elsewhere: it brings libraries and their logging into a process.
    probe = [sys.executable, "-c", "import mooncake.engine"]
    done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else None


def _goals() -> tuple[Goal, ...]:
    """Least kvlane / peer, over TCP, between processes of one host, and between GPUs."""
    tcp: list[tuple[str, int | None, str, float | None]] = [
        ("write", MIB, "nixl-tcp", 1.0),
        ("write", 16 * MIB, "nixl-tcp", 1.0),
        ("write", None, "nixl-tcp", 1.0),
        ("read", MIB, "nixl-tcp", 2.5),
        ("read", 16 * MIB, "nixl-tcp", 2.5),
        ("read", None, "nixl-tcp", 2.5),
    ]
    sizes = (MIB, 16 * MIB, None)
    tcp += [(op, size, "mooncake" if size else "mooncake-tuned", 1.0) for op in fabric.OPS for size in sizes]
    tcp += [(op, size, "iperf3", None) for op in fabric.OPS for size in (16 * MIB, None)]
    cma = [
        (op, size, "nixl-cma", goal)
        for op in fabric.OPS
        for size, goal in zip(sizes, (1.0, 1.0, 1.25), strict=True)
    ]
    cuda = [
        (op, size, other, goal if op == "read" else None)
        for other in ("nixl-cuda", "nixl-cuda-thread")
        for op in fabric.OPS
        for size, goal in ((MIB, 2.5), (16 * MIB, None), (None, 30.0))
    ]
    rows = {"kvlane": tcp, "kvlane-cma": cma, "kvlane-cuda": cuda}
    return tuple(Goal(own, *each) for own, goals in rows.items() for each in goals)


FIELD = Field(
    systems={
        **BARE.systems,
        "nixl-tcp": System("nixl", "tcp", {"UCX_TLS": "tcp"}),
        "nixl-cma": System("nixl", "cma"),
        "nixl-cuda": System("nixl", "cuda"),
        "nixl-cuda-thread": System("nixl", "cuda", {NIXL_NEAR_THREAD: "1"}),
        "mooncake": System("mooncake", "tcp"),
        # Its default queues do not take an operation of 4,096 pages.
        "mooncake-tuned": System(
            "mooncake",
            "tcp",
            {
                "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",
                "MC_TCP_ENABLE_CONNECTION_POOL": "1",
                "MC_TCP_SLICE_SIZE": str(MIB),
            },
        ),
        "iperf3": System("iperf3", "tcp"),
    },
    sides={**SIDES, "nixl": Nixl, "mooncake": Mooncake, "iperf3": Iperf3},
    program=(str(Path(__file__).resolve()), "--side"),
    tuning=("UCX_TLS", "MC_"),
    goals=(*BARE.goals, *_goals()),
    latency_others=(("kvlane", "nixl-tcp"), ("kvlane", "mooncake"), ("kvlane-cma", "nixl-cma")),
    not_of_gpus={
        **BARE.not_of_gpus,
        "mooncake": "the package has no CUDA",
        "iperf3": "it has memory of its own",
    },
    missing=missing,
    install=INSTALL,
    note=(
        "NIXL posts handles made before; nixl-cma is what UCX takes by itself on one host. mooncake is Mooncake's "
        "Transfer Engine as it comes, mooncake-tuned has longer queues, pooled connections and slices of 1 MiB. iperf3 "
        "is one stream of writes of 1 MiB, which nobody answers one by one."
    ),
    gpu_note=(
        "NIXL posts handles made before, by what UCX takes between GPUs of one host; nixl-cuda-thread has a progress "
        "thread on the near side too."
    ),
)


def main(words: list[str]) -> int:
    """Measure, or be a side."""
    if words[:1] == ["--side"]:
        be(FIELD.sides[words[1]])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    fabric.add_arguments(parser, FIELD)
    arguments = parser.parse_args(words)
    if lacks := extra.lacks():
        sys.exit(lacks)
    return fabric.run(arguments, FIELD)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
