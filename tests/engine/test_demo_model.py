"""The model that docs/start.md makes can chat: its tokenizer has a template, in which each word is one token."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from kvlane.demo.model import TINY, build_model


def test_a_chat_has_the_tokens_of_its_words_and_three_more(tmp_path: Path) -> None:
    """vLLM answered each chat with 400, since the model had no chat template."""
    tokenizer = AutoTokenizer.from_pretrained(build_model(tmp_path / "tiny", TINY))
    chat = [{"role": "user", "content": "w4 w5 w6"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    # <s>, the words, </s>, and <s> for the answer.
    assert tokenizer(text, add_special_tokens=False).input_ids == [1, 4, 5, 6, 2, 1]
    answered = [*chat, {"role": "assistant", "content": "w7"}, {"role": "user", "content": "w8"}]
    later = tokenizer.apply_chat_template(answered, tokenize=False, add_generation_prompt=True)
    assert later.startswith(text.removesuffix("<s>")), "the next turn begins with the last one"
