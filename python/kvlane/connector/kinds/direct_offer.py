"""Lends the blocks of prompts to decode engines, block by block as this engine computes them.

Each block is pinned from the step that fills it until the agent frees the lending: the decode engine has all blocks,
has given the hand-off up, or has not renewed its lease for five seconds. With `send_type` GET the workers get a
prompt's blocks in the step that fills the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlane.connector.direct_request import Lending, NotDirect, direct_of
from kvlane.connector.guard import logger
from kvlane.connector.jobs import StepJobs
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared
from kvlane.connector.requests import RequestState
from kvlane.connector.saves import block_if_intact
from kvlane.connector.vllm_protocols import (
    Block,
    Request,
    SchedulerOutput,
    Tables,
    block_state,
    transfer_params,
    wants_no_cache,
)

NAME = "direct"


@dataclass(frozen=True)
class RankGone:
    """A rank's report that its caches are gone, as before sleep, and that it lends nothing any more. Plain data, which
    vLLM pickles."""

    def merge(self, other: RankGone) -> RankGone:
        """The report of one rank is enough."""
        return self


class Computed(NamedTuple):
    """Blocks that a step fills, for the workers."""

    id: bytes
    first_block: int
    blocks: list[int]
    hash: bytes | None
    """16 bytes: the hash of the last block."""


@dataclass
class _Offered:
    lending: Lending
    request_id: str | None
    """None once the request has ended."""
    hashes: list[bytes]
    """Of the prompt's whole blocks."""
    pinned: list[Block] = field(default_factory=list)
    unsent: list[Computed] = field(default_factory=list)
    """Blocks that the workers have not been sent."""


