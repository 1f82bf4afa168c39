"""Moves bytes between registered memory of processes and hosts.

    from kvlane.fabric import Engine

    # the process that is written to
    engine = Engine()
    region = engine.register(bytearray(1 << 20))
    counter = engine.counter(7)
    send_somehow(engine.describe(), region.number, counter.generation)
    counter.wait(1)                                   # all bytes are there

    # the process that writes
    engine = Engine()
    region = engine.register(numpy_array)
    peer = engine.connect(descriptor)
    peer.write(region, remote_region, [(0, 0, 4096)], notify=(7, generation)).wait()

    # small things, without registered memory
    peer.send(b"which pages are free?").wait()
    answer = engine.receive(timeout=10)

    # or to several at once
    group = engine.group([peer, other_peer])
    group.scatter([Part(region, remote_region, runs, notify), ...]).wait()

Transfers are reliable and have no order among each other. A transfer's memory, on both sides, belongs to it until it
is over: `Transfer.wait` returned, or raised one of the errors below other than `StillMoving`. Lengths and offsets are
in bytes, times in seconds. No torch or numpy is needed; arrays and tensors in the memory of the host or of GPUs can be
registered as they are.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import struct
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple

from kvlane import _core

__all__ = [
    "Cancelled",
    "Counter",
    "DeadlineExceeded",
    "Engine",
    "EngineId",
    "FabricError",
    "GpuError",
    "GpuFailed",
    "Group",
    "GroupFailed",
    "GroupTransfer",
    "Message",
    "NoRoom",
    "Pages",
    "Part",
    "Path",
    "Peer",
    "PeerLost",
    "Refused",
    "Region",
    "Staged",
    "StillMoving",
    "Tls",
    "Transfer",
    "Window",
]

_RUN = struct.Struct("<QQQ")


class FabricError(Exception):
    """A transfer that failed. Nothing touches its memory any more."""


class Cancelled(FabricError):
    """`Transfer.cancel` ended the transfer."""


class DeadlineExceeded(FabricError, TimeoutError):
    """The transfer did not end within its `timeout`."""


class Refused(FabricError):
    """The peer does not share these bytes, or no longer does. Ask it for a new descriptor, and call `Peer.update`."""


class NoRoom(FabricError, TimeoutError):
    """The peer had no room for a message within its `timeout`, because it does not receive those that have arrived."""


class GpuFailed(FabricError):
    """The driver of a GPU, here or at the peer, could not copy the bytes. The log of that process says how."""


class GpuError(OSError):
    """Memory of a GPU cannot be registered: there is no driver, no such GPU, or it refuses; the text says which."""


class PeerLost(FabricError, ConnectionError):
    """The peer cannot be reached, or every connection broke that carried the transfer."""


class GroupFailed(FabricError):
    """The parts of some members failed, and all parts are over. `failures`: each failed member's error, by its place in
    the group."""

    def __init__(self, failures: dict[int, FabricError], members: int) -> None:
        each = "; ".join(f"member {member}: {failure}" for member, failure in failures.items())
        super().__init__(f"{len(failures)} of {members} members failed: {each}")
        self.failures = failures


class StillMoving(TimeoutError):
    """The wait timed out while the transfer goes on, so its memory still belongs to it."""


_FAILURES: dict[str, tuple[type[FabricError], str]] = {
    "cancelled": (Cancelled, "the transfer was cancelled"),
    "deadline": (DeadlineExceeded, "the transfer was not over by its deadline"),
    "room": (NoRoom, "the peer had no room for the message until its deadline"),
    "refused": (Refused, "the peer refused the transfer: it does not share these bytes, or not any more"),
    "gpu": (GpuFailed, "a GPU's driver, here or at the peer, could not copy the bytes"),
    "lost": (PeerLost, "the peer cannot be reached any more"),
    "breaks": (PeerLost, "every connection broke that carried the transfer"),
}


class Tls(NamedTuple):
    """PEM files that encrypt all connections of an engine (TLS 1.3). Each side of a connection shows a certificate that
    the other side's `authority` has signed. If a certificate limits its use, it must allow servers and clients. Names
    and addresses in certificates are not checked: any holder of one is let in to prove the token."""

    certificate: str | os.PathLike[str]
    """This process's certificate, followed by the intermediate certificates up to the authority."""
    key: str | os.PathLike[str]
    """The certificate's key, not encrypted."""
    authority: str | os.PathLike[str]
    """The certificates of the authorities that sign peers' certificates."""


