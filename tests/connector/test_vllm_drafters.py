"""Engines with speculative decoding: blocks of the drafter are stored and loaded beside those of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import BLOCK, InProcessEngine, Make, prompt
from safetensors.torch import load_file, save_file
from stores import FakeStore
from tiny_model import HIDDEN

from kvlane.connector import capabilities

ANSWER = 24

pytestmark = pytest.mark.skipif(
    not capabilities.reports_failed_requests(), reason="this vLLM has no such drafters on CPUs"
)


def speculative(method: str, path: Path) -> dict[str, Any]:
    return {"method": method, "model": str(path), "num_speculative_tokens": 2}


def ask(engine: InProcessEngine, tokens: int) -> tuple[list[int], int, float]:
    """The answer, how much of the prompt was cached, and the part of the proposed tokens that was accepted."""
    names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens")
    before = [engine.metric(name) for name in names]
    answer, cached = engine.generate(prompt(tokens, tokens), ANSWER)
    accepted, proposed = (engine.metric(name) - start for name, start in zip(names, before, strict=True))
    assert proposed > 0
    return answer, cached, accepted / proposed


def spoil(engine: InProcessEngine, fake: FakeStore, of_drafter: bool) -> None:
    """Zeros in all that is stored of the drafter's layers, or of the others."""
    pages, shape = fake.core.pages[fake.core.boot], engine.connector._scheduler._shape
    for group, namespace in zip(shape.groups, shape.namespaces, strict=True):
        # A shard is its layers one after the other; all are of one size, and the drafter's come first by their names.
        layers = sorted(group.layer_names)
        of_draft = sum(name.startswith("draft_model.") for name in layers)
        assert 0 < of_draft < len(layers)
        for blocks in [shards for key, shards in fake.core.blocks.items() if key[0] == namespace]:
            for page in blocks.values():
                stored = pages[page]
                cut = len(stored) // len(layers) * of_draft
                pages[page] = (
                    bytes(cut) + stored[cut:] if of_drafter else stored[:cut] + bytes(len(stored) - cut)
                )


def test_a_drafters_blocks_come_back_with_those_of_the_model(
    make_on_fake: Make, fake: FakeStore, model: Path
) -> None:
    """The drafter is the model itself. So all that it proposes is accepted, as long as its own blocks are right."""
    engine = make_on_fake(model, policy="recompute", speculative_config=speculative("draft_model", model))
    for tokens in (31, 64, 300, 321):
        answer, _, accepted = ask(engine, tokens)
        assert accepted > 0.85, "the last proposals go beyond the answer"
        engine.forget()
        warm = ask(engine, tokens)
        assert warm[:2] == (answer, (tokens - 1) // BLOCK * BLOCK)
        assert warm[2] > 0.85
    # Without the drafter's blocks the answer is right, and late; without the model's it is another one.
    right, _, _ = ask(engine, 300)
    for of_drafter in (True, False):
        engine.forget()
        spoil(engine, fake, of_drafter)
        answer, cached, accepted = ask(engine, 300)
        assert cached == 288
        assert (answer == right) == of_drafter
        if of_drafter:
            assert accepted < 0.7


def eagle_of(model: Path, folder: Path) -> Path:
    """A drafter of one layer, which takes the model's embeddings and hidden states."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    layer, norm = "model.layers.0.", "input_layernorm.weight"
    weights = {
        name.removeprefix("model."): each
        for name, each in load_file(model / "model.safetensors").items()
        if name.startswith(layer) and not name.endswith(norm)
    }
    weights["fc.weight"] = torch.eye(2 * HIDDEN)[:HIDDEN].clone()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_answers_beside_an_eagle_drafter_are_the_models(
    make_on_fake: Make, model: Path, tmp_path: Path
) -> None:
    engine = make_on_fake(model)
    right = {tokens: engine.generate(prompt(tokens, tokens), ANSWER)[0] for tokens in (64, 300, 321)}
    drafter = speculative("eagle", eagle_of(model, tmp_path / "eagle"))
    engine = make_on_fake(model, policy="recompute", speculative_config=drafter)
    cached = {}
    for _ in ("cold", "warm"):
        for tokens, answer in right.items():
            got, cached[tokens], _ = ask(engine, tokens)
            assert got == answer
        engine.forget()
    assert cached == {tokens: (tokens - 1) // BLOCK * BLOCK for tokens in right}
    assert engine.errors() == 0
