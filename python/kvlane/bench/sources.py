"""Counts the sources of a round's prompt tokens, by the counters of an endpoint's /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KVLANE = "vllm:kvlane_hit_tokens"
"""kvlane's counter of tokens loaded from the daemon."""
EXTERNAL = "vllm:external_prefix_cache_hits"
"""vLLM's counter of tokens that its connector gave, whichever connector that is."""
OWN = "vllm:prefix_cache_hits"
"""vLLM's counter of tokens found in its own prefix cache."""


@dataclass(frozen=True)
class Sources:
    """Prompt tokens of one round by source; None if the endpoint does not say."""

    kvlane: int | None
    external: int | None
    own: int | None
    reset: bool
    """Whether the engine's own prefix cache was emptied before the round."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float], reset: bool) -> Sources:
        """The growth of the counters."""

        def grown(name: str) -> int | None:
            return int(after[name] - before.get(name, 0.0)) if name in after else None

        return cls(grown(KVLANE), grown(EXTERNAL), grown(OWN), reset)

    def not_cold(self, shared: int) -> str | None:
        """Why the first round's prompts were not new to all caches, in a sentence; None if nothing shows that. The
        prompts can find `shared` tokens of each other."""
        found = (self.external or 0) + (self.own or 0)
        if found <= shared:
            return None
        return f"{found} prompt tokens were cached before the first round: another --seed makes new prompts"

    def not_warm(self) -> str | None:
        """Why a repeated round is not known to have come from kvlane, in a sentence; None if it has.

        kvlane's own counter is the only proof that tokens came from kvlane. The rest of the prompts did not come from
        the engine's own prefix cache only if that was emptied before, or had no hit.
        """
        own = f"; {self.own} tokens were in the engine's own prefix cache" if self.own else ""
        if self.kvlane is None and self.external:
            return (
                f"{self.external} tokens came from a connector of the engine, and its /metrics does not say that this "
                f"is kvlane ({KVLANE} is missing){own}"
            )
        if self.kvlane is None:
            return f"the endpoint's /metrics does not name kvlane{own}"
        if self.kvlane == 0:
            return f"the endpoint's /metrics counts no token from kvlane ({KVLANE}){own}"
        if self.reset or self.own == 0:
            return None
        found = "/metrics does not say how many" if self.own is None else f"{self.own} tokens"
        return (
            f"beside {self.kvlane} tokens from kvlane, {found} came from the engine's own prefix cache, which could "
            "not be emptied before: VLLM_SERVER_DEV_MODE=1 in the engine's environment allows it"
        )
