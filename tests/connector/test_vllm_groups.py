"""KV cache groups as vLLM's own classes describe them; no engine is started."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from kvlane.connector import capabilities
from kvlane.connector.assemble import may_write_free_blocks
from kvlane.connector.groups import (
    STATE,
    CacheGroup,
    Unsupported,
    block_bytes,
    cache_groups,
    check_local_hits,
)

pytestmark = pytest.mark.old_vllm

# Newer versions say how many shards differ.
TELLS = "max_tp_shards" in {field.name for field in dataclasses.fields(MLAAttentionSpec)}


def latent(**more: Any) -> MLAAttentionSpec:
    """As vLLM's layer of latent attention gives it."""
    arguments: dict[str, Any] = {"head_size": 576, "max_tp_shards": 1} if TELLS else {"head_size": 576}
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, dtype=torch.bfloat16, **{**arguments, **more})


def group(spec: Any, *, use_mla: bool = True) -> CacheGroup:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(), model_config=SimpleNamespace(use_mla=use_mla)
    )
    groups = [KVCacheGroupSpec(["a", "b"], spec)]
    (found,) = cache_groups(config, SimpleNamespace(kv_cache_groups=groups))
    return found


def test_every_tensor_parallel_rank_holds_the_same_latent_vectors() -> None:
    assert group(latent()).tensor_shards == 1
    together = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": latent(), "b": latent(head_size=128)}
    )
    assert group(together).tensor_shards == 1


def test_heads_may_differ_from_rank_to_rank() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert group(full, use_mla=False).tensor_shards is None


@pytest.mark.skipif(not TELLS, reason="this vLLM says nothing of shards")
def test_what_vllm_says_of_a_layer_counts_and_one_layer_that_is_not_known_leaves_the_group_unknown() -> None:
    assert group(latent(max_tp_shards=None)).tensor_shards is None
    assert group(latent(max_tp_shards=2)).tensor_shards == 2
    mixed = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": latent(), "b": latent(max_tp_shards=None)}
    )
    assert group(mixed).tensor_shards is None


@pytest.mark.skipif(TELLS, reason="this vLLM says it of each layer")
def test_a_cache_of_one_vector_in_a_model_with_heads_may_differ() -> None:
    assert group(latent(), use_mla=False).tensor_shards is None


def test_a_groups_format_and_quantization_are_those_of_vllms_specification() -> None:
    packed = group(latent(cache_dtype_str="fp8_ds_mla"))
    assert packed.format == "fp8_ds_mla"
    plain = group(FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16))
    assert (plain.format, plain.quantized) == ("", False)
    mode: Any = get_kv_quant_mode("fp8")
    quantized = group(
        FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.uint8, kv_quant_mode=mode)
    )
    assert quantized.quantized


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("sizes", [(64, 64, 64), (64, 128)])
def test_a_blocks_bytes_are_known_from_the_memory_that_vllm_plans(
    layout: str, sizes: tuple[int, ...]
) -> None:
    """The scheduler knows the size of one layer only, where layers differ."""
    specs = {
        str(layer): FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=size, dtype=torch.bfloat16)
        for layer, size in enumerate(sizes)
    }
    same: Any = specs["0"] if len(set(sizes)) == 1 else None
    spec = same or UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=cast("Any", specs))
    config: Any = mock.MagicMock()
    config.cache_config.num_gpu_blocks_override = None
    config.attention_config.hisparse_config = None
    if capabilities.cache_dimensions_are_named():
        from vllm.v1.kv_cache_layout import KVCacheLayout

        config.cache_config.get_resolved_kv_cache_layout.return_value = KVCacheLayout[layout]
    planned = get_kv_cache_config_from_groups(config, [KVCacheGroupSpec(list(specs), spec)], 10_000_000)
    told = generate_scheduler_kv_cache_config([planned])
    assert block_bytes(told) == sum(each.page_size_bytes for each in specs.values())


