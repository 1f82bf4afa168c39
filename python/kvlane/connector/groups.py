"""The KV cache groups of an engine as kvlane sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlane.connector import capabilities

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


STATE = "mamba"
"""The kind of group whose blocks hold a state after their last token: state-space layers, linear attention."""
CHUNKS = "chunked_local_attention"
"""The kind of group whose tokens see those before them in chunks of a fixed size."""


class Unsupported(Exception):
    """The engine is one that kvlane cannot serve; the message says why. The engine runs without the cache."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share block ids, and whose blocks are found by their hash."""

    index: int
    """Position among kvlane's groups."""
    group_id: int
    """Position among vLLM's groups."""
    kind: str
    """vLLM's name for it: full_attention, mla_attention, sliding_window, ..."""
    window: int
    """Tokens of context that a token of this group sees; 0: all."""
    tokens_per_block: int
    """Of all decode-context-parallel ranks together."""
    window_blocks: int
    """Blocks before its end that a hit needs; 0: all of them."""
    dtype: str
    is_draft: bool
    """Whether it holds the layers of a speculative drafter."""
    layer_names: tuple[str, ...]
    """Layers of this rank; another rank of a pipeline has others."""
    format: str = ""
    """vLLM's name for how a token's numbers are packed, where the layers' specification has one (latent attention); how
    a state consists of its parts."""
    quantized: bool = False
    tensor_shards: int | None = None
    """Shards that differ, among those of all tensor-parallel ranks: 1 if all hold the same bytes. None: not known, so
    all may differ."""


