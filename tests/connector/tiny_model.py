"""Small models whose answers depend on every cached block: weights N(0, 0.1), norms 1, saved to files.

vLLM's dummy weights will not do: they are so small that prompts with different beginnings get the same answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 2048
LAYERS = 4
HIDDEN = 256
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 32
INTERMEDIATE = 512


def build_tiny_model(
    path: Path, sliding_window: int | None = None, layers: int = LAYERS, kv_heads: int = KV_HEADS
) -> Path:
    """A Llama-shaped model; with a window, one whose every second layer sees only that many tokens."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if sliding_window is not None:
        config |= {
            "sliding_window": sliding_window,
            "layer_types": [
                "sliding_attention" if layer % 2 else "full_attention" for layer in range(layers)
            ],
        }
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    save_file(_weights(layers, kv_heads), str(path / "model.safetensors"))
    return path


def _weights(layers: int, kv_heads: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        for name, rows in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            weights[at + f"self_attn.{name}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN)
        weights[at + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        weights[at + "mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[at + "mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
    return weights


def write_tokenizer(path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{word}": word for word in range(3, VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, word in enumerate(("<unk>", "<s>", "</s>"))
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )
