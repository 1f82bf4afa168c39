"""bench/gpu/ranks.py: what it says of two ranks' bytes and of what their compilers chose. No GPU takes part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy


def test_ranks_are_compared_by_block_layer_and_part(gpu_script: Callable[[str], Any], tmp_path: Path) -> None:
    shape = {"kv_lora_rank": 4, "qk_rope_head_dim": 2}
    # Two layers of three blocks, each of two tokens of six elements.
    layers = [numpy.arange(36, dtype=numpy.int16).reshape(3, 12) for _ in range(2)]
    files: list[list[str]] = [[], []]
    for layer, content in enumerate(layers):
        changed = content.copy()
        if layer == 1:
            # Block 0, token 0: the last latent element, the first with positions. Block 2, token 1: the first.
            changed[0, 3] += 1
            changed[0, 4] += 1
            changed[2, 6] += 1
        for rank, blocks in enumerate((content, changed)):
            files[rank].append(str(tmp_path / f"{rank}-{layer}.npy"))
            numpy.save(files[rank][-1], blocks)
    assert gpu_script("ranks").compared(files, shape) == {
        "blocks": 3,
        "blocks_that_differ": 2,
        "elements_that_differ_by_layer": [0, 3],
        "elements_that_differ_by_part": {"latent": 2, "positions": 1},
    }


def test_choices_are_found_where_vllm_has_the_compilers_folder(
    gpu_script: Callable[[str], Any], tmp_path: Path
) -> None:
    """From torch 2.10 on vLLM moves the folder into its own, so an earlier script found no choice and said so."""
    size = {"XBLOCK": 8, "time_taken_ms": 3}
    other_size = size | {"XBLOCK": 64}
    slower = size | {"time_taken_ms": 5}
    for rank, of_kernels in enumerate([{"a": size, "b": size}, {"a": other_size, "b": slower}]):
        folder = tmp_path / f"vllm_cache_root-{rank}" / "torch_aot_compile" / "inductor_cache"
        folder.mkdir(parents=True)
        for kernel, chosen in of_kernels.items():
            (folder / f"{kernel}.best_config").write_text(json.dumps(chosen))
    assert gpu_script("ranks").chosen(tmp_path) == {
        "choices": 2,
        "choices_that_differ": {"a": [{"XBLOCK": 8}, {"XBLOCK": 64}]},
    }
