"""Which blocks of a prompt a direct hand-off consists of, and their order. Both engines count by it, so no message
names a group:

    one group         | 0 | 1 | ... | n-1 | the tokens after the last whole block |
    several groups    | 0 | 1 | ... | n-1 | last blocks of a window | ... | the last state |
                       full attention      each other group, in vLLM's order

With several groups the hand-off ends where vLLM's own hits of the prompt do, because another boundary needs other
blocks of windows, and another state. The blocks of all groups have ids of one pool, and their bytes lie in the same
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from kvlane.connector.groups import CHUNKS, CacheGroup, Unsupported
from kvlane.connector.layout import GroupLayout, Region, natural_order


@dataclass(frozen=True)
class Part:
    """Consecutive blocks of a prompt in one group."""

    group: CacheGroup
    first: int
    end: int
    """The first block, and the one behind the last, counted from the prompt's start."""
    place: int
    """The first block's place in the hand-off."""

    @property
    def end_place(self) -> int:
        """The place behind its last block's."""
        return self.place + self.end - self.first


class Order:
    """The order of an engine's hand-offs."""

    def __init__(self, groups: Sequence[CacheGroup], hands_over_rests: bool) -> None:
        """`hands_over_rests`: whether a prompt's last tokens, which fill no block, are handed over too. Raises
        Unsupported."""
        full = [group for group in groups if not group.window_blocks]
        if len(full) != 1:
            raise Unsupported(
                "direct hand-offs need a model whose layers with full attention are one KV cache group"
            )
        self.full = full[0]
        """The group of which all blocks are handed over."""
        self.others = tuple(group for group in groups if group.window_blocks)
        self.hands_over_rests = hands_over_rests and not self.others
        self._alignment = lcm(*(group.tokens_per_block for group in groups))

    def tokens(self, prompt: int) -> int:
        """How many of a prompt's first tokens are handed over."""
        if self.others:
            return (prompt - 1) // self._alignment * self._alignment
        size = self.full.tokens_per_block
        return prompt if self.hands_over_rests else prompt // size * size

    def parts(self, prompt: int) -> list[Part]:
        """The blocks of a prompt of so many tokens. The first part is that of `full`."""
        tokens = self.tokens(prompt)
        found = [Part(self.full, 0, -(-tokens // self.full.tokens_per_block), 0)]
        for group in self.others:
            end = tokens // group.tokens_per_block
            count = group.window_blocks
            if group.kind == CHUNKS:
                # Tokens do not see what was before the present chunk.
                count = -(-(tokens % group.window) // group.tokens_per_block)
            found.append(Part(group, max(0, end - count), end, found[-1].end_place))
        return found

    def count(self, prompt: int) -> int:
        """How many blocks are handed over."""
        return self.parts(prompt)[-1].end_place

    def at(self, prompt: int, place: int) -> tuple[CacheGroup, int] | None:
        """The group and the prompt's block at a place of the hand-off; None behind its end."""
        for part in self.parts(prompt):
            if part.place <= place < part.end_place:
                return part.group, part.first + place - part.place
        return None

    def facts(self) -> tuple[object, ...]:
        """All that two engines have to agree on."""
        others = [(each.kind, each.window, each.window_blocks, each.tokens_per_block) for each in self.others]
        return (self.full.tokens_per_block, self.hands_over_rests, *others)


@dataclass(frozen=True)
class SharedMemory:
    """A rank's regions, of which a block of any group is made."""

    regions: list[Region]
    last_region: dict[str, int]
    """By layer: the last region that is complete once it and the layers before it are computed. Layers that complete
    none are left out."""
    digest: bytes
    """Of the meaning of the bytes."""


@dataclass(frozen=True)
class _Piece:
    """Bytes of a layer's block."""

    start: int
    """Address in block 0."""
    index: int
    """The region's place in its group's layout."""
    length: int
    stride: int
    blocks: int
    group: int
    layer: str


def shared_memory(layouts: Sequence[GroupLayout]) -> SharedMemory:
    """The memory that the layouts of all groups have in common: vLLM gives each tensor to a layer of every group, and a
    block id to one group at a time. Raises Unsupported where two groups cut the same bytes into blocks differently."""
    if len(layouts) == 1:
        (only,) = layouts
        return SharedMemory(only.regions, only.last_region, only.digest)
    pieces = sorted(
        (piece for number, layout in enumerate(layouts) for piece in _pieces(number, layout)),
        key=lambda piece: (piece.start, piece.length),
    )
    merged: list[list[_Piece]] = []
    end = -1
    for piece in pieces:
        if piece.start < end:
            merged[-1].append(piece)
        else:
            merged.append([piece])
        end = max(end, piece.start + piece.length)
    # A region is complete when the last layer has written it. So engines order regions alike, wherever these lie.
    merged.sort(key=lambda each: (natural_order(_last_layer(each)), [_told(each, piece) for piece in each]))
    _check_cut(merged)
    regions: list[Region] = []
    last_region: dict[str, int] = {}
    for each in merged:
        first = each[0]
        length = max(piece.start + piece.length for piece in each) - first.start
        last_region[_last_layer(each)] = len(regions)
        regions.append((first.start, first.stride, first.blocks, length, [0]))
    meaning = [[_told(each, piece) for piece in each] for each in merged]
    told = repr(([layout.digest for layout in layouts], meaning))
    return SharedMemory(regions, last_region, hashlib.blake2b(told.encode(), digest_size=16).digest())


def _pieces(number: int, layout: GroupLayout) -> list[_Piece]:
    # A layer that shares another one's cache comes behind it, and writes nothing.
    layers = sorted(layout.last_region.items(), key=lambda each: (each[1], natural_order(each[0])))
    found = []
    for index, (address, stride, blocks, length, offsets) in enumerate(layout.regions):
        layer = next(name for name, last in layers if last >= index)
        found += [
            _Piece(address + offset, index, length, stride, blocks, number, layer) for offset in offsets
        ]
    return found


def _last_layer(pieces: Sequence[_Piece]) -> str:
    return max((piece.layer for piece in pieces), key=natural_order)


def _told(among: Sequence[_Piece], piece: _Piece) -> tuple[int, str, int, int, int]:
    """A piece without addresses."""
    return piece.group, piece.layer, piece.index, piece.start - among[0].start, piece.length


def _check_cut(merged: Sequence[Sequence[_Piece]]) -> None:
    end, cut = -1, (0, 0)
    for piece in sorted((piece for pieces in merged for piece in pieces), key=lambda piece: piece.start):
        own = piece.stride, piece.blocks
        if piece.start < end and own != cut:
            raise Unsupported(
                "the model's KV cache groups cut the same memory into blocks of different sizes"
            )
        end, cut = max(end, piece.start + piece.stride * (piece.blocks - 1) + piece.length), own
