"""The wire by hand: enough protobuf to say what no client of kvlane would say, and to read the answers."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

TOOL, SCHEDULER, WORKER = 0, 1, 2
# Bodies of Request.
HELLO, OPEN_ENGINE, REGISTER_WORKER, MAP_POOL, POOL_MAPPED, LOOKUP, RELEASE = 2, 3, 4, 5, 6, 7, 8
SAVE, CLAIM, COMMIT, HEARTBEAT, SETTLE, DROP_NAMESPACES, GET_STATUS, BYE = 9, 10, 11, 12, 13, 14, 15, 16
# Bodies of Reply.
REFUSED, WELCOME, ENGINE_OPENED, WORKER_REGISTERED, DONE, LOOKUP_RESULT, STATUS = 3, 4, 5, 6, 8, 9, 12
INVALID, INCOMPATIBLE, NOT_ALLOWED, CONFLICT, STOPPING, LIMIT, UNKNOWN = range(7)

Message = dict[int, list[int | bytes]]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(*pairs: tuple[int, int | bytes | str]) -> bytes:
    return b"".join(field(number, value) for number, value in pairs)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def parse(data: bytes) -> Message:
    message: Message = {}
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = read_varint(data, at)
        else:
            length, at = read_varint(data, at)
            value, at = data[at : at + length], at + length
        message.setdefault(tag >> 3, []).append(value)
    return message


def frame(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


class Closed(Exception):
    """The daemon closed the connection."""


class Wire:
    """A connection that says whatever it is told to."""

    def __init__(self, at: Path | tuple[str, int]) -> None:
        if isinstance(at, Path):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(at))
        else:
            self.socket = socket.create_connection(at)
        self.socket.settimeout(30)
        self.buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, body: int, content: bytes = b"") -> tuple[int, Message]:
        """Sends a request and answers the kind of the reply and its fields."""
        try:
            self.socket.sendall(frame(fields((1, 7), (body, content))))
        except BrokenPipeError as error:
            raise Closed from error
        return self.reply()

    def refused(self, body: int, content: bytes = b"") -> tuple[int, str]:
        """Sends what must be refused; answers reason and sentence."""
        kind, answer = self.ask(body, content)
        assert kind == REFUSED, f"answered by {kind} instead of a refusal"
        return refusal(answer)

    def reply(self) -> tuple[int, Message]:
        (length,) = struct.unpack("<I", self._take(4))
        reply = parse(self._take(length))
        kind = next(number for number in reply if number > 2)
        content = reply[kind][0]
        assert isinstance(content, bytes)
        return kind, parse(content)

    def wait_closed(self) -> None:
        """Returns when the daemon has hung up; what it still says is thrown away."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass

    def _take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            try:
                received = self.socket.recv(1 << 20)
            except ConnectionResetError as error:
                raise Closed from error
            if not received:
                raise Closed
            self.buffer += received
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken


def refusal(answer: Message) -> tuple[int, str]:
    (reason,) = answer.get(1, [0])
    (sentence,) = answer[2]
    assert isinstance(reason, int)
    assert isinstance(sentence, bytes)
    return reason, sentence.decode()


def hello(
    role: int = TOOL,
    engine: str = "",
    nonce: bytes = b"0123456789abcdef",
    wire: tuple[int, int] = (1, 1),
    client: str = "a test",
) -> bytes:
    return fields((1, wire[0]), (2, wire[1]), (3, client), (4, role), (5, engine), (6, nonce))


def group(namespace: bytes = bytes([3]) * 16, tokens: int = 16) -> bytes:
    return field(1, fields((1, namespace), (2, "by hand"), (3, tokens)))


def region(
    base: int = 1 << 20,
    stride: int = 8192,
    blocks: int = 8,
    piece: int = 4096,
    offsets: tuple[int, ...] = (0,),
) -> bytes:
    packed = b"".join(varint(offset) for offset in offsets)
    return field(3, fields((1, base), (2, stride), (3, blocks), (4, piece), (5, packed)))


def worker_group(
    *regions: bytes, namespace: bytes = bytes([3]) * 16, layout: bytes = bytes([4]) * 16
) -> bytes:
    return field(3, fields((1, namespace), (2, layout)) + b"".join(regions))


def register(*groups: bytes, rank: int = 0, workers: int = 1, fence: int = 4096, method: int = 2) -> bytes:
    return fields((1, rank), (2, workers)) + b"".join(groups) + fields((4, fence), (5, method))
