"""The answers of a fake engine, in the shapes of vLLM's server. The text is a pure function of model and prompt."""

from __future__ import annotations

import json
import time
from hashlib import blake2b
from typing import Any

WORDS = [f"w{number:03} " for number in range(1000)]
_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
DONE = b"data: [DONE]\n\n"


def dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def words(model: str, prompt: bytes, count: int) -> list[str]:
    """The first `count` tokens of the answer; equal on every engine."""
    seed = int.from_bytes(blake2b(prompt, digest_size=8, key=model.encode()[:64]).digest(), "little")
    return [WORDS[(((seed + position * _STEP) & _MASK) >> 20) % 1000] for position in range(count)]


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> bytes:
    """An error body in OpenAI's shape."""
    return dump({"error": {"message": message, "type": kind, "param": param, "code": status}})


def whole(
    chat: bool,
    request_id: str,
    model: str,
    text: str,
    count: int,
    used: dict[str, Any],
    transfer: dict[str, Any] | None,
) -> bytes:
    """The answer to a request that is not streamed, with `count` equal choices."""
    choices: list[dict[str, Any]] = []
    for index in range(count):
        choice: dict[str, Any] = {"index": index}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        else:
            choice["text"] = text
        choices.append({**choice, "logprobs": None, "finish_reason": "length", "stop_reason": None})
    return dump(
        {
            "id": request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": choices,
            "usage": used,
            "kv_transfer_params": transfer,
        }
    )


class Stream:
    """The events of one streamed answer. Their common parts are built once."""

    def __init__(self, chat: bool, request_id: str, model: str, count: int) -> None:
        self._chat = chat
        self._count = count
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._head = "data: " + dump(head).decode()[:-1] + ',"choices":['

    def opening(self) -> bytes:
        """The events before the first token: in a chat, the role."""
        if not self._chat:
            return b""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return "".join(f'{self._head}{{"index":{index},{delta}' for index in range(self._count)).encode()

    def token(self, word: str, last: bool) -> bytes:
        """A token; words need no escapes in JSON."""
        text = f'"delta":{{"content":"{word}"}}' if self._chat else f'"text":"{word}"'
        reason = '"length"' if last else "null"
        tail = f'{text},"logprobs":null,"finish_reason":{reason}}}]}}\n\n'
        if self._count == 1:
            return f'{self._head}{{"index":0,{tail}'.encode()
        return "".join(f'{self._head}{{"index":{index},{tail}' for index in range(self._count)).encode()

    def ending(self, used: dict[str, Any] | None, transfer: dict[str, Any] | None) -> bytes:
        """The events after the last token: the usage if requested, and the end."""
        if used is None and transfer is None:
            return DONE
        more = {"usage": used} if transfer is None else {"usage": used, "kv_transfer_params": transfer}
        return (self._head + "]," + dump(more).decode()[1:] + "\n\n").encode() + DONE
