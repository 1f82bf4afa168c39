"""A fake engine's times and prefix cache. Pure: the time is an argument, in seconds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Latencies:
    """The costs of requests. Zero means at once."""

    prefill_tokens_per_second: float = 0.0
    ttft: float = 0.0
    """Seconds from the end of a prefill to its first token."""
    itl: float = 0.0
    """Seconds between two tokens of one request."""
    max_num_seqs: int = 256


@dataclass(frozen=True)
class Change:
    """The changes of the prefix cache by one insertion."""

    stored: list[int]
    """Indices of the given blocks that are new."""
    removed: list[int]
    """Blocks that were evicted to make room for them."""


class PrefixCache:
    """Blocks by their hash, which covers all tokens before them; the least recently used go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hit(self, blocks: list[int]) -> int:
        """The number of leading blocks that are cached."""
        held = self._blocks
        count = 0
        for block in blocks:
            if block not in held:
                break
            count += 1
        return count

    def insert(self, blocks: list[int]) -> Change:
        """Inserts blocks as the most recently used. A prefix counts as used later than its continuations."""
        held = self._blocks
        kept = blocks[: self.capacity]
        stored = [index for index, block in enumerate(kept) if block not in held]
        for block in reversed(kept):
            held[block] = None
            held.move_to_end(block)
        removed = []
        while len(held) > self.capacity:
            removed.append(held.popitem(last=False)[0])
        return Change(stored, removed)

    def clear(self) -> None:
        self._blocks.clear()


def block_hashes(tokens: bytes, block_bytes: int, root: int, known: list[int] | None = None) -> list[int]:
    """The hash of each full block, chained from the hash of the one before; `root` separates models. `known` has the
    hashes of the first blocks, if they were computed before.
    """
    hashes = list(known or ())
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_bytes, len(tokens) - block_bytes + 1, block_bytes):
        parent = hash((parent, tokens[start : start + block_bytes]))
        hashes.append(parent)
    return hashes


@dataclass(frozen=True)
class Begun:
    """A request whose prefill is over."""

    key: Hashable
    cached_tokens: int
    first_token_at: float
    change: Change


@dataclass
class _Sequence:
    key: Hashable
    blocks: list[int]
    tokens: int
    """Tokens of the prompt."""
    remote_tokens: int
    """Prompt tokens that another engine computed."""
    arrived: float
    cached: int = 0
    prefilled_at: float = 0.0


@dataclass
class EngineModel:
    """One engine: requests wait for a seat, then their prefills run one after the other."""

    latencies: Latencies
    cache: PrefixCache
    block_size: int = 16
    cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    cache_hits: int = 0
    _waiting: deque[_Sequence] = field(default_factory=deque)
    _running: dict[Hashable, _Sequence] = field(default_factory=dict)
    _prefilling: _Sequence | None = None
    _free_since: float = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def usage(self) -> float:
        """The part of the cache's blocks that running requests use, at most 1."""
        used = sum(-(-each.tokens // self.block_size) for each in self._running.values())
        return min(1.0, used / max(1, self.cache.capacity))

    def submit(self, key: Hashable, blocks: list[int], tokens: int, remote_tokens: int, now: float) -> None:
        """A request arrives. Call `advance` after it."""
        self._waiting.append(_Sequence(key, blocks, tokens, remote_tokens, now))

    def leave(self, key: Hashable, now: float) -> None:
        """A request has ended or was aborted; one that is not there changes nothing. Call `advance` after it."""
        if self._running.pop(key, None) is None:
            self._waiting = deque(each for each in self._waiting if each.key != key)
            return
        if self._prefilling is not None and self._prefilling.key == key:
            self._prefilling = None
        self._free_since = max(self._free_since, now) if self._prefilling is None else self._free_since

    def wake_at(self) -> float | None:
        """When `advance` has work next, unless a request arrives or leaves before."""
        return None if self._prefilling is None else self._prefilling.prefilled_at

    def advance(self, now: float) -> list[Begun]:
        """The requests whose prefill is over by now, in order."""
        begun = []
        while True:
            current = self._prefilling
            if current is not None:
                if current.prefilled_at > now:
                    break
                self._prefilling = None
                self._free_since = current.prefilled_at
                begun.append(
                    Begun(
                        current.key,
                        current.cached,
                        current.prefilled_at + self.latencies.ttft,
                        self.cache.insert(current.blocks),
                    )
                )
            if not self._waiting or len(self._running) >= self.latencies.max_num_seqs:
                break
            self._begin(self._waiting.popleft())
        return begun

    def _begin(self, sequence: _Sequence) -> None:
        # As in vLLM, the last token of a prompt is always computed: its result is the first token of the answer.
        most = max(0, sequence.tokens - 1)
        local = min(self.cache.hit(sequence.blocks), most // self.block_size) * self.block_size
        self.cache_queries += sequence.tokens
        self.cache_hits += local
        sequence.cached = max(local, min(sequence.remote_tokens, most))
        rate = self.latencies.prefill_tokens_per_second
        cost = (sequence.tokens - sequence.cached) / rate if rate > 0 else 0.0
        sequence.prefilled_at = max(sequence.arrived, self._free_since) + cost
        self._running[sequence.key] = sequence
        self._prefilling = sequence
