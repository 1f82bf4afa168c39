"""The fixed facts of an engine for its scheduler role."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.connector.groups import CacheGroup


@dataclass(frozen=True)
class EngineShape:
    """Facts of an engine that do not change while it runs."""

    groups: list[CacheGroup]
    workers: int
    hash_block_size: int
    """Tokens that one entry of `request.block_hashes` covers."""
    hit_alignment: int
    """Hits are multiples of this many tokens."""
    can_load: bool
    can_save: bool
    emit_events: bool
    has_daemon: bool = True
    """Whether prompts are looked up in a daemon."""
    names_are_content: bool = True
    """Whether vLLM names multimodal inputs by their content."""
    takes_last_block: bool = False
    """Whether a hit may end one token before the prompt's end, inside its last block."""
    overlapped_tokens: int | None = None
    """Tokens from which a load with nothing beside it is promised without its last block; None: it never is."""
    empties_failed: bool = False
    """Whether a request whose load failed gets empty tables, because vLLM cannot be told that the load failed."""
    steps_at_once: int = 1
    """How many steps vLLM may have under way, the one included that it plans."""
    hash_seed: bytes | None = None
    """The hash that prompts start from, as the namespaces say; None if it is random."""
    namespaces: tuple[bytes, ...] = ()
    """The namespace of each group's blocks, which identifies their content."""
