"""Builds the two sides of the connector from vLLM's configuration."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from math import ceil, lcm
from pathlib import Path
from typing import TYPE_CHECKING

from kvlane import __version__
from kvlane.connector import capabilities, events, p2p_keys
from kvlane.connector.adapters import Adapters, watch_loads
from kvlane.connector.affinity import unbound
from kvlane.connector.axes import LayerFacts, layer_facts
from kvlane.connector.core import open_core
from kvlane.connector.core_protocols import WorkerCore
from kvlane.connector.direct import Direct
from kvlane.connector.direct_order import Order
from kvlane.connector.groups import (
    STATE,
    CacheGroup,
    Unsupported,
    block_bytes,
    cache_groups,
    keeps_tokens_apart,
)
from kvlane.connector.guard import Failures, logger
from kvlane.connector.inputs import names_are_content
from kvlane.connector.layout import GroupLayout, group_layout, layer_hints, natural_order, reading_order
from kvlane.connector.namespace import (
    adapters_meaning,
    crosses_hosts,
    engine_meaning,
    fix_hash_seed,
    group_namespace,
)
from kvlane.connector.no_daemon import NoScheduler, uses_daemon
from kvlane.connector.scheduler import SchedulerSide
from kvlane.connector.settings import Settings
from kvlane.connector.shape import EngineShape
from kvlane.connector.stream import Stream

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


_DRAFTERS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""vLLM's methods of speculative decoding that look tokens up and keep no blocks."""

_OVERLAPPED_BYTES = 192e6
"""A rank loads so many bytes in 3.5 ms on a link of 55 GB/s. A step of a block, by piecewise CUDA graphs, took 0.4 to
4 ms longer than one of a token with a full graph (bench/gpu/results, hits in GPU memory beside no connector)."""


def build_scheduler_side(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings, failures: Failures
) -> SchedulerSide:
    """The scheduler role, connecting in the background. Raises Unsupported."""
    groups = cache_groups(vllm_config, kv_cache_config)
    namespaces, hash_seed, may_cross = _namespaces(vllm_config, groups, settings)
    transfer = vllm_config.kv_transfer_config
    can_load = settings.load and transfer.is_kv_consumer
    empties_failed = len(groups) > 1 and not capabilities.reports_failed_requests()
    if can_load and empties_failed and not capabilities.begins_anew_without_blocks():
        can_load = False
        # Log: this engine saves blocks and loads none. Do: use vLLM 0.30 or newer for this model.
        logger.warning(
            "kvlane: nothing is loaded: this vLLM cannot be told of a failed load of a model with %d KV cache "
            "groups (it can from 0.30 on)",
            len(groups),
        )
    can_load = can_load and may_write_free_blocks(vllm_config, groups)
    has_daemon = uses_daemon(settings)
    shape = EngineShape(
        groups=groups,
        workers=vllm_config.parallel_config.world_size,
        hash_block_size=capabilities.hash_block_size(vllm_config, kv_cache_config),
        hit_alignment=lcm(*(group.tokens_per_block for group in groups)),
        can_load=can_load,
        can_save=settings.save and transfer.is_kv_producer,
        emit_events=events.events_enabled(vllm_config),
        has_daemon=has_daemon,
        names_are_content=names_are_content(vllm_config),
        takes_last_block=takes_last_block(vllm_config, kv_cache_config, groups),
        overlapped_tokens=overlapped_tokens(vllm_config, kv_cache_config, groups),
        empties_failed=empties_failed,
        steps_at_once=capabilities.steps_at_once(vllm_config),
        hash_seed=hash_seed,
        namespaces=tuple(namespaces),
    )
    if has_daemon:
        core = open_core(settings.address).Scheduler(
            settings.address,
            engine_id(vllm_config),
            client_name(),
            [
                (namespace, group_name(vllm_config, group), group.tokens_per_block, group.window_blocks)
                for namespace, group in zip(namespaces, groups, strict=True)
            ],
            shape.workers,
            settings.lookup_timeout_ms,
            daemon_user=settings.daemon_user,
            follow_journal=shape.emit_events,
            crosses_hosts=may_cross,
        )
    else:
        core = NoScheduler()
    # Log: the engine's connector has started; engines with the same groups and namespaces share blocks.
    logger.info(
        "kvlane: engine %s, %d worker(s), groups %s",
        engine_id(vllm_config),
        shape.workers,
        ", ".join(
            f"{group.kind} {namespace.hex()}" for group, namespace in zip(groups, namespaces, strict=True)
        ),
    )
    direct = build_direct(vllm_config, kv_cache_config, groups, namespaces, settings)
    return SchedulerSide(core, shape, settings, failures, adapters=_adapters(vllm_config), direct=direct)


