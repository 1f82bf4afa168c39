"""What travels inside vLLM's own messages: jobs to the workers, their ends back to the scheduler."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvlane.connector.jobs import JobEnd, StepJobs, merge_ends
from kvlane.connector.weights import WeightsReport


@dataclass
class KVLaneMetadata(StepJobs, KVConnectorMetadata):
    """Scheduler to workers, one a step."""


@dataclass
class KVLaneWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, one a step that ended jobs or asked for the weights."""

    ended: dict[int, JobEnd]
    weights: WeightsReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVLaneWorkerMetadata:
        """What this and the other ranks report."""
        assert isinstance(other, KVLaneWorkerMetadata)
        reports = [each.weights for each in (self, other) if each.weights is not None]
        weights = functools.reduce(WeightsReport.merge, reports) if reports else None
        return KVLaneWorkerMetadata(merge_ends(self.ended, other.ended), weights)
