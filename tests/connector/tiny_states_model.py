"""Small models with layers that keep a state, beside full attention: Qwen3-Next and Granite 4.

They run on CPUs from vLLM 0.32 on. The states forget slowly enough that tokens hundreds of positions back still count.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_model import VOCABULARY, write_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERT, EXPERTS = 256, 8, 4, 32, 64, 4
KEY_HEADS, VALUE_HEADS, STATE_HEAD, CONVOLUTION = 1, 2, 64, 4
KINDS = ["linear_attention", "full_attention"] * 2
MAMBA_HEADS, MAMBA_HEAD, MAMBA_STATE = 8, 32, 16
MAMBA_KINDS = ["mamba", "attention"] * 2


def build_states_model(path: Path) -> Path:
    """A Qwen3-Next, for bfloat16: linear attention, and a mixture of experts."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * EXPERT,
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "full_attention_interval": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": STATE_HEAD,
        "linear_value_head_dim": STATE_HEAD,
        "linear_conv_kernel_dim": CONVOLUTION,
        "decoder_sparse_step": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": EXPERT,
        "mlp_only_layers": [],
    }
    return _save(path, config, _weights())


def build_mamba_model(path: Path) -> Path:
    """A Granite 4, for float32: Mamba 2, whose layers also keep states inside chunks. On CPUs vLLM cannot write these,
    so a step must have no more tokens than a block."""
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(MAMBA_KINDS),
        "layer_types": MAMBA_KINDS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "position_embedding_type": "nope",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 2 * HIDDEN,
        "shared_intermediate_size": 2 * HIDDEN,
        "attention_multiplier": HEAD_DIM**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "mamba_n_heads": MAMBA_HEADS,
        "mamba_d_head": MAMBA_HEAD,
        "mamba_d_state": MAMBA_STATE,
        "mamba_n_groups": 1,
        "mamba_d_conv": CONVOLUTION,
        "mamba_expand": 1,
        "mamba_chunk_size": 32,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    return _save(path, config, _mamba_weights())


def _save(path: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path)
    save_file(weights, str(path / "model.safetensors"))
    return path


def _mamba_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, std: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    size = MAMBA_HEADS * MAMBA_HEAD
    channels = size + 2 * MAMBA_STATE
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer, kind in enumerate(MAMBA_KINDS):
        at = f"model.layers.{layer}."
        if kind == "attention":
            for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"{at}self_attn.{name}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN)
            # Else the other layers drown it.
            weights[at + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM, std=0.2)
        else:
            net = at + "mamba."
            weights[net + "in_proj.weight"] = normal(size + channels + MAMBA_HEADS, HIDDEN)
            weights[net + "conv1d.weight"] = normal(channels, 1, CONVOLUTION, std=0.5)
            weights[net + "conv1d.bias"] = normal(channels)
            # The decay of a state for each token: 0.002 to 0.1.
            weights[net + "A_log"] = torch.linspace(-6.0, -2.3, MAMBA_HEADS)
            weights[net + "dt_bias"] = torch.zeros(MAMBA_HEADS)
            weights[net + "D"] = torch.ones(MAMBA_HEADS)
            weights[net + "norm.weight"] = torch.ones(size)
            weights[net + "out_proj.weight"] = normal(HIDDEN, size)
        weights[at + "shared_mlp.input_linear.weight"] = normal(4 * HIDDEN, HIDDEN)
        weights[at + "shared_mlp.output_linear.weight"] = normal(HIDDEN, 2 * HIDDEN)
        weights[at + "input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, std: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    # Norms multiply by one more than these.
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.zeros(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer, kind in enumerate(KINDS):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.zeros(HIDDEN)
        weights[at + "post_attention_layernorm.weight"] = torch.zeros(HIDDEN)
        if kind == "full_attention":
            # Queries come with a gate.
            for name, rows in (("q", 2 * HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                weights[f"{at}self_attn.{name}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN)
            weights[at + "self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
            weights[at + "self_attn.q_norm.weight"] = torch.ones(HEAD_DIM)
            weights[at + "self_attn.k_norm.weight"] = torch.zeros(HEAD_DIM)
        else:
            channels = (2 * KEY_HEADS + VALUE_HEADS) * STATE_HEAD
            net = at + "linear_attn."
            weights[net + "in_proj_qkvz.weight"] = normal(channels + VALUE_HEADS * STATE_HEAD, HIDDEN)
            weights[net + "in_proj_ba.weight"] = normal(2 * VALUE_HEADS, HIDDEN)
            weights[net + "conv1d.weight"] = normal(channels, 1, CONVOLUTION, std=0.5)
            # The decay of a state for each token: 0.002 to 0.1.
            weights[net + "A_log"] = torch.linspace(-6.0, -2.3, VALUE_HEADS)
            weights[net + "dt_bias"] = torch.zeros(VALUE_HEADS)
            weights[net + "norm.weight"] = torch.ones(STATE_HEAD)
            weights[net + "out_proj.weight"] = normal(HIDDEN, VALUE_HEADS * STATE_HEAD)
        for name in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_expert"):
            weights[f"{at}mlp.{name}.gate_proj.weight"] = normal(EXPERT, HIDDEN)
            weights[f"{at}mlp.{name}.up_proj.weight"] = normal(EXPERT, HIDDEN)
            weights[f"{at}mlp.{name}.down_proj.weight"] = normal(HIDDEN, EXPERT)
        weights[at + "mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
        weights[at + "mlp.shared_expert_gate.weight"] = normal(1, HIDDEN)
    return weights
