"""What a request says of a direct hand-off, as `kv_transfer_params`:

    to the engine that computes the prompt, P    {"do_remote_decode": true, "kvlane": {"handoff": ID}}
    to the one that goes on, D                   {"kvlane": {"handoff": the same, "peer": "HOST:PORT of P"}}

The id is a text of at most 128 letters, digits, `-`, `_` and `.` that names nothing else. Both may be sent at once.
Where P is asked first, by `do_remote_decode` alone, it draws the id, and its answer is what
D's request has to say: that is how routers for vLLM's NixlConnector do it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_ID = re.compile(r"[0-9A-Za-z._-]{1,128}")
_PEER_MAX = 128


class NotDirect(ValueError):
    """What a request says of a direct hand-off makes no sense."""


@dataclass(frozen=True)
class Leg:
    """The request's prompt is computed here, for another engine."""

    name: str

    @property
    def id(self) -> bytes:
        """16 bytes, for the agents."""
        return _digest(self.name)

    def params(self, address: str) -> dict[str, object]:
        """For the engine that goes on."""
        return {"handoff": self.name, "peer": address}


@dataclass(frozen=True)
class Landing:
    """The request's prompt is computed by the engine at `peer`."""

    name: str
    peer: str

    @property
    def id(self) -> bytes:
        """As `Leg.id`."""
        return _digest(self.name)


def direct_of(params: object) -> Leg | Landing | None:
    """What a request's `kv_transfer_params` say; None where they say nothing of a direct hand-off. Raises NotDirect, in
    one sentence."""
    if not isinstance(params, Mapping):
        return None
    named = params.get("kvlane")
    prefills = bool(params.get("do_remote_decode"))
    if named is None or (isinstance(named, Mapping) and "handoff" not in named):
        return Leg(secrets.token_hex(16)) if prefills else None
    if not isinstance(named, Mapping):
        raise NotDirect(f"kvlane must be an object, not {_shown(named)}")
    text = named["handoff"]
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise NotDirect(f"handoff must be at most 128 letters, digits, -, _ and ., not {_shown(text)}")
    if prefills:
        return Leg(text)
    peer = named.get("peer")
    if not isinstance(peer, str) or not 0 < len(peer) <= _PEER_MAX:
        raise NotDirect(f"peer must be HOST:PORT of the engine that computes the prompt, not {_shown(peer)}")
    return Landing(text, peer)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _shown(value: object) -> str:
    return repr(value)[:80]
