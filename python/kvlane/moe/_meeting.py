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
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from kvlane.moe._errors import NotJoined

_HELLO = struct.Struct("<II")
_USER = struct.Struct("iii")
_MARK = b"\1"
_BYTES_MAX = 1 << 16
_RETRY_S = 0.02


class Meeting:
    """The all-gather of `size` ranks that have met at `path`. `Group.at` documents arguments and errors."""

    def __init__(self, path: str, rank: int, size: int, timeout: float) -> None:
        self._path, self._rank, self._size, self._timeout = path, rank, size, timeout
        self._end = time.monotonic() + timeout
        self._others = self._received() if rank == 0 else {0: self._connected()}

    def all_gather(self, told: bytes) -> list[bytes]:
        if len(told) > _BYTES_MAX:
            raise ValueError(f"all_gather takes at most {_BYTES_MAX} bytes of a rank, and got {len(told)}")
        self._end = time.monotonic() + self._timeout
        if self._rank:
            self._send(0, told)
            return [self._next(0) for _ in range(self._size)]
        everything = [told, *(self._next(rank) for rank in range(1, self._size))]
        for rank in self._others:
            for each in everything:
                self._send(rank, each)
        return everything

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

    def _connected(self) -> socket.socket:
        """At another rank: a connection to rank 0."""
        found = _socket()
        while True:
            try:
                found.connect(self._path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                if time.monotonic() > self._end:
                    found.close()
                    why = f"rank 0 does not listen at {self._path} after {self._timeout:g} s"
                    raise NotJoined(why) from None
                time.sleep(_RETRY_S)
        if not _is_ours(found):
            raise NotJoined(f"a process of another user listens at {self._path}")
        # If the others have met, the next all-gather says so.
        with suppress(ConnectionError):
            found.send(_HELLO.pack(self._rank, self._size))
        return found

    def _received(self) -> dict[int, socket.socket]:
        """At rank 0: the connections of all others. Strangers are sent away."""
        found: dict[int, socket.socket] = {}
        if self._size == 1:
            return found
        with _listener(self._path) as listener:
            pending: list[socket.socket] = []
            try:
                while len(found) < self._size - 1:
                    ready = wait([listener, *pending], self._left())
                    if not ready and time.monotonic() > self._end:
                        missing = [str(rank) for rank in range(1, self._size) if rank not in found]
                        raise NotJoined(
                            f"ranks {', '.join(missing)} did not come to {self._path} within {self._timeout:g} s"
                        )
                    for each in ready:
                        if each is listener:
                            pending.append(listener.accept()[0])
                            continue
                        pending.remove(each)
                        rank = self._rank_of(each)
                        if rank is None or rank in found:
                            each.close()
                        else:
                            found[rank] = each
            finally:
                for each in pending:
                    each.close()
                with suppress(FileNotFoundError):
                    os.unlink(self._path)
        return found

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
    return _USER.unpack(told)[1] == os.getuid()


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
        try:
            asked.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False