class OfferDirect(SchedulerKind):
    """The scheduler's side of lendings."""

    name = NAME

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        self._lendings: dict[bytes, _Offered] = {}
        self._by_request: dict[str, _Offered] = {}
        self._later: dict[str, Lending] = {}
        """Lendings of requests that came after a reset, which begin once the weights are known."""
        self._logged: set[str] = set()

    def request_added(self, state: RequestState) -> None:
        self._unpin_free()
        direct, shared = self._shared.direct, self._shared
        if direct is None or direct.agent is None:
            return
        try:
            lending = direct_of(transfer_params(state.request), state.request.request_id, direct.address)
        except NotDirect as error:
            self._count_refusal("nonsense", f"it makes no sense: {error}")
            return
        if not isinstance(lending, Lending) or shared.pins.pool is None:
            return
        other = self._lendings.get(lending.id)
        if other is not None and other.hashes and other.hashes == state.request.block_hashes:
            # Another sample of the same prompt.
            return
        if (
            not state.request.block_hashes
            and state.request.num_prompt_tokens >= direct.order.full.tokens_per_block
        ):
            self._count_refusal("hashes", "vLLM's prefix caching is off")
            return
        if not state.takes_part() or wants_no_cache(state.request):
            self._refuse_unknown()
        elif shared.weights.are_known:
            self._begin(state, lending)
        else:
            self._later[state.request.request_id] = lending

    def _begin(self, state: RequestState, lending: Lending) -> None:
        direct, shared = self._shared.direct, self._shared
        assert direct is not None and direct.agent is not None
        if not direct.agent.begin_lending(lending.id, direct.content(shared.hashes.key(state))):
            self._count_refusal("full", "too many hand-offs are under way, or its id was used before")
            return
        # A router may ask the decode engine only once this one has answered.
        direct.agent.hold_lending(lending.id)
        shared.counters.add("direct_legs")
        offered = _Offered(lending, state.request.request_id, list(state.request.block_hashes))
        self._lendings[lending.id] = self._by_request[state.request.request_id] = offered

    def _begin_later(self) -> None:
        """Begins the lendings that waited for the weights."""
        direct, shared = self._shared.direct, self._shared
        if not self._later or not shared.weights.are_known or direct is None or direct.agent is None:
            return
        later, self._later = self._later, {}
        for request_id, lending in later.items():
            state = shared.requests.get(request_id)
            if state is not None:
                self._begin(state, lending)

    def _refuse_unknown(self) -> None:
        self._count_refusal(
            "unknown", "the content of its blocks has no certain identity, or it asks for no cache"
        )

    def _count_refusal(self, kind: str, why: str) -> None:
        """Logs each kind of reason once, and counts all."""
        self._shared.counters.add("direct_not_offered")
        if kind not in self._logged:
            self._logged.add(kind)
            # Log: the decode engine computes this prompt, or takes it from the daemon. Do: read the reason;
            # docs/handoff.md says what each setting allows.
            logger.warning(
                "kvlane: a prompt is not handed over directly, since %s. (Further cases of this kind are only "
                "counted.)",
                why,
            )

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        self._unpin_free()
        self._begin_later()
        if not self._by_request:
            return
        filled: list[Computed] = []
        shown = block_state(output)
        for request_id, offered in list(self._by_request.items()):
            scheduled = output.num_scheduled_tokens.get(request_id, 0)
            state = self._shared.requests.get(request_id)
            if not scheduled or state is None:
                continue
            tables = shown.resolve_block_ids(request_id) if shown is not None else state.block_ids
            if tables:
                filled += self._fill(state, offered, scheduled, tables, shown is not None)
        if filled:
            jobs.others[NAME] = filled

    def _fill(
        self, state: RequestState, offered: _Offered, scheduled: int, tables: Tables, exact: bool
    ) -> list[Computed]:
        """Pins the prompt's blocks that this step fills, as far as they are handed over."""
        shared, direct = self._shared, self._shared.direct
        assert direct is not None and direct.agent is not None
        request = state.request
        tokens = request.num_computed_tokens + scheduled
        if not direct.agent.lending_progress(offered.lending.id, 0, tokens):
            self._end_request(request.request_id, is_complete=False)
            return []
        filled = self._filled(state, offered, tokens, tables, exact)
        if filled is None:
            self._count_refusal(
                "boundary", "vLLM has not kept all that its hits need at the end of its last whole block"
            )
            self._end_request(request.request_id, is_complete=False)
            return []
        if not filled:
            return []
        pool = shared.pins.pool
        assert pool is not None
        blocks = [pool.blocks[block_id] for each in filled for block_id in each.blocks]
        most, setting = direct.offered_blocks(len(pool.blocks))
        if not self._make_room(len(blocks), most, offered.lending.id):
            self._count_refusal("pins", f"more blocks than {setting} allows would be pinned")
            self._end_request(request.request_id, is_complete=False)
            return []
        shared.pins.pin(blocks)
        offered.pinned += blocks
        offered.unsent += filled
        if direct.offers_at_once and len(offered.pinned) < direct.order.count(request.num_prompt_tokens):
            return []
        filled, offered.unsent = offered.unsent, []
        shared.counters.add("direct_offered_blocks", sum(len(each.blocks) for each in filled))
        return filled

    def _filled(
        self, state: RequestState, offered: _Offered, tokens: int, tables: Tables, exact: bool
    ) -> list[Computed] | None:
        """What a lending has of the prompt's first `tokens` tokens, and has not pinned yet. None if vLLM has not kept
        what windows and states hand over. `exact`: as in `Saves.add`."""
        direct, hashes, pool = self._shared.direct, self._shared.hashes, self._shared.pins.pool
        assert direct is not None and pool is not None
        order, lending, prompt = direct.order, offered.lending.id, state.request.num_prompt_tokens
        handed, first = order.tokens(prompt), len(offered.pinned)
        full, *others = order.parts(prompt)
        size, table = full.group.tokens_per_block, tables[full.group.group_id]
        whole = min(tokens, handed) // size
        found = []
        if whole > first:
            found.append(
                Computed(lending, first, list(table[first:whole]), hashes.ending_at(state, whole * size))
            )
        if first < full.end and tokens >= handed:
            if full.end > whole:
                rest = hashes.of_rest(state, whole * size)
                found.append(Computed(lending, whole, list(table[whole : full.end]), rest))
            # Another boundary needs other blocks of windows, and another state.
            for part in others:
                if part.end == part.first:
                    continue
                blocks = list(tables[part.group.group_id][part.first : part.end])
                raw = hashes.raw(state, part.group, part.first, part.end)
                if len(blocks) < part.end - part.first or not all(
                    block_if_intact(pool.blocks[block_id], block_hash, part.group, exact)
                    for block_id, block_hash in zip(blocks, raw, strict=True)
                ):
                    return None
                last = hashes.ending_at(state, part.end * part.group.tokens_per_block)
                found.append(Computed(lending, part.place, blocks, last))
        return found

    def _make_room(self, blocks: int, most: int, lending: bytes) -> bool:
        """Whether `blocks` more may be pinned for a lending. If room is short, this ends the oldest lendings that no
        engine wants."""
        direct = self._shared.direct
        assert direct is not None and direct.agent is not None
        if len(self._lendings[lending].pinned) + blocks > most:
            return False
        while sum(len(offered.pinned) for offered in self._lendings.values()) + blocks > most:
            unwanted = direct.agent.end_oldest_unwanted_lending(lending)
            if unwanted is None:
                return False
            self._unpin(unwanted)
        return True

    def request_finished(self, request: Request, state: RequestState, tables: Tables) -> None:
        if self._later.pop(request.request_id, None) is not None:
            self._refuse_unknown()
        offered = self._by_request.get(request.request_id)
        if offered is not None and self._shared.direct is not None:
            blocks = self._shared.direct.order.count(request.num_prompt_tokens)
            self._end_request(request.request_id, is_complete=len(offered.pinned) >= blocks)

    def _end_request(self, request_id: str, is_complete: bool) -> None:
        """Ends the offer of further blocks. The decode engine goes on reading if the whole prompt is computed."""
        offered = self._by_request.pop(request_id, None)
        direct = self._shared.direct
        if offered is None:
            return
        if direct is None or direct.agent is None:
            return
        if is_complete:
            direct.agent.release_lending(offered.lending.id)
        else:
            direct.agent.give_up_lending(offered.lending.id)
            offered.request_id = None

    def hands_over(self, request: Request, state: RequestState) -> dict[str, object] | None:
        """The params for the decode engine. All kinds know by now that the request has ended."""
        direct = self._shared.direct
        found = [each for each in self._lendings.values() if each.request_id == request.request_id]
        if not found or direct is None:
            return None
        return found[0].lending.params(direct.address)

    def give_back(self, state: RequestState) -> None:
        self._later.pop(state.request.request_id, None)
        self._end_request(state.request.request_id, is_complete=False)

    def _unpin_free(self) -> None:
        """Unpins the blocks of lendings that no engine reads any more."""
        direct = self._shared.direct
        if direct is None or direct.agent is None or not self._lendings:
            return
        for lending in direct.agent.take_free_lendings():
            self._unpin(lending)

    def _unpin(self, lending: bytes) -> None:
        """Ends a lending whose blocks no engine reads."""
        offered = self._lendings.pop(lending, None)
        if offered is None:
            return
        self._by_request = {
            request: each for request, each in self._by_request.items() if each is not offered
        }
        self._shared.pins.unpin(offered.pinned)

    def pinned(self) -> Iterable[Block]:
        return [block for offered in self._lendings.values() for block in offered.pinned]

    def reported(self, part: object) -> None:
        """Ends all lendings, because the ranks lend nothing any more."""
        direct = self._shared.direct
        if not isinstance(part, RankGone) or direct is None or direct.agent is None:
            return
        # Log: the engine slept or its caches were freed, which ends direct hand-offs until a restart. Do: restart
        # the engine to have them again.
        logger.warning(
            "kvlane: this engine's KV caches went away, as before sleep: from here on its prompts are handed over "
            "through the daemon only"
        )
        direct.close()
        for offered in self._lendings.values():
            self._shared.pins.unpin(offered.pinned)
        self._lendings, self._by_request, self._later = {}, {}, {}

    def before_pool_reset(self) -> None:
        """Unpins what is free. The landings' kind has ended its part before."""
        self._unpin_free()
