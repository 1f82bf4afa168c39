"""Direct hand-offs: a prompt's blocks go from the engine that computes it into the own cache of the one that goes on.

Each rank and each scheduler of an engine has an agent of the core. The ranks' are made where vLLM registers the KV
caches; what the scheduler has to know of them travels as vLLM's handshake metadata.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Protocol

from kvlane.connector.core_protocols import HandoffScheduler
from kvlane.connector.direct_peers import Peers, publish
from kvlane.connector.groups import CacheGroup, Unsupported
from kvlane.connector.settings import Settings

VERSION = 1


class Rank(Protocol):
    """What an engine's scheduler has to know of a rank."""

    @property
    def rank(self) -> int: ...
    @property
    def endpoint(self) -> bytes: ...
    @property
    def key(self) -> bytes: ...
    @property
    def layout(self) -> bytes: ...


def the_group(groups: list[CacheGroup]) -> CacheGroup:
    """The group whose blocks are handed over. Raises Unsupported for models that have other ones."""
    if len(groups) != 1 or groups[0].window_blocks:
        raise Unsupported(
            "direct hand-offs need a model whose layers all have full attention, in one KV cache group"
        )
    return groups[0]


class Direct:
    """The scheduler's part of direct hand-offs, if it has one."""

    def __init__(
        self,
        settings: Settings,
        group: CacheGroup,
        namespace: bytes,
        sizes: tuple[int, int],
        hands_over_rests: bool,
    ) -> None:
        self.group = group
        self.peers = Peers(settings.networks())
        self._settings = settings
        self.hands_over_rests = hands_over_rests
        """Whether the last tokens of a prompt go too that fill no block. With a drafter they do not: vLLM leaves its
        last tokens out."""
        self._namespace = namespace
        self._sizes = sizes
        self.agent: HandoffScheduler | None = None

    def blocks_of(self, tokens: int) -> int:
        """How many blocks of a prompt are handed over."""
        size = self.group.tokens_per_block
        return -(-tokens // size) if self.hands_over_rests else tokens // size

    def start(self, ranks: Sequence[Rank]) -> None:
        """All ranks are known."""
        from kvlane import _core

        ranks = sorted(ranks, key=lambda rank: rank.rank)
        shape = hashlib.blake2b(digest_size=16)
        facts = (VERSION, *self._sizes, self.group.tokens_per_block, len(ranks), self.hands_over_rests)
        shape.update(repr(facts).encode())
        for rank in ranks:
            shape.update(rank.layout)
        self.agent = _core.HandoffScheduler(
            self._settings.direct_listen,
            self._settings.direct_token,
            [(rank.endpoint, rank.key) for rank in ranks],
            shape.digest(),
            self.peers.networks,
        )
        publish(self.agent.address, os.getpid())

    def content(self, key: bytes) -> bytes:
        """What a request's tokens mean. `key`: of the engine's present weights and the request's adapter."""
        return hashlib.blake2b(self._namespace + key, digest_size=16).digest()

    @property
    def address(self) -> str:
        """Where other engines reach this one; empty without an agent."""
        return self.agent.address if self.agent is not None else ""

    def close(self) -> None:
        """End everything."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close()
