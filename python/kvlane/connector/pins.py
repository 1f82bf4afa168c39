"""References on blocks of the engine's pool: vLLM does not reuse a block while somebody may still copy it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pins:
    """The engine's block pool, as far as blocks are pinned in it."""

    def __init__(self) -> None:
        self.pool: Any = None
        """vLLM's block pool; nothing can be pinned, and so nothing be copied, before `bind`."""

    def bind(self, pool: Any) -> None:
        """From now on blocks of this pool are pinned."""
        self.pool = pool

    def pin(self, blocks: list[Any]) -> None:
        """One reference more on each."""
        self.pool.touch(blocks)

    def unpin(self, blocks: Sequence[Any]) -> None:
        """Give the references back; `blocks` are in the order of their prompts."""
        # The end of a prompt is worth the least without its beginning, so it is offered for reuse first.
        self.pool.free_blocks(reversed(blocks))
