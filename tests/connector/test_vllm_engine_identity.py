"""Real engines that mean different things by equal prompts, on one daemon: none answers from another one's blocks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import InProcessEngine
from safetensors.torch import save_file
from stores import DaemonStore
from test_vllm_engine import Make, engines, prompt
from tiny_model import HEAD_DIM, HEADS, HIDDEN, LAYERS, build_tiny_model

from kvlane.connector import adapters, namespace

pytestmark = pytest.mark.old_vllm

RANK = 8


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    store = DaemonStore(tmp_path)
    try:
        with engines(store.address) as start:
            yield start
    finally:
        store.close()


def build_longrope_model(folder: Path) -> Path:
    """Takes its long rotary factors where a request may be longer than 512 tokens."""
    model = build_tiny_model(folder)
    half = HEAD_DIM // 2
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [8.0] * half,
        "original_max_position_embeddings": 512,
        "factor": 4.0,
    }
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_a_longrope_model_with_another_longest_request_answers_as_without_kvlane(
    make: Make, tmp_path: Path
) -> None:
    """Models like Phi-3 take the short or the long rotary factors by --max-model-len. Started with a longer one, the
    engine loaded keys of the short factors and answered wrongly."""
    model = build_longrope_model(tmp_path / "phi")
    engine = make(model, max_model_len=512)
    short, _ = engine.generate(prompt(1))
    engine.drain()
    engine = make(model, max_model_len=1024)
    long, cached = engine.generate(prompt(1))
    assert cached == 0
    assert long != short, "the comparison would not notice the other factors"
    engine.forget()
    assert engine.generate(prompt(1)) == (long, 288)
    engine = make(model, max_model_len=500)
    assert engine.generate(prompt(1)) == (short, 288), "any length up to the trained one is the same model"
    assert engine.errors() == 0


def test_longrope_engines_that_are_made_to_share_hit_and_answer_wrongly(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: where the configuration counts for nothing the blocks are found, and are wrong."""
    model = build_longrope_model(tmp_path / "phi")
    with engines(None) as start:
        long, _ = start(model, max_model_len=1024).generate(prompt(1))
    monkeypatch.setattr(namespace, "counted_fields", lambda *_: {})
    engine = make(model, max_model_len=512)
    engine.generate(prompt(1))
    engine.drain()
    wrong, cached = make(model, max_model_len=1024).generate(prompt(1))
    assert cached == 288
    assert wrong != long


def write_adapter(folder: Path, seed: int, alpha: int = 16) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj."
        tensors[at + "lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.3
        tensors[at + "lora_B.weight"] = torch.randn(HEADS * HEAD_DIM, RANK, generator=generator) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    # A file that has just been written is not trusted yet.
    newest = max(each.stat().st_ctime_ns for each in folder.iterdir())
    while time.time_ns() < newest + 2_100_000_000:
        time.sleep(0.05)


def ask(engine: InProcessEngine, adapter: Any, seed: int, tokens: int = 300) -> tuple[list[int], int]:
    """An answer with an adapter, and how many tokens of the prompt came from a cache."""
    from vllm import SamplingParams

    name = f"adapted-{next(engine._names)}"
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.llm.llm_engine.add_request(
        name, {"prompt_token_ids": prompt(seed, tokens)}, parameters, lora_request=adapter
    )
    output = engine.run()[name]
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_an_adapter_overwritten_while_loaded_leaves_no_blocks_to_the_new_one(
    make: Make, tmp_path: Path
) -> None:
    """vLLM goes on with the weights that it has loaded; the engine that is started next loads the new ones."""
    from vllm.lora.request import LoRARequest

    model = build_tiny_model(tmp_path / "tiny")
    folder = tmp_path / "adapter"
    write_adapter(folder, 1)
    adapter = LoRARequest("tuned", 1, str(folder))
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK}
    engine = make(model, **options)
    plain, _ = engine.generate(prompt(1))
    old, cached = ask(engine, adapter, 1)
    assert cached == 0 and old != plain, "the adapter would not be noticed"
    engine.forget()
    assert ask(engine, adapter, 1) == (old, 288)
    # A prompt of whole blocks, of which the engine computes the last token: beside the same one without the adapter.
    without, _ = engine.generate(prompt(3, 288))
    tuned, cached = ask(engine, adapter, 3, 288)
    assert cached == 0 and tuned != without
    engine.drain()
    assert ask(engine, adapter, 3, 288) == (tuned, 287)
    assert engine.generate(prompt(3, 288)) == (without, 287)
    engine.forget()
    assert ask(engine, adapter, 3, 288) == (tuned, 287)
    write_adapter(folder, 2)
    old, cached = ask(engine, adapter, 2)
    assert cached == 0
    engine.forget()
    assert ask(engine, adapter, 2) == (old, 0)
    assert engine.counted["unshared_requests"] == 2

    engine = make(model, **options)
    new, cached = ask(engine, adapter, 2)
    assert cached == 0 and new != old
    engine.forget()
    assert ask(engine, adapter, 2) == (new, 288)

    # The scale stands in the configuration only.
    write_adapter(folder, 2, alpha=64)
    engine = make(model, **options)
    scaled, cached = ask(engine, adapter, 2)
    assert cached == 0 and scaled != new
    assert engine.errors() == 0


def test_adapters_that_are_made_to_share_hit_and_answer_wrongly(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: where an adapter's content counts for nothing, blocks are found and are wrong."""
    from vllm.lora.request import LoRARequest

    model = build_tiny_model(tmp_path / "tiny")
    folder = tmp_path / "adapter"
    adapter = LoRARequest("tuned", 1, str(folder))
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK}
    monkeypatch.setattr(adapters, "digest16", lambda _: bytes(16))
    write_adapter(folder, 2)
    with engines(None) as start:
        right, _ = ask(start(model, **options), adapter, 1)
    write_adapter(folder, 1)
    engine = make(model, **options)
    ask(engine, adapter, 1)
    engine.drain()
    write_adapter(folder, 2)
    wrong, cached = ask(make(model, **options), adapter, 1)
    assert cached == 288
    assert wrong != right