class EngineId(NamedTuple):
    """An engine, and one start of it."""

    engine: int
    boot: int


class Message(NamedTuple):
    """A message of a peer."""

    sender: EngineId
    """As `Peer.id`."""
    data: bytes


class Staged(NamedTuple):
    """Bytes that went through pinned memory of the host, because no transport reached a GPU's memory itself."""

    to_gpus: int
    """Bytes copied into the memory of GPUs."""
    from_gpus: int
    """Bytes copied out of the memory of GPUs."""
    failed: int
    """Copies that a driver reported as failed."""


class Engine:
    """Memory, peers and transfers of this process.

    `listen`: addresses at which peers connect, HOST:PORT, port 0 for any. Each address is a path of its own for peers.
    An address that other hosts reach needs a `token`, which both sides have to give.
    `token`: an engine with a token trusts only engines with the same token. Without one, it trusts engines of this user
    on this host, by a secret in the user's runtime folder ($XDG_RUNTIME_DIR/kvlane or /tmp/kvlane-UID). If that folder
    is not this user's alone, the descriptor carries a secret, and the engine trusts any engine that has the descriptor.
    Both sides prove the secret or the token to each other before anything else.
    `connections`: connections to each address of a peer.
    `patience`: after so many seconds a peer that cannot be reached is lost, and transfers with it fail.
    `transport`: "auto" takes the best way that this process and a peer both have, and "tcp" only TCP. "cma" reaches
    only peers of this host whose memory may be read, "cuda" only GPU memory of peers of this host and user, from GPU
    memory here; `Peer.paths` says why others are not reached.
    `copy_threads`: most threads that copy between this process and others of its host, 1 to 64, including the one that
    waits. None takes one for each processor that this process may use, at most 4.
    `socket_threads`: threads of the engine that read and write sockets, 1 to 64. One moves a few GB/s. More of them
    serve several connections at once: those of several peers, several addresses, or more `connections`.
    `inbox_messages` and `inbox_bytes`: most messages, and bytes of them, that wait for `receive`: at least 1 and
    65,536. Peers that send more are told to try again later.
    `checksums`: bytes that cross sockets have checksums (crc32c). If bytes were changed on the way, they are not taken:
    the engine connects again, and sends again what was in flight on that connection. There are no checksums if one side
    has False, or with `tls`, which finds every change itself.
    `tls`: certificates, as a `Tls` or such a tuple. The engine does not talk to peers without certificates, as
    `Peer.paths` says, and all bytes go by TCP. ValueError names a file that cannot be used.

    An engine belongs to the process that made it. In a child that this process forks, calls of the engine and of all
    objects made by it raise RuntimeError, and closing it does nothing. Make another engine there.
    """

    def __init__(
        self,
        listen: Sequence[str] = ("127.0.0.1:0",),
        token: str = "",
        connections: int = 1,
        patience: float = 2.5,
        transport: str = "auto",
        copy_threads: int | None = None,
        socket_threads: int = 1,
        inbox_messages: int = 1024,
        inbox_bytes: int = 16 << 20,
        checksums: bool = True,
        tls: Tls | tuple[str, str, str] | None = None,
    ) -> None:
        inbox = (inbox_messages, inbox_bytes)
        files = None
        if tls is not None:
            certificate, key, authority = (os.fspath(file) for file in tls)
            files = (certificate, key, authority)
        self._core = _core.FabricEngine(
            list(listen),
            token,
            connections,
            patience * 1e3,
            transport,
            copy_threads,
            socket_threads,
            inbox,
            checksums,
            files,
        )
        self._owners: dict[int, Any] = {}

    def register(
        self,
        memory: Any,
        length: int | None = None,
        writable: bool = True,
        device: str | None = None,
        windows_only: bool = False,
    ) -> Region:
        """Lets transfers touch memory: any object that can be written and has the buffer protocol (bytearray, mmap,
        numpy array), a tensor (`data_ptr()`, `nbytes` and `device`), an array of a GPU (`__cuda_array_interface__`), or
        an address with a `length` in bytes. Peers may read the memory, and write it if `writable`. With `windows_only`
        they read what `open_window` shows each of them, and nothing else. The engine keeps the object alive until
        `unregister` or `close`. For an address, the caller keeps the memory.

        `device`: "cpu", or "cuda:N" for the N-th GPU of this process, if the memory does not say it itself. Bytes
        between GPUs go straight from one to the other, once that path is up, if both processes are of one host and one
        user; else through pinned memory of the host and sockets. The engine copies in streams of its own. So all
        enqueued work that touches the memory has to be over when a transfer begins.

        ValueError for other memory, and for a GPU's if the engine was made for cma only. `GpuError` if there is no
        driver or no such GPU, or if it refuses, as for memory that is not allocated on it.
        """
        address, size, owner, where = _memory(memory, length, device)
        if length is not None and length > size:
            raise ValueError(f"{length} bytes of memory that has {size}")
        size = size if length is None else length
        access = "windows" if windows_only else "write" if writable else "read"
        if where is None:
            number = self._core.register(address, size, access)
        else:
            try:
                number = self._core.register_gpu(where, address, size, access)
            except OSError as error:
                raise GpuError(f"memory of cuda:{where} cannot be registered: {error}") from None
        self._owners[number] = owner
        return Region(self, number, size)

    def open_window(self, peer: EngineId, ranges: Iterable[tuple[Region | int, int, int]]) -> Window:
        """Lets one peer, connected or not yet, read these ranges of registered memory, each (region, offset, length),
        until `Window.close`. Send it `Window.descriptor` by any way; it reads by `Peer.read_window`. `peer`: its
        `Engine.id`, which `Message.sender` and `Peer.id` say too.

        ValueError for ranges that are not registered, for ranges of the host's memory and a GPU's together, and for
        more than 65,536.
        """
        numbers = [(_number(region), offset, length) for region, offset, length in ranges]
        descriptor = self._core.open_window((peer.engine, peer.boot), numbers)
        return Window(self, descriptor, sum(length for _, _, length in numbers))

    def describe(self) -> bytes:
        """The descriptor by which a peer connects and names the registered memory. Send it by any way. It is secret
        only if this engine has neither a token nor a runtime folder."""
        return self._core.describe()

    def connect(self, peer: bytes | str, timeout: float = 5.0) -> Peer:
        """A peer, by its descriptor or by the address at which it listens, HOST:PORT.

        By its descriptor this returns at once: transfers wait for the connection. ValueError for a descriptor of
        another version of kvlane, or if only one of both engines has a token.

        By its address this waits until both sides have proved the token, or their user's secret, and the peer has sent
        its regions (`Peer.regions`). ConnectionError if that takes longer than `timeout` seconds.
        """
        if isinstance(peer, str):
            return Peer(self, self._core.connect_to(peer, timeout * 1e3))
        return Peer(self, self._core.connect(peer))

    def group(self, peers: Sequence[Peer]) -> Group:
        """A group of these peers, in this order. ValueError if one of them is there twice, KeyError if one was
        disconnected."""
        return Group(self, peers)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The oldest message that has arrived from any peer. None if none comes within `timeout` seconds. ValueError if
        the engine is closed, also during the call. Other threads run meanwhile."""
        message = self._core.receive(_milliseconds(timeout))
        return None if message is None else Message(EngineId(*message[0]), message[1])

    @property
    def id(self) -> EngineId:
        """The sender of messages from this engine."""
        return EngineId(*self._core.id())

    @property
    def checksum_errors(self) -> int:
        """Connections, ours and peers', that ended because a checksum differed: something between the two hosts, or one
        of them, changes bytes."""
        return self._core.checksum_errors()

    @property
    def connections_without_rings(self) -> int:
        """Control connections to processes of this host, ours and peers', that went without shared memory since the
        engine was made; `Path.no_rings` says why."""
        return self._core.connections_without_rings()

    @property
    def staged(self) -> Staged:
        """Bytes to and from the memory of GPUs since the engine was made."""
        return Staged(*self._core.staged())

    def counter(self, number: int) -> Counter:
        """A counter of this process, which transfers of peers count up."""
        return Counter(self, number, self._core.open_counter(number))

    def close(self) -> None:
        """Ends all transfers as failed and all connections, and releases all memory. Waits up to a second for processes
        of this host to confirm that they no longer read our memory."""
        self._core.close()
        self._owners.clear()

    def __del__(self) -> None:
        if hasattr(self, "_owners"):
            self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _memory(memory: Any, length: int | None, device: str | None) -> tuple[int, int, Any, int | None]:
    """Address, bytes, the object that keeps the memory, and the number of the GPU; None for the host's."""
    if isinstance(memory, int):
        if length is None:
            raise ValueError("an address needs a length")
        return memory, length, None, _gpu(device)
    if hasattr(memory, "data_ptr"):
        if not memory.is_contiguous():
            raise ValueError("a tensor that is not contiguous cannot be registered as one range")
        return memory.data_ptr(), memory.nbytes, memory, _gpu(device, memory)
    if interface := getattr(memory, "__cuda_array_interface__", None):
        if interface.get("strides") is not None:
            raise ValueError("an array that is not contiguous cannot be registered as one range")
        address, is_constant = interface["data"]
        if is_constant:
            raise ValueError("memory has to be writable and contiguous")
        size = math.prod(interface["shape"]) * int(interface["typestr"][2:])
        gpu = _gpu(device, memory)
        if gpu is None:
            raise ValueError('an array of a GPU that does not say which: give device="cuda:N"')
        return address, size, memory, gpu
    if _gpu(device) is not None:
        raise ValueError(f"this memory is the host's, and not on {device}")
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous:
        raise ValueError("memory has to be writable and contiguous")
    # Pins the memory, because a bytearray cannot be resized while it is exported.
    owner = (ctypes.c_char * view.nbytes).from_buffer(memory)
    return ctypes.addressof(owner), view.nbytes, owner, None


