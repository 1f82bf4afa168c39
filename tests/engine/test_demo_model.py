"""The models that pages make: that of docs/start.md can chat, those of docs/hybrids.md say how they are served."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_a_family_is_made_as_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlane.demo.model", "--shape", "gpt-oss", "out/gpt-oss"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    made = tmp_path / ran.stdout.strip()
    assert json.loads((made / "config.json").read_text())["model_type"] == "gpt_oss"
    assert "vllm serve out/gpt-oss --max-model-len 4096 --enforce-eager --dtype float32" in ran.stderr
    named = subprocess.run([*command, "--dtype", "bfloat16"], cwd=tmp_path, capture_output=True, text=True)
    assert named.returncode == 2 and "has a dtype of its own" in named.stderr
