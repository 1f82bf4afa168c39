"""One tensor that holds every block's layers together, as vLLM before 0.29 makes it on request, seen layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def layer_caches(
    cache: torch.Tensor, order: Sequence[int], layers: Sequence[Sequence[str]], num_blocks: int
) -> dict[str, torch.Tensor]:
    """Each layer's KV cache. `cache` has its dimensions as they lie in memory, the blocks first; `order` says which
    dimension of the backend's shape each of them is, where 0 counts the layers. `layers` has the names that share entry
    0, 1, ...

    Where heads lie outside the layers, or a block is several of the attention kernel's, a layer's part of a block is
    many short pieces. Then every name stands for the whole tensor: a cache that layers share is stored once, so a block
    stays one piece, and no layer is there before all are.
    """
    if order[1] != 0 or cache.shape[0] != num_blocks:
        return {name: cache for names in layers for name in names}
    by_layer = cache.permute(*[order.index(dim) for dim in range(len(order))])
    return {name: by_layer[index] for index, names in enumerate(layers) for name in names}
