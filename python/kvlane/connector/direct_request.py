"""The `kv_transfer_params` by which a request names a direct hand-off:

    to the prefill engine, P    {"do_remote_decode": true, "kvlane": {"handoff": ID}}
    to the decode engine, D     {"kvlane": {"handoff": the same, "peer": "HOST:PORT of P"}}

The id is a text of at most 128 letters, digits, `-`, `_` and `.`, unique to the prompt. Both requests may be sent at
once. If P is asked first, by `do_remote_decode` alone, it draws the id, and its answer has the params for D's request.
Routers for vLLM's NixlConnector ask in this order.

Proxies for vLLM's P2P NCCL connector send none of these. They name both engines in the request's id (p2p_ids.py).
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from kvlane.connector.p2p_ids import BadId, pair_of

_ID = re.compile(r"[0-9A-Za-z._-]{1,128}")
_PEER_MAX = 128
# A request with one of these fields was written by a router that says what it wants. Its id then says nothing.
_OWN = ("kvlane", "do_remote_decode", "do_remote_prefill")


class NotDirect(ValueError):
    """The request names a direct hand-off in a way that makes no sense."""


@dataclass(frozen=True)
class Lending:
    """P's side: this engine computes the prompt, and another engine reads its blocks."""

    name: str

    @property
    def id(self) -> bytes:
        """16 bytes by which the agents name the hand-off."""
        return _digest(self.name)

    def params(self, address: str) -> dict[str, object]:
        """The params for the decode engine."""
        return {"handoff": self.name, "peer": address}


@dataclass(frozen=True)
class Landing:
    """D's side: the engine at `peer` computes the prompt."""

    name: str
    peer: str

    @property
    def id(self) -> bytes:
        """As `Lending.id`."""
        return _digest(self.name)


def direct_of(params: object, request_id: str = "", address: str = "") -> Lending | Landing | None:
    """The hand-off that a request's `kv_transfer_params` name, or else its id. `address`: this engine's own. None if
    neither does. Raises NotDirect, in one sentence."""
    if not isinstance(params, Mapping) or not any(params.get(key) for key in _OWN):
        return _of_id(request_id, address)
    named = params.get("kvlane")
    prefills = bool(params.get("do_remote_decode"))
    if named is None or (isinstance(named, Mapping) and "handoff" not in named):
        return Lending(secrets.token_hex(16)) if prefills else None
    if not isinstance(named, Mapping):
        raise NotDirect(f"kvlane must be an object, not {_shown(named)}")
    text = named["handoff"]
    if not isinstance(text, str) or not _ID.fullmatch(text):
        raise NotDirect(f"handoff must be at most 128 letters, digits, -, _ and ., not {_shown(text)}")
    if prefills:
        return Lending(text)
    peer = named.get("peer")
    if not isinstance(peer, str) or not 0 < len(peer) <= _PEER_MAX:
        raise NotDirect(f"peer must be HOST:PORT of the engine that computes the prompt, not {_shown(peer)}")
    return Landing(text, peer)


def _of_id(request_id: str, address: str) -> Lending | Landing | None:
    try:
        pair = pair_of(request_id)
    except BadId as error:
        raise NotDirect(str(error)) from None
    if pair is None:
        return None
    return Lending(pair.name) if pair.prefill == address else Landing(pair.name, pair.prefill)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _shown(value: object) -> str:
    return repr(value)[:80]
