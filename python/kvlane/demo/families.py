"""Small models of families whose layers do not all keep the same of a token, with random but saved weights.

Weights are N(0, 0.1) and norms one, with three exceptions, so that each cached block and state changes an answer: the
outputs of attention count twice where other layers would drown them, its scores are sharp, and states forget between
0.2 % and 10 % a token. vLLM 0.32 runs all of them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STD = 0.1
VOCABULARY = 2048
HIDDEN = 256
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32
MLP = 512
EXPERTS, EXPERT = 4, 64
# vLLM's kernel of linear attention for CPUs takes no smaller heads.
LINEAR_KEY_HEADS, LINEAR_HEADS, LINEAR_HEAD = 1, 2, 64
MAMBA_HEADS, MAMBA_HEAD, MAMBA_STATE = 8, 32, 16
CONVOLUTION = 4
# The two kinds of layers take turns.
PAIRS = 2
WINDOW = 64


@dataclass(frozen=True)
class Family:
    """A kind of model."""

    what: str
    config: dict[str, Any]
    weights: Callable[[int], dict[str, torch.Tensor]]
    """Draws them, by a seed."""
    flags: str
    """What `vllm serve` needs for it on a CPU, beside --enforce-eager."""


class Weights:
    """Named tensors, which one seed draws in the order of calls."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)
        self.made: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float = STD) -> None:
        """Draws a tensor."""
        self.made[name] = self._torch.randn(*shape, generator=self._generator) * std

    def full(self, value: float, size: int, *names: str) -> None:
        """Fills tensors."""
        for name in names:
            self.made[name] = self._torch.full((size,), value)

    def decay(self, at: str, heads: int) -> None:
        """How fast the states of heads forget."""
        self.made[at + "A_log"] = self._torch.linspace(-6.0, -2.3, heads)
        self.full(0.0, heads, at + "dt_bias")

    def ends(self, norm: float = 1.0) -> None:
        """Embeddings, the last norm and the head."""
        self.normal("model.embed_tokens.weight", VOCABULARY, HIDDEN)
        self.full(norm, HIDDEN, "model.norm.weight")
        self.normal("lm_head.weight", VOCABULARY, HIDDEN)

    def attention(self, at: str, *, gated: bool = False, bias: bool = False) -> None:
        """Queries, keys, values and the output; `gated`: a gate comes with each query."""
        for name, heads in (("q", HEADS * (1 + gated)), ("k", KV_HEADS), ("v", KV_HEADS)):
            self.normal(f"{at}{name}_proj.weight", heads * HEAD_DIM, HIDDEN)
            if bias:
                self.normal(f"{at}{name}_proj.bias", heads * HEAD_DIM)
        self.normal(at + "o_proj.weight", HIDDEN, HEADS * HEAD_DIM, std=2 * STD)
        if bias:
            self.normal(at + "o_proj.bias", HIDDEN)

    def mlp(self, at: str, size: int = MLP) -> None:
        """A gated multilayer perceptron."""
        self.normal(at + "gate_proj.weight", size, HIDDEN)
        self.normal(at + "up_proj.weight", size, HIDDEN)
        self.normal(at + "down_proj.weight", HIDDEN, size)


def _config(architecture: str, model_type: str, pair: list[str], **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": PAIRS * len(pair),
        "layer_types": PAIRS * pair,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "float32",
        **more,
    }


def _layer(number: int) -> str:
    return f"model.layers.{number}."


