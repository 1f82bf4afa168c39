"""A request's body, read and checked as far as a fake engine needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

TOKEN_BYTES = 4


class Tokenizer(Protocol):
    """Makes tokens of texts, 4 bytes each."""

    def tokens(self, text: str) -> bytes: ...

    def chat(self, messages: list[tuple[str, str]]) -> bytes: ...


class BadRequest(ValueError):
    """A body that vLLM would answer with 400."""


@dataclass
class Asked:
    """A checked request."""

    body: dict[str, Any]
    model: str | None
    prompt: bytes
    max_tokens: int
    stream: bool
    include_usage: bool
    choices: int

    @property
    def prompt_tokens(self) -> int:
        return count_tokens(self.prompt)


def count_tokens(prompt: bytes) -> int:
    return -(-len(prompt) // TOKEN_BYTES)


def token_ids(prompt: bytes) -> list[int]:
    """Each 4 bytes of the prompt are a token, its id their value in little-endian order."""
    return [
        int.from_bytes(prompt[at : at + TOKEN_BYTES], "little") for at in range(0, len(prompt), TOKEN_BYTES)
    ]


def read_json(data: bytes) -> dict[str, Any]:
    """Raises BadRequest."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def read_generation(data: bytes, chat: bool, tokenizer: Tokenizer | None = None) -> Asked:
    """A body of /v1/completions or /v1/chat/completions. Without a tokenizer a token is 4 bytes. Raises BadRequest."""
    body = read_json(data)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string.")
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens", "max_completion_tokens")
    max_tokens = next((body[name] for name in names if body.get(name) is not None), 16)
    _check_integer("max_tokens", max_tokens)
    choices = body["n"] if body.get("n") is not None else 1
    _check_integer("n", choices)
    if body.get("min_tokens") is not None and type(body["min_tokens"]) is not int:
        raise BadRequest("min_tokens must be an integer.")
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object.")
    prompt = messages_text(body.get("messages")) if chat else prompt_text(body.get("prompt"))
    if tokenizer is not None:
        prompt = _tokenized(body, chat, tokenizer) or prompt
    include_usage = stream and bool(options and options.get("include_usage"))
    return Asked(body, model, prompt, max_tokens, stream, include_usage, choices)


def _tokenized(body: dict[str, Any], chat: bool, tokenizer: Tokenizer) -> bytes | None:
    """The prompt in tokens; None if it is token ids already. The caller has checked the body."""
    if chat:
        messages = body["messages"]
        return tokenizer.chat([(each.get("role", ""), messages_text([each]).decode()) for each in messages])
    return tokenizer.tokens(body["prompt"]) if isinstance(body["prompt"], str) else None


def messages_text(messages: object) -> bytes:
    """The contents of the messages, one after the other. Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty.")
    parts: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts += [_part_text(part) for part in content]
        elif not isinstance(message, dict) or "role" not in message:
            raise BadRequest("A message must be an object with a role.")
    return "".join(parts).encode(errors="surrogatepass")


def prompt_text(prompt: object) -> bytes:
    """A prompt of text or of token ids. Raises BadRequest."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt.encode(errors="surrogatepass")
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("prompt must be a string or a list of token ids, one prompt, and not empty.")
    if not all(type(each) is int and 0 <= each < 1 << 32 for each in prompt):
        raise BadRequest("Token ids must be integers of 32 bits; this server takes one prompt in a request.")
    text = b"".join(each.to_bytes(TOKEN_BYTES, "little") for each in prompt)
    # A text may end within its last token.
    return text[:-TOKEN_BYTES] + (text[-TOKEN_BYTES:].rstrip(b"\0") or b"\0")


def _part_text(part: object) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    return json.dumps(part, sort_keys=True)


def _check_integer(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} must be at least 1, got {value!r}.")
