"""How far a forward pass is, counted in regions of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Layers:
    """The layers of a rank in the order of their regions. A model computes them in this order; one that comes before
    its turn is counted when those before it are done."""

    def __init__(self, last_region: Mapping[str, int]) -> None:
        """`last_region`: of each layer, the last region that it writes."""
        self._order = sorted(last_region.items(), key=lambda item: item[1])

    def begin(self, tell: Callable[[int], None]) -> Callable[[str], None]:
        """A step begins. The answer is to be called with each layer that is done; it calls `tell` with how many
        regions are, the first ones."""
        order, done = self._order, set[str]()
        at = 0

        def layer_done(name: str) -> None:
            nonlocal at
            done.add(name)
            before = at
            while at < len(order) and order[at][0] in done:
                at += 1
            if at > before:
                tell(order[at - 1][1] + 1)

        return layer_done
