"""What a hand-off of several groups lands is what vLLM's own search for hits needs, and no more: by the coordinator of
each version, over groups of any windows, chunks and block sizes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from math import gcd, lcm
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvlane.connector import capabilities
from kvlane.connector.direct_order import Order
from kvlane.connector.groups import cache_groups

pytestmark = pytest.mark.old_vllm


@dataclass(frozen=True)
class Case:
    """A model's groups after that of full attention: kind, tokens a block, and tokens of its window or chunk."""

    full: int
    others: tuple[tuple[str, int, int], ...]
    blocks: int
    beyond: int
    """The prompt has so many times the tokens at which hits end, and so many more."""

    def specs(self) -> list[Any]:
        heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        found: list[Any] = [FullAttentionSpec(block_size=self.full, **heads)]
        for kind, size, tokens in self.others:
            if kind == "window":
                found.append(SlidingWindowSpec(block_size=size, sliding_window=tokens, **heads))
            elif kind == "chunk":
                # vLLM wants all blocks of a chunk to be those of full attention.
                chunk = ChunkedLocalAttentionSpec(block_size=self.full, attention_chunk_size=tokens, **heads)
                found.append(chunk)
            else:
                shapes: dict[str, Any] = {"shapes": ((4,),), "dtypes": (torch.float32,)}
                found.append(MambaSpec(block_size=size, mamba_cache_mode="align", **shapes))
        return found


def cases() -> some.SearchStrategy[Case]:
    sizes = some.sampled_from([4, 8, 16])
    window = some.tuples(some.just("window"), sizes, some.integers(1, 70))
    chunk = some.tuples(some.just("chunk"), sizes, some.integers(1, 60))
    state = some.tuples(some.just("state"), some.sampled_from([8, 16, 32]), some.just(0))
    alone = some.one_of(window, chunk).map(lambda each: (each,))
    if not capabilities.reconciles_hybrid_hits():
        return some.builds(Case, sizes, alone, some.integers(0, 6), some.integers(0, 40))
    others = some.one_of(alone, state.map(lambda each: (each,)), some.tuples(window, state))
    return some.builds(Case, sizes, others, some.integers(0, 6), some.integers(0, 40))


@settings(max_examples=150, deadline=None)
@given(cases(), some.randoms(use_true_random=False))
def test_a_landed_prompt_is_a_hit_and_without_any_of_its_blocks_it_is_shorter(
    case: Case, random: Any
) -> None:
    specs = case.specs()
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=600, kv_cache_tensors=[], kv_cache_groups=groups)
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(use_mla=False),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        speculative_config=None,
    )
    sizes = [spec.block_size for spec in specs]
    prompt = max(1, case.blocks * lcm(*sizes) + case.beyond)
    order = Order(cache_groups(engine, config), True)
    named: dict[str, Any] = {
        "kv_cache_config": config,
        "max_model_len": 4096,
        "max_in_flight_tokens": 4096,
        "max_num_batched_tokens": 4096,
        "use_eagle": False,
        "enable_caching": True,
        "enable_kv_cache_events": True,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": lcm(*sizes),
        "hash_block_size": gcd(*sizes),
    }
    known = inspect.signature(get_kv_cache_coordinator).parameters
    coordinator: Any = get_kv_cache_coordinator(
        **{name: value for name, value in named.items() if name in known}
    )
    pool = coordinator.block_pool
    hashes = [BlockHash(number.to_bytes(2, "big") * 16) for number in range(prompt // gcd(*sizes))]
    request = SimpleNamespace(
        request_id="r",
        block_hashes=hashes,
        all_token_ids=list(range(prompt)),
        num_prompt_tokens=prompt,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
    )
    taken = pool.get_new_blocks(order.count(prompt))
    for part in order.parts(prompt):
        own = taken[part.place : part.end_place]
        pool.cache_full_blocks(
            request=request,
            blocks=[pool.null_block] * part.first + own,
            num_cached_blocks=part.first,
            num_full_blocks=part.first + len(own),
            block_size=part.group.tokens_per_block,
            kv_cache_group_id=part.group.group_id,
        )

    def hit() -> int:
        return coordinator.find_longest_cache_hit(hashes, prompt - 1)[1]

    assert hit() == order.tokens(prompt)
    if taken:
        # The control: vLLM needs each of them.
        pool.evict_blocks({random.choice(taken).block_id})
        assert hit() < order.tokens(prompt)
