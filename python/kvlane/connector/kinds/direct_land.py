"""Lands prompts that a prefill engine computes in blocks of this engine's own pool, where they become its prefix cache.

Nothing is promised. A request waits until its blocks have landed or the hand-off is given up, and then finds landed
blocks as its own cache; the engine computes the others. Only `plan` takes blocks, because the step's own allocations
are done by then: so it takes none that a request has just found. The daemon's part of a prompt's beginning is loaded
into such blocks too, and the prefill engine is asked for the rest. The last tokens, which fill no block or which vLLM
does not take as a hit, land in a block of their own and are copied before the step.

A prompt that finds no room, and of which the prefill engine already has blocks, overflows into the daemon's pool
(`direct_overflow`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvlane.connector.direct_request import Landing, NotDirect, direct_of
from kvlane.connector.guard import logger
from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.copies import CopyBlocks
from kvlane.connector.kinds.direct_landing import (
    BLOCKS_FOR_RUNNING,
    STUCK_SECONDS,
    Landed,
    landing_pool,
    proven_blocks,
    take_blocks,
)
from kvlane.connector.kinds.direct_overflow import Overflow
from kvlane.connector.kinds.kind import ASK_AGAIN, NOTHING, Answer, SchedulerKind, SchedulerShared
from kvlane.connector.kinds.load import LookUpAndLoad
from kvlane.connector.requests import RequestState
from kvlane.connector.saves import Saves
from kvlane.connector.vllm_protocols import (
    AllocatedBlocks,
    Block,
    Request,
    SchedulerOutput,
    Tables,
    transfer_params,
    wants_no_cache,
)

if TYPE_CHECKING:
    from kvlane.connector.direct import Direct

# A shorter prompt is computed here, because a hand-off of it takes as long.
TOKENS_MIN = 64
# Blocks taken in one step. Each costs the step 0.7 us.
BLOCKS_A_STEP = 1024
END_TIMEOUT_MS = 2000.0
# Longest pause of a step in which nothing can be computed. A new request waits for the step's end.
IDLE_WAIT_MS = 5.0
# Landed prompts are unpinned if nothing has run for this long.
STILL_SECONDS = 0.2
# Longest wait of a running request for a landing to give up its blocks.
YIELD_TIMEOUT_MS = 50.0
_UNKNOWN = "unknown", "the content of its blocks has no certain identity, or its id is another's"


class LandDirect(SchedulerKind):
    """Prompts that other engines compute for this one."""

    name = "land"

    def __init__(
        self, shared: SchedulerShared, loads: LookUpAndLoad, saves: Saves, copies: CopyBlocks
    ) -> None:
        super().__init__(shared)
        self._loads = loads
        self._copies = copies
        self._overflow = Overflow(shared, saves, loads, self._fell_back)
        self._landings: dict[bytes, Landed] = {}
        self._by_request: dict[str, Landed] = {}
        self._with: dict[str, Landed] = {}
        """By request: the landing of another sample of the same prompt and id, for which it waits."""
        self._logged: set[str] = set()
        self._gave_room = False
        """Whether the last plan took blocks, so that the next one may take more."""
        self._yielded = False
        """Blocks were given up for a running request, which gets them before landings do."""
        self._nothing_runs_since: float | None = None
        self._running = 0
        """Requests that compute in the planned step."""
        self._zeroed: frozenset[int] = frozenset()
        """Blocks that the workers fill with zeros in that step, as models with states need it."""

    def request_added(self, state: RequestState) -> None:
        self._end_finished()
        direct, shared, request = self._shared.direct, self._shared, state.request
        if direct is None or direct.agent is None or not shared.shape.can_load:
            return
        try:
            landing = direct_of(transfer_params(request), request.request_id, direct.address)
        except NotDirect:
            # OfferDirect logs and counts it.
            return
        if not isinstance(landing, Landing) or shared.pins.pool is None:
            return
        other = self._landings.get(landing.id)
        hashes, takes_cache = request.block_hashes, not wants_no_cache(request)
        if other is not None and takes_cache and hashes and other.state.request.block_hashes == hashes:
            self._with[request.request_id] = other
            return
        against = self._against(state, landing, direct)
        if against is not None:
            self._fell_back(*against)
            return
        until = shared.clock() + shared.settings.direct_wait_ms / 1e3 + STUCK_SECONDS
        landed = Landed(landing, state, until=until)
        self._landings[landing.id] = self._by_request[request.request_id] = landed

    def _against(self, state: RequestState, landing: Landing, direct: Direct) -> tuple[str, str] | None:
        """The reason why a prompt cannot land here: a word for its kind, and a sentence. None if it can."""
        request = state.request
        if request.num_prompt_tokens < TOKENS_MIN:
            return "short", f"it has less than {TOKENS_MIN} tokens"
        if wants_no_cache(request):
            return "no_cache", "it asks for no cache, as for the prompt's own probabilities"
        if not request.block_hashes:
            return "hashes", "vLLM's prefix caching is off"
        if not state.takes_part() or landing.id in self._landings:
            return _UNKNOWN
        if landing.peer == direct.address:
            return "own_address", f"{landing.peer!r} is this engine itself"
        if not direct.peers.allows(landing.peer):
            return (
                "refused_address",
                f"{landing.peer!r} is no engine of this user on this host, and kvlane.direct.peers does not name it",
            )
        if direct.lands_nothing_since:
            return "no_room", direct.lands_nothing_since
        return None

    def _fell_back(self, word: str, why: str) -> None:
        """Counts a prompt that is computed here, and logs each kind of reason once."""
        self._shared.counters.add("direct_fallbacks")
        if word not in self._logged:
            self._logged.add(word)
            # Log: a direct hand-off was not used; the answer is right, and later. Do: read the reason;
            # docs/handoff.md says what each setting allows.
            logger.warning(
                "kvlane: a prompt that another engine was to hand over is computed here, since %s. (Further cases of "
                "this kind are only counted.)",
                why,
            )

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        if self._waits_with_another(state):
            return ASK_AGAIN
        landed = self._by_request.get(state.request.request_id)
        if landed is None or self._shared.direct is None or self._shared.direct.agent is None:
            return NOTHING
        if not landed.is_ready:
            if self._shared.clock() < landed.until:
                return ASK_AGAIN
            self._leave(landed)
            return NOTHING
        direct = self._shared.direct
        assert direct is not None
        rest = state.request.num_prompt_tokens - 1 - local_tokens
        if landed.rest is None or not 0 < rest < direct.order.full.tokens_per_block:
            return NOTHING
        # The request computes one token. The copy is enqueued before that, and cannot fail.
        return Answer(rest, at_once=True)

    def _waits_with_another(self, state: RequestState) -> bool:
        landed = self._with.get(state.request.request_id)
        if landed is None:
            return False
        lands = not landed.is_ready and self._landings.get(landed.landing.id) is landed
        if lands and self._shared.clock() < landed.until:
            return True
        del self._with[state.request.request_id]
        if landed.overflow is not None:
            self._loads.look_up_again(state)
        return False

    def _leave(self, landed: Landed) -> None:
        """Has the prompt computed here, because a rank has not reported that it stopped writing, or the daemon does not
        answer. Blocks that may be written stay pinned until the rank does."""
        if landed.overflow is not None and landed.overflow.is_over:
            self._fell_back("overflow", "the daemon does not answer")
        else:
            self._fell_back("stuck", "a rank does not answer")
        self._by_request.pop(landed.state.request.request_id, None)
        landed.is_alive = False

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        self._end_finished()
        # A READ into a block would not wait for a step in progress that copies from it.
        room, is_first = BLOCKS_A_STEP if self._copies.is_settled else 0, True
        self._running = len(output.num_scheduled_tokens)
        # A request of this step may have had them, and was preempted.
        self._zeroed = frozenset(getattr(output, "new_block_ids_to_zero", None) or ())
        landings = list(self._landings.values())
        in_use = sum(len(each.taken) for each in landings if each.overflow is None)
        # As in vLLM's own queue, a prompt without room lets no later one pass. One that waits in the daemon's pool is
        # in that queue.
        has_room = not any(landed.is_ready and landed.overflow is not None for landed in landings)
        if self._yielded:
            room = 0
        self._free_if_stuck(landings)
        for landed in landings:
            if not landed.is_alive or landed.is_ready or landed.overflow is not None:
                continue
            before = len(landed.taken)
            # A landing begins with room, or it would ask the prefill engine for what the daemon has.
            if not landed.is_begun and not self._yielded and self._may_begin(landed):
                self._begin(landed, room, in_use, is_first)
            if landed.is_begun and not landed.is_ready:
                given = len(landed.taken) - before
                if len(landed.taken) < landed.wanted:
                    has_found = self._find_room(
                        landed, room - given, in_use + given, is_first, has_room, jobs
                    )
                    has_room = has_room and has_found
                if landed.overflow is not None:
                    continue
                given = len(landed.taken) - before
                room, in_use = room - given, in_use + given
                is_first = False
        self._gave_room = room < BLOCKS_A_STEP
        if any(landed.overflow is not None for landed in landings):
            takes_blocks = self._running > 0 or not self._a_request_waits_for_room()
            self._overflow.go_on(landings, self._running, takes_blocks and not self._yielded, room, jobs)
            self._drop_dead()
        self._yielded = False

    def _free_if_stuck(self, landings: list[Landed]) -> None:
        """Unpins a landed prompt if nothing has run for a while: the request before it in vLLM's queue may need its
        blocks, and keeps it from being asked for. Its blocks stay prefix cache until then."""
        ready = [each for each in landings if each.is_ready and each.overflow is None and each.taken]
        if self._running or not ready or self._loads.pending():
            self._nothing_runs_since = None
            return
        now = self._shared.clock()
        if self._nothing_runs_since is None:
            self._nothing_runs_since = now
        elif now >= self._nothing_runs_since + STILL_SECONDS:
            self._free(ready[-1])

    def _find_room(
        self, landed: Landed, room: int, in_use: int, is_first: bool, is_next: bool, jobs: StepJobs
    ) -> bool:
        """Takes blocks for a landing, at most `room` in this step, if none before it waits for room (`is_next`). If
        there are too few, the prompt overflows where that is possible, and else waits. `in_use` and `is_first` are
        those of `_share`. False if running requests keep it from taking blocks."""
        rest = landed.wanted - len(landed.taken)
        share = self._share(landed, rest, in_use, is_first) if landed.fits else 0
        # A prompt that holds blocks while it waits for more takes them from running requests, which vLLM then preempts.
        is_patient = share < rest and self._running > 0
        if is_next and not is_patient:
            self._give_room(landed, min(share, room))
        if (share < rest or not is_next) and self._overflow.is_possible(landed.state):
            free = landing_pool(self._shared).get_num_free_blocks() - BLOCKS_FOR_RUNNING * self._running
            landings = list(self._landings.values())
            lacks_blocks = free < rest or not is_next or not landed.fits
            self._overflow.begin_if_offered(landed, landings, lacks_blocks, jobs)
        return not (is_patient and landed.fits and landed.overflow is None)

    def _a_request_waits_for_room(self) -> bool:
        """Whether a request waits for anything but a landing."""
        land = {name for name, each in self._by_request.items() if not each.is_ready}
        return any(name not in land and name not in self._with for name in self._shared.requests)

    def _drop_dead(self) -> None:
        """Forgets prompts that overflowed, whose requests have ended and whose READs are over."""
        for landed in list(self._landings.values()):
            if landed.overflow is not None and landed.overflow.is_over and not landed.is_alive:
                self._landings.pop(landed.landing.id, None)

    def idle(self) -> None:
        """Waits for the end of a landing if all requests wait for landings. Without this wait vLLM would step without
        a pause, and take a processor from the prefill engine if that is on this host."""
        direct, shared = self._shared.direct, self._shared
        if direct is None or direct.agent is None or not direct.may_wait or self._gave_room:
            return
        landings = [*self._by_request.values(), *self._with.values()]
        if (
            landings
            and len(landings) == len(shared.requests)
            and all(
                each.is_begun and not each.is_ready and not each.loads and each.overflow is None
                for each in landings
            )
        ):
            direct.agent.wait_for_end(IDLE_WAIT_MS)

    def _may_begin(self, landed: Landed) -> bool:
        """Whether the weights are known. After a reset a landing waits for the workers' report; if that takes too long,
        the prompt is computed."""
        shared = self._shared
        if shared.weights.are_known:
            return True
        if not shared.weights.is_worth_waiting(shared.clock()):
            self._fell_back(*_UNKNOWN)
            landed.is_ready = True
        return False

    def _begin(self, landed: Landed, room: int, in_use: int, is_first: bool) -> None:
        """Pins the blocks that the engine's cache has of the prompt, loads those of the daemon, and asks the prefill
        engine for the rest. The other arguments are those of `_share`."""
        direct, shared, request = self._shared.direct, self._shared, landed.state.request
        pool = landing_pool(self._shared)
        assert direct is not None and direct.agent is not None
        landed.is_begun = True
        order, full = direct.order, direct.order.full
        size = full.tokens_per_block
        end = order.count(request.num_prompt_tokens)
        whole = order.tokens(request.num_prompt_tokens) // size
        found = min(self._loads.tokens_found(landed.state) // size, whole)
        for block_hash in shared.hashes.raw(landed.state, full, 0, whole):
            own = pool.get_cached_block(block_hash, [full.group_id])
            if not own:
                break
            pool.touch(own)
            landed.local += own
        local = len(landed.local)
        landed.wanted = end - local
        landed.fits = landed.wanted <= direct.largest_landing(len(pool.blocks))
        may_land = landed.fits or (self._overflow.is_possible(landed.state) and self._overflow.fits_pool(end))
        if not may_land:
            # The prompt would wait for room that never comes.
            self._fell_back("no_room", "it takes more blocks than a prompt may land in")
        missing = (end - max(local, found)) * size
        if order.others:
            # vLLM's own hit may be shorter than what it has of full attention.
            has = max(landed.state.local_tokens, found * size)
            missing = order.tokens(request.num_prompt_tokens) - has
        if not may_land or missing < TOKENS_MIN or not landed.wanted:
            self._free(landed)
            landed.is_ready = True
            return
        # After `touch`, because blocks that are pinned are no longer free.
        stored = min(found - local, self._share(landed, room, in_use, is_first))
        landed.taken = take_blocks(self._shared, stored, self._zeroed)
        landed.stored = len(landed.taken)
        content = direct.content(shared.hashes.key(landed.state))
        patience, first = shared.settings.direct_wait_ms, local + landed.stored
        budget = 1e3 * shared.rate.budget(request.num_prompt_tokens - first * size)
        landed.until = shared.clock() + min(patience, budget) / 1e3 + STUCK_SECONDS
        landing = landed.landing
        against = "full", "too many hand-offs are under way, or its id was used before"
        try:
            begun = direct.agent.begin_landing(
                landing.id, landing.peer, content, first, end, patience, budget
            )
        except ValueError as error:
            begun, against = False, ("no_address", str(error))
        if not begun:
            self._fell_back(*against)
            self._free(landed)
            landed.is_ready = True
            return
        shared.counters.add("direct_landings")
        landed.begun = shared.clock()
        if landed.stored:
            self._load(landed)

    def _load(self, landed: Landed) -> None:
        """Loads the first taken blocks from the daemon."""
        direct, shared = self._shared.direct, self._shared
        assert direct is not None
        full = direct.order.full
        size = full.tokens_per_block

        def ended(ok: bool) -> None:
            landed.loads = False
            if ok:
                shared.counters.add("direct_loaded_tokens", landed.stored * size)
            else:
                self._load_failed(landed)

        blocks = landed.taken[: landed.stored]
        try:
            self._loads.load_into(landed.state, full, len(landed.local), blocks, ended)
            landed.loads = True
        except Exception as error:  # noqa: BLE001
            shared.failures.record("loading a prompt's beginning", error, "it is computed")
            self._load_failed(landed)

    def _load_failed(self, landed: Landed) -> None:
        """Has no sample of the prompt promised the load's blocks again, because they would fail again."""
        landed.failed = True
        self._loads.promise_no_more(landed.state)
        for request_id, other in self._with.items():
            state = self._shared.requests.get(request_id)
            if other is landed and state is not None:
                self._loads.promise_no_more(state)

    def _share(self, landed: Landed, most: int, in_use: int, is_first: bool) -> int:
        """How many more blocks a landing may take, at most `most`. All landings together have taken `in_use`. With
        `is_first`, the oldest one may exceed the common share, so that a long prompt has its turn."""
        direct, pool = self._shared.direct, landing_pool(self._shared)
        assert direct is not None
        share = direct.landing_blocks(len(pool.blocks)) - in_use
        if is_first:
            share = max(share, direct.largest_landing(len(pool.blocks)) - len(landed.taken))
        kept = BLOCKS_FOR_RUNNING * self._running + self._overflow.kept_free(list(self._landings.values()))
        return min(most, share, max(0, pool.get_num_free_blocks() - kept))

    def _give_room(self, landed: Landed, most: int) -> None:
        """Takes blocks for the landing, and has the prefill engine's blocks read into them."""
        direct = self._shared.direct
        assert direct is not None and direct.agent is not None
        blocks = take_blocks(self._shared, min(landed.wanted - len(landed.taken), most), self._zeroed)
        if blocks:
            landed.taken += blocks
            direct.agent.give_room(landed.landing.id, [each.block_id for each in blocks])

    def _end_finished(self) -> None:
        direct = self._shared.direct
        if direct is None:
            return
        if direct.agent is None:
            # The ranks' caches are gone, so nothing writes into them.
            for landed in list(self._landings.values()):
                landed.is_ready = True
                self._forget(landed)
            return
        if not self._landings:
            return
        live = set(direct.agent.live_landings())
        for landed in list(self._landings.values()):
            # Prompts that overflow end in `plan`.
            goes_on = landed.loads or landed.landing.id in live or landed.overflow is not None
            if landed.is_begun and not landed.is_ready and not goes_on:
                self._end(landed, direct.agent.standing(landed.landing.id))

    def _end(
        self, landed: Landed, standing: tuple[str | None, str, int, list[tuple[int, bytes]]] | None
    ) -> None:
        """Ends a landing that no rank writes any more. Blocks that have landed become prefix cache; the others are
        unpinned."""
        direct, shared = self._shared.direct, self._shared
        assert direct is not None and direct.agent is not None
        landed.is_ready = True
        if standing is None:
            self._free(landed)
            return
        word, sentence, end_block, hashes = standing
        first = len(landed.local) + landed.stored
        arrived = max(0, min(end_block - first, len(landed.taken) - landed.stored))
        known = proven_blocks(shared, landed.state, hashes)
        # Blocks behind the last hash that came are not used: nothing proves their content.
        count = max(0, min(arrived, (known or 0) - first))
        is_whole = word == "landed" and count == arrived
        if arrived > 0 and (known is None or (word == "landed" and not is_whole)):
            self._fell_back("other_content", "what came is not what this engine would compute")
        elif word != "landed" and landed.is_alive:
            self._fell_back(str(word), sentence)
            # The other engine may have saved to the same daemon what it did not keep for this one.
            self._loads.look_up_again(landed.state)
        elif (landed.failed or landed.loads) and landed.is_alive:
            self._fell_back("store", "what the daemon had of its beginning did not come")
        direct.agent.forget_landing(landed.landing.id)
        has_beginning = not landed.loads and not landed.failed
        is_whole = is_whole and has_beginning
        order, prompt = direct.order, landed.state.request.num_prompt_tokens
        size = order.full.tokens_per_block
        # From here on `count` includes the blocks loaded from the daemon.
        count = landed.stored + count if has_beginning else 0
        whole = min(count, prompt // size - len(landed.local))
        if order.others:
            # A boundary before the last one would need other blocks of windows.
            count = whole = count if is_whole else 0
        if whole > 0 and not landed.state.stale:
            self._cache(landed, whole)
        if (
            is_whole
            and count > landed.stored
            and order.hands_over_rests
            and self._copies.is_possible
            and landed.is_alive
            and not landed.state.stale
        ):
            landed.rest = landed.taken[count - 1]
        elif count > whole:
            count = whole
        self._shared.pins.unpin(landed.taken[count:])
        del landed.taken[count:]
        counters = shared.counters
        counters.add("direct_landed", is_whole)
        counters.add("direct_wait_seconds", shared.clock() - landed.begun)
        landed_tokens = min((len(landed.local) + count) * size, order.tokens(prompt)) - first * size
        counters.add("direct_landed_tokens", max(0, landed_tokens))
        if not landed.is_alive:
            self._free(landed)
            self._landings.pop(landed.landing.id, None)

    def _cache(self, landed: Landed, count: int) -> None:
        """Gives the first `count` blocks behind `local` their hashes, each in its group."""
        direct, pool, request = self._shared.direct, landing_pool(self._shared), landed.state.request
        assert direct is not None
        blocks = landed.local + landed.taken[:count]
        for part in direct.order.parts(request.num_prompt_tokens):
            own = blocks[part.place : part.end_place]
            pool.cache_full_blocks(
                request=request,
                # vLLM counts the prompt's blocks from its beginning.
                blocks=[pool.null_block] * part.first + own,
                num_cached_blocks=max(part.first, len(landed.local)) if part.place == 0 else part.first,
                num_full_blocks=part.first + len(own),
                block_size=part.group.tokens_per_block,
                kv_cache_group_id=part.group.group_id,
            )

    def _free(self, landed: Landed) -> None:
        """Unpins all blocks of the landing, which stay in the prefix cache until vLLM reuses them."""
        self._shared.pins.unpin(landed.local + landed.taken)
        landed.local, landed.taken, landed.rest = [], [], None

    def allocated(
        self, request: Request, state: RequestState | None, blocks: AllocatedBlocks, tokens: int
    ) -> None:
        """Ends the landing, because the request has its own references by now."""
        landed, direct = self._by_request.get(request.request_id), self._shared.direct
        if landed is None or not landed.is_ready:
            return
        if tokens and landed.rest is not None and direct is not None and state is not None:
            full = direct.order.full
            own = blocks.blocks[full.group_id][(request.num_prompt_tokens - 1) // full.tokens_per_block]
            self._copies.copy(landed.rest, own)
            # The step copies the block before it computes, and so before its saves.
            state.tokens_ended(ok=True)
        self._forget(landed)

    def _forget(self, landed: Landed) -> None:
        self._free(landed)
        self._landings.pop(landed.landing.id, None)
        self._by_request.pop(landed.state.request.request_id, None)

    def give_back(self, state: RequestState) -> None:
        """Gives up a landing in progress, because its request has ended; `_end` caches what has landed."""
        self._with.pop(state.request.request_id, None)
        landed = self._by_request.get(state.request.request_id)
        if landed is None:
            return
        if landed.is_ready or not landed.is_begun:
            self._forget(landed)
            return
        direct = self._shared.direct
        self._by_request.pop(state.request.request_id)
        landed.is_alive = False
        if direct is not None and direct.agent is not None:
            direct.agent.give_landing_up(landed.landing.id)

    def pinned(self) -> Iterable[Block]:
        return [block for landed in self._landings.values() for block in landed.local + landed.taken]

    def before_pool_reset(self) -> None:
        """Ends all landings and lendings, because no block may be read or written when vLLM resets."""
        direct = self._shared.direct
        if direct is None or direct.agent is None:
            return
        if not direct.agent.end_all(END_TIMEOUT_MS):
            # Log: vLLM answers that the reset failed, because blocks may still be written. Do: call it again
            # after some seconds.
            logger.warning("kvlane: vLLM cannot reset its cache now: direct hand-offs did not end within 2 s")
            return
        for landed in list(self._landings.values()):
            if not landed.is_begun:
                continue
            standing = direct.agent.standing(landed.landing.id)
            if standing is not None and standing[0] is not None:
                direct.agent.forget_landing(landed.landing.id)
            landed.is_ready = True
            if landed.overflow is not None:
                landed.overflow.is_over = True
            self._free(landed)
            if not landed.is_alive:
                self._landings.pop(landed.landing.id, None)

    def free_blocks_soon(self) -> bool:
        """Called when a running request gets no block: has the youngest landing give up its blocks."""
        direct = self._shared.direct
        if direct is None or direct.agent is None:
            return False
        if self._overflow.frees_are_near(list(self._landings.values())):
            # The kind that saves says so.
            self._yielded = True
            return False
        for landed in reversed(list(self._landings.values())):
            # Blocks of a load in progress cannot be given up.
            held = landed.stored if landed.loads else 0
            if len(landed.taken) <= held or landed.is_ready:
                continue
            direct.agent.give_landing_up(landed.landing.id)
            if direct.agent.wait_over(landed.landing.id, YIELD_TIMEOUT_MS):
                if landed.overflow is not None:
                    self._overflow.give_up(landed, landed.overflow, "a running request needs its blocks")
                    self._yielded = True
                    return True
                self._end(landed, direct.agent.standing(landed.landing.id))
                self._free(landed)
                self._yielded = True
                return True
            return False
        return False

    def reset(self) -> None:
        """Drops loads for the former weights, also if vLLM did not reset its own cache."""
        for landed in self._landings.values():
            landed.failed = landed.failed or landed.stored > 0 or landed.overflow is not None

    def request_finished(self, request: Request, state: RequestState, tables: Tables) -> None:
        """`give_back` follows."""
