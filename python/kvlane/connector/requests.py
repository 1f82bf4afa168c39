"""The state of a request in the scheduler role, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from kvlane.connector.adapters import Adapter, Adapters
from kvlane.connector.awaited_save import AwaitedSave
from kvlane.connector.core_protocols import Hit
from kvlane.connector.groups import CacheGroup
from kvlane.connector.inputs import has_counted_inputs
from kvlane.connector.namespace import keyed_hash
from kvlane.connector.vllm_protocols import Request

NEVER = 1 << 62
BlockRange = tuple[int, int]
"""(first, end): blocks of a request that follow each other, by their places in it; `end` is the first that is not one
of them."""


@dataclass
class RequestState:
    """One live request. Token and block counts are of the whole request, from its first token."""

    request: Request
    adapter: Adapter | None
    saved_blocks: list[int]
    """Per group: blocks that are not saved any more, because the daemon has them or their save was begun."""
    unsaved: list[list[BlockRange]]
    """Per group: those of `saved_blocks` that the daemon will not have, because their save failed or there was nothing
    to save. When saving starts anew, new lists replace these. Ends of earlier saves go to the old lists, and do not
    affect the new saves."""
    awaited_save: AwaitedSave | None = None
    """The save of the prompt that another engine named, until a lookup has waited for it."""
    counted_inputs: bool = False
    """Whether an image or the like has a name that is only a number."""
    may_be_looked_up: bool = True
    """False once a landing's load of the daemon's blocks has failed. Then the request is not looked up again."""
    looking_up: bool = False
    hit: Hit | None = None
    """The last lookup's answer. While its tokens are above 0, the request holds its lease."""
    answered_at: float = 0.0
    """When `hit` came, in seconds of the scheduler's clock."""
    asked_tokens: int = 0
    """The upper bound given to the last lookup."""
    local_tokens: int = 0
    """Tokens in the engine's own cache at the last scheduling attempt."""
    promised_by: str | None = None
    """The kind of job that promised tokens at the last scheduling attempt."""
    loading: int | None = None
    """The job that loads its promised blocks."""
    awaits_tokens: bool = False
    """Promised tokens are not in the request's blocks yet, though vLLM counts them as computed. None of its blocks may
    be saved until the kind that promised them calls `tokens_ended`."""
    load_failed: bool = False
    """Promised tokens did not come."""
    stale: bool = False
    """The cache was reset while it ran, so its blocks hold what the old weights computed."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Per vLLM group, kept only for versions that do not show the block table."""
    next_save: int = 0
    """Computed tokens below which there is nothing to save."""
    number: int = 0
    """The engine's number of the request, for recordings."""
    arrived_at: float = 0.0
    """When it arrived, in seconds of the scheduler's clock."""
    had_blocks: bool = False
    """vLLM has allocated blocks for it, at its first turn or before a preemption."""
    looked_up_blocks: int = 0
    """Blocks of the recorded group that its first lookup named; 0 if it was not looked up."""
    first_local_tokens: int | None = None
    """Tokens in the engine's own cache at the first scheduling attempt."""

    @staticmethod
    def new(
        request: Request, groups: list[CacheGroup], adapters: Adapters, names_are_content: bool = True
    ) -> RequestState:
        return RequestState(
            request=request,
            adapter=adapters.of(request.lora_request),
            saved_blocks=[0] * len(groups),
            unsaved=[[] for _ in groups],
            counted_inputs=has_counted_inputs(request, names_are_content),
        )

    def takes_part(self) -> bool:
        """Whether the content of its blocks has an identity. Without one they are neither looked up nor saved."""
        return not self.counted_inputs and (self.adapter is None or self.adapter.shared())

    def tokens_ended(self, ok: bool) -> None:
        """The tokens that were promised for it have come to all workers, or some have not."""
        self.awaits_tokens = False
        # Promising them again would fail again, and vLLM would ask without end.
        self.load_failed = self.load_failed or not ok

    def forget_progress(self) -> None:
        """Save from the first block on again."""
        self.are_stored([0] * len(self.saved_blocks))

    def are_stored(self, blocks: list[int]) -> None:
        """The daemon has so many blocks of each group. From here on all others are saved, again if need be."""
        self.saved_blocks = blocks
        self.unsaved = [[] for _ in blocks]
        self.next_save = 0

    def tokens_to_find(self, groups: Sequence[CacheGroup], alignment: int, limit: int) -> int:
        """The number of its first tokens that others can find once the saves in progress have ended well: a multiple of
        `alignment`, and at most `limit`."""
        tokens = min(limit, *(self.saved_blocks[group.index] * group.tokens_per_block for group in groups))
        while True:
            tokens -= tokens % alignment
            shorter = min(self._tokens_before_gap(group, tokens) for group in groups)
            if shorter >= tokens:
                return tokens
            tokens = shorter

    def _tokens_before_gap(self, group: CacheGroup, tokens: int) -> int:
        """`tokens`, or those before the first block of the group that finding so many takes and that is not saved."""
        end = tokens // group.tokens_per_block
        start = max(0, end - group.window_blocks) if group.window_blocks else 0
        gaps = [
            max(first, start) for first, after in self.unsaved[group.index] if first < end and after > start
        ]
        return min(gaps) * group.tokens_per_block if gaps else tokens


