"""Counters of the connector: through vLLM's own channel to its log and to Prometheus as vllm:kvlane_*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Each is summed over an interval; scheduler and workers send the same kind of object.
COUNTERS = {
    "lookups": "Lookups sent to the kvlane daemon",
    "hits": "Lookups that found at least one block",
    "misses": "Lookups that found nothing",
    "timeouts": "Lookups given up after kvlane.lookup_timeout_ms",
    "lookup_seconds": "Seconds from asking to answer, summed over lookups",
    "reconnects": "Connections to the daemon that were made again",
    "hit_tokens": "Prompt tokens loaded from the daemon instead of computed",
    "load_jobs": "Loads that ended, by worker",
    "load_blocks": "Blocks loaded, by worker",
    "load_bytes": "Bytes loaded",
    "load_seconds": "Seconds of loading, summed over jobs",
    "failed_loads": "Loads that did not bring all bytes",
    "save_jobs": "Saves that ended, by worker",
    "save_blocks": "Blocks saved, by worker",
    "save_bytes": "Bytes saved",
    "save_seconds": "Seconds of saving, summed over jobs",
    "present_blocks": "Blocks not saved because the daemon had them, by worker",
    "failed_saves": "Saves that the daemon did not take completely",
    "skipped_blocks": "Blocks not saved because too many were pinned or the daemon was away",
    "errors": "Errors inside the connector, each survived",
}
# Names in the core's take_stats that differ from ours.
CORE_NAMES = {"lookup_seconds_sum": "lookup_seconds"}


class Counters:
    """Counts between two intervals."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, value: float = 1) -> None:
        """Count; `name` is a key of COUNTERS."""
        assert name in COUNTERS, f"no counter is called {name!r}"
        if value:
            self._values[name] = self._values.get(name, 0) + value

    def add_core(self, values: Mapping[str, float], names: frozenset[str]) -> None:
        """Count what the core counted itself, as far as it is in `names`; the rest is counted elsewhere."""
        for name, value in values.items():
            ours = CORE_NAMES.get(name, name)
            if ours in names:
                self.add(ours, value)

    def take(self) -> KVLaneStats | None:
        """What was counted since the last call; None when nothing was."""
        if not self._values:
            return None
        values, self._values = self._values, {}
        return KVLaneStats(data=values)


class KVLaneStats(KVConnectorStats):
    """Counter names to sums; plain numbers, so that they cross process borders."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
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
    """One Prometheus counter for each of COUNTERS."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_engine: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvlane_{name}", documentation=documentation, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._by_engine[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counters = self._by_engine.get(engine_idx, {})
        for name, value in transfer_stats_data.items():
            if name in counters:
                counters[name].inc(value)
