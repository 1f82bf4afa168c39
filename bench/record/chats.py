"""Conversations as clients of a chat hold them, all turns known before the first one is sent.

A conversation is about one of a few instructions that many share. Each turn sends the whole conversation again, with
the engine's answers in it. A fake engine's answer depends on the prompt alone, so the answers are known beforehand.
The times of the turns are drawn too, and no turn waits for an answer: so the same requests come at the same times,
however the engines are chosen.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvlane.testing.fake_engine.answers import words

MODEL = "fake"
INSTRUCTIONS = 6
# Bytes of text, as many short ones as long ones on a logarithmic scale. A fake engine's token is 4 of them.
INSTRUCTION_BYTES = (6_000, 10_000)
MESSAGE_BYTES = (400, 40_000)
TURNS = (2, 7)
ANSWER_TOKENS = (16, 64)
# So much later than at the router before, so that the engines of all routers do not compute the same turn at once.
STAGGER_S = 2.5
# Between two turns of a conversation: so many seconds, and an exponential time of this mean more.
PAUSE_S, PAUSE_MEAN_S = 5.0, 10.0
_CONSONANTS, _VOWELS = "bdfgklmnprstv", "aeiou"
_FIRST_TOKEN = b'"delta":{"content":'


@dataclass(frozen=True)
class Turn:
    """One request."""

    at: float
    """Seconds from the beginning."""
    body: bytes
    prompt: bytes
    """What a fake engine takes for the prompt: the contents of all messages."""
    output: int
    """Tokens of the answer."""


def conversations(seconds: float, rate: float, seed: int) -> list[Turn]:
    """All turns that come in this time, by their times. `rate`: conversations a second that begin."""
    chance = random.Random(seed)
    instructions = [_text(chance, INSTRUCTION_BYTES) for _ in range(INSTRUCTIONS)]
    turns: list[Turn] = []
    begins = chance.expovariate(rate)
    while begins < seconds:
        turns += _conversation(chance, chance.choice(instructions), begins, seconds)
        begins += chance.expovariate(rate)
    return sorted(turns, key=lambda turn: turn.at)


def _conversation(chance: random.Random, instruction: str, at: float, until: float) -> list[Turn]:
    messages = [{"role": "system", "content": instruction}]
    turns = []
    for _ in range(chance.randint(*TURNS)):
        messages.append({"role": "user", "content": _text(chance, MESSAGE_BYTES)})
        output = chance.randint(*ANSWER_TOKENS)
        prompt = "".join(message["content"] for message in messages).encode()
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": output,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if at < until:
            turns.append(Turn(at, json.dumps(body).encode(), prompt, output))
        messages.append({"role": "assistant", "content": "".join(words(MODEL, prompt, output))})
        at += PAUSE_S + chance.expovariate(1 / PAUSE_MEAN_S)
    return turns


def _text(chance: random.Random, length: tuple[int, int]) -> str:
    """Words that no other text begins with."""
    wanted = round(math.exp(chance.uniform(*map(math.log, length))))
    text = ""
    while len(text) < wanted:
        syllables = range(chance.randint(1, 4))
        text += "".join(chance.choice(_CONSONANTS) + chance.choice(_VOWELS) for _ in syllables) + " "
    return text[:wanted]


@dataclass
class Seen:
    """What the clients of one router saw."""

    first_token_s: list[float | None] = field(default_factory=list)
    """From the request to its first token, in the order of the turns; None if there was none."""
    sent_late_s: float = 0.0
    """The most that a request was sent after its time."""
    under_way: int = 0
    under_way_most: int = 0


def ask(turns: Sequence[Turn], routers: Mapping[str, str]) -> dict[str, Seen]:
    """Sends all turns to each of the routers (HOST:PORT), at their times."""
    return asyncio.run(_ask(turns, routers))


async def _ask(turns: Sequence[Turn], routers: Mapping[str, str]) -> dict[str, Seen]:
    seen = {name: Seen([None] * len(turns)) for name in routers}
    begin = time.monotonic() + 1.0
    clients = [
        _ask_all(seen[name], turns, address, begin + STAGGER_S * number)
        for number, (name, address) in enumerate(routers.items())
    ]
    await asyncio.gather(*clients)
    return seen


async def _ask_all(seen: Seen, turns: Sequence[Turn], address: str, begin: float) -> None:
    asking: list[asyncio.Task[None]] = []
    for number, turn in enumerate(turns):
        due = begin + turn.at
        await asyncio.sleep(due - time.monotonic())
        asking.append(asyncio.create_task(_ask_one(seen, number, turn, address, due)))
    await asyncio.gather(*asking)


async def _ask_one(seen: Seen, number: int, turn: Turn, address: str, due: float) -> None:
    host, _, port = address.rpartition(":")
    sent = time.monotonic()
    seen.sent_late_s = max(seen.sent_late_s, sent - due)
    seen.under_way += 1
    seen.under_way_most = max(seen.under_way_most, seen.under_way)
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(
            f"{head}Content-Length: {len(turn.body)}\r\nConnection: close\r\n\r\n".encode() + turn.body
        )
        answer = b""
        first = None
        while data := await reader.read(65536):
            answer += data
            if first is None and _FIRST_TOKEN in answer:
                first = time.monotonic() - sent
        writer.close()
        # A token is one event; an answer that was cut off is no answer.
        if answer.startswith(b"HTTP/1.1 200") and answer.count(_FIRST_TOKEN) == turn.output:
            seen.first_token_s[number] = first
    except OSError:
        pass
    finally:
        seen.under_way -= 1