def may_write_free_blocks(vllm_config: VllmConfig, groups: list[CacheGroup]) -> bool:
    """Whether no step reads the blocks that vLLM gives to a request, or that are free. Logs why not."""
    if (
        not any(group.window_blocks for group in groups)
        or capabilities.steps_at_once(vllm_config) == 1
        or capabilities.windows_outlast_steps()
    ):
        return True
    # Log: this engine saves blocks, loads none and takes none over, because a step could still read what a load
    # writes. Do: use vLLM 0.32 or newer for this model, or --no-async-scheduling.
    logger.warning(
        "kvlane: nothing is loaded: with async scheduling or a pipeline this vLLM gives away blocks that fell out of a "
        "window while a step still reads them (0.32 does not, nor does any with --no-async-scheduling)"
    )
    return False


def takes_last_block(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: list[CacheGroup]
) -> bool:
    """Whether hits may end inside a prompt's last block."""
    if vllm_config.speculative_config is not None:
        why = "the engine has a drafter"
    elif not keeps_tokens_apart(kv_cache_config, groups):
        why = "not all of the model's layers keep each token by itself, with full attention"
    elif getattr(vllm_config.scheduler_config, "policy", "fcfs") != "fcfs":
        # It may preempt a request whose blocks have their hashes and were never computed.
        why = "the scheduling policy is not fcfs"
    else:
        return bool(vllm_config.cache_config.enable_prefix_caching)
    # Log: hits end before a prompt's last block, for the reason named. Do: nothing; such a hit is a few milliseconds
    # later.
    logger.info("kvlane: the last block of a prompt is computed although it is stored: %s", why)
    return False


