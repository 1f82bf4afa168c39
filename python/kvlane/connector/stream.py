"""The engine's compute stream on a GPU, as loads and saves need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """The engine's compute stream, for which copies wait and which waits for copies."""

    handle: Callable[[], int]
    """Returns the handle of the stream that the calling thread computes in."""
    awaited: dict[str, tuple[int, int]]
    """The region, its group and its number, that the hook of each layer waits for, with those before it. Empty if loads
    cannot be awaited in parts."""
    awaited_first: tuple[int, int] | None
    """The region that a step waits for before its first layer, or None."""
    step_kind: Callable[[], str | None]
    """How vLLM runs the forward pass of the step that begins. None if layers do not call their hooks, as in a full CUDA
    graph."""