def _gpu(device: str | None, memory: Any = None) -> int | None:
    """The number of the GPU that holds the memory, from the memory itself or else from `device`."""
    own = getattr(memory, "device", None)
    # An array of cupy's has an object with the number.
    number = getattr(own, "id", None)
    said = f"cuda:{number}" if isinstance(number, int) else None if own is None else str(own)
    if said is not None and device is not None and said != device:
        raise ValueError(f"memory on {said} was said to be on {device}")
    where = said or device or "cpu"
    if where == "cpu" or where.startswith("cpu:"):
        return None
    if not (found := re.fullmatch(r"cuda:(\d+)", where)):
        raise ValueError(f"memory on {where}: it has to be on cpu or cuda:N")
    return int(found[1])


class Region:
    """Registered memory. `number` is its name for peers."""

    def __init__(self, engine: Engine, number: int, length: int) -> None:
        self._engine = engine
        self._number: int | None = number
        self.length = length

    @property
    def number(self) -> int:
        """KeyError once the region is unregistered, because other memory may have the number by then."""
        if self._number is None:
            raise KeyError("the region is not registered any more")
        return self._number

    def unregister(self) -> None:
        """Ends the registration: nothing touches the memory any more when this returns. ValueError while transfers of
        this process use it, KeyError if it is not registered."""
        number = self.number
        self._engine._core.unregister(number)
        self._number = None
        self._engine._owners.pop(number, None)


