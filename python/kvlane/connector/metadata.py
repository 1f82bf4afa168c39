"""What travels inside vLLM's own messages: jobs to the workers, their ends back to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class SaveJob:
    """Blocks to save. Their bytes do not change until every rank has reported the job."""

    job: int
    groups: list[tuple[int, bytes, list[bytes], list[int]]]
    """(group, hash of the block before the first or b"", hashes, block ids)"""


@dataclass(frozen=True)
class LoadJob:
    """A promised hit, to be copied into the engine's blocks."""

    job: int
    request_id: str
    boot: bytes
    groups: list[tuple[int, list[int], list[bytes]]] | None
    """(group, block ids, pool pages for each rank). None: the promise cannot be kept; report it as failed."""
    block_ids: frozenset[int] = frozenset()
    """All blocks of the load, for versions that report failures by block."""


@dataclass
class KVLaneMetadata(KVConnectorMetadata):
    """Scheduler to workers, one a step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    idle: bool = False
    """Nothing is computed in this step: the worker may wait a moment for its copies instead of spinning."""


@dataclass
class JobEnd:
    """How a job ended, summed over ranks."""

    ranks: int
    ok: bool
    """Load: every byte arrived. Save: the daemon has all of its blocks, from this engine or another."""


@dataclass
class KVLaneWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, one a step that ended jobs."""

    ended: dict[int, JobEnd]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVLaneWorkerMetadata:
        """Both ranks' ends, as a new object."""
        assert isinstance(other, KVLaneWorkerMetadata)
        ended = {job: JobEnd(end.ranks, end.ok) for job, end in self.ended.items()}
        for job, end in other.ended.items():
            mine = ended.setdefault(job, JobEnd(0, True))
            mine.ranks += end.ranks
            mine.ok = mine.ok and end.ok
        return KVLaneWorkerMetadata(ended)
