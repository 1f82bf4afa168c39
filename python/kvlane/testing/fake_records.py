"""The fake daemon's records of an engine, its answers, and access to blocks in an engine's memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

Region = tuple[int, int, int, int, list[int]]
SaveGroups = list[tuple[int, bytes, list[bytes], list[int]]]
LoadGroups = list[tuple[int, list[int], bytes]]


@dataclass
class FakeHit:
    """See `kvlane._core.Hit`."""

    tokens: int = 0
    lease: int = 0
    boot: bytes = b""
    groups: list[tuple[int, int]] = field(default_factory=list)
    _pages: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _stored: list[int] = field(default_factory=list)

    def stored_blocks(self, group: int) -> int:
        return self._stored[group]

    def pages(self, group: int, rank: int) -> bytes:
        return self._pages[group, rank]

    def pages_of(self, group: int, rank: int, blocks: list[int]) -> bytes:
        pages, first = self._pages[group, rank], dict(self.groups)[group]
        if not all(first <= block < first + len(pages) // 4 for block in blocks):
            raise ValueError("not all of these blocks are in the hit")
        return b"".join(pages[(block - first) * 4 :][:4] for block in blocks)


@dataclass
class FakeFinished:
    """See `kvlane._core.Finished`."""

    job: int
    kind: str
    ok: bool
    blocks: int = 0
    present: int = 0
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""


@dataclass
class OpenEngine:
    """An engine that called `FakeCore.Scheduler` or `FakeCore.Worker`."""

    groups: list[tuple[bytes, str, int, int]] = field(default_factory=list)
    workers: int = 0
    crosses_hosts: bool = False
    run: bytes = b""
    """The run of its scheduler; empty once that is closed."""
    saving: int = 0
    """Jobs of its workers that have not ended."""
    ranks: dict[int, list[tuple[bytes, bytes, list[Region]]]] = field(default_factory=dict)
    cancelled: int = 0
    """Save jobs up to this one are refused."""
    replicas: list[int] = field(default_factory=list)
    """For each group, how many consecutive ranks hold the same blocks."""

    @property
    def ready(self) -> bool:
        return 0 < self.workers == len(self.ranks)

    def space(self, group: int) -> tuple[bytes, ...]:
        return tuple(self.ranks[rank][group][1] for rank in range(self.workers))


def read_block(regions: list[Region], block_id: int) -> bytes:
    """A block's bytes: the pieces of all regions in their order."""
    parts = []
    for base, stride, blocks, piece, offsets in regions:
        assert 0 <= block_id < blocks, f"block {block_id} of {blocks}"
        parts += [ctypes.string_at(base + block_id * stride + offset, piece) for offset in offsets]
    return b"".join(parts)


def write_block(regions: list[Region], block_id: int, data: bytes) -> None:
    """The inverse of `read_block`."""
    at = 0
    for base, stride, blocks, piece, offsets in regions:
        assert 0 <= block_id < blocks, f"block {block_id} of {blocks}"
        for offset in offsets:
            ctypes.memmove(base + block_id * stride + offset, data[at : at + piece], piece)
            at += piece
    assert at == len(data), f"a block of {at} bytes got {len(data)}"
