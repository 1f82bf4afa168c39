"""The rate at which this engine computes prompts, learned from its own steps. It bounds the time for which a prompt
waits for another engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise

# A request with fewer tokens in a step generates, even with a drafter's tokens. It shows nothing of prompts.
PROMPT_TOKENS_MIN = 32
# Steps with fewer tokens of prompts say little.
TOKENS_MIN = 64
# Tokens a second of a slow engine, assumed until a step has shown this engine's rate.
UNKNOWN_RATE = 250.0
# Weight of the latest sample.
WEIGHT = 0.3
# A hand-off may take this many times as long as computing the prompt here.
TIMES = 2.0
SECONDS_MIN = 2.0


class PrefillRate:
    """Tokens a second, as a moving average over steps that compute prompts."""

    def __init__(self, steps_at_once: int = 1) -> None:
        """`steps_at_once`: steps that may be under way. A step is over when that many further ones are planned."""
        self._rate: float | None = None
        self._steps: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=max(1, steps_at_once) + 1)

    def step_is_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """Record the start of a step. `scheduled`: its tokens, by request."""
        self._steps.append((now, scheduled))
        if len(self._steps) < (self._steps.maxlen or 0):
            return
        steps = list(self._steps)
        # The oldest step is over now. It ran from the end of the step before it, at which one more step was planned.
        tokens = sum(count for count in steps[0][1].values() if count >= PROMPT_TOKENS_MIN)
        if tokens < TOKENS_MIN:
            return
        # Between steps without a common request the engine may have had nothing to do.
        goes_on = all(not one.keys().isdisjoint(other) for (_, one), (_, other) in pairwise(steps))
        seconds = now - steps[-2][0]
        if goes_on and seconds > 0:
            sample = tokens / seconds
            self._rate = sample if self._rate is None else self._rate + WEIGHT * (sample - self._rate)

    def budget(self, tokens: int) -> float:
        """Seconds that a hand-off of this many tokens may take."""
        return max(SECONDS_MIN, TIMES * tokens / (self._rate or UNKNOWN_RATE))
