"""Prefill and decode legs: tells them apart, checks a prefill leg, and makes its answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

FORMS = ("none", "kvlane", "nixl", "p2p-nccl", "direct")
P2P_REQUEST_ID = re.compile(r".*___prefill_addr_(.+:\d+)___decode_addr_(.+:\d+)_(.+)")
"""The name of a request in vLLM's P2P NCCL connector, which tells both engines the address of the other."""


class BadLeg(ValueError):
    """A request that no engine of this form would serve."""


@dataclass(frozen=True)
class Pairing:
    """How this engine takes part in prefill and decode pairs."""

    form: str = "none"
    engine_id: str = "fake"
    role: str | None = None
    """The role in P2P NCCL: "P" or "D". If None, the addresses in the request's id decide."""
    zmq_address: str | None = None
    host: str = "127.0.0.1"
    port: int = 5600
    block_size: int = 16


@dataclass(frozen=True)
class Leg:
    name: str = "whole"
    remote_tokens: int = 0
    """Prompt tokens that the other engine computed; at most all."""


WHOLE = Leg()
_ALL = 1 << 60


def leg_of(body: dict[str, Any], max_tokens: int, request_id: str, pairing: Pairing) -> Leg:
    """Which leg a request is. Raises BadLeg."""
    if pairing.form == "none":
        return WHOLE
    if pairing.form == "p2p-nccl":
        return _p2p_leg(max_tokens, request_id, pairing)
    asked = body.get("kv_transfer_params")
    if asked is None:
        return WHOLE
    if not isinstance(asked, dict):
        raise BadLeg("kv_transfer_params must be an object.")
    if asked.get("do_remote_decode"):
        _check_prefill(body, max_tokens)
        return Leg("prefill")
    if asked.get("do_remote_prefill") or (pairing.form == "kvlane" and "kvlane" in asked):
        return Leg("decode", _remote_tokens(asked, pairing))
    return WHOLE


def transfer_params(pairing: Pairing, run: str, prompt_tokens: int, request_id: str) -> dict[str, Any] | None:
    """The transfer params in a prefill leg's answer, for the decode leg."""
    if pairing.form == "kvlane":
        named = {"engine": pairing.engine_id, "run": run, "daemon": run[::-1], "tokens": prompt_tokens}
        return {"kvlane": named}
    if pairing.form == "nixl":
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": pairing.engine_id,
            "remote_block_ids": [list(range(1, 1 + -(-prompt_tokens // pairing.block_size)))],
            "remote_host": pairing.host,
            "remote_port": pairing.port,
            "remote_request_id": request_id,
        }
    return None


def new_run() -> str:
    """A name of this run of the engine, in hex."""
    return os.urandom(16).hex()


def _check_prefill(body: dict[str, Any], max_tokens: int) -> None:
    if body.get("stream"):
        raise BadLeg("A prefill leg cannot be streamed.")
    if body.get("stream_options") is not None:
        raise BadLeg("stream_options is only allowed when stream is true.")
    if (body.get("min_tokens") or 0) > 1:
        raise BadLeg("min_tokens of a prefill leg must be at most 1.")
    if (body.get("n") or 1) > 1:
        raise BadLeg("A prefill leg gives one choice: n must be 1.")
    logprobs = body.get("logprobs")
    if logprobs is not None and logprobs is not False:
        raise BadLeg("A prefill leg gives no logprobs.")
    if max_tokens != 1:
        raise BadLeg("A prefill leg generates one token: max_tokens must be 1.")


def _remote_tokens(asked: dict[str, Any], pairing: Pairing) -> int:
    if pairing.form == "direct":
        named = asked.get("kvlane")
        if not isinstance(named, dict) or not all(
            isinstance(named.get(name), str) for name in ("handoff", "peer")
        ):
            raise BadLeg("A decode leg must name the hand-off that it waits for, and where.")
        return _ALL
    if pairing.form == "kvlane":
        named = asked.get("kvlane")
        if not isinstance(named, dict) or type(named.get("tokens")) is not int:
            raise BadLeg("A decode leg must name the engine, run, daemon and tokens of its prefill.")
        return named["tokens"]
    missing = [
        name
        for name in ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        if asked.get(name) is None
    ]
    if missing:
        raise BadLeg(f"A decode leg must have {', '.join(missing)} in kv_transfer_params.")
    return _ALL


def _p2p_leg(max_tokens: int, request_id: str, pairing: Pairing) -> Leg:
    match = P2P_REQUEST_ID.fullmatch(request_id)
    if match is None:
        raise BadLeg(
            "X-Request-Id must be ___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_SUFFIX, "
            f"and is {request_id!r}."
        )
    prefill, decode, _ = match.groups()
    role = pairing.role or {prefill: "P", decode: "D"}.get(pairing.zmq_address or "")
    if role is None:
        raise BadLeg(f"X-Request-Id names neither side as {pairing.zmq_address}.")
    if pairing.zmq_address is not None and pairing.zmq_address != (prefill if role == "P" else decode):
        raise BadLeg(f"X-Request-Id names another engine than {pairing.zmq_address} for this leg.")
    if role == "D":
        return Leg("decode", _ALL)
    if max_tokens != 1:
        raise BadLeg("A prefill leg generates one token: max_tokens must be 1.")
    return Leg("prefill")
