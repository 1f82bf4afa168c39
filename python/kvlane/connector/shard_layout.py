"""The layout of a rank's part of a block, in words that two sides can compare, and its digest.

The daemon gets both. Engines of equal digests share blocks, and the words prove that these are the same bytes, or say
how they differ. The core reads these classes by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvlane.connector.digest import JsonValue, digest16

Axis = Literal["untold", "kernel block", "layer", "half", "head", "token", "content", "state"]
"""The unit that a dimension counts. Half: keys and values. Content: numbers of a token in a head. State: of a
state-space layer. Layer: of layers that lie between each other's heads, so that they are one cache."""


@dataclass(frozen=True)
class Dimension:
    """One dimension of a layer's part of a block, as it lies in memory."""

    axis: Axis
    index: int | None
    """Among the dimensions of vLLM's tensor, that of the blocks not counted. None for kernel blocks, a part of it."""
    size: int


@dataclass(frozen=True)
class Heads:
    """A layer's KV heads in this rank."""

    count: int
    size: int
    """Numbers of a key."""
    place: tuple[int, int] | None = None
    """The first one among all KV heads of the layer, and how many those are; None where vLLM does not tell."""


@dataclass(frozen=True)
class LayerLayout:
    """A layer's cache, or one of the states that it consists of."""

    name: str
    part: int
    dtype: str
    element_bytes: int
    backend: str
    dimensions: tuple[Dimension, ...]
    """The outermost in memory first; those of size 1 are left out."""
    heads: Heads | None = None
    tokens: int | None = None
    """Tokens of a block."""


@dataclass(frozen=True)
class ShardLayout:
    """A rank's part of a block."""

    index: int
    """The rank, divided by `holders`."""
    holders: int
    """Consecutive ranks that hold the same bytes."""
    tensor_parallel: int
    pipeline_parallel: int
    layers: tuple[LayerLayout, ...]
    """In the order in which they are stored."""

    def digest(self) -> bytes:
        """16 bytes. A new value for the same layout would lose all stored blocks, so nothing may be added to it. Axes,
        heads and tokens stay out, because the namespace and the digested fields determine them."""
        parallel = [self.tensor_parallel, self.pipeline_parallel]
        # Equal in ranks that share blocks, and in nobody else.
        which: Sequence[JsonValue]
        which = (
            [self.index, *parallel] if self.holders == 1 else ["shared", self.index, self.holders, *parallel]
        )
        return digest16(["layout", 1, which, [_in_digest(layer) for layer in self.layers]])


def _in_digest(layer: LayerLayout) -> JsonValue:
    shape = [(-1 if each.index is None else each.index, each.size) for each in layer.dimensions]
    return [layer.name, layer.part, layer.dtype, layer.element_bytes, shape, layer.backend]
