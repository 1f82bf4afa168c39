"""The rate at which this engine computes prompts, learned from its own steps. It bounds the time for which a prompt
waits for another engine, and what the daemon fetches for it."""

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
# Samples that count. A single one may be far off: a scheduler that was late sees two steps end at once.
SAMPLES = 8
SAMPLES_MIN = 3
# A hand-off may take this many times as long as computing the prompt here.
TIMES = 2.0
SECONDS_MIN = 2.0
# A lookup carries 32 bits.
TOKENS_PER_S_MAX = 2**32 - 1


class PrefillRate:
    """Tokens a second: the median of the last steps that compute prompts, each counting by its tokens."""

    def __init__(self, steps_at_once: int = 1) -> None:
        """`steps_at_once`: steps that may be under way. A step is over when that many further ones are planned."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)
        """Rate and tokens of each step."""
        self._rate: float | None = None
        self._steps: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=max(1, steps_at_once) + 1)

    def step_is_planned(self, now: float, scheduled: Mapping[str, int]) -> None:
        """Record the start of a step. `scheduled`: its tokens, by request."""
        self._steps.append((now, scheduled))
        if len(self._steps) < (self._steps.maxlen or 0):
            return
        steps = list(self._steps)
        # The oldest step is over now.
        tokens = sum(count for count in steps[0][1].values() if count >= PROMPT_TOKENS_MIN)
        if tokens < TOKENS_MIN:
            return
        # Between steps without a common request the engine may have had nothing to do.
        goes_on = all(not one.keys().isdisjoint(other) for (_, one), (_, other) in pairwise(steps))
        # If steps overlap it took the last of these times, else the first. The longest never says too high a rate.
        seconds = max(later - earlier for (earlier, _), (later, _) in pairwise(steps))
        if goes_on and seconds > 0:
            self._samples.append((tokens / seconds, tokens))
            self._rate = self._median()

    def _median(self) -> float:
        half = sum(tokens for _, tokens in self._samples) / 2
        seen = 0
        for rate, tokens in sorted(self._samples):
            seen += tokens
            if seen >= half:
                return rate
        raise AssertionError("there is no sample")

    @property
    def tokens_per_s(self) -> int:
        """0 if it is not known yet."""
        if self._rate is None or len(self._samples) < SAMPLES_MIN:
            return 0
        return min(max(1, round(self._rate)), TOKENS_PER_S_MAX)

    def budget(self, tokens: int) -> float:
        """Seconds that a hand-off of this many tokens may take."""
        return max(SECONDS_MIN, TIMES * tokens / (self._rate or UNKNOWN_RATE))
