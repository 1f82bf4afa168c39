"""The processes that `kvlane bench fabric` starts: for each system a near and a far side. Those of peers are in
bench/fabric/peers.py, a script beside the package.
"""

from __future__ import annotations

import base64
import ctypes
import os
import random
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from kvlane import fabric
from kvlane.bench import report
from kvlane.bench.children import serve_commands
from kvlane.bench.extra import numpy
from kvlane.bench.memory import GpuMemory, Memory, allocate

ADDRESS_PREFIX = "kvf1:"
POISON = 0xA5
# Single operations step through the region in so many steps, so that they do not find their bytes in a cache.
_STEPS = 256
_libc = ctypes.CDLL(None)
# How long a carrier may take until it is up.
CARRIER_SECONDS = 10.0
# Ranges in one call of process_vm.
_RANGES = 1024
_REGION = struct.Struct("<QQ")
_RUN = struct.Struct("<QQQ")
# A request of the socket loop: twice the bytes of an operation, plus one for a write; then the number of writes, or the
# offset to read at.
_REQUEST = struct.Struct("<QQ")


class _Range(ctypes.Structure):
    """A struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


Operation = Callable[[int], None]
Runs = list[tuple[int, int, int]]


class Cell(NamedTuple):
    """The bytes of one operation: `bytes` in one piece, or as many in `pages` pages."""

    pattern: str
    bytes: int
    pages: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.bytes // self.pages

    def offsets(self, region: int) -> list[int]:
        """Offsets of single operations in one piece, the same on both sides; taken in turns."""
        steps = max(1, min(_STEPS, region // self.bytes))
        # Multiples of 64, so that all addresses are aligned.
        step = region // steps // 64 * 64 if steps > 1 else 0
        return [each * step for each in (*range(1, steps), 0)]

    def order(self, near: bool) -> list[int]:
        """The shuffled pages of one side."""
        order = list(range(self.pages))
        random.Random(f"{near} {self.pages}").shuffle(order)
        return order

    def first_runs(self, region: int, whole: bool) -> Runs:
        """The first operation: offset near, offset far, length. `whole`: pages go in one piece."""
        if self.pages == 1 or whole:
            offset = self.offsets(region)[0]
            return [(offset, offset, self.bytes)]
        length = self.page_bytes
        pairs = zip(self.order(True), self.order(False), strict=True)
        return [(near * length, far * length, length) for near, far in pairs]


class Side:
    """One process of a system. The benchmark calls the public methods by commands."""

    moves_pages = True
    # True if one process has both sides.
    is_both = False
    # The patterns of the cells that the system can do.
    patterns: tuple[str, ...] = ("contiguous", "paged")

    def __init__(self) -> None:
        self.memory: Any = None
        self._prepared: dict[tuple[str, Cell], Operation] = {}

    def open(self, size: int, **options: Any) -> None:
        """Allocates memory, and touches all of it. `options` are the system's own."""
        self.memory = Memory(size, huge=True)
        self.start(**options)

    def start(self, **options: Any) -> None:
        """Prepares what the system needs in this process."""

    def listen(self) -> str:
        """The address of the far side."""
        raise NotImplementedError

    def connect(self, address: str) -> None:
        """Connects the near side to that far side."""
        raise NotImplementedError

    def operation(self, op: str, cell: Cell) -> Operation:
        """A function that does operation number N from start to end. Made once, so that preparation is not measured."""
        raise NotImplementedError

    def announce(self, op: str, cell: Cell, count: int) -> None:
        """Called before `count` operations."""

    def memory_of(self, far: bool) -> Any:
        """This side's memory. `far`: the other side's, if one process has both."""
        assert not far, "this process has no far memory"
        return self.memory

    def bytes_of(self, far: bool) -> numpy.ndarray[Any, Any]:
        """The bytes of the host's memory."""
        return self.memory_of(far).words.view(numpy.uint8)

    def measure(self, op: str, cell: Cell, warm_up: int, count: int) -> dict[str, float]:
        """Times single operations one after the other. The first `warm_up` do not count."""
        operate = self._operation(op, cell)
        self.announce(op, cell, warm_up + count)
        seconds: list[float] = []
        for number in range(warm_up + count):
            start = time.perf_counter()
            operate(number)
            seconds.append(time.perf_counter() - start)
        counted = seconds[warm_up:]
        times = report.summary(counted)
        return {
            "gb_per_s": cell.bytes * count / sum(counted) / 1e9,
            "p50_us": times["p50"] * 1e6,
            "p99_us": times["p99"] * 1e6,
        }

    def once(self, op: str, cell: Cell) -> None:
        """Does the first operation, without measuring it."""
        operate = self._operation(op, cell)
        self.announce(op, cell, 1)
        operate(0)

    def fill(self, start: int, end: int, salt: int, far: bool = False) -> None:
        """Fills memory with bytes that differ by place and by salt."""
        self.memory_of(far).put(start, _pattern(start, end - start, salt))

    def poison(self, start: int, end: int, far: bool = False) -> None:
        """Fills memory with bytes that no transfer brings."""
        self.memory_of(far).put(start, numpy.full(end - start, POISON, dtype=numpy.uint8))

    def wrong(self, start: int, end: int, salt: int, runs: Runs, far: bool = False) -> int | None:
        """The first wrong place from `start` to `end`. Where the runs (offset there, offset here, length) brought
        bytes, they must equal memory filled with `salt`. Elsewhere the poison must still stand."""
        expected = numpy.full(end - start, POISON, dtype=numpy.uint8)
        for source, target, length in runs:
            expected[target - start : target - start + length] = _pattern(source, length, salt)
        differs = self.memory_of(far).get(start, end) != expected
        return start + int(differs.argmax()) if differs.any() else None

    def _operation(self, op: str, cell: Cell) -> Operation:
        if (op, cell) not in self._prepared:
            self._prepared[op, cell] = self.operation(op, cell)
        return self._prepared[op, cell]


