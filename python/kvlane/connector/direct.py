"""Direct hand-offs: a prompt's blocks go from the prefill engine's cache into the decode engine's own.

Each rank and each scheduler of an engine has an agent of the core. A rank makes its agent when vLLM registers the KV
caches, and vLLM's handshake metadata carries the rank's facts to the scheduler.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Protocol

from kvlane.connector import core_log
from kvlane.connector.affinity import unbound
from kvlane.connector.core_protocols import HandoffScheduler
from kvlane.connector.direct_order import Order
from kvlane.connector.direct_peers import Peers, publish, withdraw
from kvlane.connector.p2p_pings import Pings, start_pings
from kvlane.connector.settings import Settings

VERSION = 1
# Share of the engine's blocks in which prompts may land at once, where no kv_buffer_size says so.
SHARE_MAX = 0.1


class Rank(Protocol):
    """The facts of a rank for the engine's scheduler."""

    @property
    def rank(self) -> int: ...
    @property
    def endpoint(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def layout(self) -> bytes: ...


class Direct:
    """The scheduler's part of direct hand-offs, if it has one."""

    def __init__(
        self,
        settings: Settings,
        order: Order,
        namespace: bytes,
        sizes: tuple[int, int],
        block_bytes: int = 0,
        may_wait: bool = True,
        ping_role: str = "P",
    ) -> None:
        """`block_bytes`: of a block in one rank. `ping_role`: what pings call this engine, "P" or "D"."""
        self.block_bytes = block_bytes
        shards = order.full.tensor_shards
        self.copies = max(1, sizes[0] // shards) if shards else 1
        """How many ranks hold the same bytes of a block."""
        self.may_wait = may_wait
        """Whether this engine may pause in a step. A data-parallel engine may not, because others wait for its step."""
        self.order = order
        self.peers = Peers(settings.networks())
        self._settings = settings
        self._namespace = namespace
        self._sizes = sizes
        self._buffer_blocks: int | None = None
        if settings.kv_buffer_size is not None:
            self._buffer_blocks = int(settings.kv_buffer_size // block_bytes)
        self.lands_nothing_since = ""
        """Why no prompt lands here, in words; empty if they do."""
        if self._buffer_blocks == 0:
            self.lands_nothing_since = (
                f"kv_buffer_size is {settings.kv_buffer_size:g} bytes, and one block takes {block_bytes}"
            )
        self.offers_at_once = settings.send_type == "GET"
        """Whether a prompt is offered once all of it is computed."""
        self.agent: HandoffScheduler | None = None
        self._file: Path | None = None
        self._ping_role = ping_role
        self._pings: Pings | None = None

    def landing_blocks(self, blocks: int) -> int:
        """In how many of the engine's `blocks` prompts may land at once."""
        if self._buffer_blocks is None:
            return int(blocks * SHARE_MAX)
        # Each landed prompt needs one more block to generate, so landings never take all blocks.
        return min(self._buffer_blocks, self._pinned_blocks(blocks))

    def largest_landing(self, blocks: int) -> int:
        """How many of the engine's `blocks` a prompt may take whose turn it is."""
        # Without a kv_buffer_size a long prompt may take more than the common share.
        return self.landing_blocks(blocks) if self._buffer_blocks is not None else self._pinned_blocks(blocks)

    def offered_blocks(self, blocks: int) -> tuple[int, str]:
        """How many of the engine's `blocks` may be pinned for others, and what sets that."""
        buffer, share = self._buffer_blocks, self._pinned_blocks(blocks)
        # With PUT it is no bound: users of vLLM's P2P NCCL connector give as little as 1e1 there.
        if self.offers_at_once and buffer is not None and buffer < share:
            return buffer, "kv_buffer_size"
        return share, "kvlane.max_pinned_share"

    def _pinned_blocks(self, blocks: int) -> int:
        return int(blocks * self._settings.max_pinned_share)

    def start(self, ranks: Sequence[Rank]) -> None:
        """Starts the agent, once all ranks have sent their handshakes."""
        from kvlane import _core

        ranks = sorted(ranks, key=lambda rank: rank.rank)
        shape = hashlib.blake2b(digest_size=16)
        # In the order of builds that knew one group: they still hand over to this one.
        tokens_per_block, hands_over_rests, *others = self.order.facts()
        facts = (VERSION, *self._sizes, tokens_per_block, len(ranks), hands_over_rests, *others)
        shape.update(repr(facts).encode())
        for rank in ranks:
            shape.update(rank.layout)
        with unbound():
            core_log.start(_core)
            self.agent = _core.HandoffScheduler(
                self._settings.direct_listen,
                self._settings.direct_token,
                [(rank.endpoint, rank.key) for rank in ranks],
                shape.digest(),
                self.peers.networks,
                self._settings.tls_files(),
            )
        self._file = publish(self.agent.address, os.getpid())
        if self._file is not None:
            # vLLM ends its engine's process without the hooks of atexit, and not every end calls `close`.
            Finalize(self, withdraw, (self._file,), exitpriority=0)
        with unbound():
            self._pings = start_pings(self._settings, self._ping_role, self.address)

    def content(self, key: bytes) -> bytes:
        """The meaning of a request's tokens. `key`: of the engine's present weights and the request's adapter."""
        return hashlib.blake2b(self._namespace + key, digest_size=16).digest()

    @property
    def address(self) -> str:
        """The address at which other engines reach this one; empty without an agent."""
        return self.agent.address if self.agent is not None else ""

    def close(self) -> None:
        """End everything."""
        pings, self._pings = self._pings, None
        if pings is not None:
            pings.close()
        agent, self.agent = self.agent, None
        if agent is not None:
            if self._file is not None:
                withdraw(self._file)
            agent.close()
