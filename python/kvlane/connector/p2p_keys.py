"""The keys of vLLM's P2P NCCL connector, which that connector's users have in their configurations.

The keys have no prefix. A configuration that has one of them and not `kvlane.direct` switches direct hand-offs on. A
value that makes no sense counts as missing: the engine starts, and a sentence says what is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SEND_TYPES = ("PUT_ASYNC", "PUT", "GET")
# Fields of vLLM's own configuration with these names, and their defaults. vLLM has no `kv_buffer_size` from 0.32 on.
FIELDS = {"kv_buffer_size": 1e9, "kv_port": 14579}
# Nothing here corresponds to them.
WITHOUT_EFFECT = ("mem_pool_size_gb", "nccl_num_channels")
PORT_MAX = 65535


@dataclass
class Found:
    """What a configuration has of these keys."""

    values: dict[str, Any] = field(default_factory=dict)
    """By key, as the fields of Settings want them."""
    given: list[str] = field(default_factory=list)
    """The keys that are there, also those without a sensible value."""
    ignored: list[str] = field(default_factory=list)
    """A sentence for each value that makes no sense."""


def read(extra: Mapping[str, object] | None, own: Mapping[str, object] | None = None) -> Found:
    """`extra`: `kv_connector_extra_config`. `own`: vLLM's own fields; a default there counts as missing."""
    found = Found()
    given = {key: value for key, value in (own or {}).items() if not _is_default(key, value)}
    # An empty text was the former connector's way to say that there is no proxy.
    given |= {key: value for key, value in (extra or {}).items() if value not in (None, "")}
    for key, (parse, wanted, instead) in _KEYS.items():
        if key not in given:
            continue
        found.given.append(key)
        value = parse(given[key])
        if value is None:
            found.ignored.append(f"{key} must be {wanted}, not {_shown(given[key])}: {instead}")
        else:
            found.values[key] = value
    found.given += [key for key in WITHOUT_EFFECT if key in given]
    for one, other in (("proxy_ip", "proxy_port"), ("proxy_port", "proxy_ip")):
        if one in found.values and other not in given:
            found.ignored.append(f"{one} is there and {other} is not: this engine sends no pings")
    return found


def _is_default(key: str, value: object) -> bool:
    """vLLM turns texts into numbers; the configuration that a user checks still has them."""
    parse = _KEYS[key][0]
    return value in (None, "", FIELDS[key]) or parse(value) == FIELDS[key]


def own_fields(transfer: object) -> dict[str, object]:
    """The fields of FIELDS that a KVTransferConfig of the installed vLLM has."""
    return {key: getattr(transfer, key) for key in FIELDS if hasattr(transfer, key)}


def _send_type(value: object) -> str | None:
    word = value.upper() if isinstance(value, str) else ""
    return word if word in SEND_TYPES else None


def _size(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return number if 0 < number < math.inf else None


def _port(value: object) -> int | None:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    is_port = text.isascii() and text.isdecimal() and len(text) < 6
    return int(text) if is_port and 0 < int(text) <= PORT_MAX else None


def _host(value: object) -> str | None:
    text = value.strip().strip("[]") if isinstance(value, str) else ""
    return text if re.fullmatch(r"[0-9A-Za-z.:_%-]{1,253}", text) else None


_A_PORT = f"a port, 1 to {PORT_MAX}"
# How each key is read, what its value has to be, and what happens without it.
_KEYS: dict[str, tuple[Callable[[object], Any], str, str]] = {
    "send_type": (_send_type, f"one of {', '.join(SEND_TYPES)}", f"{SEND_TYPES[0]} counts"),
    "kv_buffer_size": (
        _size,
        "a number of bytes above 0, such as 8e9",
        "prompts may land in a tenth of the engine's blocks",
    ),
    "proxy_ip": (_host, "an address or a host name", "this engine sends no pings"),
    "proxy_port": (_port, _A_PORT, "this engine sends no pings"),
    "http_port": (_port, _A_PORT, "pings name the port of this engine's own API server"),
    "kv_port": (_port, _A_PORT, "direct hand-offs listen at any free port"),
}


def _shown(value: object) -> str:
    return repr(value)[:80]