def _pattern(offset: int, length: int, salt: int) -> numpy.ndarray[Any, Any]:
    first = offset // 8
    words = numpy.arange(first, (offset + length + 7) // 8, dtype=numpy.uint64)
    words *= numpy.uint64(0x9E37_79B9_7F4A_7C15)
    words ^= numpy.uint64(salt)
    return words.view(numpy.uint8)[offset - 8 * first :][:length]


class Kvlane(Side):
    """kvlane.fabric."""

    def open(self, size: int, memory: str = "host", **options: Any) -> None:
        """Allocates memory of the host, all of it touched, or of a GPU."""
        self.memory = allocate(size, memory)
        options.pop("far_memory", None)
        self.start(**options)

    def start(
        self,
        token: str = "",
        connections: int = 1,
        socket_threads: int = 1,
        listen: Sequence[str] = ("127.0.0.1:0",),
        tls: Sequence[str] | None = None,
        transport: str = "auto",
        checksums: bool = True,
        **_: Any,
    ) -> None:
        """Starts an engine, and registers the memory."""
        credentials = fabric.Tls(*tls) if tls else None
        self.transport = transport
        self.engine = fabric.Engine(
            listen,
            token,
            connections,
            transport=transport,
            socket_threads=socket_threads,
            checksums=checksums,
            tls=credentials,
        )
        device = self.memory.device if isinstance(self.memory, GpuMemory) else None
        self.region = self.engine.register(self.memory.address, self.memory.size, device=device)

    def listen(self) -> str:
        """Descriptor, region number and region length."""
        packed = _REGION.pack(self.region.number, self.region.length) + self.engine.describe()
        return ADDRESS_PREFIX + base64.urlsafe_b64encode(packed).decode()

    def connect(self, address: str) -> None:
        """Connects to the other side by its descriptor, and waits until its carrier is there."""
        descriptor, self.remote, length = unpack_address(address)
        if length < self.memory.size:
            raise ValueError(
                f"the server's region has {length} bytes, these sizes and pages need {self.memory.size}: "
                "give the server the same --sizes, --pages and --page-bytes"
            )
        self.peer = self.engine.connect(descriptor)
        if self.transport in ("cma", "cuda"):
            self._wait_for_carrier()

    def _wait_for_carrier(self) -> None:
        deadline = time.monotonic() + CARRIER_SECONDS
        while not any(path.carrier == self.transport and path.up for path in self.peer.paths):
            if time.monotonic() > deadline:
                troubles = [f"{path.carrier}: {path.trouble}" for path in self.peer.paths if path.trouble]
                raise OSError(
                    f"bytes do not go by {self.transport}: {'; '.join(troubles) or 'no reason is known'}"
                )
            time.sleep(0.001)

    def operation(self, op: str, cell: Cell) -> Operation:
        """Begins a transfer, and waits for it."""
        if cell.pages > 1:
            move_pages = self.peer.write_pages if op == "write" else self.peer.read_pages
            near = fabric.Pages(self.region, cell.order(True), cell.page_bytes)
            far = fabric.Pages(self.remote, cell.order(False), cell.page_bytes)
            return lambda _: move_pages(cell.page_bytes, near, far).wait()
        move = self.peer.write if op == "write" else self.peer.read
        region, remote = self.region, self.remote
        runs = [_RUN.pack(offset, offset, cell.bytes) for offset in cell.offsets(self.memory.size)]
        return lambda number: move(region, remote, runs[number % len(runs)]).wait()

    def move(self, op: str, start: int, end: int) -> None:
        """Moves one range between the same offsets of both sides, in one transfer."""
        move = self.peer.write if op == "write" else self.peer.read
        move(self.region, self.remote, [(start, start, end - start)]).wait()


def unpack_address(address: str) -> tuple[bytes, int, int]:
    """Descriptor, region number, region length. ValueError with a sentence."""
    try:
        if not address.startswith(ADDRESS_PREFIX):
            raise ValueError("prefix")
        packed = base64.b64decode(address[len(ADDRESS_PREFIX) :], altchars=b"-_", validate=True)
        number, length = _REGION.unpack_from(packed)
    except (ValueError, struct.error):
        raise ValueError(
            f"the address is not one that `kvlane bench fabric --server` printed: {address}"
        ) from None
    return packed[_REGION.size :], number, length


class Loop(Side):
    """Plain blocking sockets."""

    moves_pages = False

    def listen(self) -> str:
        """The port of a listener on loopback. A thread serves one near side."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def connect(self, address: str) -> None:
        """Connects to the other side by its port."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def announce(self, op: str, cell: Cell, count: int) -> None:
        """Tells the far side how many writes come, so that each write is only its bytes."""
        if op == "write":
            self.socket.sendall(_REQUEST.pack(cell.bytes * 2 + 1, count))

    def operation(self, op: str, cell: Cell) -> Operation:
        """A write sends the bytes and receives one byte. A read sends a request and receives the bytes."""
        offsets = cell.offsets(self.memory.size)
        views = self._views(offsets, cell.bytes)
        send, receive = self.socket.sendall, self.socket.recv_into
        answer = bytearray(1)

        def write(number: int) -> None:
            send(views[number % len(views)])
            if not receive(answer):
                raise ConnectionError("the other side of the socket loop ended")

        requests = [_REQUEST.pack(cell.bytes * 2, offset) for offset in offsets]

        def read(number: int) -> None:
            send(requests[number % len(requests)])
            _receive(self.socket, views[number % len(views)])

        return write if op == "write" else read

    def _views(self, offsets: Sequence[int], length: int) -> list[memoryview]:
        whole = memoryview(self.bytes_of(False)).cast("B")
        return [whole[offset : offset + length] for offset in offsets]

    def _serve(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = memoryview(bytearray(_REQUEST.size))
        while True:
            _receive(near, request)
            size, argument = _REQUEST.unpack(request)
            if size % 2 == 0:
                near.sendall(self._views([argument], size // 2)[0])
                continue
            cell = Cell("contiguous", size // 2)
            views = self._views(cell.offsets(self.memory.size), cell.bytes)
            for number in range(argument):
                _receive(near, views[number % len(views)])
                near.sendall(b"\1")


def _receive(source: socket.socket, rest: memoryview) -> None:
    while rest:
        got = source.recv_into(rest)
        if not got:
            raise ConnectionError("the other side of the socket loop ended")
        rest = rest[got:]


class ProcessVm(Side):
    """The bare system call: one for each operation, or as many as its pages need. The far side only owns memory."""

    def listen(self) -> str:
        """The pid, and the address of the memory."""
        return f"{os.getpid()} {self.memory.address}"

    def connect(self, address: str) -> None:
        """Takes the pid and the address of the other side's memory."""
        self.pid, self.remote = map(int, address.split())

    def operation(self, op: str, cell: Cell) -> Operation:
        """Calls of at most 1,024 ranges, the kernel's limit."""
        call = _libc.process_vm_writev if op == "write" else _libc.process_vm_readv
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
        whole: list[list[tuple[int, int]]]
        if cell.pages > 1:
            pairs = zip(cell.order(True), cell.order(False), strict=True)
            whole = [[(near * cell.page_bytes, far * cell.page_bytes) for near, far in pairs]]
        else:
            whole = [[(offset, offset)] for offset in cell.offsets(self.memory.size)]
        prepared = [self._calls(places, cell.page_bytes) for places in whole]

        def operate(number: int) -> None:
            for near, far, count, size in prepared[number % len(prepared)]:
                if call(self.pid, near, count, far, count, 0) != size:
                    raise OSError(ctypes.get_errno(), f"process_vm {op} failed")

        return operate

    def _calls(self, places: list[tuple[int, int]], length: int) -> list[tuple[Any, Any, int, int]]:
        calls = []
        for start in range(0, len(places), _RANGES):
            some = places[start : start + _RANGES]
            near, far = (
                (_Range * len(some))(*[(base + place[side], length) for place in some])
                for side, base in enumerate((self.memory.address, self.remote))
            )
            calls.append((near, far, len(some), len(some) * length))
        return calls


class Memcpy(Side):
    """numpy's copy between two memories of one process."""

    moves_pages = False
    is_both = True

    def start(self, **_: Any) -> None:
        """The other memory."""
        self.far_memory = Memory(self.memory.size, huge=True)

    def memory_of(self, far: bool) -> Any:
        """Either memory."""
        return self.far_memory if far else self.memory

    def operation(self, op: str, cell: Cell) -> Operation:
        """One copy."""
        offsets = cell.offsets(self.memory.size)
        near, far = ([self.bytes_of(each)[at : at + cell.bytes] for at in offsets] for each in (False, True))
        targets, sources = (far, near) if op == "write" else (near, far)
        copy = numpy.copyto

        def operate(number: int) -> None:
            copy(targets[number % len(targets)], sources[number % len(sources)])

        return operate


class GpuCopies(Side):
    """Copies bytes from one memory of a GPU to another through the host's pinned memory, in one process: a transfer
    without its network."""

    moves_pages = False
    is_both = True

    def open(self, size: int, memory: str = "cuda:0", far_memory: str = "cuda:0", **options: Any) -> None:
        """Two memories."""
        self.memory, self.far_memory = GpuMemory(size, memory), GpuMemory(size, far_memory)

    def memory_of(self, far: bool) -> Any:
        """Either memory."""
        return self.far_memory if far else self.memory

    def operation(self, op: str, cell: Cell) -> Operation:
        """A loop of copies out and in."""
        offsets = cell.offsets(self.memory.size)
        source, target = self.memory.core, self.far_memory.core
        if op == "read":
            source, target = target, source

        def operate(number: int) -> None:
            offset = offsets[number % len(offsets)]
            source.copy_to(offset, target, offset, cell.bytes)

        return operate


class PeerCopy(Side):
    """Copies bytes of one GPU's memory into another's, or into the same one's, in one process: in one piece by a copy
    engine, pages by the copy kernel. No transfer between processes is faster."""

    is_both = True
    # The copy kernel's thread blocks: enough to fill a link.
    BLOCKS = 16

    def open(self, size: int, memory: str = "cuda:0", far_memory: str = "cuda:0", **options: Any) -> None:
        """The two memories."""
        self.memory, self.far_memory = GpuMemory(size, memory), GpuMemory(size, far_memory)

    def memory_of(self, far: bool) -> Any:
        """Either memory."""
        return self.far_memory if far else self.memory

    def operation(self, op: str, cell: Cell) -> Operation:
        """One call of the driver for a piece, one kernel for pages."""
        near, far = self.memory.core, self.far_memory.core
        target, source = (far, near) if op == "write" else (near, far)
        if cell.pages > 1:
            length = cell.page_bytes
            pairs = zip(cell.order(op == "read"), cell.order(op == "write"), strict=True)
            runs = [(to * length, at * length, length) for to, at in pairs]
            return lambda _: target.copy_from(source, runs, self.BLOCKS)
        offsets = cell.offsets(self.memory.size)
        pieces = [[(offset, offset, cell.bytes)] for offset in offsets]
        return lambda number: target.copy_from(source, pieces[number % len(pieces)], 0)


SIDES: dict[str, type[Side]] = {
    "kvlane": Kvlane,
    "loop": Loop,
    "gpu-copies": GpuCopies,
    "peer-copy": PeerCopy,
    "process_vm": ProcessVm,
    "memcpy": Memcpy,
}


def be(side: type[Side]) -> NoReturn:
    """Serves as a process of that side, and ends without unloading libraries, because some peers crash there."""
    status = 1
    try:
        serve_commands(side(), _with_cell)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _with_cell(command: dict[str, Any]) -> None:
    if "cell" in command:
        command["cell"] = Cell(*command["cell"])


if __name__ == "__main__":
    be(SIDES[sys.argv[1]])
