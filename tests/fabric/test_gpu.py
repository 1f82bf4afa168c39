"""kvlane.fabric with the memory of GPUs, fake ones: what can be registered, what arrives, what fails and how."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest

from kvlane import _core, fabric
from kvlane.bench.memory import GpuMemory

pytestmark = pytest.mark.fake_gpus

SIZE = 1 << 20
PATIENCE = 30.0

# The other process: memory of a GPU, a counter; then it says what it is asked for.
OTHER = """
import hashlib, sys
import numpy
from kvlane import fabric
from kvlane.bench.memory import GpuMemory
memory = GpuMemory(1 << 20, "cuda:1")
memory.put(0, numpy.full(1 << 20, ord("o"), dtype=numpy.uint8))
engine = fabric.Engine()
region = engine.register(memory.core)
counter = engine.counter(7)
print(engine.describe().hex(), region.number, counter.generation, flush=True)
for line in sys.stdin:
    match line.split():
        case ["wait", count]:
            print(counter.wait(int(count), 30), flush=True)
        case ["digest"]:
            print(hashlib.sha256(memory.get(0, 1 << 20).tobytes()).hexdigest(), flush=True)
"""


@pytest.fixture(autouse=True)
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")


class Other:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        descriptor, region, generation = self.heard().split()
        self.descriptor = bytes.fromhex(descriptor)
        self.region = int(region)
        self.notify = (7, int(generation))

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.heard()


@contextmanager
def other() -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Other(process)
    finally:
        process.kill()
        process.wait()


def digest(data: bytes | bytearray) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(("transport", "carrier"), [("cuda", "cuda"), ("tcp", "tcp-slots")])
def test_a_gpus_memory_goes_to_a_gpu_of_another_process_and_back(transport: str, carrier: str) -> None:
    source = numpy.random.default_rng(1).integers(0, 256, SIZE, dtype=numpy.uint8)
    memory = GpuMemory(SIZE, "cuda:0")
    memory.put(0, source)
    with other() as there, fabric.Engine(transport=transport) as engine:
        region = engine.register(memory.address, SIZE, device="cuda:0")
        peer = engine.connect(there.descriptor)
        expected = bytearray(b"o" * SIZE)
        runs = [(0, 100, 8193), (50_000, 20_000, 1), (60_000, 30_000, 300_000), (5, 5, 0)]
        for here, far, length in runs:
            expected[far : far + length] = source[here : here + length].tobytes()
        write = peer.write(region, there.region, runs, notify=there.notify)
        write.wait(PATIENCE)
        assert there.ask("wait 1") == "True"
        assert there.ask("digest") == digest(expected)
        pages, page = 64, 4096
        order = [(each * 37 + 5) % (SIZE // page) for each in range(pages)]
        local = fabric.Pages(region, order, stride=page)
        remote = fabric.Pages(there.region, range(pages), stride=page)
        read = peer.read_pages(page, local, remote)
        read.wait(PATIENCE)
        for far, here in enumerate(order):
            came = memory.get(here * page, (here + 1) * page)
            assert came.tobytes() == expected[far * page : (far + 1) * page]
        moved = sum(length for _, _, length in runs)
        assert (write.carried, read.carried) == ({carrier: moved}, {carrier: pages * page})
        staged = (pages * page, moved, 0) if transport == "tcp" else (0, 0, 0)
        assert engine.staged == fabric.Staged(*staged)
        region.unregister()


def test_a_gpus_memory_comes_into_the_hosts_through_sockets() -> None:
    with other() as there, fabric.Engine() as engine:
        host = bytearray(SIZE)
        peer = engine.connect(there.descriptor)
        read = peer.read(engine.register(host), there.region, [(0, 0, SIZE)])
        read.wait(PATIENCE)
        assert host == b"o" * SIZE and read.carried == {"tcp-slots": SIZE}


class Tensor:
    """As torch's: it says where it is."""

    def __init__(self, memory: GpuMemory, device: str) -> None:
        self.memory, self.device, self.nbytes = memory, device, memory.size

    def data_ptr(self) -> int:
        return self.memory.address

    def is_contiguous(self) -> bool:
        return True


class CupyDevice:
    id = 1


class Array:
    """As cupy's."""

    def __init__(self, memory: GpuMemory, **interface: Any) -> None:
        self.device = CupyDevice()
        usual = {"shape": (4, SIZE // 16), "typestr": "<f4", "data": (memory.address, False), "version": 3}
        self.__cuda_array_interface__ = usual | interface


def test_tensors_and_arrays_of_gpus_say_what_is_needed() -> None:
    memory = GpuMemory(SIZE, "cuda:1")
    with fabric.Engine() as engine:
        for each in (memory.core, Tensor(memory, "cuda:1"), Array(memory)):
            region = engine.register(each)
            assert region.length == SIZE
            region.unregister()
        assert engine.register(Tensor(memory, "cuda:1"), length=10, device="cuda:1").length == 10
        with pytest.raises(ValueError, match="said to be on cuda:0"):
            engine.register(Tensor(memory, "cuda:1"), device="cuda:0")
        with pytest.raises(ValueError, match="contiguous"):
            engine.register(Array(memory, strides=(8, 4)))
        with pytest.raises(ValueError, match="writable"):
            engine.register(Array(memory, data=(memory.address, True)))
        with pytest.raises(ValueError, match="mps"):
            engine.register(Tensor(memory, "mps:0"))
        with pytest.raises(ValueError, match="the host's"):
            engine.register(bytearray(10), device="cuda:0")


def test_memory_that_no_gpu_has_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GpuMemory(SIZE, "cuda:0")
    with fabric.Engine() as engine:
        with pytest.raises(fabric.GpuError, match="there is no GPU 9"):
            engine.register(memory.address, SIZE, device="cuda:9")
        with pytest.raises(fabric.GpuError, match="CUDA_ERROR"):
            engine.register(4096, SIZE, device="cuda:0")
        monkeypatch.setenv("KVLANE_GPU_DRIVER", "off")
        with pytest.raises(fabric.GpuError, match="KVLANE_GPU_DRIVER is off"):
            engine.register(memory.address, SIZE, device="cuda:0")
        with pytest.raises(OSError, match="off"):
            _core.GpuMemory(0, SIZE)
        # The host's memory needs none.
        engine.register(bytearray(10))


def test_where_cma_is_required_a_gpus_memory_is_refused() -> None:
    memory = GpuMemory(SIZE, "cuda:0")
    with other() as there, fabric.Engine(transport="cma") as engine:
        with pytest.raises(ValueError, match="cannot go by cma"):
            engine.register(memory.core)
        region = engine.register(bytearray(10))
        peer = engine.connect(there.descriptor)
        with pytest.raises(ValueError, match="between memory of the host here and of a GPU at the peer"):
            peer.write(region, there.region, [(0, 0, 10)])
