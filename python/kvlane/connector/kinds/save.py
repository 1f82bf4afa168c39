"""Saves new blocks: those that a step fills, and at a request's end the last full ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlane.connector.awaited_save import AwaitedSave
from kvlane.connector.guard import logger
from kvlane.connector.jobs import JobEnd, StepJobs
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared
from kvlane.connector.requests import RequestState
from kvlane.connector.saves import Saves
from kvlane.connector.vllm_protocols import Block, Request, SchedulerOutput, Tables, block_state

# How long a reset of vLLM's cache waits for the daemon to give up the saves that are under way.
CANCEL_TIMEOUT_MS = 2000.0


class SaveBlocks(SchedulerKind):
    """When an engine's blocks are saved; `saves` decides which and keeps them pinned."""

    name = "save"

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        self._run: bytes | None = None
        """The run of the daemon whose blocks are announced."""
        self.saves = Saves(
            shared.shape.groups,
            shared.hashes,
            shared.shape.workers,
            shared.settings,
            shared.announcements,
            shared.counters,
            shared.jobs,
            shared.pins,
        )

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        if self._shared.announcements is not None:
            self._run = self._shared.connection.boot or self._run
            # The journal is read before this step's saves are announced, because a restart in it concerns earlier
            # announcements.
            self._shared.events += self._shared.announcements.changed(*self._shared.core.take_changes())
        self._queue(output)
        save = self.saves.take_job(self._shared.clock())
        if save is not None:
            jobs.saves.append(save)

    def _queue(self, output: SchedulerOutput) -> None:
        """Queues the blocks that this step fills."""
        shared = self._shared
        shown = block_state(output)
        if not self._can_save():
            return
        known = shared.requests.get
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = known(request_id)
            if state is None:
                continue
            # The workers copy after this step's forward pass.
            computed = state.request.num_computed_tokens + scheduled
            if computed < state.next_save:
                continue
            tables = shown.resolve_block_ids(request_id) if shown is not None else state.block_ids
            if tables:
                self.saves.add(state, computed, tables, tables_are_exact=shown is not None, wait=True)

    def _can_save(self) -> bool:
        shared = self._shared
        return shared.shape.can_save and shared.weights.are_known and shared.core.ready

    def ended(self, job: int, end: JobEnd) -> bool:
        stored = self.saves.ended(job, end.ranks, end.ok)
        if stored is None:
            return False
        self._shared.events += stored
        return True

    def request_finished(self, request: Request, state: RequestState, tables: Tables) -> None:
        """Its last full blocks are saved before vLLM frees them."""
        if self._can_save() and not state.awaits_tokens and not state.load_failed:
            # The last sampled token was never an input, so its keys and values were not computed.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self.saves.add(state, computed, tables, tables_are_exact=True, wait=False)

    def hands_over(self, request: Request, state: RequestState) -> dict[str, object] | None:
        """Names the tokens of the prompt that are stored or being saved, even if the daemon has not seen their save
        yet. Tokens that will not be stored are left out, because the other engine would wait for them in vain."""
        shared = self._shared
        if not shared.shape.has_daemon:
            return None
        shared.counters.add("handed_over")
        boot = shared.core.boot
        if boot is None or not self._can_save() or state.stale:
            shared.counters.add("not_handed_over")
            return None
        if not state.takes_part():
            # The request is the reason, not the engine. So the answer names 0 tokens, and routers go on pairing with
            # this engine.
            shared.counters.add("not_handed_over")
            return AwaitedSave(shared.core.engine_id, shared.core.run, boot, 0).params()
        alignment, prompt_tokens = shared.shape.hit_alignment, request.num_prompt_tokens
        tokens = state.tokens_to_find(shared.shape.groups, alignment, prompt_tokens)
        if tokens == 0 and prompt_tokens >= alignment:
            shared.counters.add("not_handed_over")
            return None
        last = shared.hashes.ending_at(state, tokens)
        return AwaitedSave(shared.core.engine_id, shared.core.run, boot, tokens, last).params()

    def daemon_restarted(self) -> None:
        """Saves running requests from their beginning again."""
        for state in self._shared.requests.values():
            state.forget_progress()
        self._withdraw()

    def runs_gone(self, gone: Sequence[bytes]) -> None:
        if self._run in gone:
            self._withdraw()

    def _withdraw(self) -> None:
        """Withdraws the announced blocks, because this engine cannot reach them any more."""
        if self._shared.announcements is not None:
            self._shared.events += self._shared.announcements.withdraw_all()

    def pinned(self) -> Iterable[Block]:
        return self.saves.pinned()

    def before_pool_reset(self) -> None:
        """Unpins all blocks, once the daemon has confirmed that it gave its saves up: vLLM may overwrite an unpinned
        block at once."""
        self.saves.drop_queued()
        if not self.saves.pending:
            return
        if self._shared.core.cancel_saves(self.saves.last_job, CANCEL_TIMEOUT_MS):
            self.saves.give_up()
            for state in self._shared.requests.values():
                # So blocks that are computed again are saved again.
                state.forget_progress()
        else:
            # Log: vLLM answers that the reset failed, because the daemon may still read blocks. Do: call it again
            # after 10 s; see whether the daemon answers.
            logger.warning(
                "kvlane: vLLM cannot reset its cache now: saves are under way, and the daemon did not confirm that it "
                "has given them up; they end by themselves within the save timeout"
            )

    def reset(self) -> None:
        """Keeps stored blocks, for engines that still have these weights."""
        self.saves.drop_queued()

    def pending(self) -> bool:
        return self.saves.pending

    def free_blocks_soon(self) -> bool:
        return self.saves.frees_are_near(self._shared.clock())