_GEMMA3 = _config(
    "Gemma3ForCausalLM",
    "gemma3_text",
    ["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    query_pre_attn_scalar=4,
    hidden_activation="gelu_pytorch_tanh",
    rope_local_base_freq=10000.0,
)


def _gemma3(seed: int) -> dict[str, torch.Tensor]:
    weights = Weights(seed)
    # Norms multiply by one more than their weights.
    weights.ends(norm=0.0)
    for number in range(2 * PAIRS):
        at = _layer(number)
        weights.attention(at + "self_attn.")
        weights.full(0.0, HEAD_DIM, at + "self_attn.q_norm.weight", at + "self_attn.k_norm.weight")
        weights.mlp(at + "mlp.")
        weights.full(1.0, HIDDEN, at + "post_attention_layernorm.weight")
        for name in ("input", "pre_feedforward", "post_feedforward"):
            weights.full(0.0, HIDDEN, f"{at}{name}_layernorm.weight")
    return weights.made


_GPT_OSS = _config(
    "GptOssForCausalLM",
    "gpt_oss",
    ["sliding_attention", "full_attention"],
    sliding_window=WINDOW,
    intermediate_size=EXPERT,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    swiglu_limit=7.0,
    attention_bias=True,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
)


def _gpt_oss(seed: int) -> dict[str, torch.Tensor]:
    weights = Weights(seed)
    weights.ends()
    for number in range(2 * PAIRS):
        at = _layer(number)
        weights.attention(at + "self_attn.", bias=True)
        weights.normal(at + "self_attn.sinks", HEADS, std=1.0)
        weights.normal(at + "mlp.router.weight", EXPERTS, HIDDEN)
        weights.normal(at + "mlp.router.bias", EXPERTS)
        weights.normal(at + "mlp.experts.gate_up_proj", EXPERTS, HIDDEN, 2 * EXPERT)
        weights.normal(at + "mlp.experts.gate_up_proj_bias", EXPERTS, 2 * EXPERT)
        weights.normal(at + "mlp.experts.down_proj", EXPERTS, EXPERT, HIDDEN)
        weights.normal(at + "mlp.experts.down_proj_bias", EXPERTS, HIDDEN)
        weights.full(1.0, HIDDEN, at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
    return weights.made


_LLAMA4 = _config(
    "Llama4ForCausalLM",
    "llama4_text",
    ["chunked_attention", "full_attention"],
    intermediate_size_mlp=MLP,
    num_local_experts=2,
    num_experts_per_tok=1,
    moe_layers=[],
    interleave_moe_layer_step=0,
    no_rope_layers=[1, 0] * PAIRS,
    attention_chunk_size=WINDOW,
    use_qk_norm=False,
    attn_temperature_tuning=False,
    floor_scale=8192,
    attn_scale=0.1,
)


def _llama4(seed: int) -> dict[str, torch.Tensor]:
    weights = Weights(seed)
    weights.ends()
    for number in range(2 * PAIRS):
        at = _layer(number)
        weights.attention(at + "self_attn.")
        weights.mlp(at + "feed_forward.")
        weights.full(1.0, HIDDEN, at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
    return weights.made


_QWEN3_NEXT = _config(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    ["linear_attention", "full_attention"],
    torch_dtype="bfloat16",
    full_attention_interval=2,
    partial_rotary_factor=0.5,
    linear_num_key_heads=LINEAR_KEY_HEADS,
    linear_num_value_heads=LINEAR_HEADS,
    linear_key_head_dim=LINEAR_HEAD,
    linear_value_head_dim=LINEAR_HEAD,
    linear_conv_kernel_dim=CONVOLUTION,
    decoder_sparse_step=1,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_intermediate_size=EXPERT,
    shared_expert_intermediate_size=EXPERT,
    mlp_only_layers=[],
)


def _qwen3_next(seed: int) -> dict[str, torch.Tensor]:
    size, weights = LINEAR_HEADS * LINEAR_HEAD, Weights(seed)
    channels = 2 * LINEAR_KEY_HEADS * LINEAR_HEAD + size
    weights.ends(norm=0.0)
    for number, kind in enumerate(_QWEN3_NEXT["layer_types"]):
        at = _layer(number)
        weights.full(0.0, HIDDEN, at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
        if kind == "full_attention":
            weights.attention(at + "self_attn.", gated=True)
            weights.full(1.0, HEAD_DIM, at + "self_attn.q_norm.weight")
            weights.full(0.0, HEAD_DIM, at + "self_attn.k_norm.weight")
        else:
            net = at + "linear_attn."
            weights.normal(net + "in_proj_qkvz.weight", channels + size, HIDDEN)
            weights.normal(net + "in_proj_ba.weight", 2 * LINEAR_HEADS, HIDDEN)
            weights.normal(net + "conv1d.weight", channels, 1, CONVOLUTION, std=0.5)
            weights.decay(net, LINEAR_HEADS)
            weights.full(1.0, LINEAR_HEAD, net + "norm.weight")
            weights.normal(net + "out_proj.weight", HIDDEN, size)
        for expert in range(EXPERTS):
            weights.mlp(f"{at}mlp.experts.{expert}.", EXPERT)
        weights.mlp(at + "mlp.shared_expert.", EXPERT)
        weights.normal(at + "mlp.gate.weight", EXPERTS, HIDDEN)
        weights.normal(at + "mlp.shared_expert_gate.weight", 1, HIDDEN)
    return weights.made


_GRANITE4 = _config(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    ["mamba", "attention"],
    position_embedding_type="nope",
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=MLP,
    attention_multiplier=HEAD_DIM**-0.5,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    logits_scaling=1.0,
    mamba_n_heads=MAMBA_HEADS,
    mamba_d_head=MAMBA_HEAD,
    mamba_d_state=MAMBA_STATE,
    mamba_n_groups=1,
    mamba_d_conv=CONVOLUTION,
    mamba_expand=1,
    mamba_chunk_size=32,
    mamba_conv_bias=True,
    mamba_proj_bias=False,
)


def _granite4(seed: int) -> dict[str, torch.Tensor]:
    size, weights = MAMBA_HEADS * MAMBA_HEAD, Weights(seed)
    channels = size + 2 * MAMBA_STATE
    weights.ends()
    for number, kind in enumerate(_GRANITE4["layer_types"]):
        at = _layer(number)
        weights.full(1.0, HIDDEN, at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
        if kind == "attention":
            weights.attention(at + "self_attn.")
        else:
            net = at + "mamba."
            weights.normal(net + "in_proj.weight", size + channels + MAMBA_HEADS, HIDDEN)
            weights.normal(net + "conv1d.weight", channels, 1, CONVOLUTION, std=0.5)
            weights.normal(net + "conv1d.bias", channels)
            weights.decay(net, MAMBA_HEADS)
            weights.full(1.0, MAMBA_HEADS, net + "D")
            weights.full(1.0, size, net + "norm.weight")
            weights.normal(net + "out_proj.weight", HIDDEN, size)
        weights.normal(at + "shared_mlp.input_linear.weight", 2 * MLP, HIDDEN)
        weights.normal(at + "shared_mlp.output_linear.weight", HIDDEN, MLP)
    return weights.made


FAMILIES = {
    "gemma3": Family("sliding windows beside full attention", _GEMMA3, _gemma3, "--dtype float32"),
    "gpt-oss": Family("the same, with sinks and a mixture of experts", _GPT_OSS, _gpt_oss, "--dtype float32"),
    "llama4": Family("attention in chunks beside full attention", _LLAMA4, _llama4, "--dtype float32"),
    "qwen3-next": Family(
        "linear attention beside full attention", _QWEN3_NEXT, _qwen3_next, "--dtype bfloat16"
    ),
    # On CPUs vLLM cannot write the states that Mamba 2 keeps inside a step, so a step ends with each block.
    "granite4": Family(
        "Mamba 2 beside full attention",
        _GRANITE4,
        _granite4,
        "--dtype float32 --block-size 32 --max-num-batched-tokens 32 --max-num-seqs 8",
    ),
}
