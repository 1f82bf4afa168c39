"""A trace with shared system prompts: what many users of a few applications send to a row of engines."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Lengths in blocks. The n-th most frequent system prompt is asked in proportion to 1 / n ** zipf."""

    system_prompts: int
    requests: int
    zipf: float
    system_blocks: tuple[int, int]
    user_blocks: tuple[int, int]


@dataclass(frozen=True)
class Request:
    """One request; the user's part is its own."""

    number: int
    system_prompt: int
    system_blocks: int
    user_blocks: int

    @property
    def blocks(self) -> int:
        """How many blocks the whole prompt has."""
        return self.system_blocks + self.user_blocks


@dataclass(frozen=True)
class Trace:
    """Requests in order, and how many blocks all system prompts have together."""

    requests: list[Request]
    system_blocks: int


def make(shape: Shape, seed: int) -> Trace:
    """The same trace for the same shape and seed."""
    source = random.Random(seed)
    lengths = [source.randint(*shape.system_blocks) for _ in range(shape.system_prompts)]
    weights = [1 / rank**shape.zipf for rank in range(1, shape.system_prompts + 1)]
    asked = source.choices(range(shape.system_prompts), weights, k=shape.requests)
    requests = [
        Request(number, prompt, lengths[prompt], source.randint(*shape.user_blocks))
        for number, prompt in enumerate(asked)
    ]
    return Trace(requests, sum(lengths))