class Pages:
    """Pages of a region: page `i` begins at `offset + stride * i`. `indices` are integers, or little-endian 32-bit ones
    as bytes. For a peer's pages `region` is the number that the peer gave."""

    def __init__(
        self, region: Region | int, indices: Iterable[int] | bytes, stride: int, offset: int = 0
    ) -> None:
        packed = indices if isinstance(indices, bytes) else array("I", indices).tobytes()
        self._side = (_number(region), offset, stride, packed)


def _number(region: Region | int) -> int:
    return region if isinstance(region, int) else region.number


class Window:
    """Ranges of our registered memory that one peer may read, made by `Engine.open_window`."""

    def __init__(self, engine: Engine, descriptor: bytes, length: int) -> None:
        self._engine = engine
        self.descriptor = descriptor
        """The data that the peer needs to read through the window."""
        self.length = length
        """Bytes of all ranges together."""

    def close(self) -> None:
        """Ends all reads through the window. When this returns, the memory can be used for something else: no byte
        written from then on reaches the peer, even if this stops a read halfway. A read that was not over fails there
        as `Refused`. Takes up to a second if the peer does not take bytes that are on their way. KeyError if it is
        closed already."""
        self._engine._core.close_window(self.descriptor)

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # It may have been closed before, by itself, or with its memory or its engine.
        with suppress(KeyError, ValueError):
            self.close()


