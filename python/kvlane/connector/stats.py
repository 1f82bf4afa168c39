"""Sends the connector's counters through vLLM's own channel: to its log, and to Prometheus as vllm:kvlane_*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvlane.connector.counters import COUNTERS
from kvlane.connector.shared_pool import DOCUMENTATION, LABELS, NAME, POOL, PoolInfo

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class KVLaneStats(KVConnectorStats):
    """Sums by counter name, and changes of the shared pool; plain values, so that they cross process borders."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name == POOL:
                self.data[POOL] = {**self.data.get(POOL, {}), **value}
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name.endswith("_seconds"):
                line[name] = round(value, 4)
            else:
                line[name] = int(value)
        return line

    def is_empty(self) -> bool:
        return not self.data


class KVLanePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter for each of COUNTERS, and the pool that each engine shares."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[int, dict[str, PromMetric]] = {engine: {} for engine in per_engine_labelvalues}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvlane_{name}", documentation=documentation, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = counter.labels(*values)
        gauge = self._gauge_cls(
            name=NAME,
            documentation=DOCUMENTATION,
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, *LABELS],
        )
        self._pools = {engine: PoolInfo(gauge, values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counters = self._by_engine.get(engine_idx, {})
        if POOL in transfer_stats_data and engine_idx in self._pools:
            self._pools[engine_idx].hear(transfer_stats_data[POOL])
        for name, value in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(value)
