"""The save that a decode engine's lookup awaits: a prefill engine names it in its answer, and a proxy passes it on.

It travels in vLLM's `kv_transfer_params`:

    to the prefill engine       {"do_remote_decode": true, ...}
    its answer, and then        {"kvlane":
    to the decode engine          {"engine": ID, "run": 32 hex digits, "daemon": 32 hex digits, "tokens": N,
                                   "last": 32 hex digits}}

`engine` and `run` name the prefill engine's scheduler at its daemon, and `daemon` that daemon's run. `tokens` of the
prompt will be stored. The prefill engine answers before it has saved its last blocks, so the decode engine's lookup
waits for them. `last` is the hash of the block that ends with `tokens`. It covers the prompt before, the adapter and
changed weights. If the decode engine's own hash there differs, it does not wait, because the save has other content.
Older engines neither send nor read `last`. The only member is kvlane's own name, because beside another connector in
vLLM's MultiConnector two answers with the same name end the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SIXTEEN_BYTES = re.compile(r"[0-9a-f]{32}")
_ENGINE_ID_BYTES_MAX = 512
_TOKENS_MAX = 1 << 40


class NotAnAwaitedSave(ValueError):
    """The request names a save in a way that makes no sense."""


@dataclass(frozen=True)
class AwaitedSave:
    """Another engine is saving the first tokens of the prompt."""

    engine: str
    """The other engine's id at the daemon."""
    run: bytes
    """16 bytes: the run of that engine's scheduler."""
    daemon: bytes
    """16 bytes: the run of the daemon that stores them."""
    tokens: int
    """Tokens of the prompt, from its start."""
    last: bytes | None = None
    """16 bytes: the hash of the block that ends with `tokens` (`GroupHashes.ending_at`); None from older engines."""

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
    def of(params: object) -> AwaitedSave | None:
        """The save that a request's `kv_transfer_params` name, or None. Clients may have written them, so this checks
        each member.

        Raises NotAnAwaitedSave, in one sentence.
        """
        named = params.get("kvlane") if isinstance(params, Mapping) else None
        # Direct hand-offs have other members there.
        if named is None or (isinstance(named, Mapping) and "engine" not in named):
            return None
        if not isinstance(named, Mapping):
            raise NotAnAwaitedSave(f"kvlane must be an object, not {_shown(named)}")
        engine, tokens = named.get("engine"), named.get("tokens")
        if (
            not isinstance(engine, str)
            or not 0 < len(engine.encode(errors="replace")) <= _ENGINE_ID_BYTES_MAX
        ):
            raise NotAnAwaitedSave(f"engine must be the id of an engine, not {_shown(engine)}")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _TOKENS_MAX:
            raise NotAnAwaitedSave(f"tokens must be a number of tokens, not {_shown(tokens)}")
        run, daemon = _sixteen_bytes(named, "run"), _sixteen_bytes(named, "daemon")
        last = _sixteen_bytes(named, "last") if "last" in named else None
        return AwaitedSave(engine, run, daemon, tokens, last)


def is_for_another_engine(params: object) -> bool:
    """Whether a request's `kv_transfer_params` ask for a prompt that another engine decodes."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def _sixteen_bytes(named: Mapping[object, object], name: str) -> bytes:
    value = named.get(name)
    if not isinstance(value, str) or not _SIXTEEN_BYTES.fullmatch(value):
        raise NotAnAwaitedSave(f"{name} must be 32 hex digits, not {_shown(value)}")
    return bytes.fromhex(value)


def _shown(value: object) -> str:
    return repr(value)[:80]
