"""The model of the comparison, and what is done to its memory in vLLM's worker processes.

python bench/gpu/model.py llama-8b FOLDER    # a model without weights, for `vllm serve --load-format dummy`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

from kvlane.demo.families import FAMILIES
from kvlane.demo.model import write_tokenizer

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    # By two ranks as the one above is by four: two heads of the KV cache each, pieces of 16 KiB.
    "llama-8b-4-kv-heads": LLAMA_8B | {"num_key_value_heads": 4},
    # Three of four layers see the last 1,024 tokens only.
    "llama-8b-windows": LLAMA_8B
    | {"sliding_window": 1024, "layer_types": 8 * [*3 * ["sliding_attention"], "full_attention"]},
    # Latent attention as in DeepSeek-V2, without experts: 576 elements a token and layer, the same in all ranks.
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "first_k_dense_replace": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "vocab_size": 102400,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    # Experts and attention of the sizes of Qwen3-30B-A3B, with half of its layers and experts.
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    # Linear attention in three of four layers: Qwen3-Next-80B-A3B, with half of its layers and 32 of its experts.
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 24,
        "layer_types": 6 * [*3 * ["linear_attention"], "full_attention"],
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "num_experts": 32,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    # The same kinds of layers, for trying it out on a CPU.
    "tiny-states": FAMILIES["qwen3-next"].config,
    # Two CPU cores compute about 700 tokens of a prompt in a second.
    "demo": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "torch_dtype": "float32",
    },
    # Runs on a CPU in seconds: for trying the comparison out.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 32000,
        "torch_dtype": "float32",
    },
}


# Standard deviation of the weights by shape, so that a changed block of the prompt changes the answer, which the
# controls check.
DEVIATION = dict.fromkeys(SHAPES, 0.04) | {"demo": 0.1, "tiny": 0.5, "tiny-states": 0.1}


def bytes_a_token(shape: str) -> int:
    """Bytes of KV cache of a token, all layers and heads together, of shapes without latent attention."""
    facts = SHAPES[shape]
    size = 4 if facts["torch_dtype"] == "float32" else 2
    return int(2 * facts["num_hidden_layers"] * facts["num_key_value_heads"] * facts["head_dim"] * size)


def write_config(shape: str, folder: Path) -> Path:
    """The folder of a model of this shape without weights."""
    target = folder / shape
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    text, file = json.dumps(config | SHAPES[shape]), target / "config.json"
    if not file.exists() or file.read_text() != text:
        # Engines that start at the same time read it meanwhile.
        unfinished = target / f"config.{os.getpid()}.{threading.get_ident()}"
        unfinished.write_text(text)
        unfinished.replace(file)
    return target


def redraw_weights(worker: Any, deviation: float) -> None:
    """vLLM's dummy weights are so small that the KV cache does not change the answer; these are not. The same in every
    process, so that engines agree."""
    import torch

    named = list(worker.model_runner.model.named_parameters())
    generator = torch.Generator(device=named[0][1].device).manual_seed(0)
    for name, weight in named:
        if name.endswith("A_log"):
            # States that forget 0.2 % to 10 % a token.
            weight.data.copy_(torch.linspace(-6.0, -2.3, len(weight)))
        elif name.endswith("dt_bias"):
            weight.data.fill_(0)
        elif weight.dim() == 1:
            weight.data.fill_(1)
        else:
            weight.data.normal_(0, deviation, generator=generator)


def _experts(worker: Any) -> list[Any]:
    """The weights of a mixture's experts, of which this worker has some: [experts, ...]."""
    named = worker.model_runner.model.named_parameters()
    return [weight for name, weight in named if "experts" in name and weight.dim() == 3]


def redraw_experts(worker: Any, deviation: float) -> None:
    """Other weights in each rank of expert parallelism: `redraw_weights` gives all ranks the same experts."""
    import torch
    from vllm.distributed import get_ep_group

    for weight in _experts(worker):
        generator = torch.Generator(device=weight.device).manual_seed(1 + get_ep_group().rank_in_group)
        weight.data.normal_(0, deviation, generator=generator)


def swap_experts(worker: Any) -> None:
    """The first two experts of each layer and rank take each other's place."""
    for weight in _experts(worker):
        weight.data[:2] = weight.data[:2].flip(0)


def all_to_all_facts(worker: Any) -> tuple[list[str], int]:
    """The classes by which the engine's layers send rows to experts, and the dispatches of kvlane's ranks."""
    import gc

    from kvlane.moe import AllToAll

    # vLLM freezes what it has made, and frozen objects are not listed.
    gc.unfreeze()
    objects = gc.get_objects()
    names = {type(each).__name__ for each in objects}
    ranks = [each for each in objects if isinstance(each, AllToAll)]
    return sorted(name for name in names if "PrepareAndFinalize" in name), sum(
        rank.stats().dispatches for rank in ranks
    )


