"""Open-loop load on an OpenAI completions endpoint: each request leaves at its time, even if earlier ones have no
answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvlane.bench.extra import aiohttp


@dataclass
class Timing:
    """One request. Times in seconds."""

    started: float
    """Since the start of the round."""
    late: float = 0.0
    """How much later than planned the request left, because the client itself was too slow."""
    chunks: list[float] = field(default_factory=list)
    """The times of each piece of text, since `started`."""
    tokens: int = 0
    total: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.chunks[0]

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; of a single token there is none."""
        if self.tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between two pieces of text (ITL)."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


def arrival_times(count: int, rate: float, pattern: str, seed: int) -> list[float]:
    """Seconds after the start at which `count` requests leave: `pattern` is poisson or fixed; rate inf: all at once."""
    if rate == float("inf"):
        return [0.0] * count
    if pattern == "fixed":
        return [index / rate for index in range(count)]
    assert pattern == "poisson", pattern
    source = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.expovariate(rate)
    return times


def make_prompts(count: int, length: int, shared: int, seed: int | str, vocab: int) -> list[list[int]]:
    """Prompts of `length` token ids, the first `shared` the same in all. Ids below 100, often special, are left out."""
    assert 0 <= shared <= length, (shared, length)
    source = random.Random(seed)

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocab) for _ in range(tokens)]

    prefix = draw(shared)
    return [prefix + draw(length - shared) for _ in range(count)]


async def run_round(
    base_url: str,
    model: str,
    prompts: Sequence[list[int]],
    arrivals: Sequence[float],
    output_tokens: int,
    *,
    api_key: str = "",
    timeout_s: float = 600.0,
    on_done: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Send every prompt at its arrival time; one timing each, in the order of the prompts."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=limits, headers=headers
    ) as session:
        begin = time.perf_counter()

        async def one(prompt: list[int], planned: float) -> Timing:
            await asyncio.sleep(max(0.0, begin + planned - time.perf_counter()))
            started = time.perf_counter()
            timing = Timing(started=started - begin, late=started - begin - planned)
            request = {
                "model": model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            try:
                await _stream(session, f"{base_url}/v1/completions", request, timing, started)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                timing.error = f"{type(error).__name__}: {error}"
            timing.total = time.perf_counter() - started
            on_done()
            return timing

        return list(await asyncio.gather(*map(one, prompts, arrivals)))


async def _stream(
    session: aiohttp.ClientSession, url: str, request: dict[str, object], timing: Timing, started: float
) -> None:
    """Read the server-sent events of one answer into `timing`. ValueError if the endpoint answers anything else."""
    async with session.post(url, json=request) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise ValueError(str(event["error"])[:200])
            if event.get("choices"):
                timing.chunks.append(time.perf_counter() - started)
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
    if not timing.chunks:
        raise ValueError("the answer had no text")
    # Endpoints that know no stream_options send one token a chunk.
    timing.tokens = timing.tokens or len(timing.chunks)
