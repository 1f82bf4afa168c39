"""Jobs from the scheduler role to the workers, and their ends back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

M = TypeVar("M", bound="Mergeable")


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
    """The request that waits for the job in vLLM; empty if none does, and only the job's end is reported."""
    boot: bytes
    groups: list[tuple[int, list[int], list[bytes]]] | None
    """(group, block ids, pool pages for each rank). None: the promise cannot be kept; report it as failed."""
    block_ids: frozenset[int] = frozenset()
    """All blocks of the load, for versions that report failures by block."""


@dataclass
class StepJobs:
    """The jobs that the workers start in one step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before the step computes: from, to."""
    unplanned: list[int] = field(default_factory=list)
    """Loads whose requests waited for them when vLLM planned this step. It reads none of their blocks, even if a worker
    has released them by now."""
    idle: bool = False
    """Nothing is computed in this step, and no lookup is awaited: the worker may wait a moment for its copies instead
    of spinning."""
    computes: bool = True
    """The step has a forward pass."""
    decodes: int = 0
    """The requests of a step in which each computes one token; 0 for other steps."""
    present: bytes | None = None
    """The daemon's run that the scheduler is connected to, if all loads of this step are of it."""
    gone: list[bytes] = field(default_factory=list)
    """Runs that the scheduler was connected to and never is again. No load of this step or a later one is of them."""
    look_at_weights: int | None = None
    """The reset after which the workers are to digest the weights that they compute with; None in other steps."""
    others: dict[str, object] = field(default_factory=dict)
    """By name of a further kind: its data for its worker halves. Plain data, which vLLM pickles."""


@dataclass
class JobEnd:
    """How a job ended, summed over ranks."""

    ranks: int
    ok: bool
    """Load: every byte arrived. Save: the daemon has all of its blocks, from this engine or another."""


class Mergeable(Protocol):
    """A report of a kind's worker halves for its scheduler half: plain data, which vLLM pickles."""

    def merge(self: M, other: M) -> M:
        """The reports of this and another rank, as a new object."""
        ...


def merge_others(one: Mapping[str, Mergeable], other: Mapping[str, Mergeable]) -> dict[str, Mergeable]:
    """The merged reports of two sets of ranks, by name of the kind."""
    merged = dict(one)
    for name, part in other.items():
        merged[name] = merged[name].merge(part) if name in merged else part
    return merged


def merge_ends(one: Mapping[int, JobEnd], other: Mapping[int, JobEnd]) -> dict[int, JobEnd]:
    """The ends that two sets of ranks report, as new objects."""
    merged = {job: JobEnd(end.ranks, end.ok) for job, end in one.items()}
    for job, end in other.items():
        mine = merged.setdefault(job, JobEnd(0, True))
        mine.ranks += end.ranks
        mine.ok = mine.ok and end.ok
    return merged