def states(mode: str = "align", **more: Any) -> MambaSpec:
    """As a layer of linear attention gives it."""
    shapes = {"shapes": ((3, 256), (2, 64, 64)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(block_size=96, mamba_cache_mode=mode, **(shapes | more))


def mixed_states() -> UniformTypeKVCacheSpecs:
    turned = states(shapes=((256, 3), (2, 64, 64)))
    return UniformTypeKVCacheSpecs(block_size=96, kv_cache_specs={"a": states(), "b": turned})


def with_states(spec: Any, drafter: object = None, caching: bool = True) -> tuple[Any, Any]:
    """An engine's configuration, and its groups."""
    full = FullAttentionSpec(block_size=96, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(use_mla=False),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        speculative_config=drafter,
    )
    groups = [KVCacheGroupSpec(["a"], spec), KVCacheGroupSpec(["b"], full)]
    return config, SimpleNamespace(kv_cache_groups=groups, hash_block_size=96)


@pytest.mark.skipif(
    not capabilities.reconciles_hybrid_hits(), reason="this vLLM shows hits that states do not have"
)
def test_states_at_the_ends_of_blocks_take_part_and_their_parts_are_in_the_format() -> None:
    found = cache_groups(*with_states(states()))[0]
    assert (found.kind, found.window_blocks, found.tokens_per_block) == (STATE, 1, 96)
    others = [states(shapes=((256, 3), (2, 64, 64))), states(shapes=((3, 256), (64, 2, 64)))]
    formats = {cache_groups(*with_states(spec))[0].format for spec in others} | {found.format}
    for name in ("conv_state_layout", "device_type"):
        with mock.patch.object(capabilities, name, return_value="another"):
            formats.add(cache_groups(*with_states(states()))[0].format)
    assert len(formats) == 5


@pytest.mark.skipif(
    not capabilities.reconciles_hybrid_hits(), reason="this vLLM shows hits that states do not have"
)
def test_states_that_are_at_no_end_of_a_block_are_refused() -> None:
    refused = [
        ("kvlane needs 'align'", states("none"), None),
        ("has a drafter", states(), object()),
        ("states of several kinds", mixed_states(), None),
    ]
    if "num_prefill_checkpoint_blocks" in {field.name for field in dataclasses.fields(MambaSpec)}:
        spec = states(num_prefill_checkpoint_blocks=1)
        assert cache_groups(*with_states(spec))[0].kind == STATE
        refused.append(("named in smaller units", spec, None))
    for why, spec, drafter in refused:
        config, groups = with_states(spec, drafter)
        groups.hash_block_size = 48
        with pytest.raises(Unsupported, match=why):
            cache_groups(config, groups)


def test_where_vllm_takes_hits_that_states_do_not_have_the_engine_does_not_start() -> None:
    """Up to 0.26, whatever the connector answers."""
    config, groups = with_states(states())
    if capabilities.reconciles_hybrid_hits():
        check_local_hits(config, groups)
    with mock.patch.object(capabilities, "hits_may_lack_states", return_value=True):
        with pytest.raises(ValueError, match=r"use vLLM 0\.27 or newer, or --no-enable-prefix-caching"):
            check_local_hits(config, groups)
        check_local_hits(*with_states(states(), caching=False))
        full = groups.kv_cache_groups[1]
        check_local_hits(config, SimpleNamespace(kv_cache_groups=[full, full]))


def in_use_of_a_running_step() -> int:
    """How many blocks of a window vLLM frees while a step that writes them is under way."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
    from vllm.v1.request import Request

    def made(kind: Any, **arguments: Any) -> Any:
        known = inspect.signature(kind.__init__).parameters
        return kind(**{name: value for name, value in arguments.items() if name in known})

    init_none_hash(sha256)
    sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip("ab", specs, strict=True)]
    manager = made(
        KVCacheManager,
        kv_cache_config=KVCacheConfig(num_blocks=600, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_in_flight_tokens=1024,
        scheduler_block_size=16,
        hash_block_size=16,
        enable_caching=True,
    )
    request = made(
        Request,
        request_id="r",
        prompt_token_ids=list(range(2000)),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        eos_token_id=None,
        block_hasher=get_request_block_hasher(16, sha256),
    )
    assert manager.allocate_slots(request, 512)
    written = list(manager.get_blocks("r").blocks[1])
    # The next step is planned while that one runs.
    request.num_computed_tokens = request.num_in_flight_tokens = 512
    assert manager.allocate_slots(request, 512)
    return sum(block.ref_cnt == 0 for block in written)


def test_where_vllm_frees_blocks_that_a_step_uses_nothing_is_loaded_into_windows() -> None:
    assert (in_use_of_a_running_step() == 0) == capabilities.windows_outlast_steps()
    full = CacheGroup(0, 0, "full_attention", 0, 16, 0, "f32", False, ("a",))
    window = dataclasses.replace(full, index=1, kind="sliding_window", window=64, window_blocks=4)

    def may(groups: list[CacheGroup], steps: int, outlast: bool) -> bool:
        config: Any = SimpleNamespace(max_concurrent_batches=steps)
        with mock.patch.object(capabilities, "windows_outlast_steps", return_value=outlast):
            return may_write_free_blocks(config, groups)

    assert not may([full, window], 2, False)
    assert may([full, window], 1, False) and may([full, window], 2, True) and may([full], 2, False)
