"""Plain stand-ins for what vLLM hands to the connector's scheduler role."""

from __future__ import annotations

import functools
import hashlib
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from kvlane.connector import kinds
from kvlane.connector.adapters import Adapters
from kvlane.connector.groups import CacheGroup
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import Mergeable, StepJobs, merge_others
from kvlane.connector.kinds.kind import SchedulerKind, SchedulerShared, WorkerKind, WorkerShared
from kvlane.connector.no_daemon import NoScheduler
from kvlane.connector.scheduler import SchedulerSide
from kvlane.connector.settings import Settings
from kvlane.connector.shape import EngineShape
from kvlane.connector.weights import STARTED_WITH, Weights, WeightsReport
from kvlane.connector.worker import WorkerSide
from kvlane.testing import FakeCore

BLOCK = 4
BLOCK_BYTES = 64


def full_group(index: int = 0, tokens_per_block: int = BLOCK) -> CacheGroup:
    return CacheGroup(index, index, "full_attention", 0, tokens_per_block, 0, "f32", False, ("a",))


def window_group(index: int, window_blocks: int, tokens_per_block: int = BLOCK) -> CacheGroup:
    window = (window_blocks - 1) * tokens_per_block + 2
    return CacheGroup(
        index, index, "sliding_window", window, tokens_per_block, window_blocks, "f32", False, ("b",)
    )


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    block_hash: bytes | None = None


