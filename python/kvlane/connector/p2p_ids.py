"""The request ids of proxies for vLLM's P2P NCCL connector. Such an id names both engines of a prompt:

    cmpl-___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_<32 hex digits>-0-<8 hex digits>
    `-- vLLM's prefix    `-- P's address              `-- D's        `-- unique      |  `-- vLLM's, at random
                                                                                     `-- which prompt of a batch

Both engines get the proxy's part of the id. vLLM adds the rest, of which only the prompt's number is the same in both.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARK, _SECOND_MARK = "___prefill_addr_", "___decode_addr_"
_ADDRESS = re.compile(r"[^\s_]\S*:[0-9]{1,5}")
_REST = re.compile(r"(\S*)_([0-9a-f]{32})(?![0-9a-zA-Z])(?:-(\d+))?")
# After the number of a sample, if there are several.
_COMPLETION = re.compile(r"(?:\d+_)?cmpl-")
# Two addresses of the longest host names fit.
LENGTH_MAX = 700


class BadId(ValueError):
    """An id that looks like one of a P2P NCCL proxy, and cannot be used."""


class Pair(NamedTuple):
    """The two engines of a prompt, and its name."""

    prefill: str
    """HOST:PORT."""
    decode: str
    """HOST:PORT."""
    name: str
    """The same in both engines, and unique to the prompt."""


def pair_of(request_id: str) -> Pair | None:
    """The pair that an engine's request id names; None if it names none. Raises BadId, in one sentence."""
    at = request_id.find(_MARK)
    if at < 0:
        return None
    if len(request_id) > LENGTH_MAX:
        raise BadId(f"its id has {len(request_id)} characters, more than {LENGTH_MAX}")
    prefill, _, rest = request_id[at + len(_MARK) :].partition(_SECOND_MARK)
    found = _REST.match(rest)
    if found is None:
        raise BadId(
            "its id is not ___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_ and 32 hex digits, but "
            + repr(request_id)[:80]
        )
    decode, name, number = found.groups()
    for address in (prefill, decode):
        if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 65536:
            raise BadId(f"its id names {address[:80]!r}, which is no HOST:PORT")
    if prefill == decode:
        raise BadId(f"its id names {prefill[:80]!r} on both sides")
    # Only ids of completions have the number. An id of a chat has vLLM's random part there, which may be digits.
    is_numbered = number is not None and _COMPLETION.match(request_id)
    return Pair(prefill, decode, f"{name}-{number}" if is_numbered else name)
