"""What travels inside vLLM's own messages: jobs to the workers, their ends back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvlane.connector.jobs import JobEnd, StepJobs, merge_ends


@dataclass
class KVLaneMetadata(StepJobs, KVConnectorMetadata):
    """Scheduler to workers, one a step."""


@dataclass
class KVLaneWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, one a step that ended jobs."""

    ended: dict[int, JobEnd]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVLaneWorkerMetadata:
        """What this and the other ranks report."""
        assert isinstance(other, KVLaneWorkerMetadata)
        return KVLaneWorkerMetadata(merge_ends(self.ended, other.ended))
