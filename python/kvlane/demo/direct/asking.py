"""Sends one prompt to two engines at once, as a router for direct hand-offs does."""

from __future__ import annotations

import json
import re
import secrets
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvlane.demo.direct.cluster import Side
from kvlane.demo.pd.asking import ANSWER_TIMEOUT_S, MODEL_NAME

_COUNTER = re.compile(r"^vllm:kvlane_(\w+?)_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Streamed:
    """An answer, token by token."""

    tokens: list[int]
    first_s: float
    """From the request to its first token."""
    all_s: float


@dataclass(frozen=True)
class HandedOver:
    """The answers and times of two engines for one prompt."""

    answer: Streamed
    prefill_s: float | None
    """From the request to the end of the prefill engine's part; None if it did not answer."""


def stream(side: Side, prompt: str, tokens: int, params: dict[str, Any] | None, salt: str = "") -> Streamed:
    """The answer to a prompt, always the most probable tokens. Raises OSError."""
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    body |= {"kv_transfer_params": params} if params else {}
    body |= {"cache_salt": salt} if salt else {}
    request = urllib.request.Request(
        side.node.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, got = time.monotonic(), None, list[int]()
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
        for line in reply:
            text = line.decode().strip()
            if not text.startswith("data: {"):
                continue
            for choice in json.loads(text.removeprefix("data: "))["choices"]:
                got += choice.get("token_ids") or []
            if got and first is None:
                first = time.monotonic() - began
    if first is None:
        raise OSError(f"{side.node.url} answered without a token")
    return Streamed(got, first, time.monotonic() - began)


def hand_over(pool: ThreadPoolExecutor, prefill: Side, decode: Side, prompt: str, tokens: int) -> HandedOver:
    """Sends the prompt to both engines at the same time. Raises OSError if the decode engine does not answer."""
    handoff = secrets.token_hex(16)
    began = time.monotonic()
    for_prefill = {"do_remote_decode": True, "kvlane": {"handoff": handoff}}
    other: Future[Streamed] = pool.submit(stream, prefill, prompt, 1, for_prefill)
    ended: list[float] = []
    other.add_done_callback(lambda _: ended.append(time.monotonic() - began))
    for_decode = {"kvlane": {"handoff": handoff, "peer": prefill.handoff}}
    answer = stream(decode, prompt, tokens, for_decode)
    failed = other.exception(ANSWER_TIMEOUT_S)
    return HandedOver(answer, None if failed is not None else ended[0])


def counters(side: Side) -> dict[str, float]:
    """The counters of the engine's connector, by name."""
    with urllib.request.urlopen(side.node.url + "/metrics", timeout=ANSWER_TIMEOUT_S) as reply:
        text = reply.read().decode()
    return {name: float(value) for name, value in _COUNTER.findall(text)}
