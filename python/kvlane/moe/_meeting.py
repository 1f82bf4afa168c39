"""How ranks without torch.distributed find each other: at the path of a Unix socket.

```text
 another rank                          rank 0
 connects, again until it can          listens until all have come
 rank u32, ranks u32           --->
 each all-gather:
 1, its bytes                  --->
                               <---    1, the bytes of a rank: a packet of each rank, in order
```
Packets keep their bounds (SOCK_SEQPACKET). Numbers are little-endian. A packet of no bytes is the end of a connection,
so each begins with a 1.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

from kvlane.moe._errors import NotJoined

_HELLO = struct.Struct("<II")
_USER = struct.Struct("iii")
_MARK = b"\1"
_BYTES_MAX = 1 << 16
_RETRY_S = 0.02
_SILENT_MAX = 128
"""Most connections that have not said a rank."""


class Meeting:
    """The all-gather of `size` ranks that have met at `path`. `Group.at` documents arguments and errors."""

    def __init__(self, path: str, rank: int, size: int, timeout: float) -> None:
        self._path, self._rank, self._size, self._timeout = path, rank, size, timeout
        self._end = time.monotonic() + timeout
        self._others: dict[int, socket.socket] = {}
        with self._ended_by_errors():
            if rank == 0 and size > 1:
                self._receive()
            elif rank > 0:
                self._connect()

    def all_gather(self, told: bytes) -> list[bytes]:
        if len(told) > _BYTES_MAX:
            raise ValueError(f"all_gather takes at most {_BYTES_MAX} bytes of a rank, and got {len(told)}")
        self._end = time.monotonic() + self._timeout
        with self._ended_by_errors():
            if self._rank:
                self._send(0, told)
                return [self._next(0) for _ in range(self._size)]
            everything = [told, *(self._next(rank) for rank in range(1, self._size))]
            for rank in self._others:
                for each in everything:
                    self._send(rank, each)
            return everything

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """The others learn of an error here: their connections end."""
        try:
            yield
        except BaseException as error:
            for each in self._others.values():
                each.close()
            if isinstance(error, OSError):
                raise NotJoined(f"rank {self._rank} at {self._path}: {error.strerror or error}") from None
            raise

    def _send(self, rank: int, told: bytes) -> None:
        try:
            self._others[rank].settimeout(self._left())
            self._others[rank].send(_MARK + told)
        except TimeoutError:
            raise NotJoined(f"rank {rank} at {self._path} took nothing within {self._timeout:g} s") from None
        except OSError:
            raise self._ended(rank) from None

    def _next(self, rank: int) -> bytes:
        try:
            self._others[rank].settimeout(self._left())
            packet = self._others[rank].recv(_BYTES_MAX + len(_MARK))
        except TimeoutError:
            why = f"rank {rank} at {self._path} sent rank {self._rank} nothing within {self._timeout:g} s"
            raise NotJoined(why) from None
        except OSError:
            packet = b""
        if not packet:
            raise self._ended(rank)
        return packet.removeprefix(_MARK)

    def _ended(self, rank: int) -> NotJoined:
        return NotJoined(
            f"rank {rank} at {self._path} has ended its connection to rank {self._rank}: it has failed, or another "
            f"process is rank {self._rank}, or the number of ranks is not {self._size} there"
        )

    def _left(self) -> float:
        return max(self._end - time.monotonic(), 1e-3)

    def _connect(self) -> None:
        """At another rank: a connection to rank 0."""
        found = self._others[0] = _socket()
        while True:
            try:
                found.settimeout(self._left())
                found.connect(self._path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                if time.monotonic() > self._end:
                    why = f"rank 0 does not listen at {self._path} after {self._timeout:g} s"
                    raise NotJoined(why) from None
                time.sleep(_RETRY_S)
        if not _is_ours(found):
            raise NotJoined(f"a process of another user listens at {self._path}")
        # If the others have met, the next all-gather says so.
        with suppress(ConnectionError):
            found.send(_HELLO.pack(self._rank, self._size))

    def _receive(self) -> None:
        """At rank 0: the connections of all others. Strangers are sent away."""
        pending: list[socket.socket] = []
        with _listener(self._path) as listener:
            own = os.stat(self._path)
            try:
                while len(self._others) < self._size - 1:
                    ready = wait([listener, *pending], self._left())
                    if time.monotonic() > self._end:
                        missing = [str(rank) for rank in range(1, self._size) if rank not in self._others]
                        raise NotJoined(
                            f"ranks {', '.join(missing)} did not come to {self._path} within {self._timeout:g} s"
                        )
                    for each in ready:
                        if each is listener:
                            pending.append(listener.accept()[0])
                            if len(pending) > _SILENT_MAX:
                                pending.pop(0).close()
                                break
                        elif isinstance(each, socket.socket):
                            pending.remove(each)
                            self._greet(each)
            finally:
                for each in pending:
                    each.close()
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(self._path), own):
                        os.unlink(self._path)

    def _greet(self, came: socket.socket) -> None:
        """Keeps a connection that says it is another rank's. One of a process that has ended gives way."""
        rank = self._rank_of(came)
        if rank in self._others and _has_ended(self._others[rank]):
            self._others.pop(rank).close()
        if rank is None or rank in self._others:
            came.close()
        else:
            self._others[rank] = came

    def _rank_of(self, came: socket.socket) -> int | None:
        """Which rank it says it is; None for a stranger."""
        try:
            hello = came.recv(_HELLO.size + 1)
        except OSError:
            return None
        if len(hello) != _HELLO.size or not _is_ours(came):
            return None
        rank, size = _HELLO.unpack(hello)
        return rank if size == self._size and 0 < rank < size else None


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other end is of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size)
    return _USER.unpack(told)[1] == os.geteuid()


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listener(path: str) -> socket.socket:
    listener = _socket()
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        if not _is_left_behind(path):
            raise NotJoined(f"rank 0 cannot listen at {path}: {error.strerror or error}") from None
        os.unlink(path)
        return _listener(path)
    os.chmod(path, 0o600)
    listener.listen(socket.SOMAXCONN)
    return listener


def _is_left_behind(path: str) -> bool:
    """Whether it is a socket at which nobody listens."""
    if not Path(path).is_socket():
        return False
    with _socket() as asked:
        # A rank 0 with many at its door gives no answer at once.
        asked.setblocking(False)
        try:
            asked.connect(path)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
