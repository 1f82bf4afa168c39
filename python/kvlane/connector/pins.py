"""References on blocks of the engine's pool: vLLM does not reuse a block while a copy may still use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvlane.connector.vllm_protocols import Block, BlockPool


class Pins:
    """The engine's block pool, and the references that kvlane holds on its blocks."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        """vLLM's block pool. None before `bind`: nothing can be pinned, and so nothing is copied."""

        self.was_reset = True
        """Whether vLLM's last reset of the pool succeeded; True if there was none."""

    def bind(
        self,
        pool: BlockPool,
        before_reset: Callable[[], None] | None = None,
        after_reset: Callable[[], None] | None = None,
    ) -> None:
        """Pins blocks of this pool from now on.

        vLLM resets its pool before it tells its connector, and refuses while any block is referenced. So the pool's
        reset calls `before_reset` first, and `after_reset` if it succeeded.
        """
        self.pool = pool
        if before_reset is None:
            return
        reset = pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            before_reset()
            self.was_reset = reset()
            if self.was_reset and after_reset is not None:
                after_reset()
            return self.was_reset

        pool.reset_prefix_cache = reset_prefix_cache

    def are_all(self, pinned: Iterable[Block]) -> bool:
        """Whether these pins hold all referenced blocks of the pool. A block is named as often as it is pinned."""
        times = Counter(block.block_id for block in pinned)
        assert self.pool is not None
        blocks = self.pool.blocks
        ours = sum(1 for block_id, count in times.items() if blocks[block_id].ref_cnt == count)
        # The null block is never free.
        return len(blocks) - self.pool.get_num_free_blocks() - 1 == ours

    def pin(self, blocks: Sequence[Block]) -> None:
        """Adds a reference to each."""
        assert self.pool is not None
        self.pool.touch(blocks)

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Drops a reference of each; `blocks` are in the order of their prompts."""
        assert self.pool is not None
        # The end of a prompt is worth least without its beginning, so it is offered for reuse first.
        self.pool.free_blocks(reversed(blocks))
