"""Has blocks copied inside the engine's own cache before a step computes, as the last block of a prompt: the engine
computes the prompt's last token, and must not write into a block that others read.

The workers copy in the order of the steps, behind what earlier steps write. A copy's source is pinned until its step is
over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared
from kvlane.connector.vllm_protocols import Block, SchedulerOutput


@dataclass(frozen=True)
class CanCopy:
    """How many more ranks can copy blocks than before. Plain data, which vLLM pickles."""

    ranks: int

    def merge(self, other: CanCopy) -> CanCopy:
        """The ranks of both."""
        return CanCopy(self.ranks + other.ranks)


class CopyBlocks(SchedulerKind):
    """Copies that the workers make before the next step."""

    name = "copy"

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        self._ranks = 0
        self._copies: list[tuple[int, int]] = []
        self._sources: list[Block] = []
        """Sources of the next step's copies."""
        self._former_sources: deque[list[Block]] = deque()
        """Sources of steps that may be in progress."""
        self._unsettled_plans = 0

    @property
    def is_possible(self) -> bool:
        """Whether all ranks can copy."""
        return self._ranks == self._shared.shape.workers

    @property
    def is_settled(self) -> bool:
        """False in the plans after a reset whose earlier steps may still copy from blocks that the reset unpinned."""
        return self._unsettled_plans == 0

    def copy(self, source: Block, target: Block) -> None:
        """Has all ranks copy one block to another before the next step."""
        self._shared.pins.pin([source])
        self._sources.append(source)
        self._copies.append((source.block_id, target.block_id))

    def take(self) -> list[tuple[int, int]]:
        """Takes the copies to send to the workers in this step. They do not depend on the rest of its plan: vLLM
        computes with them in any case."""
        copies, self._copies = self._copies, []
        return copies

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        """`take` has taken the copies before."""
        self._unsettled_plans = max(0, self._unsettled_plans - 1)
        self._former_sources.append(self._sources)
        self._sources = []
        while len(self._former_sources) > self._shared.shape.steps_at_once:
            copied = self._former_sources.popleft()
            if copied:
                self._shared.pins.unpin(copied)

    def reported(self, part: object) -> None:
        if isinstance(part, CanCopy):
            self._ranks += part.ranks

    def pinned(self) -> Iterable[Block]:
        return self._sources + [block for step in self._former_sources for block in step]

    def before_pool_reset(self) -> None:
        """Unpins all sources. vLLM's later steps write behind the copies of earlier ones."""
        sources = list(self.pinned())
        if not sources:
            return
        self._shared.pins.unpin(sources)
        self._sources, self._copies = [], []
        self._former_sources.clear()
        self._unsettled_plans = self._shared.shape.steps_at_once
