"""When answers of two engines count as alike.

On CPUs engines compute in float32, and equal prompts get equal answers. On GPUs they compute in bfloat16. There a
prompt's last token is computed among all others by one engine, and alone by an engine that got the rest: other
kernels round otherwise, and where two tokens are almost as likely the answers diverge. Of 40 answers of 16 tokens 10
and 20 were equal on an H200. So there most answers have to begin alike, which they do not with wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlane.demo.pd.asking import Answer


@dataclass(frozen=True)
class Comparing:
    """The rule for the engines of a demo."""

    is_exact: bool
    """They compute in float32."""

    @property
    def word(self) -> str:
        """What answers are that count as alike."""
        return "equal" if self.is_exact else "begin alike"

    def are_alike(self, one: Answer, other: Answer) -> bool:
        """Whether two answers to the same prompt count as alike."""
        return one.tokens == other.tokens if self.is_exact else one.tokens[:1] == other.tokens[:1]

    def count(self, pairs: Iterable[tuple[Answer, Answer]]) -> int:
        """How many pairs of answers count as alike."""
        return sum(self.are_alike(one, other) for one, other in pairs)

    def are_enough(self, alike: int, pairs: int) -> bool:
        """Whether so many of these pairs show that the engines agree."""
        return alike == pairs if self.is_exact else 2 * alike > pairs