class GroupHashes:
    """A request's block hashes at the block size of each group.

    vLLM hashes in steps of `hash_block_size` tokens, each hash covering all tokens before it; the hash of a larger
    block is the one at its end.
    """

    def __init__(self, groups: list[CacheGroup], hash_block_size: int) -> None:
        for group in groups:
            assert group.tokens_per_block % hash_block_size == 0, (
                f"blocks of {group.tokens_per_block} tokens are not made of hashes of {hash_block_size}"
            )
        self._hash_block_size = hash_block_size
        self._scale = [group.tokens_per_block // hash_block_size for group in groups]
        self.weights_key: bytes | None = None
        """The key of the engine's present weights; None for those of its files."""

    def count(self, state: RequestState, group: CacheGroup) -> int:
        """Blocks of the group that have a hash."""
        return len(state.request.block_hashes) // self._scale[group.index]

    def raw(self, state: RequestState, group: CacheGroup, first: int, end: int) -> list[bytes]:
        """vLLM's own hashes of the blocks [first, end)."""
        scale = self._scale[group.index]
        hashes = state.request.block_hashes
        if scale == 1:
            # vLLM's list slices to a plain list.
            return cast("list[bytes]", hashes[first:end])
        return [hashes[(block + 1) * scale - 1] for block in range(first, end)]

    def stored(self, state: RequestState, group: CacheGroup, first: int, end: int) -> list[bytes]:
        """The hashes under which the blocks [first, end) are stored."""
        return self._keyed(state, self.raw(state, group, first, end))

    def ending_at(self, state: RequestState, tokens: int) -> bytes | None:
        """The hash under which a block is stored that ends with the request's first `tokens` tokens. It is the same in
        all groups that have such a block. 16 bytes, by which the daemon tells blocks apart; None if vLLM has no hash
        there."""
        place, rest = divmod(tokens, self._hash_block_size)
        if rest or not 0 < place <= len(state.request.block_hashes):
            return None
        return self._keyed(state, [state.request.block_hashes[place - 1]])[0][:16]

    def key(self, state: RequestState) -> bytes:
        """The key of the engine's present weights and the request's adapter, if they are not those of the namespace."""
        return (self.weights_key or b"") + (state.adapter.digest if state.adapter is not None else b"")

    def of_rest(self, state: RequestState, tokens: int) -> bytes:
        """16 bytes that are the same where the prompt's tokens behind its first `tokens`, and all before them, are."""
        before = self.ending_at(state, tokens) or b""
        rest = list(state.request.all_token_ids[tokens : state.request.num_prompt_tokens])
        return keyed_hash(repr(rest).encode(), before + self.key(state))[:16]

    def _keyed(self, state: RequestState, raw: list[bytes]) -> list[bytes]:
        key = self.key(state)
        return [keyed_hash(each, key) for each in raw] if key else raw
