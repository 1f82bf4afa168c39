"""The demo's requests to engines and to the router, over HTTP."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL_NAME = "demo"
"""The name under which the engines serve the model, whatever its own name is."""
ANSWER_TIMEOUT_S = 300.0
_PAGE_TIMEOUT_S = 10.0
_COUNT_TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$")


class AskFailed(Exception):
    """No answer came, or it was an error. The sentence names the address."""


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt."""

    tokens: list[int]
    prompt_tokens: int
    seconds: float


def complete(
    base_url: str,
    prompt: str,
    tokens: int,
    request_id: str,
    salt: str | None = None,
    model: str = MODEL_NAME,
    **more: Any,
) -> Answer:
    """The answer to a prompt, always the most probable tokens. With a `salt` the engine uses no block of requests
    without it, so a prompt is computed from its beginning. Raises AskFailed."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **({"cache_salt": salt} if salt else {}), **more}
    request = urllib.request.Request(
        base_url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": request_id},
    )
    started = time.monotonic()
    said = json.loads(_read(request, ANSWER_TIMEOUT_S))
    seconds = time.monotonic() - started
    return Answer(list(said["choices"][0]["token_ids"]), int(said["usage"]["prompt_tokens"]), seconds)


def page(base_url: str, path: str) -> Any:
    """A page of JSON. Raises AskFailed."""
    return json.loads(_read(urllib.request.Request(base_url + path), _PAGE_TIMEOUT_S))


def is_healthy(base_url: str) -> bool:
    """Whether /health answers that the process is well."""
    try:
        _read(urllib.request.Request(base_url + "/health"), _PAGE_TIMEOUT_S)
    except AskFailed:
        return False
    return True


def tokens_of(base_url: str, text: str) -> int:
    """The number of tokens that the engine's tokenizer makes of a text."""
    body = json.dumps({"model": MODEL_NAME, "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(base_url + "/tokenize", body, {"Content-Type": "application/json"})
    return int(json.loads(_read(request, _PAGE_TIMEOUT_S))["count"])


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens of an engine since its start, by where their KV came from. vLLM counts a request when it has its
    first token."""

    computed: int = 0
    own_cache: int = 0
    connector: int = 0

    @property
    def total(self) -> int:
        """Prompt tokens of all sources."""
        return self.computed + self.own_cache + self.connector

    def __add__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(
            self.computed + other.computed,
            self.own_cache + other.own_cache,
            self.connector + other.connector,
        )

    def __sub__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(
            self.computed - other.computed,
            self.own_cache - other.own_cache,
            self.connector - other.connector,
        )


def prompt_tokens(base_url: str) -> PromptTokens:
    """The engine's counters. An answer's `usage` will not do for the decode engine: vLLM puts in there what the prefill
    engine had cached."""
    text = _read(urllib.request.Request(base_url + "/metrics"), _PAGE_TIMEOUT_S).decode()
    return read_prompt_tokens(text)


def read_prompt_tokens(metrics: str) -> PromptTokens:
    """The counters in the page /metrics."""
    sources: dict[str, int] = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample[1] == "vllm:prompt_tokens_by_source":
            source = re.search(r'source="(\w+)"', sample[2] or "")
            if source and source[1] in sources:
                sources[source[1]] += int(float(sample[3]))
    return PromptTokens(*sources.values())


def counted(counters: Callable[[], PromptTokens], before: PromptTokens, tokens: int) -> PromptTokens:
    """The growth of the counters once they have counted a prompt of `tokens`. Exact while no other request runs. Raises
    AskFailed if they count another number."""
    deadline = time.monotonic() + _COUNT_TIMEOUT_S
    while (grown := counters() - before).total < tokens and time.monotonic() < deadline:
        time.sleep(0.02)  # vLLM counts beside answering, and tells nobody when it has
    if grown.total != tokens:
        raise AskFailed(f"the engines' counters grew by {grown} with a prompt of {tokens} tokens")
    return grown


def prompt_text(words: int, seed: str, vocabulary: int = 32_000) -> str:
    """A text that no other seed begins with. The demo's own model takes each of its words for one token."""
    source = random.Random(seed)
    return " ".join(f"w{source.randrange(4, vocabulary)}" for _ in range(words))


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return reply.read()
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise AskFailed(f"{request.full_url} answered status {error.code}: {said}") from error
    except (OSError, TimeoutError) as error:
        raise AskFailed(f"{request.full_url} did not answer: {error}") from error
