"""The features of the running vLLM, found in its objects, never by its version number."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.metrics.cache_hit_source import CacheHitSource


def reports_failed_requests() -> bool:
    """Whether a failed load can be reported by its request; before, only by block ids of a single group."""
    return hasattr(_base(), "get_transfer_results")


def begins_anew_without_blocks() -> bool:
    """Whether a request whose load is reported as done is computed from its first token on, if its tables are empty by
    then: the connector hears ranks' reports before vLLM does and has vLLM's own tables, and vLLM leaves the request's
    prefix alone if it is told to."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    ends = getattr(Scheduler, "_update_from_kv_xfer_finished", None)
    if ends is None:
        return False
    said = inspect.getsource(ends)
    told, used = (
        said.find("connector.update_connector_output("),
        said.find("finished_recving_kv_req_ids.add("),
    )
    return (
        0 <= told < used
        and "manager.req_to_blocks.get(" in inspect.getsource(KVCacheCoordinator.get_blocks)
        and "return KVCacheBlocks(blocks)" in inspect.getsource(KVCacheManager.create_kv_cache_blocks)
        and "request.skip_reading_prefix_cache" in inspect.getsource(KVCacheManager)
    )


def reconciles_hybrid_hits() -> bool:
    """Whether the local hit shown to connectors holds for all groups, state-space groups included."""
    return hasattr(_base(), "supports_divergent_local_hybrid_hits")


def hits_may_lack_states() -> bool:
    """Whether, with a connector, local hits are those of the group with the longest one."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return not (reconciles_hybrid_hits() or hasattr(KVCacheManager, "get_computed_blocks_for_connector"))


def device_type() -> str:
    """Where the engine computes: cpu, cuda, ..."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def conv_state_layout() -> str:
    """The order of the numbers in the convolution's part of a state."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return get_conv_state_layout()


def host_hit_source() -> CacheHitSource | None:
    """vLLM's name for blocks that came from host memory; None where hits are not split by source."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def layout_name(wanted: str) -> str | None:
    """The connector's answer when vLLM asks for its layout; `wanted` is one of the setting's words. None leaves vLLM
    the choice, and is the only answer before 0.29, where other names than NHD and HND stop the engine."""
    if wanted == "auto" or hears_cross_layer_wish():
        return None
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return None
    # Inside a layer the order that most attention backends can use, the same in both: they share blocks.
    name = {"block": "BLHNC", "layer": "LBHNC"}[wanted]
    return name if name in KVCacheLayout.__members__ else None


def cache_dimensions_are_named() -> bool:
    """Whether each layer's cache has its dimensions in one order for all backends: blocks, heads, tokens, content."""
    try:
        import vllm.v1.kv_cache_layout  # noqa: F401
    except ImportError:
        return False
    return True


def hears_cross_layer_wish() -> bool:
    """Whether a block's layers come together by `prefer_cross_layer_blocks`, as before layouts had names."""
    return hasattr(_base(), "register_cross_layers_kv_cache")


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens that one entry of `request.block_hashes` covers."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    if known:
        return known
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def cacheable_group_ids(kv_cache_config: KVCacheConfig) -> list[int]:
    """The KV cache groups whose blocks are found by their hash."""
    known = getattr(kv_cache_config, "prefix_cacheable_group_ids", None)
    return list(known) if known is not None else list(range(len(kv_cache_config.kv_cache_groups)))


def hashes_adapter_paths() -> bool:
    """Whether vLLM's block hashes hold a LoRA adapter's path beside its name, so that its own prefix cache tells apart
    adapters that had one name after the other."""
    from types import SimpleNamespace

    from vllm.v1.core import kv_cache_utils

    keys_of = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if keys_of is None:
        return False
    adapter = SimpleNamespace(lora_name="a name", lora_path="a path")
    return "a path" in str(keys_of(SimpleNamespace(lora_request=adapter)))


def tensor_shards(vllm_config: VllmConfig, spec: KVCacheSpec) -> int | None:
    """Shards of a layer's cache that differ among all tensor-parallel ranks; further ranks hold copies. None where vLLM
    does not tell."""
    if hasattr(spec, "max_tp_shards"):
        return spec.max_tp_shards
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    # Before, it is known of latent attention: one vector for all heads.
    latent = get_kv_cache_spec_kind(spec).value in ("mla_attention", "sliding_window_mla")
    return 1 if latent and vllm_config.model_config.use_mla else None


def context_ranks(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Decode-context-parallel ranks over which a layer's cache has the tokens of each block dealt."""
    # Newer versions say it of each layer. Older ones deal tokens in all layers, but keep states whole in every rank.
    is_dealt = getattr(spec, "dcp_sharded", not hasattr(spec, "mamba_cache_mode"))
    return getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) if is_dealt else 1


def context_interleave(vllm_config: VllmConfig) -> int:
    """Consecutive tokens that a context-parallel rank gets before the next one does."""
    # Workers deal by this field, whatever vLLM's former `dcp_kv_cache_interleave_size` says.
    return getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1)


def windows_outlast_steps() -> bool:
    """Whether blocks that fall out of a window stay their request's until the steps that read them are over. Else vLLM
    gives them away while such a step is under way, and a load may overwrite them."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return "num_in_flight_tokens" in inspect.getsource(KVCacheManager.allocate_slots)


def steps_at_once(vllm_config: VllmConfig) -> int:
    """How many steps an engine may have under way: more than one with async scheduling, or in a pipeline."""
    known = getattr(vllm_config, "max_concurrent_batches", None)
    # A version without this field has at most this many.
    return known if isinstance(known, int) else 1 + vllm_config.parallel_config.pipeline_parallel_size


def steps_ahead(vllm_config: VllmConfig) -> float:
    """Steps that at least lie between a worker's report, as of a load's end, and the step that vLLM plans by it."""
    scheduling = vllm_config.scheduler_config
    is_ahead = getattr(scheduling, "async_scheduling", False) and steps_at_once(vllm_config) > 1
    # The report comes with the results of a step. With async scheduling the step before is still being computed when
    # the worker reports, and the next one is planned before the results.
    return 2.5 if is_ahead else 0.5


def step_kind() -> str | None:
    """How the step that begins runs its forward pass, if its layers call the connector's hooks: without CUDA graphs, or
    with graphs between the attention layers. None for a full graph, and if vLLM does not say."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    # A runner that replays a full graph sets no forward context (V2), or one that says so (V1).
    if not is_forward_context_available():
        return None
    mode = getattr(get_forward_context(), "cudagraph_runtime_mode", None)
    name = getattr(mode, "name", None)
    return name if name in ("NONE", "PIECEWISE") else None


def empty_transfer_results() -> KVConnectorTransferResults:
    """An empty `KVConnectorTransferResults`."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return base.KVConnectorTransferResults()


def _base() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return KVConnectorBase_V1