def overlapped_tokens(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: list[CacheGroup]
) -> int | None:
    """How many tokens have `_OVERLAPPED_BYTES`. None where steps of one token and of a block are alike, where a step of
    a block has no graphs at all, and where it may not wait layer by layer."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    # Data-parallel ranks run without full graphs as soon as one of them does.
    if (
        [group.kind for group in groups] != ["full_attention"]
        or vllm_config.parallel_config.data_parallel_size > 1
        or mode is None
    ):
        return None
    if (mode.decode_mode().name, mode.mixed_mode().name) != ("FULL", "PIECEWISE"):
        return None
    # The engine computes a block and a token of a prompt that is one token longer than its blocks.
    if (compilation.max_cudagraph_capture_size or 0) <= groups[0].tokens_per_block:
        return None
    return ceil(_OVERLAPPED_BYTES * groups[0].tokens_per_block / block_bytes(kv_cache_config))


def build_direct(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: list[CacheGroup],
    namespaces: list[bytes],
    settings: Settings,
) -> Direct | None:
    """Direct hand-offs, where they are wanted and the model can have them."""
    _log_p2p_keys(vllm_config, settings)
    if settings.direct == "off":
        return None
    try:
        order = handoff_order(vllm_config, kv_cache_config, groups)
    except Unsupported as reason:
        # Log: `kvlane.direct` has no effect for this model, for the reason named. Do: leave it out, or give both
        # engines one daemon.
        logger.warning("kvlane: prompts are handed over through the daemon only: %s", reason)
        return None
    if settings.send_type == "PUT":
        # Log: `send_type` PUT was given; nothing is slower by it.
        logger.info(
            "kvlane: send_type PUT does the same here as PUT_ASYNC: the forward pass waits for no other engine"
        )
    parallel = vllm_config.parallel_config
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    size = block_bytes(kv_cache_config)
    may_wait = parallel.data_parallel_size == 1
    role = "D" if vllm_config.kv_transfer_config.kv_role == "kv_consumer" else "P"
    return Direct(settings, order, namespaces[order.full.index], sizes, size, may_wait, role)


def handoff_order(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: list[CacheGroup]) -> Order:
    """The order of direct hand-offs. Raises Unsupported."""
    drafter = vllm_config.speculative_config
    if drafter is not None and len(groups) > 1 and drafter.method not in _DRAFTERS_WITHOUT_LAYERS:
        raise Unsupported("the engine has a drafter with layers, and its model has several KV cache groups")
    # With a drafter vLLM leaves a prompt's last tokens out.
    return Order(groups, drafter is None and keeps_tokens_apart(kv_cache_config, groups))


def _log_p2p_keys(vllm_config: VllmConfig, settings: Settings) -> None:
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config or {}
    found = p2p_keys.read(extra, p2p_keys.own_fields(transfer))
    if settings.direct == "off":
        return
    if "kvlane.direct" not in extra:
        # Log: the engine hands over directly, although `kvlane.direct` is missing. Do: nothing, or write
        # "kvlane.direct": "off".
        logger.info(
            "kvlane: direct hand-offs are on, because the configuration has %s of vLLM's P2P NCCL connector",
            ", ".join(found.given),
        )
    for sentence in found.ignored:
        # Log: a value of the engine's configuration is ignored, for the reason named. Do: correct it.
        logger.warning("kvlane: %s", sentence)


def build_worker_core(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    kv_caches: dict[str, torch.Tensor],
) -> tuple[WorkerCore, Stream | None, list[int], list[bytes]]:
    """The core's worker for this rank's KV caches, connecting in the background; for caches on a GPU how the engine
    computes there; and of each group, how many ranks hold its blocks, and their layout. Raises Unsupported."""
    groups = cache_groups(vllm_config, kv_cache_config)
    namespaces, *_ = _namespaces(vllm_config, groups, settings)
    device = gpu_of(kv_caches)
    hints = layer_hints(vllm_config, kv_cache_config)
    facts = _facts(vllm_config, kv_cache_config, groups)
    parallel = vllm_config.parallel_config
    cut = [parallel.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    described = []
    shards = []
    replicas = []
    layouts: list[GroupLayout] = []
    for namespace, group in zip(namespaces, groups, strict=True):
        layout = group_layout(
            kv_caches,
            group.layer_names,
            kv_cache_config.num_blocks,
            hints,
            cut,
            holders(group, parallel),
            facts,
        )
        if not layout.regions:
            raise Unsupported(f"rank {parallel.rank} has no layer of KV cache group {group.group_id}")
        described.append((namespace, layout.digest, layout.regions))
        shards.append(layout.shard)
        layouts.append(layout)
        _tell_layout(parallel.rank, group, layout, settings)
        replicas.append(layout.replicas)
    digests = [layout.digest for layout in layouts]
    if device is not None:
        with unbound():
            core = open_core(settings.address).Worker(
                settings.address,
                engine_id(vllm_config),
                client_name(),
                parallel.rank,
                parallel.world_size,
                described,
                gpu=device_uuid(device),
                replicas=replicas,
                daemon_user=settings.daemon_user,
                shards=shards,
                layers=reading_order(layouts),
                steps_ahead=capabilities.steps_ahead(vllm_config),
                load_stall_ms=settings.load_stall_ms,
            )
        awaited, first = awaited_regions(groups, layouts), None
        if keeps_tokens_apart(kv_cache_config, groups):
            awaited, first = one_layer_ahead(awaited)
        return (
            core,
            Stream(compute_stream(device), awaited, first, capabilities.step_kind),
            replicas,
            digests,
        )
    with unbound():
        core = open_core(settings.address).Worker(
            settings.address,
            engine_id(vllm_config),
            client_name(),
            parallel.rank,
            parallel.world_size,
            described,
            settings.save_method,
            replicas=replicas,
            daemon_user=settings.daemon_user,
            shards=shards,
        )
    return core, None, replicas, digests


def awaited_regions(groups: list[CacheGroup], layouts: list[GroupLayout]) -> dict[str, tuple[int, int]]:
    """The group and the number of the last region that each layer reads; empty where a step cannot wait layer by layer.
    vLLM reads and copies states before it calls the connector, so a load with states has to be there by then."""
    if any(group.kind == STATE for group in groups):
        return {}
    return {
        name: (group.index, region)
        for group, layout in zip(groups, layouts, strict=True)
        for name, region in layout.last_region.items()
    }


def one_layer_ahead(
    awaited: dict[str, tuple[int, int]],
) -> tuple[dict[str, tuple[int, int]], tuple[int, int] | None]:
    """The same, but each layer waits for the next one's region, too; and what a step waits for before its first layer.

    A load may bring a prompt's last block, of which the engine computes the last token. vLLM writes that token into a
    layer's block before it calls the layer's hook. A copy that the hook waits for would overwrite the token with the
    pool's bytes."""
    assert len({group for group, _ in awaited.values()}) <= 1, "regions of several groups have no order"
    order = sorted(awaited, key=natural_order)
    ahead = {
        name: max(awaited[name], awaited[after])
        for name, after in zip(order, order[1:] + order[-1:], strict=True)
    }
    return ahead, awaited[order[0]] if order else None


def _facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, groups: list[CacheGroup]
) -> dict[str, LayerFacts]:
    """These facts only explain. A vLLM that has them elsewhere is served without them."""
    try:
        is_named = capabilities.cache_dimensions_are_named()
        return layer_facts(vllm_config, kv_cache_config, groups, is_named)
    except Exception as error:  # noqa: BLE001
        # Log: `kvlane status` cannot explain differences between this engine's layout and others; caching works.
        # Do: report it, with vLLM's version and the model.
        logger.warning("kvlane: cannot describe the dimensions of the KV caches to the daemon: %r", error)
        return {}


