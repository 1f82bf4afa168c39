"""Takes prompts that find no room to land through a few of the engine's blocks into the daemon's pool.

    the prefill engine's blocks --READ--> a few blocks of this engine --save--> the daemon's pool --load--> the request
                                               ^        freed        |
                                               +---------------------+

    landing --offers without room--> READs, saves --no READ left--> saves --all ended--> lookup --answered--> ready

So the prefill engine need not keep a prompt until this engine has room for all of it. The saves are this engine's own:
the daemon claims, copies and seals as for blocks that this engine has computed. Then the prompt is looked up, its lease
keeps it in the pool, and its load waits for room like any other hit's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlane.connector.core_protocols import HandoffScheduler
from kvlane.connector.direct import Direct
from kvlane.connector.guard import logger
from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.direct_landing import (
    BLOCKS_FOR_RUNNING,
    STUCK_SECONDS,
    Landed,
    Overflowing,
    landing_pool,
    proven_blocks,
    take_blocks,
)
from kvlane.connector.kinds.kind import SchedulerShared
from kvlane.connector.kinds.load import LookUpAndLoad
from kvlane.connector.requests import RequestState
from kvlane.connector.saves import Saves
from kvlane.connector.vllm_protocols import Block

# Largest share of the daemon's pool for prompts that wait there for room in this engine.
POOL_SHARE = 0.25
# The READs and saves of these prompts take so many blocks of the engine, as a share of those for landings.
BLOCKS_SHARE = 0.5
# Where landings have their share, and the engine has free blocks, a prompt waits this long before it overflows: prompts
# that have landed may be admitted in the next step.
WAIT_FOR_SHARE_SECONDS = 0.05
# No prompt begins to overflow for this long after the daemon has not kept one, as when its pool is full.
PAUSE_SECONDS = 5.0


class Overflow:
    """All prompts of an engine that overflow."""

    def __init__(
        self,
        shared: SchedulerShared,
        saves: Saves,
        loads: LookUpAndLoad,
        fell_back: Callable[[str, str], None],
    ) -> None:
        """`fell_back` counts a prompt that is computed here: a word for the kind of reason, and a sentence."""
        self._shared = shared
        self._saves = saves
        self._loads = loads
        self._fell_back = fell_back
        self._paused_until = 0.0
        self._was_logged = False

    def _agent(self) -> tuple[Direct, HandoffScheduler]:
        direct = self._shared.direct
        assert direct is not None and direct.agent is not None
        return direct, direct.agent

    def is_possible(self, state: RequestState) -> bool:
        """Whether a prompt may begin to overflow."""
        return self._daemon_takes(state) and self._shared.clock() >= self._paused_until

    def _daemon_takes(self, state: RequestState) -> bool:
        shared = self._shared
        direct, _ = self._agent()
        # The saves of an overflow are of one group.
        return (
            not direct.order.others
            and shared.shape.has_daemon
            and shared.shape.can_save
            and shared.core.ready
            and shared.weights.are_known
            and state.may_be_looked_up
            and not state.stale
        )

    def fits_pool(self, blocks: int) -> bool:
        """Whether the daemon's pool may have so many blocks of a prompt that overflows."""
        direct, _ = self._agent()
        return blocks <= self._blocks_in_pool(direct)

    def begin_if_offered(
        self, landed: Landed, landings: Sequence[Landed], lacks_blocks: bool, jobs: StepJobs
    ) -> None:
        """Has a landing without enough room overflow, if the prefill engine already has blocks that wait for it. If not
        the engine `lacks_blocks` but landings have their share, the prompt waits a moment before."""
        direct, agent = self._agent()
        now = self._shared.clock()
        standing = agent.standing(landed.landing.id)
        if standing is None or standing[0] is not None:
            return
        _, _, end_block, hashes = standing
        given = len(landed.local) + len(landed.taken)
        if end_block < given or all(block < given for block, _ in hashes):
            landed.no_room_since = None
            return
        if landed.no_room_since is None:
            landed.no_room_since = now
        end = direct.order.count(landed.state.request.num_prompt_tokens)
        others = sum(each.overflow.end_block for each in landings if each.overflow is not None)
        is_early = not lacks_blocks and now < landed.no_room_since + WAIT_FOR_SHARE_SECONDS
        if landed.loads or landed.failed or is_early or not self.fits_pool(end + others):
            return
        overflow = Overflowing(0, end)
        if len(landed.local) > self._saves.room:
            return
        # A lookup finds nothing behind a gap.
        self._save(landed.state, overflow, landed.local, jobs)
        overflow.next_save = len(landed.local) + landed.stored
        stored = landed.taken[: landed.stored]
        self._shared.pins.unpin(landed.local + stored)
        del landed.taken[: landed.stored]
        landed.local, landed.stored, landed.overflow = [], 0, overflow
        self._shared.counters.add("direct_overflows")
        if not self._was_logged:
            self._was_logged = True
            # Log: this engine has no room for a prompt, so it waits in the daemon's pool. Do: nothing; if the counter
            # grows steadily, the engine gets more prompts than it can decode.
            logger.info(
                "kvlane: a prompt of another engine waits in the daemon's pool for room in this engine. (Further "
                "ones are only counted.)"
            )

    def _blocks_in_pool(self, direct: Direct) -> int:
        """How many blocks of the daemon's pool prompts that overflow may have."""
        shared = self._shared
        # Ranks that hold the same bytes save them once.
        of_block = direct.block_bytes * max(1, shared.shape.workers // direct.copies)
        return int(shared.core.pool_bytes * POOL_SHARE) // max(1, of_block)

    def _postpone(self, landed: Landed, waits_for_room: bool) -> None:
        """Extends the landing's time, because this engine has no room to compute the prompt either. With
        `waits_for_room` it is this engine's turn, not the prefill engine's."""
        _, agent = self._agent()
        shared = self._shared
        budget = shared.rate.budget(0)
        agent.postpone_landing(landed.landing.id, 1e3 * budget, waits_for_room)
        latest = landed.begun + shared.settings.direct_wait_ms / 1e3
        landed.until = max(landed.until, min(shared.clock() + budget, latest) + STUCK_SECONDS)

    def go_on(
        self, landings: Sequence[Landed], running: int, takes_blocks: bool, most: int, jobs: StepJobs
    ) -> None:
        """Saves what has arrived of prompts that overflow, and has their next blocks read: at most `most`, and none
        unless `takes_blocks`. `running` requests compute in this step."""
        overflowing = [(each, each.overflow) for each in landings if each.overflow is not None]
        for landed, overflow in overflowing:
            if landed.is_ready:
                continue
            if not overflow.is_over:
                self._look(landed, overflow, jobs)
            if overflow.is_over and landed.is_alive:
                self._finish(landed, overflow)
        if not takes_blocks:
            return
        _, agent = self._agent()
        free = landing_pool(self._shared).get_num_free_blocks()
        room = min(most, self._room(landings), free - BLOCKS_FOR_RUNNING * running)
        for landed, overflow in overflowing:
            if landed.is_ready or overflow.is_over or not landed.is_alive:
                continue
            given = overflow.next_save + len(landed.taken)
            # No more than what waits: another prompt needs the room.
            blocks = take_blocks(self._shared, min(overflow.offered - given, room))
            if blocks:
                room -= len(blocks)
                landed.taken += blocks
                agent.give_room(landed.landing.id, [each.block_id for each in blocks])

    def _room(self, landings: Sequence[Landed]) -> int:
        """How many more of the engine's blocks prompts that overflow may take."""
        direct, _ = self._agent()
        blocks = len(landing_pool(self._shared).blocks)
        share = max(1, int(direct.landing_blocks(blocks) * BLOCKS_SHARE))
        overflowing = ((len(each.taken), each.overflow) for each in landings if each.overflow is not None)
        return max(0, share - sum(taken + overflow.in_saves for taken, overflow in overflowing))

    def kept_free(self, landings: Sequence[Landed]) -> int:
        """How many free blocks other landings leave for prompts that overflow."""
        if all(each.overflow is None or each.overflow.is_over or each.is_ready for each in landings):
            return 0
        return self._room(landings)

    def _look(self, landed: Landed, overflow: Overflowing, jobs: StepJobs) -> None:
        """Saves what has arrived. Ends the prompt's READs if they are no use any more."""
        _, agent = self._agent()
        standing = agent.standing(landed.landing.id)
        if standing is None:
            self.drop(landed, overflow)
            return
        word, sentence, end_block, hashes = standing
        overflow.offered = max([end_block, *(block + 1 for block, _ in hashes)])
        takes = landed.is_alive and not landed.failed and self._daemon_takes(landed.state)
        proven = proven_blocks(self._shared, landed.state, hashes) if takes else 0
        if proven is None:
            self._count(overflow, "other_content", "what came is not what this engine would compute")
            landed.failed, takes = True, False
        is_saved = not takes or self._save_arrived(landed, overflow, min(end_block, proven or 0), jobs)
        if word is None:
            if takes:
                self._postpone(landed, waits_for_room=end_block < overflow.offered)
            else:
                agent.give_landing_up(landed.landing.id)
        elif is_saved:
            if word != "landed" and takes:
                self._count(overflow, word, sentence)
            self.drop(landed, overflow)

    def _count(self, overflow: Overflowing, word: str, why: str) -> None:
        """Counts a prompt once that this engine computes in part."""
        if not overflow.is_counted:
            overflow.is_counted = True
            self._fell_back(word, why)

    def _save_arrived(self, landed: Landed, overflow: Overflowing, end_block: int, jobs: StepJobs) -> bool:
        """Saves whole blocks before this one, as many as may be pinned. False if some are left."""
        direct, _ = self._agent()
        whole = landed.state.request.num_prompt_tokens // direct.order.full.tokens_per_block
        count = min(end_block, whole) - overflow.next_save
        if count <= 0:
            return True
        saved = self._save(landed.state, overflow, landed.taken[:count], jobs)
        overflow.next_save += saved
        self._shared.pins.unpin(landed.taken[:saved])
        del landed.taken[:saved]
        return saved == count

    def _save(
        self, state: RequestState, overflow: Overflowing, blocks: Sequence[Block], jobs: StepJobs
    ) -> int:
        """Saves the prompt's blocks from `next_save` on, as many as may be pinned. The save pins them."""
        direct, _ = self._agent()
        count = min(len(blocks), self._saves.room)
        if count <= 0:
            return 0

        def ended(ok: bool) -> None:
            # The lookup says whether the prompt is stored: another engine may be saving the same blocks.
            overflow.in_saves -= count

        now = self._shared.clock()
        first = overflow.next_save
        jobs.saves.append(
            self._saves.save_apart(state, direct.order.full, first, list(blocks[:count]), now, ended)
        )
        overflow.in_saves += count
        return count

    def frees_are_near(self, landings: Sequence[Landed]) -> bool:
        """Whether blocks of prompts that overflow are being saved, and will be free."""
        is_saving = any(each.overflow is not None and each.overflow.in_saves for each in landings)
        return is_saving and self._saves.frees_are_near(self._shared.clock())

    def give_up(self, landed: Landed, overflow: Overflowing, why: str) -> None:
        """Counts the prompt, and gives its blocks back. Its READs are over."""
        self._count(overflow, "given_up", why)
        self.drop(landed, overflow)

    def drop(self, landed: Landed, overflow: Overflowing) -> None:
        """Gives the landing's blocks back, because no READ writes them any more. What was saved before stays."""
        _, agent = self._agent()
        if agent.standing(landed.landing.id) is not None:
            agent.forget_landing(landed.landing.id)
        overflow.is_over = True
        self._shared.pins.unpin(landed.taken)
        landed.taken = []

    def _finish(self, landed: Landed, overflow: Overflowing) -> None:
        """Looks the prompt up once its saves have ended. The hit's lease keeps it in the pool from then on."""
        direct, _ = self._agent()
        shared, state = self._shared, landed.state
        if overflow.in_saves:
            return
        tokens = overflow.next_save * direct.order.full.tokens_per_block
        if not overflow.is_looked_up:
            overflow.is_looked_up = True
            self._loads.find_saved(state, tokens)
        if not self._loads.has_answer(state):
            return
        found = state.hit.tokens if state.hit is not None else 0
        most = self._loads.tokens_to_find(state)
        if found < min(tokens, most):
            self._paused_until = shared.clock() + PAUSE_SECONDS
        if found < most:
            self._count(overflow, "overflow", "the daemon has not kept all of it, as when its pool is full")
        shared.counters.add("direct_overflowed_tokens", found)
        shared.counters.add("direct_wait_seconds", shared.clock() - landed.begun)
        landed.is_ready = True