class Pool:
    """vLLM's block pool: reference counts, and the order in which blocks were freed."""

    def __init__(self, size: int) -> None:
        self.blocks = [Block(number) for number in range(size)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.freed: list[int] = []

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        found = [block for block in self.blocks if block.block_hash == block_hash]
        return found[:1] or None

    def get_num_free_blocks(self) -> int:
        return sum(1 for block in self.blocks if block.ref_cnt == 0 and not block.is_null)

    def reset_prefix_cache(self) -> bool:
        return all(block.ref_cnt == 0 for block in self.blocks)

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.freed.append(block.block_id)


class FakeWeights:
    """What a worker computes with; the test says what it is."""

    def __init__(self) -> None:
        self.present: str | None = STARTED_WITH

    def label(self, reset: int) -> str | None:
        return self.present


class Request:
    """A request whose block hashes grow with its tokens."""

    def __init__(
        self, request_id: str, tokens: list[int], hash_block: int = BLOCK, transfer: object = None
    ) -> None:
        self.request_id = request_id
        self.kv_transfer_params = transfer
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.lora_request: Any = None
        self.mm_features: Any = None
        self.skip_reading_prefix_cache = False
        self.status = SimpleNamespace(name="WAITING")
        self._hash_block = hash_block

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, parent = [], b""
        size = self._hash_block
        for first in range(0, len(self.all_token_ids) - size + 1, size):
            parent = hashlib.sha256(parent + repr(self.all_token_ids[first : first + size]).encode()).digest()
            hashes.append(parent)
        return hashes


@dataclass
class Step:
    """vLLM's SchedulerOutput, as far as it is read."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    kv_connector_block_state: Any = None
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = field(
        default_factory=lambda: SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    )

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Engine:
    """Both roles around a byte array for each rank; block ids are handed out one after the other."""

    def __init__(
        self,
        store: FakeCore,
        groups: list[CacheGroup] | None = None,
        workers: int = 1,
        blocks: int = 64,
        hash_block: int = BLOCK,
        engine_id: str = "engine",
        settings: dict[str, Any] | None = None,
        emit_events: bool = False,
        replicas: int = 1,
        adapters: Adapters | None = None,
        scheduler_kinds: Callable[[SchedulerShared], list[SchedulerKind]] = kinds.scheduler_kinds,
        worker_kinds: Callable[[WorkerShared], list[WorkerKind]] = kinds.worker_kinds,
        has_daemon: bool = True,
        steps_at_once: int = 1,
        empties_failed: bool = False,
        overlapped_tokens: int | None = None,
    ) -> None:
        self.groups = groups or [full_group()]
        self.store = store
        self.replicas = replicas
        self.now = 1000.0
        self.pool = Pool(blocks)
        self.memory = [bytearray(blocks * BLOCK_BYTES * len(self.groups)) for _ in range(workers)]
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.failures = Failures()
        namespaces = [bytes([group.index + 1] * 16) for group in self.groups]
        core = store.Scheduler(
            None,
            engine_id,
            "test",
            [
                (namespace, "test", group.tokens_per_block, group.window_blocks)
                for namespace, group in zip(namespaces, self.groups, strict=True)
            ],
            workers,
            follow_journal=emit_events,
        )
        from math import lcm

        shape = EngineShape(
            groups=self.groups,
            workers=workers,
            hash_block_size=hash_block,
            hit_alignment=lcm(*(group.tokens_per_block for group in self.groups)),
            can_load=True,
            can_save=True,
            emit_events=emit_events,
            has_daemon=has_daemon,
            takes_last_block=len(self.groups) == 1 and not self.groups[0].window_blocks,
            overlapped_tokens=overlapped_tokens,
            empties_failed=empties_failed,
            steps_at_once=steps_at_once,
            namespaces=tuple(namespaces),
        )
        self.scheduler = SchedulerSide(
            core if has_daemon else NoScheduler(),
            shape,
            Settings.parse(settings),
            self.failures,
            clock=lambda: self.now,
            adapters=adapters or Adapters(now_ns=after_a_while),
            kinds=scheduler_kinds,
        )
        self.scheduler.pins.bind(self.pool, self.scheduler.before_pool_reset, self.scheduler.pool_was_reset)
        self.weights = FakeWeights()
        self.workers = []
        for rank in range(workers):
            worker = WorkerSide(rank, self.failures, worker_kinds)
            worker.weights = cast("Weights", self.weights)
            layout = []
            for group, namespace in zip(self.groups, namespaces, strict=True):
                base = address(self.memory[rank]) + group.index * blocks * BLOCK_BYTES
                layout.append((namespace, b"l" * 16, [(base, BLOCK_BYTES, blocks, BLOCK_BYTES, [0])]))
            shared = [replicas] * len(self.groups)
            worker.attach(
                store.Worker(None, engine_id, "test", rank, workers, layout, replicas=shared),
                replicas=shared,
                layouts=[each[1] for each in layout],
            )
            worker.can_copy_by(functools.partial(self._copy, rank))
            self.workers.append(worker)
        self._next_block = 1

    def _copy(self, rank: int, source: int, target: int) -> None:
        memory, from_, to = self.memory[rank], source * BLOCK_BYTES, target * BLOCK_BYTES
        memory[to : to + BLOCK_BYTES] = memory[from_ : from_ + BLOCK_BYTES]

    def fill(self, rank: int, group: int, block: int, value: int) -> None:
        """What the forward pass would write."""
        at = (group * len(self.pool.blocks) + block) * BLOCK_BYTES
        self.memory[rank][at : at + BLOCK_BYTES] = bytes([value] * BLOCK_BYTES)

    def content(self, rank: int, group: int, block: int) -> int:
        """The value that fills a block; all bytes must agree."""
        at = (group * len(self.pool.blocks) + block) * BLOCK_BYTES
        values = set(self.memory[rank][at : at + BLOCK_BYTES])
        assert len(values) == 1, "a block with bytes of several writes"
        return values.pop()

    def allocate(self, request: Request, tokens: int) -> Any:
        """Blocks for the first `tokens` tokens of a request, like vLLM's KVCacheBlocks."""
        table = self.tables.setdefault(request.request_id, tuple([] for _ in self.groups))
        for group, ids in zip(self.groups, table, strict=True):
            while len(ids) * group.tokens_per_block < tokens:
                ids.append(self._next_block)
                self.pool.touch([self.pool.blocks[self._next_block]])
                self._next_block += 1
        return SimpleNamespace(blocks=tuple([self.pool.blocks[each] for each in ids] for ids in table))

    def free(self, request: Request) -> None:
        """vLLM's free: the request's own references go."""
        for ids in self.tables.pop(request.request_id):
            self.pool.free_blocks([self.pool.blocks[each] for each in reversed(ids) if each])

    def step(self, scheduled: dict[str, int] | None = None) -> tuple[set[str], set[str]]:
        """One engine step: plan, run on all ranks, report. Gives the loaded and failed requests of rank 0."""
        scheduled = scheduled or {}
        output = Step(
            scheduled,
            SimpleNamespace(resolve_block_ids=lambda request_id: self.tables[request_id]),
        )
        jobs = StepJobs(loads=self.scheduler.take_loads(), copies=self.scheduler.take_copies())
        self.scheduler.plan_step(output, jobs)
        results = []
        reports = []
        others: dict[str, Mergeable] = {}
        for worker in self.workers:
            # It travels between processes.
            worker.bind(pickle.loads(pickle.dumps(jobs)))
            worker.start_saves()
            worker.poll()
            results.append(worker.take_loaded())
            ended = worker.take_ended()
            worker.unbind()
            self.scheduler.jobs_ended(ended)
            report = worker.take_weights_report()
            if report is not None:
                reports.append(report)
            others = merge_others(others, pickle.loads(pickle.dumps(worker.take_others())))
        if reports:
            self.scheduler.weights_reported(functools.reduce(WeightsReport.merge, reports))
        self.scheduler.reported(others)
        return results[0]

    def compute(self, request: Request, tokens: int) -> None:
        """Schedule `tokens` more tokens of a request and write its blocks."""
        self.allocate(request, request.num_computed_tokens + tokens)
        for group, ids in zip(self.groups, self.tables[request.request_id], strict=True):
            end = (request.num_computed_tokens + tokens) // group.tokens_per_block
            hashes = request.block_hashes
            scale = group.tokens_per_block // request._hash_block
            for index in range(end):
                if (index + 1) * scale <= len(hashes) and ids[index]:
                    for rank in range(len(self.workers)):
                        self.fill(rank, group.index, ids[index], self.value(request, group, index, rank))
        self.step({request.request_id: tokens})
        request.num_computed_tokens += tokens

    def value(self, request: Request, group: CacheGroup, index: int, rank: int) -> int:
        """What a block of a request should hold; never 0."""
        scale = group.tokens_per_block // request._hash_block
        shard = rank // self.replicas
        return (request.block_hashes[(index + 1) * scale - 1][0] + group.index + shard) % 255 + 1

    def run(self, request: Request) -> int:
        """A request from arrival to its whole prompt computed; gives the tokens that were loaded."""
        self.scheduler.add_request(request)
        tokens, _ = self.scheduler.matched_tokens(request, 0)
        assert tokens is not None
        if tokens:
            self.scheduler.allocated(request, self.allocate(request, tokens), tokens)
            loaded, failed = self.step()
            assert loaded == {request.request_id} and not failed
            request.num_computed_tokens = tokens
        self.scheduler.allocated(request, self.allocate(request, request.num_tokens), 0)
        self.compute(request, request.num_tokens - request.num_computed_tokens)
        return tokens

    def finish(self, request: Request) -> dict[str, object] | None:
        """Gives what the request's answer says to the engine that goes on with it."""
        handed_over = self.scheduler.request_finished(request, self.tables[request.request_id])
        self.free(request)
        return handed_over


def after_a_while() -> int:
    """A clock at which the files that a test writes are no longer new."""
    return time.time_ns() + 3_000_000_000


def address(memory: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
