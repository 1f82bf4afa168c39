"""The class that vLLM calls. It only forwards to the role's side, and lets no error through."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvlane.connector import capabilities
from kvlane.connector.assemble import build_scheduler_side, build_worker_core
from kvlane.connector.block_copier import block_copier
from kvlane.connector.cross_layers import layer_caches
from kvlane.connector.direct_rank import RankHandshake, start_rank
from kvlane.connector.groups import Unsupported, check_local_hits
from kvlane.connector.guard import Failures, guarded, logger
from kvlane.connector.metadata import KVLaneMetadata, KVLaneWorkerMetadata
from kvlane.connector.no_daemon import uses_daemon
from kvlane.connector.p2p_keys import own_fields
from kvlane.connector.scheduler import SchedulerSide
from kvlane.connector.settings import Settings
from kvlane.connector.shared_pool import POOL
from kvlane.connector.stats import KVLanePromMetrics, KVLaneStats
from kvlane.connector.vllm_protocols import AllocatedBlocks, BlockPool, KVEvent
from kvlane.connector.weights import Weights, calling_runner, parameters_move, parameters_of
from kvlane.connector.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVLaneConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps an engine's KV blocks in the kvlane daemon. An engine that it cannot serve runs as without it."""

    _cache_hit_source = capabilities.host_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError for a wrong setting, and where vLLM would answer wrongly because of it."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.failures = Failures()
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config, own_fields(transfer))
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._handshake: RankHandshake | None = None
        if role == KVConnectorRole.WORKER:
            # Also without a core: jobs that arrive have to be reported.
            self._worker = WorkerSide(vllm_config.parallel_config.rank, self.failures)
        else:
            check_local_hits(vllm_config, self._kv_cache_config)
            self._build_scheduler()

    @guarded(lambda: None, "the engine runs without the cache")
    def _build_scheduler(self) -> None:
        try:
            self._scheduler = build_scheduler_side(
                self._vllm_config, self._kv_cache_config, self._settings, self.failures
            )
        except Unsupported as reason:
            # Log: kvlane cannot serve this model or setting, for the reason named; vLLM works without it. Do:
            # change what the reason names (docs/compatibility.md), or remove the connector.
            logger.warning("kvlane: the engine runs without the cache: %s", reason)

    # Worker role

    @guarded(lambda: None, "this worker takes no part in the cache")
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        self._worker.detach()
        self._kv_caches = kv_caches
        try:
            if uses_daemon(self._settings):
                self._worker.attach(
                    *build_worker_core(self._vllm_config, self._kv_cache_config, self._settings, kv_caches)
                )
            self._watch_weights()
        except Unsupported as reason:
            # Log: kvlane cannot reach this worker's KV cache, for the reason named; the engine computes. Do:
            # change what the reason names (docs/compatibility.md).
            logger.warning("kvlane: this worker takes no part in the cache: %s", reason)
        self._start_copies(kv_caches)
        self._start_direct(kv_caches)

    @guarded(lambda: None, "the last block of a prompt is computed although it is stored")
    def _start_copies(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        try:
            self._worker.can_copy_by(block_copier(self._vllm_config, self._kv_cache_config, kv_caches))
        except Unsupported as reason:
            # Log: hits end before a prompt's last block, for the reason named. Do: nothing; such a hit is a few
            # milliseconds later.
            logger.info("kvlane: the last block of a prompt is computed although it is stored: %s", reason)

    @guarded(lambda: None, "prompts are handed over through the daemon only")
    def _start_direct(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        if self._settings.direct == "off" or self._handshake is not None:
            # The scheduler knows the rank that was there first.
            return
        try:
            rank, self._handshake = start_rank(
                self._vllm_config, self._kv_cache_config, self._settings, kv_caches
            )
            self._worker.attach_direct(rank)
        except Unsupported as reason:
            # Log: `kvlane.direct` has no effect in this worker, for the reason named. Do: change what the reason
            # names, or leave the key out.
            logger.warning("kvlane: prompts are handed over through the daemon only: %s", reason)

    @guarded(lambda: None)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    @guarded(lambda: None, "after a reset this engine shares no blocks with others")
    def _watch_weights(self) -> None:
        """Called where vLLM registers the KV caches: the weights are loaded, and the model runner is the caller."""
        assert self._worker is not None
        if self._worker.weights is not None:
            return
        # Named weights have an identity even if the rest fails.
        self._worker.weights = Weights(None)
        runner = calling_runner()
        if runner is None or parameters_move(self._vllm_config):
            # Log: after `reset_prefix_cache` kvlane cannot check the weights, so this engine may share nothing
            # then. Do: name weights that change (docs/weights.md).
            logger.info(
                "kvlane: cannot digest this engine's weights: after a reset only named weights have an identity"
            )
        else:
            self._worker.weights = Weights(functools.partial(parameters_of, runner))

    @guarded(lambda: None, "this worker takes no part in the cache")
    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]
    ) -> None:
        """For versions before 0.29, where `prefer_cross_layer_blocks` was granted."""
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        config = self._kv_cache_config
        layers = [tensor.shared_by for tensor in config.kv_cache_tensors]
        self.register_kv_caches(layer_caches(kv_cache, order, layers, config.num_blocks))

    @guarded(lambda: None)
    def unregister_kv_caches(self) -> None:
        """Before sleep: the memory goes away, so copies end first."""
        if self._worker is not None:
            self._worker.detach()

    @guarded(lambda: None, "this worker takes no part in the cache")
    def restore_kv_caches(self) -> None:
        """After sleep: the memory is back, at the same addresses."""
        if self._worker is not None and not self._worker.attached and self._kv_caches:
            self.register_kv_caches(self._kv_caches)

    @guarded(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KVLaneMetadata):
            self._worker.bind(connector_metadata)

    @guarded(lambda: None)
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.unbind()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Loads were started when the metadata came."""
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs once its blocks are there, or, on a GPU, on their way: then the stream waits for them."""
        if self._worker is not None and self._worker.on_layer is not None:
            self._worker.on_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: object
    ) -> None:
        """Saves start once the whole step is computed; what is handed over directly goes layer by layer."""
        if self._worker is not None and self._worker.on_layer_computed is not None:
            self._worker.on_layer_computed(layer_name)

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves()

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For versions before 0.30, which learn of failed loads by `get_block_ids_with_load_errors`."""
        if self._worker is None:
            return None, None
        self._worker.poll()
        loaded, _ = self._worker.take_loaded()
        return None, loaded or None

    @guarded(capabilities.empty_transfer_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """For versions from 0.30 on: failed loads by request."""
        results = capabilities.empty_transfer_results()
        if self._worker is not None:
            self._worker.poll()
            results.finished_recving, results.failed_recving = self._worker.take_loaded()
            self._worker.take_failed_blocks()
        return results

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVLaneWorkerMetadata | None:
        if self._worker is None:
            return None
        ended, weights = self._worker.take_ended(), self._worker.take_weights_report()
        others = self._worker.take_others()
        if not ended and weights is None and not others:
            return None
        return KVLaneWorkerMetadata(ended, weights, others)

    # Scheduler role

    @guarded(lambda: None, "nothing is saved or loaded")
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.pins.bind(gpu_block_pool, self._before_pool_reset, self._scheduler.pool_was_reset)

    @guarded(lambda: None, "vLLM may not be able to reset its cache before saves have ended")
    def _before_pool_reset(self) -> None:
        assert self._scheduler is not None
        self._scheduler.before_pool_reset()

    @guarded(lambda: None, "prompts are handed over through the daemon only")
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        direct = self._scheduler.direct if self._scheduler is not None else None
        ranks = [each for each in metadata.values() if isinstance(each, RankHandshake)]
        if direct is not None and len(ranks) == self._vllm_config.parallel_config.world_size:
            direct.start(ranks)
            # Log: this engine hands prompts over directly, and other engines reach it at this address.
            logger.info("kvlane: direct hand-offs by %s", direct.address)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): each for rank, each in metadata.items()})

    @guarded(lambda: None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.add_request(request)

    @guarded(lambda: (0, False), "the request is computed")
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = KVLaneMetadata()
        if self._scheduler is not None:
            # First, and on their own: what was promised is sent whatever happens to the rest.
            metadata.loads = self._scheduler.take_loads()
            metadata.copies = self._scheduler.take_copies()
            self._plan_step(scheduler_output, metadata)
        return metadata

    @guarded(lambda: None, "this step saves nothing")
    def _plan_step(self, scheduler_output: SchedulerOutput, metadata: KVLaneMetadata) -> None:
        assert self._scheduler is not None
        self._scheduler.plan_step(scheduler_output, metadata)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(metadata, KVLaneWorkerMetadata):
            self._scheduler.jobs_ended(metadata.ended)
            if metadata.weights is not None:
                self._scheduler.weights_reported(metadata.weights)
            if metadata.others:
                self._scheduler.reported(metadata.others)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """Never keeps a request's blocks, because saves pin block by block."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.request_finished(request, block_ids)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        side = self._scheduler
        return side is not None and (side.has_pending_work() or side.pool.is_due())

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.free_blocks_soon()

    @guarded(lambda: False, "blocks of other weights may be found")
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @guarded(tuple)
    def take_events(self) -> Iterable[KVEvent]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because a dropped save is only a later miss."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """For versions before 0.29; later ones ask by `get_required_kvcache_layout`."""
        return self._settings.layout == "block"

    # Both roles

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVLaneStats | None:
        side = self._scheduler or self._worker
        if side is None:
            return None
        stats: dict[str, object] = {**(side.take_stats() or {})}
        pool = side.pool.take()
        if pool is not None:
            stats[POOL] = pool
        return KVLaneStats(data=stats) if stats else None

    @guarded(lambda: None)
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, object] | None = None) -> KVLaneStats | None:
        # vLLM's log takes numbers only.
        return KVLaneStats(data={name: value for name, value in (data or {}).items() if name != POOL})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLanePromMetrics:
        return KVLanePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A wish: any layout is taken as it is. Raises ValueError for a wrong setting."""
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        return capabilities.layout_name(Settings.parse(transfer.kv_connector_extra_config).layout)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, object]) -> bool:
        return False
