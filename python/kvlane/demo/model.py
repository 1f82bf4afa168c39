"""Builds a small model with random but saved weights, and its tokenizer, on this machine: Llama-shaped, or of a family
whose layers do not all keep the same of a token.

vLLM's own dummy weights are so small that the answer hardly depends on the KV cache: a test with them passes on
wrong bytes. Weights from N(0, 0.1) with norms of one give every prompt its own answer, and one changed block of
32 tokens gives another one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlane.bench import extra
from kvlane.demo.families import FAMILIES, VOCABULARY

WEIGHT_STD = 0.1
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
# Spaces separate words, so a message costs two tokens beside its own. Random weights need no roles.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. `dtype` names a torch dtype, also the one of its KV cache."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 32_000
    max_tokens: int = 4096
    dtype: str = "float32"
    std: float = WEIGHT_STD
    """Standard deviation of the weights. With the width its square grows the outputs, so wider models take less."""

    def parameters(self) -> int:
        """Number of weights."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocab * self.hidden


# Starts at once; for tests.
TINY = ModelShape(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=512)
# A 2,000-token prefill takes seconds on two CPU cores. In float32, because bfloat16 is fast on some CPUs only, and
# because rounding then does not change an answer between a computed and a loaded prefix.
DEMO = ModelShape(layers=6, hidden=1024, heads=16, kv_heads=4, head_dim=64, intermediate=2816)
# For a GPU, which knows no float32 attention: 1.1 billion weights, 64 KiB of KV cache a token.
GPU_DEMO = ModelShape(
    layers=16,
    hidden=2048,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=8192,
    max_tokens=16_384,
    dtype="bfloat16",
    std=0.07,
)
SHAPES = {"tiny": TINY, "demo": DEMO, "gpu": GPU_DEMO}


def build_model(directory: Path, shape: ModelShape, seed: int = 0) -> Path:
    """Write config, weights and tokenizer into `directory`, unless the same model already stands there."""

    def write(building: Path) -> None:
        _write_config(building, shape)
        write_tokenizer(building, shape.vocab)
        _write_weights(building, shape, seed)

    return _as_a_whole(directory, {"shape": asdict(shape), "seed": seed, "format": 3}, write)


def build_family(directory: Path, name: str, seed: int = 0) -> Path:
    """The same for a small model of a family, which `FAMILIES` names."""

    def write(building: Path) -> None:
        from safetensors.torch import save_file

        family = FAMILIES[name]
        (building / "config.json").write_text(json.dumps(family.config, indent=1))
        write_tokenizer(building, VOCABULARY)
        save_file(family.weights(seed), building / "model.safetensors", metadata={"format": "pt"})

    return _as_a_whole(directory, {"family": name, "seed": seed, "format": 1}, write)


def _as_a_whole(directory: Path, recipe: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """The directory appears as a whole or not at all, so an interrupted build leaves nothing half written."""
    wanted = json.dumps(recipe, sort_keys=True)
    stamp = directory / "recipe.json"
    if stamp.is_file() and stamp.read_text() == wanted:
        return directory
    building = directory.with_name(directory.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write(building)
    (building / stamp.name).write_text(wanted)
    shutil.rmtree(directory, ignore_errors=True)
    building.rename(directory)
    return directory


def _write_config(directory: Path, shape: ModelShape) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": shape.dtype,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(directory: Path, vocab: int) -> None:
    """One word a token, "w4" to "w31999", so that a text is as long as one likes."""
    words = {word: i for i, word in enumerate(_SPECIAL_TOKENS)}
    words.update({f"w{i}": i for i in range(len(words), vocab)})
    added = [
        {
            "id": i,
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, word in enumerate(_SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(directory: Path, shape: ModelShape, seed: int) -> None:
    # Imported late, because the package must import without torch.
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * shape.std).to(dtype)

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = torch.ones(shape.hidden, dtype=dtype)
    weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights[prefix + "self_attn.q_proj.weight"] = normal(query, shape.hidden)
        weights[prefix + "self_attn.k_proj.weight"] = normal(key_value, shape.hidden)
        weights[prefix + "self_attn.v_proj.weight"] = normal(key_value, shape.hidden)
        weights[prefix + "self_attn.o_proj.weight"] = normal(shape.hidden, query)
        weights[prefix + "mlp.gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[prefix + "mlp.down_proj.weight"] = normal(shape.hidden, shape.intermediate)
        weights[prefix + "input_layernorm.weight"] = norm.clone()
        weights[prefix + "post_attention_layernorm.weight"] = norm.clone()
    weights["model.norm.weight"] = norm
    weights["lm_head.weight"] = normal(shape.vocab, shape.hidden)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """`python -m kvlane.demo.model --shape demo DIRECTORY`."""
    families = "\n".join(f"  {name:11} {family.what}" for name, family in FAMILIES.items())
    parser = argparse.ArgumentParser(
        description="Build a small model with random saved weights.",
        epilog=f"shapes:\n  tiny, demo  Llama's\n  gpu         Llama's, for a GPU\n{families}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=[*SHAPES, *FAMILIES], default="demo", help="(default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the shape's own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if lacks := extra.missing(("torch", "safetensors")):
        sys.exit(
            f"kvlane.demo.model needs {' and '.join(lacks)}, which come with vLLM, beside {sys.executable}: start it "
            "with the Python of an environment that has vLLM 0.24 to 0.33"
        )
    if family := FAMILIES.get(arguments.shape):
        if arguments.dtype:
            parser.error(f"{arguments.shape} has a dtype of its own")
        print(build_family(arguments.directory, arguments.shape, arguments.seed))
        command = (
            f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {arguments.directory} --max-model-len 4096 --enforce-eager"
        )
        print(f"on a CPU: {command} {family.flags}", file=sys.stderr)
        return
    shape = SHAPES[arguments.shape]
    if arguments.dtype:
        shape = ModelShape(**{**asdict(shape), "dtype": arguments.dtype})
    print(build_model(arguments.directory, shape, arguments.seed))


if __name__ == "__main__":
    main()