def _tell_layout(rank: int, group: CacheGroup, layout: GroupLayout, settings: Settings) -> None:
    # Log: the line says how a block of this worker lies in memory; fewer runs are copied faster.
    logger.info(
        "kvlane: rank %d, %s: a block of %d bytes in %d runs",
        rank,
        group.kind,
        layout.block_bytes,
        layout.runs,
    )
    if settings.layout == "block" and layout.runs > 1:
        # Log: `kvlane.layout` has no effect in this engine; caching works, and copies are slower. Do: choose
        # another attention backend, or leave the key out.
        logger.warning(
            "kvlane: kvlane.layout is 'block', but vLLM keeps the layers of a block apart: %d runs a block in rank %d "
            "(its attention backend, its model runner or its own settings do not allow it)",
            layout.runs,
            rank,
        )


def holders(group: CacheGroup, parallel: ParallelConfig) -> int:
    """How many consecutive ranks hold the same blocks of a group. Tensor-parallel ranks are neighbours in vLLM's order,
    and so are those among them that hold the same shard."""
    tensor = parallel.tensor_parallel_size
    shards = group.tensor_shards
    return tensor // shards if shards and tensor % shards == 0 else 1


def engine_id(vllm_config: VllmConfig) -> str:
    """The same in an engine's scheduler and workers, different in every data-parallel engine."""
    known = vllm_config.kv_transfer_config.engine_id
    parallel = vllm_config.parallel_config
    suffix = f"_dp{parallel.data_parallel_rank}"
    # vLLM appends the suffix itself in every way of starting that goes through its engine processes.
    if parallel.data_parallel_size > 1 and not known.endswith(suffix):
        return known + suffix
    return known


def client_name() -> str:
    """The name of this engine in the daemon's log."""
    import vllm

    return f"kvlane {__version__}, vLLM {vllm.__version__}"


def group_name(vllm_config: VllmConfig, group: CacheGroup) -> str:
    """A group's name for people."""
    model = vllm_config.model_config
    dtype = group.dtype.removeprefix("torch.")
    window = f" window {group.window}" if group.window else ""
    return f"{Path(model.model).name} {dtype} {group.tokens_per_block} tokens{window}"


def _namespaces(
    vllm_config: VllmConfig, groups: list[CacheGroup], settings: Settings
) -> tuple[list[bytes], bytes | None, bool]:
    """A namespace for each group, the hash seed that is in them, and whether other hosts may have their blocks."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = fix_hash_seed(algorithm)
    if seed is None:
        # Log: nothing is shared between engines or found after a restart. Do: set `PYTHONHASHSEED` to the same
        # number for all engines.
        logger.warning(
            "kvlane: with prefix_caching_hash_algo %s vLLM draws a random hash seed, so this engine finds no blocks "
            "of other engines or of its own last run; set PYTHONHASHSEED to the same number in all of them",
            algorithm,
        )
    meaning = engine_meaning(vllm_config, groups, settings.namespace, seed)
    return [group_namespace(group, meaning) for group in groups], seed, crosses_hosts(meaning)


def _adapters(vllm_config: VllmConfig) -> Adapters:
    lora = vllm_config.lora_config
    adapters = Adapters(
        meaning=adapters_meaning(vllm_config),
        path_is_hashed=capabilities.hashes_adapter_paths(),
    )
    if lora is not None:
        adapters.loads_are_seen = watch_loads(adapters)
    return adapters


def gpu_of(kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> torch.device | None:
    """The CUDA device that all KV caches are on; None for host memory. Raises Unsupported for anything else."""
    found: dict[str, torch.device] = {}
    for cache in kv_caches.values():
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            device = getattr(tensor, "device", None)
            if device is not None:
                found[str(device)] = device
    if len(found) > 1:
        raise Unsupported(f"the KV caches lie on several devices: {', '.join(sorted(found))}")
    device = next(iter(found.values()), None)
    if device is None or device.type == "cpu":
        return None
    if device.type != "cuda":
        raise Unsupported(f"the KV caches are in {device} memory, which kvlane cannot reach")
    return device


def compute_stream(device: torch.device) -> Callable[[], int]:
    """Gives the handle of the CUDA stream that the calling thread computes in."""
    import torch

    return lambda: torch.cuda.current_stream(device).cuda_stream


def device_uuid(device: torch.device) -> bytes:
    """The UUID by which every process of the host knows a CUDA device."""
    import torch

    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes
