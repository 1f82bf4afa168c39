"""How the engine computes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """Where copies meet the engine's computing."""

    handle: Callable[[], int]
    """Gives the handle of the stream that the calling thread computes in."""
    last_region: dict[str, int]
    """Of each layer, the last region that it reads; empty where loads cannot be waited for in parts."""
    step_kind: Callable[[], str | None]
    """Of the step that begins: how vLLM runs its forward pass. None where layers do not call their hooks, as in a full
    CUDA graph. Steps of one kind call the same hooks."""
