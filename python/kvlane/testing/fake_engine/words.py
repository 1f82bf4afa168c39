"""Tokens that are whole words, by the vocabulary of a tokenizer.json: a fake engine and a router can agree on them."""

from __future__ import annotations

import json
from pathlib import Path

from kvlane.testing.fake_engine.requests import TOKEN_BYTES


class Words:
    """A WordLevel tokenizer that splits at spaces, and a chat template of its own.

    A chat is "<|ROLE|> CONTENT </s>" for each message, then "<|assistant|>", with a space between all of these.
    """

    def __init__(self, file: Path) -> None:
        model = json.loads(file.read_text())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._unknown = self._ids[model["unk_token"]]

    def tokens(self, text: str) -> bytes:
        """The words' numbers, each in as many bytes as a token of any fake engine has."""
        ids = (self._ids.get(word, self._unknown) for word in text.split())
        return b"".join(each.to_bytes(TOKEN_BYTES, "little") for each in ids)

    def chat(self, messages: list[tuple[str, str]]) -> bytes:
        """The tokens of a chat of roles and contents."""
        text = " ".join(f"<|{role}|> {content} </s>" for role, content in messages)
        return self.tokens(f"{text} <|assistant|>")
