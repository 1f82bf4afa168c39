"""What tests of a prefill and a decode engine behind a router ask, with the tiny model."""

from __future__ import annotations

from served import ServedEngine

from kvlane.demo.pd import asking
from kvlane.demo.pd.asking import PromptTokens

# Whole blocks and a part of one, and long enough to be split.
PROMPT_TOKENS = 300
ANSWER = 16
SPLIT = "prefill, then decode"


def prompt(seed: str) -> str:
    """A text of which the tiny model takes each word for one token."""
    return asking.prompt_text(PROMPT_TOKENS, seed, vocabulary=2000)


def complete(base_url: str, text: str, request_id: str = "test", salt: str | None = None) -> list[int]:
    """The tokens of the answer. With a salt an engine finds no block of requests without it."""
    answer = asking.complete(base_url, text, ANSWER, request_id, salt, model="tiny")
    assert answer.prompt_tokens == PROMPT_TOKENS
    return answer.tokens


def counted(engine: ServedEngine, before: PromptTokens) -> PromptTokens:
    """Where the KV of one prompt came from since. Nothing else may run at the engine."""
    return asking.counted(lambda: counters(engine), before, PROMPT_TOKENS)


def counters(engine: ServedEngine) -> PromptTokens:
    """Prompt tokens of the engine since its start."""
    return asking.prompt_tokens(engine.url)


def alone(engine: ServedEngine, text: str) -> list[int]:
    """The answer of one engine that computes the whole prompt, and leaves nothing that serves it without the salt."""
    before = counters(engine)
    answer = complete(engine.url, text, salt="alone")
    assert counted(engine, before).computed == PROMPT_TOKENS
    return answer
