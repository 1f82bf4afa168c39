"""Caches as vLLM's own code makes them, and what it is told of our wish; no engine is started."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheTensor

from kvlane.connector import KVLaneConnector, capabilities
from kvlane.connector.axes import layer_facts
from kvlane.connector.cross_layers import layer_caches
from kvlane.connector.groups import cache_groups
from kvlane.connector.layout import GroupLayout, group_layout, layer_hints
from kvlane.connector.shard_layout import Heads
from kvlane.testing import read_block, write_block

pytestmark = pytest.mark.old_vllm

NAMED = importlib.util.find_spec("vllm.v1.kv_cache_layout") is not None
LAYERS = [f"model.layers.{number}.attn" for number in range(3)]
BLOCKS = 6
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
ENGINE: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
    model_config=SimpleNamespace(use_mla=False),
    speculative_config=None,
)


def config(**extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        compilation_config=None,
        parallel_config=ENGINE.parallel_config,
    )


def wish(word: str) -> str | None:
    return KVLaneConnector.get_required_kvcache_layout(config(**{"kvlane.layout": word}))


def check(caches: dict[str, Any], kv_cache_config: Any) -> GroupLayout:
    """Every block comes back as it was, nothing else changes, and its dimensions have names; gives the layout."""
    hints = layer_hints(config(), kv_cache_config)
    groups = cache_groups(ENGINE, kv_cache_config)
    facts = layer_facts(ENGINE, kv_cache_config, groups, capabilities.cache_dimensions_are_named())
    layout = group_layout(caches, LAYERS, BLOCKS, hints, [0, 1, 1], facts=facts)
    for number, cache in enumerate(caches.values()):
        cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) % 251 + number)
    wanted = {name: cache.clone() for name, cache in caches.items()}
    write_block(layout.regions, 1, read_block(layout.regions, 4))
    for name, cache in caches.items():
        wanted[name][1] = wanted[name][4]
        assert torch.equal(cache, wanted[name])
    assert layout.block_bytes == len(LAYERS) * SPEC.page_size_bytes
    told = layout.shard.layers[0]
    assert (told.heads, told.tokens, told.dtype) == (Heads(2, 64, (0, 2)), 16, "torch.bfloat16")
    sizes = {each.axis: each.size for each in told.dimensions}
    # Before dimensions had an order of their own two heads could be the two halves.
    wanted = {"head": 2, "token": 16, "content": 128} if NAMED else {"untold": 2, "token": 16, "content": 64}
    assert wanted.items() <= sizes.items()
    return layout


def test_nothing_is_asked_for_unless_the_user_does() -> None:
    assert KVLaneConnector.get_required_kvcache_layout(config()) is None
    assert wish("auto") is None
    with pytest.raises(ValueError, match="auto, block, layer"):
        wish("BLHNC")


@pytest.mark.skipif(NAMED, reason="layouts have names here")
def test_another_name_than_vllm_knows_is_never_answered() -> None:
    """It would stop the engine."""
    assert wish("block") is wish("layer") is None
    assert capabilities.hears_cross_layer_wish()


if NAMED:
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    @pytest.mark.parametrize(("word", "runs"), [("block", 1), ("layer", len(LAYERS))])
    def test_the_layout_that_is_asked_for(word: str, runs: int) -> None:
        name = wish(word)
        assert name is not None
        layout = KVCacheLayout[name]
        assert layout.is_block_outermost == (word == "block")
        page = SPEC.page_size_bytes
        layer_stride, block_stride = (page, page * len(LAYERS)) if word == "block" else (page * BLOCKS, page)
        tensor = KVCacheTensor(
            size=page * BLOCKS * len(LAYERS),
            layers=LAYERS,
            layer_stride=layer_stride,
            block_stride=block_stride,
        )
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        views = create_kv_cache_views(raw, SPEC, BLOCKS, layout, tensor)
        groups = [KVCacheGroupSpec(LAYERS, SPEC)]
        made = check(
            dict(zip(LAYERS, views, strict=True)),
            SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[tensor]),
        )
        assert made.runs == runs
        assert list(made.last_region.values()) == [0, 1, 2]

else:
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    @pytest.mark.parametrize("interior", ["NHD", "HND"])
    def test_a_tensor_of_all_layers(interior: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flash_attn, "get_kv_cache_layout", lambda: interior)
        tensors = [KVCacheTensor(size=SPEC.page_size_bytes * BLOCKS, shared_by=[name]) for name in LAYERS]
        kv_cache_config: Any = SimpleNamespace(
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, SPEC)], kv_cache_tensors=tensors, num_blocks=BLOCKS
        )
        group = SimpleNamespace(kv_cache_spec=SPEC, backend=flash_attn.FlashAttentionBackend)
        caches, together, backend = KVConnectorModelRunnerMixin.allocate_uniform_kv_caches(
            kv_cache_config, [[group]], "auto", torch.device("cpu"), [SPEC.block_size]
        )
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        mine = layer_caches(together, order, [tensor.shared_by for tensor in tensors], BLOCKS)
        if interior == "NHD":
            assert all(torch.equal(mine[name], caches[name]) for name in LAYERS)
        made = check(mine, kv_cache_config)
        assert made.runs == 1
