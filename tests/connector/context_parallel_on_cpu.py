"""Decode context parallelism for vLLM on CPUs, where vLLM has it for GPUs only.

A plugin, so that all of vLLM's processes have it. It brings attention in torch, and the search for a token's slot.
Blocks, their ids and hashes, and which rank keeps which token are vLLM's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

SPOIL = "KVLANE_TEST_SPOIL"
"""Names a file with what attention gets of the ranks' parts that is not right, or nothing."""
SPOILS = ("second rank's part is zero", "parts are exchanged")
DISTANCE = 0.01
"""Scores fall so much with each token between. Without it, tokens that exchange their places change no answer, because
keys bring their positions along."""


def install(folder: Path) -> str:
    """Makes a package that vLLM finds as a plugin; returns a PYTHONPATH with it."""
    package = folder / "context_parallel_on_cpu-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: context-parallel-on-cpu\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncontext_parallel_on_cpu = context_parallel_on_cpu:register\n"
    )
    return os.pathsep.join([str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.block_table import BlockTable

    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.ContextParallelBackend")
    BlockTable.compute_slot_mapping = _compute_slot_mapping


def rank_and_offset(within: torch.Tensor, ranks: int, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rank keeps the token at a place of its block, and where in the rank's part of the block."""
    rank = within // interleave % ranks
    return rank, within // (ranks * interleave) * interleave + within % interleave


def _compute_slot_mapping(
    self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
) -> None:
    starts = query_start_loc[: num_reqs + 1]
    request = torch.repeat_interleave(torch.arange(num_reqs), starts[1:] - starts[:-1])
    position = positions[: len(request)]
    together = self.block_size * self.dcp_world_size
    rank, offset = rank_and_offset(position % together, self.dcp_world_size, self.cp_kv_cache_interleave_size)
    block = self.block_table.gpu[request, position // together].to(torch.int64)
    slots = self.slot_mapping.gpu
    slots.fill_(-1)
    slots[: len(request)] = torch.where(rank == self.dcp_rank, block * self.block_size + offset, -1)


def __getattr__(name: str) -> Any:
    # vLLM's modules are imported when its platform is known, which is after its plugins are.
    if name != "ContextParallelBackend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_dcp_group
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    class ContextParallelImpl(CPUAttentionBackendImpl):
        supports_dcp = True
        can_return_lse_for_decode = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

        def do_kv_cache_update(
            self,
            layer: Any,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            kept = slot_mapping >= 0
            tokens = torch.cat([key, value], dim=-1)[: len(slot_mapping)][kept]
            slots, size = slot_mapping[kept], kv_cache.shape[2]
            kv_cache[slots // size, :, slots % size] = tokens

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if attn_metadata is None:
                return output
            starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
            group, size = get_dcp_group(), kv_cache.shape[2]
            for request, length in enumerate(lengths):
                asked = query[starts[request] : starts[request + 1]]
                together = size * group.world_size
                blocks = attn_metadata.block_table[request, : -(-length // together)].long()
                mine = kv_cache[blocks].permute(0, 2, 1, 3).flatten(0, 1).contiguous()
                every = group.all_gather(mine.unsqueeze(0), dim=0)
                spoil = Path(os.environ[SPOIL]).read_text()
                if spoil == SPOILS[0]:
                    every[1] = 0
                elif spoil == SPOILS[1]:
                    every = every.flip(0)
                position = torch.arange(length)
                rank, offset = rank_and_offset(position % together, group.world_size, self.interleave)
                tokens = every[rank, position // together * size + offset].repeat_interleave(
                    self.num_queries_per_kv, dim=1
                )
                keys, values = tokens.split(self.head_size, dim=-1)
                distance = torch.arange(length - len(asked), length)[:, None] - position[None]
                scores = torch.einsum("qhd,khd->hqk", asked, keys) * self.scale - DISTANCE * distance
                weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
                output[starts[request] : starts[request + 1]] = torch.einsum("hqk,khd->qhd", weights, values)
            return output

    class ContextParallelBackend(CPUAttentionBackend):
        @staticmethod
        def get_impl_cls() -> type[CPUAttentionBackendImpl]:
            return ContextParallelImpl

    globals()[name] = ContextParallelBackend
    return ContextParallelBackend
