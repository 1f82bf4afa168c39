"""The data inside vLLM's own messages: jobs to the workers, and their ends back to the scheduler."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvlane.connector.jobs import JobEnd, Mergeable, StepJobs, merge_ends, merge_others
from kvlane.connector.weights import WeightsReport


@dataclass
class KVLaneMetadata(StepJobs, KVConnectorMetadata):
    """Scheduler to workers, one a step."""


@dataclass
class KVLaneWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, one a step that has something to tell."""

    ended: dict[int, JobEnd]
    weights: WeightsReport | None = None
    others: dict[str, Mergeable] = field(default_factory=dict)
    """By name of a further kind: the report of its worker halves besides ends of jobs."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVLaneWorkerMetadata:
        """The merged reports of this and the other ranks."""
        assert isinstance(other, KVLaneWorkerMetadata)
        reports = [each.weights for each in (self, other) if each.weights is not None]
        weights = functools.reduce(WeightsReport.merge, reports) if reports else None
        return KVLaneWorkerMetadata(
            merge_ends(self.ended, other.ended), weights, merge_others(self.others, other.others)
        )
