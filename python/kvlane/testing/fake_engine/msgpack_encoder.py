"""A small msgpack encoder: what KV events and pings need, after the specification of msgpack."""

from __future__ import annotations

import struct
from typing import Any


def encode(value: Any) -> bytes:
    """Ints of 64 bits, strings, bytes, lists, tuples, maps, floats, bools and None. Raises TypeError, OverflowError."""
    out = bytearray()
    _encode(value, out)
    return bytes(out)


def _encode(value: Any, out: bytearray) -> None:
    if value is None:
        out.append(0xC0)
    elif value is False or value is True:
        out.append(0xC3 if value else 0xC2)
    elif isinstance(value, int):
        _encode_int(value, out)
    elif isinstance(value, float):
        out += struct.pack(">Bd", 0xCB, value)
    elif isinstance(value, str):
        data = value.encode()
        if len(data) < 32:
            out.append(0xA0 | len(data))
        else:
            _encode_length(len(data), (0xD9, 0xDA, 0xDB), out)
        out += data
    elif isinstance(value, (bytes, bytearray)):
        _encode_length(len(value), (0xC4, 0xC5, 0xC6), out)
        out += value
    elif isinstance(value, (list, tuple)):
        if len(value) < 16:
            out.append(0x90 | len(value))
        else:
            _encode_length(len(value), (None, 0xDC, 0xDD), out)
        for item in value:
            _encode(item, out)
    elif isinstance(value, dict):
        if len(value) < 16:
            out.append(0x80 | len(value))
        else:
            _encode_length(len(value), (None, 0xDE, 0xDF), out)
        for name, item in value.items():
            _encode(name, out)
            _encode(item, out)
    else:
        raise TypeError(f"msgpack has no {type(value).__name__}")


def _encode_length(length: int, marks: tuple[int | None, int, int], out: bytearray) -> None:
    """A length of 8, 16 or 32 bits after its mark."""
    if length < 1 << 8 and marks[0] is not None:
        out += struct.pack(">BB", marks[0], length)
    elif length < 1 << 16:
        out += struct.pack(">BH", marks[1], length)
    elif length < 1 << 32:
        out += struct.pack(">BI", marks[2], length)
    else:
        raise OverflowError("longer than msgpack allows")


def _encode_int(value: int, out: bytearray) -> None:
    if 0 <= value < 128:
        out.append(value)
    elif -32 <= value < 0:
        out.append(value & 0xFF)
    elif value >= 0:
        for mark, form in ((0xCC, "B"), (0xCD, "H"), (0xCE, "I"), (0xCF, "Q")):
            if value < 1 << 8 * struct.calcsize(form):
                out += struct.pack(">B" + form, mark, value)
                return
        raise OverflowError("larger than 64 bits")
    else:
        for mark, form in ((0xD0, "b"), (0xD1, "h"), (0xD2, "i"), (0xD3, "q")):
            if value >= -(1 << 8 * struct.calcsize(form) - 1):
                out += struct.pack(">B" + form, mark, value)
                return
        raise OverflowError("larger than 64 bits")