class Path(NamedTuple):
    """A way to a peer, as it is now."""

    carrier: str
    """The carrier. "control": messages, counters and what carriers say to each other. For bytes: "cuda" between GPUs of
    one host, "cma" (process_vm) between processes of a host that may read each other's memory, "tcp" for the memory of
    hosts otherwise, "tcp-slots" where a GPU's memory is on either side."""
    address: str | None
    """The peer's address; None before the first attempt."""
    up: bool
    """Whether transfers can use it."""
    bytes_per_second: float | None
    """Rate over the last parts that it carried, counting only the time in which it had any. None before the first."""
    trouble: str | None
    """The reason of the last break or failed attempt."""
    no_rings: str | None = None
    """For "control" between processes of a host: why messages go through the socket, and not through shared memory.
    None if they go through shared memory."""


class RemoteRegion(NamedTuple):
    """Memory that a peer has registered."""

    number: int
    """The name of the memory in transfers."""
    length: int
    """Bytes."""
    writable: bool
    """Whether transfers may write it, not only read it."""
    gpu: bool
    """Whether it is memory of a GPU."""


class Peer:
    """Another process."""

    def __init__(self, engine: Engine, core: _core.FabricPeer) -> None:
        self._engine = engine
        self._core = core

    def write(
        self,
        region: Region,
        remote: int,
        runs: Iterable[tuple[int, int, int]] | bytes,
        notify: tuple[int, int] | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Transfer:
        """Bytes of our region to the peer's region of the number `remote`. Each run is (offset here, offset there,
        length); as bytes, three little-endian 64-bit integers each. How:

        - `notify`: (number, generation) of a counter of the peer, counted once after all bytes are in place
        - `timeout`: seconds after which the transfer is given up
        - `bulk`: others come first
        """
        return self._begin_runs(True, region, remote, runs, notify, timeout, bulk)

    def read(
        self,
        region: Region,
        remote: int,
        runs: Iterable[tuple[int, int, int]] | bytes,
        notify: tuple[int, int] | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Transfer:
        """Reads bytes of the peer's region into ours, otherwise as `write`."""
        return self._begin_runs(False, region, remote, runs, notify, timeout, bulk)

    def read_window(
        self,
        region: Region,
        window: bytes,
        runs: Iterable[tuple[int, int, int]] | bytes,
        notify: tuple[int, int] | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Transfer:
        """Reads bytes that the peer shows through a window into our region. `window`: the `Window.descriptor` that the
        peer sent. Offsets there count through the window's ranges one after the other; otherwise as `write`. `Refused`,
        here or by `Transfer.wait`, if the peer has closed the window."""
        extras = (notify, _milliseconds(timeout), bulk)
        core = self._engine._core.read_window(self._core, window, region.number, _packed(runs), extras)
        if core is None:
            raise Refused("the peer has closed this window: ask it for another")
        return Transfer(core, self)

    def write_pages(self, page_bytes: int, local: Pages, remote: Pages, **how: Any) -> Transfer:
        """Writes the n-th of our pages to the n-th of the peer's, otherwise as `write`."""
        return self._begin_pages(True, page_bytes, local, remote, **how)

    def read_pages(self, page_bytes: int, local: Pages, remote: Pages, **how: Any) -> Transfer:
        """Reads the n-th of the peer's pages into the n-th of ours, otherwise as `write`."""
        return self._begin_pages(False, page_bytes, local, remote, **how)

    def send(self, data: bytes, timeout: float = 10.0, bulk: bool = False) -> Transfer:
        """Sends a message of at most 65,536 bytes, which the peer takes by `Engine.receive`. Neither side needs
        registered memory. `bulk`: others come first.

        A message is delivered once, or fails. Messages have no order, among each other or with transfers. If the peer
        has no room, the message is sent again, until it fails as `NoRoom` after `timeout` seconds. A message that
        failed otherwise may have been delivered. If a connection broke, it may still be delivered for a moment. It is
        never delivered twice. ValueError if it is too long or too many are under way, KeyError if the peer was
        disconnected.
        """
        return Transfer(self._engine._core.send(self._core, data, timeout * 1e3, bulk), self)

    @property
    def id(self) -> EngineId:
        """The sender of messages from the peer."""
        return EngineId(*self._core.id())

    @property
    def regions(self) -> list[RemoteRegion]:
        """The regions that the peer has registered. While it is connected, it announces changes by itself."""
        return [RemoteRegion(*region) for region in self._engine._core.regions(self._core)]

    def update(self, descriptor: bytes) -> None:
        """Takes the peer's newer registrations from its new descriptor, before the peer announces them. KeyError if it
        is another process by now."""
        self._engine._core.update(self._core, descriptor)

    @property
    def paths(self) -> list[Path]:
        """All paths to the peer, and the trouble of those that are not up."""
        return [Path(*path) for path in self._engine._core.paths(self._core)]

    def disconnect(self) -> None:
        """Ends the connections; transfers under way fail as `PeerLost`."""
        self._engine._core.disconnect(self._core)

    def _begin_runs(
        self,
        is_write: bool,
        region: Region,
        remote: int,
        runs: Iterable[tuple[int, int, int]] | bytes,
        notify: tuple[int, int] | None,
        timeout: float | None,
        bulk: bool,
    ) -> Transfer:
        extras = (notify, _milliseconds(timeout), bulk)
        regions = (region.number, remote)
        core = self._engine._core.begin_runs(self._core, is_write, regions, _packed(runs), extras)
        return Transfer(core, self)

    def _begin_pages(
        self,
        is_write: bool,
        page_bytes: int,
        local: Pages,
        remote: Pages,
        notify: tuple[int, int] | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Transfer:
        pieces = _core.FabricPieces.pages(page_bytes, local._side, remote._side)
        extras = (notify, _milliseconds(timeout), bulk)
        return Transfer(self._engine._core.begin(self._core, is_write, pieces, extras), self)


def _packed(runs: Iterable[tuple[int, int, int]] | bytes) -> bytes:
    return runs if isinstance(runs, bytes) else b"".join(_RUN.pack(*run) for run in runs)


def _milliseconds(timeout: float | None) -> float | None:
    return None if timeout is None else timeout * 1e3


class Part:
    """One member's write in a group: bytes of our region to the member's region of the number `remote`, as by
    `Peer.write`. `notify`: (number, generation) of a counter of the member, counted once after all of these bytes are
    in place."""

    def __init__(
        self,
        region: Region,
        remote: int,
        runs: Iterable[tuple[int, int, int]] | bytes,
        notify: tuple[int, int] | None = None,
    ) -> None:
        self._core = (_core.FabricPieces.runs(region.number, remote, _packed(runs)), notify)

    @classmethod
    def pages(
        cls, page_bytes: int, local: Pages, remote: Pages, notify: tuple[int, int] | None = None
    ) -> Part:
        """The n-th of our pages to the n-th of the member's, as by `Peer.write_pages`."""
        part = cls.__new__(cls)
        part._core = (_core.FabricPieces.pages(page_bytes, local._side, remote._side), notify)
        return part


class Group:
    """Distinct peers in a fixed order, made by `Engine.group`.

    A call begins the parts of all members or, if it raises, of none. ValueError if there is not one part for each
    member, a part does not fit its memory, or too many transfers are under way. KeyError if a member was disconnected
    or a region unregistered. From then on each part is a transfer of its own, and a failed one holds up no other.
    """

    def __init__(self, engine: Engine, peers: Sequence[Peer]) -> None:
        self._peers = list(peers)
        self._core = engine._core.group([peer._core for peer in self._peers])

    def scatter(
        self, parts: Iterable[Part], timeout: float | None = None, bulk: bool = False
    ) -> GroupTransfer:
        """Writes each member its own part, the n-th to the n-th member. Each part is given up after `timeout` seconds;
        `bulk`: others come first."""
        cores = self._core.scatter([part._core for part in parts], _milliseconds(timeout), bulk)
        return GroupTransfer(cores, self._peers)

    def barrier(self, counters: Iterable[tuple[int, int]], timeout: float | None = None) -> GroupTransfer:
        """Tell each member's counter, the n-th (number, generation) the n-th member's; no bytes move. Given up after
        `timeout` seconds.

        For processes to wait for each other, each makes a counter, and a group of all others:

            told = others.barrier(their_counters, timeout=10)
            if not counter.wait(len(others) * round, timeout=10):   # round: 1, 2, 3...
                ...                                                 # somebody did not come
            told.wait()

        It has no order with transfers that were begun before: wait for those first. A member that is gone fails as
        `PeerLost`, and the others' counters do not get there: their wait ends by its timeout. After a failure members
        may have counted differently: `Counter.retire`, and go on with the next generation.
        """
        return GroupTransfer(self._core.barrier(list(counters), _milliseconds(timeout)), self._peers)

    def __len__(self) -> int:
        return len(self._peers)


class GroupTransfer:
    """The transfers of one call of a group. `parts`: each member's transfer in the group's order, which can be waited
    for or cancelled alone."""

    def __init__(self, cores: list[_core.FabricTransfer], peers: list[Peer]) -> None:
        self.parts = [Transfer(core, peer) for core, peer in zip(cores, peers, strict=True)]

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the parts of all members are complete. Raises `GroupFailed` when all are over and some failed,
        and `StillMoving` if not all are over after `timeout` seconds. Other threads run meanwhile."""
        deadline = None if timeout is None else monotonic() + timeout
        failures: dict[int, FabricError] = {}
        for member, part in enumerate(self.parts):
            try:
                part.wait(None if deadline is None else max(0.0, deadline - monotonic()))
            except FabricError as failure:
                failures[member] = failure
        if failures:
            raise GroupFailed(failures, len(self.parts))

    @property
    def done(self) -> bool:
        """Whether all parts are over, complete or failed."""
        return all(part.done for part in self.parts)

    def cancel(self) -> None:
        """Cancels all parts that are not over. A part is over only when `wait` says so."""
        for part in self.parts:
            part.cancel()


class Transfer:
    """A transfer in progress or over."""

    __slots__ = ("__weakref__", "_core", "_peer")

    def __init__(self, core: _core.FabricTransfer, peer: Peer) -> None:
        self._core = core
        self._peer = peer

    def wait(self, timeout: float | None = None) -> None:
        """Returns when all bytes are in place, and the peer's counter has counted. Raises a `FabricError` if the
        transfer failed, and `StillMoving` if it is not over after `timeout` seconds. Other threads run meanwhile."""
        outcome = self._core.wait(_milliseconds(timeout))
        if outcome is None:
            raise StillMoving("the transfer is not over yet; its memory still belongs to it")
        if outcome:
            kind, sentence = _FAILURES[outcome]
            if issubclass(kind, PeerLost):
                with suppress(ValueError):  # the engine was closed
                    down = [path for path in self._peer.paths if path.trouble and not path.up]
                    troubles = (f"{path.carrier} {path.address or ''}: {path.trouble}" for path in down)
                    sentence = "; ".join([sentence, *troubles])
            raise kind(sentence)

    @property
    def done(self) -> bool:
        """Whether it is over, complete or failed."""
        return self._core.outcome() is not None

    @property
    def carried(self) -> dict[str, int]:
        """The bytes that each carrier moved, by its name as in `Path.carrier`. Empty before the transfer is over."""
        return dict(self._core.carried())

    def cancel(self) -> None:
        """Cancels the transfer. It is over when `wait` has raised `Cancelled`, or returned if it was over before."""
        self._core.cancel()


class Counter:
    """Counts transfers of peers that name it, each after its last byte. `generation` goes to the peers."""

    def __init__(self, engine: Engine, number: int, generation: int) -> None:
        self._engine = engine
        self.number = number
        self.generation = generation

    @property
    def count(self) -> int:
        """How often transfers have counted it up in this generation."""
        return self._engine._core.count(self.number, self.generation)

    def wait(self, target: int, timeout: float | None = None) -> bool:
        """Waits until `count` reaches `target`. False if `timeout` seconds pass first, or the engine is closed."""
        return self._engine._core.wait_count(self.number, self.generation, target, _milliseconds(timeout))

    def retire(self) -> None:
        """Starts the next generation at 0. Transfers that still name this generation count nowhere."""
        self.generation = self._engine._core.retire_counter(self.number, self.generation)
