"""What a prefill engine says of a prompt to the engine that goes on with it, both with kvlane's connector.

It travels in vLLM's `kv_transfer_params`, through whatever proxy stands before the engines:

    to the prefill engine       {"do_remote_decode": true, ...}
    its answer, and then        {"kvlane":
    to the decode engine          {"engine": ID, "run": 32 hex digits, "daemon": 32 hex digits, "tokens": N,
                                   "last": 32 hex digits}}

`engine` and `run` name the prefill engine's scheduler as its daemon knows it, `daemon` the daemon's run, and `tokens`
how many of the prompt's first tokens will be stored. The prefill engine answers before its last blocks are saved, so
the decode engine's lookup waits for them. `last` is the hash under which the block is stored that ends with `tokens`.
It covers all of the prompt before, the adapter and changed weights: if the decode engine would ask for another one
there, nothing of what is saved is what it looks for, and it does not wait. Engines from before `last` do not say it,
and ignore it. Nothing stands there but kvlane's own name: beside another connector in vLLM's MultiConnector, two
answers with the same name end the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SIXTEEN_BYTES = re.compile(r"[0-9a-f]{32}")
_ENGINE_ID_BYTES_MAX = 512
_TOKENS_MAX = 1 << 40


class NotAHandOff(ValueError):
    """What a request says of its hand-off makes no sense."""


@dataclass(frozen=True)
class HandOff:
    """That a prompt's first tokens are being stored by another engine."""

    engine: str
    """The other engine's id at the daemon."""
    run: bytes
    """16 bytes: the run of that engine's scheduler."""
    daemon: bytes
    """16 bytes: the run of the daemon that stores them."""
    tokens: int
    """From the prompt's start."""
    last: bytes | None = None
    """16 bytes: the hash under which the block that ends with `tokens` is stored (`GroupHashes.ending_at`); None if the
    other engine does not say it."""

    def params(self) -> dict[str, object]:
        """As `kvlane` in the `kv_transfer_params` for the decode engine."""
        named: dict[str, object] = {
            "engine": self.engine,
            "run": self.run.hex(),
            "daemon": self.daemon.hex(),
            "tokens": self.tokens,
        }
        if self.last is not None:
            named["last"] = self.last.hex()
        return named

    @staticmethod
    def of(params: object) -> HandOff | None:
        """The hand-off that a request's `kv_transfer_params` name; None if they name none of kvlane's. Whoever sends
        requests to the engine writes them, so nothing of them is believed before it was checked.

        Raises NotAHandOff, in one sentence.
        """
        named = params.get("kvlane") if isinstance(params, Mapping) else None
        # Other kinds of hand-offs may have other members there.
        if named is None or (isinstance(named, Mapping) and "engine" not in named):
            return None
        if not isinstance(named, Mapping):
            raise NotAHandOff(f"kvlane must be an object, not {_shown(named)}")
        engine, tokens = named.get("engine"), named.get("tokens")
        if (
            not isinstance(engine, str)
            or not 0 < len(engine.encode(errors="replace")) <= _ENGINE_ID_BYTES_MAX
        ):
            raise NotAHandOff(f"engine must be the id of an engine, not {_shown(engine)}")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _TOKENS_MAX:
            raise NotAHandOff(f"tokens must be a number of tokens, not {_shown(tokens)}")
        run, daemon = _sixteen_bytes(named, "run"), _sixteen_bytes(named, "daemon")
        last = _sixteen_bytes(named, "last") if "last" in named else None
        return HandOff(engine, run, daemon, tokens, last)


def asks_for_hand_off(params: object) -> bool:
    """Whether a request's `kv_transfer_params` say that another engine goes on with it."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def _sixteen_bytes(named: Mapping[object, object], name: str) -> bytes:
    value = named.get(name)
    if not isinstance(value, str) or not _SIXTEEN_BYTES.fullmatch(value):
        raise NotAHandOff(f"{name} must be 32 hex digits, not {_shown(value)}")
    return bytes.fromhex(value)


def _shown(value: object) -> str:
    return repr(value)[:80]