def begin_profile(worker: Any) -> None:
    """From here on the GPU's kernels are recorded."""
    import torch

    worker.kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    worker.kernels.start()


def end_profile(worker: Any) -> dict[str, tuple[float, int]]:
    """The kernels since `begin_profile`: by name, microseconds and launches."""
    import torch

    torch.cuda.synchronize()
    worker.kernels.stop()
    found = worker.kernels.key_averages()
    del worker.kernels
    return {
        each.key: (each.self_device_time_total, each.count) for each in found if each.self_device_time_total
    }


def _by_block(worker: Any) -> list[list[Any]]:
    """The KV cache of each group's layers as rows of bytes, one a block, without what is behind a state."""
    import torch

    runner = worker.model_runner
    blocks, groups = runner.kv_cache_config.num_blocks, runner.kv_cache_config.kv_cache_groups
    # The runner has them in the order of the model's layers.
    names = sorted((name for group in groups for name in group.layer_names), key=_layer)
    by_name = dict(zip(names, runner.kv_caches, strict=True))

    def rows(cache: Any, spec: Any) -> Any:
        axis = list(cache.shape).index(blocks)
        found = (cache.movedim(axis, 0) if axis else cache).view(torch.uint8)
        if not hasattr(spec, "shapes"):
            return found
        used = sum(
            math.prod(shape) * kind.itemsize for shape, kind in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return found.reshape(blocks, -1)[:, :used]

    return [
        [rows(part, group.kv_cache_spec) for name in group.layer_names for part in _parts(by_name[name])]
        for group in groups
    ]


def _layer(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdecimal())


def _parts(cache: Any) -> list[Any]:
    """A layer with states may have a tensor for each of their parts."""
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def poison(worker: Any, byte: int) -> None:
    """Overwrites all blocks."""
    import torch

    for cache in worker.model_runner.kv_caches:
        for part in _parts(cache):
            part.view(torch.uint8).fill_(byte)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def block_hashes(worker: Any, byte: int) -> list[tuple[int, ...]]:
    """For each block, a hash for each KV cache group of the bytes of its layers. Blocks that are poison in the first
    layer of every group are left out."""
    import torch

    hashes = []
    written: Any = None
    for group in _by_block(worker):
        total: Any = None
        for layer, rows in enumerate(group):
            words = rows.reshape(rows.shape[0], -1).contiguous().view(torch.int64)
            if total is None:
                poisoned = int.from_bytes(bytes([byte]) * 8, "little", signed=True)
                own = (words != poisoned).any(dim=1)
                written = own if written is None else written | own
            # Odd factors by place: bytes that changed places change the sum. It wraps around, which does no harm.
            places = torch.arange(words.shape[1], device=words.device, dtype=torch.int64)
            factors = (places * 2654435761 + layer * 40503) * 2 + 1
            # In parts, so that the products do not need the memory of a whole layer.
            sums = torch.cat([(part * factors).sum(dim=1) for part in words.split(256)])
            total = sums if total is None else total * 31 + sums
        hashes.append(total)
    return list(zip(*(total[written].tolist() for total in hashes), strict=True))


def save_blocks(worker: Any, byte: int, folder: str) -> list[str]:
    """Writes the blocks of the first KV cache group that are not poison in its first layer: for each layer a file with
    an array of 16-bit elements. Returns the files in the order of the layers."""
    import numpy
    import torch

    files: list[str] = []
    written: Any = None
    for layer, rows in enumerate(_by_block(worker)[0]):
        flat = rows.reshape(rows.shape[0], -1)
        if written is None:
            written = (flat != byte).any(dim=1)
        files.append(f"{folder}/{worker.rank}-{layer}.npy")
        numpy.save(files[-1], flat[written].contiguous().view(torch.int16).cpu().numpy())
    return files


def blocks_that_differ(found: list[tuple[int, ...]], computed: list[tuple[int, ...]]) -> int:
    """How many blocks of `found` have no group's bytes that a block of `computed` has. Both are of `block_hashes`."""
    of_group = [set(hashes) for hashes in zip(*computed, strict=True)]
    return sum(
        not any(own in theirs for own, theirs in zip(block, of_group, strict=False)) for block in found
    )


def main() -> None:
    """Writes a model's configuration and a tokenizer."""
    parser = argparse.ArgumentParser(
        description="a model without weights, for vllm serve --load-format dummy"
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path, help="in which a folder of the shape's name is made")
    settings = parser.parse_args()
    target = write_config(settings.shape, settings.folder)
    write_tokenizer(target, SHAPES[settings.shape]["vocab_size"])
    print(target)


if __name__ == "__main__":
    main()