def check_local_hits(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """ValueError where vLLM's own prefix cache gives wrong answers as soon as there is a connector, whatever that does:
    up to 0.26 it then takes the longest hit of any group, and a state-space layer may have none that long."""
    groups = [_layers(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    has_states = len(groups) > 1 and any(hasattr(specs[0], "mamba_cache_mode") for specs in groups)
    if has_states and vllm_config.cache_config.enable_prefix_caching and capabilities.hits_may_lack_states():
        raise ValueError(
            "with any KV connector, this vLLM takes prefix hits that a model's state-space layers do not have, and "
            "answers wrongly: use vLLM 0.27 or newer, or --no-enable-prefix-caching"
        )


def cache_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[CacheGroup]:
    """The engine's groups in the same order for scheduler and workers. Raises Unsupported."""
    size = getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1)
    if size > 1:
        raise Unsupported(
            f"prefill_context_parallel_size is {size}; kvlane knows decode context parallelism only"
        )
    ids = capabilities.cacheable_group_ids(kv_cache_config)
    if not ids:
        raise Unsupported("the model has no KV cache group whose blocks are found by their hash")
    groups = [
        _cache_group(vllm_config, kv_cache_config, index, group_id) for index, group_id in enumerate(ids)
    ]
    if any(group.window_blocks == 0 for group in groups):
        return groups
    raise Unsupported("the model has no full-attention group; kvlane needs one to know how long a prefix is")


def _layers(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """A group's specification, or those of its layers where they are told apart."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if inner else [spec]


def _cache_group(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, index: int, group_id: int
) -> CacheGroup:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    group = kv_cache_config.kv_cache_groups[group_id]
    specs = _layers(group.kv_cache_spec)
    # Workers see the specs of all layers, the scheduler only the first; what is used here is the same in all.
    spec = specs[0]
    kind = get_kv_cache_spec_kind(spec).value
    context_ranks = capabilities.context_ranks(vllm_config, spec)
    block = spec.block_size * context_ranks
    window = window_blocks = 0
    if kind in ("sliding_window", "sliding_window_mla"):
        window = spec.sliding_window
        seen = window - 1 + getattr(spec, "extra_retained_tokens", 0)
        window_blocks = max(1, -(-seen // block))
    elif kind == CHUNKS:
        window = spec.attention_chunk_size
        window_blocks = max(1, -(-window // block))
    elif kind == STATE:
        _check_state_space(vllm_config, kv_cache_config, specs)
        window = window_blocks = 1
    elif kind not in ("full_attention", "mla_attention"):
        raise Unsupported(f"KV cache group {group_id} is of the kind {kind!r}, which kvlane does not know")
    return CacheGroup(
        index=index,
        group_id=group_id,
        kind=kind,
        window=window,
        tokens_per_block=block,
        window_blocks=window_blocks,
        dtype=str(getattr(spec, "dtype", None) or getattr(spec, "dtypes", "")),
        is_draft=bool(getattr(group, "is_eagle_group", False)),
        layer_names=tuple(group.layer_names),
        format=_state_format(spec) if kind == STATE else str(getattr(spec, "cache_dtype_str", None) or ""),
        quantized=getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") != "NONE",
        # Context-parallel neighbours hold other tokens. Ranks with the same ones, if there are any, are no neighbours.
        tensor_shards=_tensor_shards(vllm_config, specs) if context_ranks == 1 else None,
    )


def keeps_tokens_apart(kv_cache_config: KVCacheConfig, groups: list[CacheGroup]) -> bool:
    """Whether blocks that are found by their hash hold all that is kept of their tokens, each by itself. Then an engine
    can go on inside a block. Some models gather the raw keys of several tokens, in a group without hashes, and store
    one state for them."""
    if len(kv_cache_config.kv_cache_groups) != 1 or len(groups) != 1:
        return False
    specs = _layers(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    gathers = ("tokens_per_state", "compress_ratio")
    return (
        groups[0].kind in ("full_attention", "mla_attention")
        and groups[0].window_blocks == 0
        and all((getattr(each, name, 1) or 1) == 1 for each in specs for name in gathers)
    )


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a block of all layers in one rank."""
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    sizes = [tensor.size for tensor in tensors]
    # Each tensor is memory of its own, or names all the memory in which it is one of several: always from 0.29 on, and
    # before where the layers of a block are packed.
    together = [hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0) > 0 for tensor in tensors]
    return (max(sizes) if any(together) else sum(sizes)) // blocks


def _tensor_shards(vllm_config: VllmConfig, specs: list[KVCacheSpec]) -> int | None:
    """The shards of layers that are stored together; None unless the layers agree."""
    found = {capabilities.tensor_shards(vllm_config, spec) for spec in specs}
    return found.pop() if len(found) == 1 else None


def _check_state_space(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, specs: list[KVCacheSpec]
) -> None:
    mode = specs[0].mamba_cache_mode
    if mode not in ("align", "all"):
        raise Unsupported(
            f"mamba_cache_mode is {mode!r}; kvlane needs 'align', which keeps states at ends of blocks"
        )
    if not capabilities.reconciles_hybrid_hits():
        raise Unsupported("this vLLM shows connectors a local hit that its state-space layers do not have")
    if vllm_config.speculative_config is not None:
        raise Unsupported(
            "the engine has a drafter beside state-space layers, whose states may be of rejected tokens"
        )
    has_checkpoints = any(getattr(spec, "num_prefill_checkpoint_blocks", 0) for spec in specs)
    if has_checkpoints and capabilities.hash_block_size(vllm_config, kv_cache_config) < specs[0].block_size:
        # vLLM 0.32 then gives a block's hash to a state of fewer tokens.
        raise Unsupported(
            "blocks are named in smaller units (prefix_match_unit) than those of the model's state-space layers, which "
            "also keep states of tokens inside a step's chunk"
        )
    if len({_state_format(spec) for spec in specs}) > 1:
        raise Unsupported("the model's state-space layers have states of several kinds in a group")


def _state_format(spec: KVCacheSpec) -> str:
    """All that decides which number of a state lies where: vLLM shows it as bytes, and CPUs turn some around."""
    shapes = "; ".join("x".join(map(str, shape)) for shape in spec.shapes)
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    return f"{kind} {shapes} {capabilities.conv_state_layout()} {capabilities.device_type()}"
