"""A kind of job that nobody but this test knows: two classes and their place in the lists, nothing else is touched.

It holds a prompt back until the worker has seen some steps, as a kind would that waits for what another engine
computes; then it says that the prompt's beginning comes from elsewhere, and its worker half brings it.
"""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass
from typing import Any, cast

import pytest
from fakes import Engine, Request
from test_roles import PROMPT, check_nothing_held

from kvlane.connector.core_protocols import Finished
from kvlane.connector.jobs import JobEnd, Mergeable, StepJobs, merge_others
from kvlane.connector.kinds import scheduler_kinds, worker_kinds
from kvlane.connector.kinds.kind import (
    ASK_AGAIN,
    NOTHING,
    Answer,
    LayerHook,
    SchedulerKind,
    SchedulerShared,
    WorkerKind,
    WorkerShared,
)
from kvlane.connector.requests import RequestState
from kvlane.connector.vllm_protocols import AllocatedBlocks, SchedulerOutput
from kvlane.connector.vllm_protocols import Request as VllmRequest
from kvlane.testing import FakeCore, FakeWorker

STEPS = 3


@dataclass
class Seen:
    """Steps that ranks have seen."""

    steps: frozenset[tuple[int, int]]  # (rank, steps)

    def merge(self, other: Seen) -> Seen:
        return Seen(self.steps | other.steps)


@dataclass
class StepPart:
    """What the scheduler half tells in one step."""

    count: bool
    bring: list[tuple[int, str, int]]  # (job, request, block)


class HandOff(SchedulerKind):
    """Prompts of one engine, brought by another."""

    name = "handoff"

    def __init__(self, shared: SchedulerShared) -> None:
        super().__init__(shared)
        self._waiting = False
        self._seen: dict[int, int] = {}
        self._bring: list[tuple[int, str, int]] = []
        self.ends: list[tuple[int, JobEnd]] = []
        self.under_way: dict[int, tuple[str, int]] = {}  # job to (request, ranks that have not reported)

    def answer(self, state: RequestState, local_tokens: int) -> Answer:
        if not state.request.request_id.startswith("theirs"):
            return NOTHING
        self._waiting = min(self._seen.values(), default=0) < STEPS
        return ASK_AGAIN if self._waiting else Answer(4)

    def allocated(
        self, request: VllmRequest, state: RequestState | None, blocks: AllocatedBlocks, tokens: int
    ) -> None:
        if tokens:
            job = next(self._shared.jobs)
            self.under_way[job] = (request.request_id, self._shared.shape.workers)
            self._bring.append((job, request.request_id, blocks.blocks[0][0].block_id))

    def plan(self, output: SchedulerOutput, jobs: StepJobs) -> None:
        if self._waiting or self._bring:
            jobs.others[self.name] = StepPart(self._waiting, self._bring)
            self._bring = []

    def ended(self, job: int, end: JobEnd) -> bool:
        if job not in self.under_way:
            return False
        self.ends.append((job, end))
        request_id, ranks = self.under_way.pop(job)
        if ranks > end.ranks:
            self.under_way[job] = (request_id, ranks - end.ranks)
        elif request_id in self._shared.requests:
            self._shared.requests[request_id].tokens_ended(all(each.ok for _, each in self.ends))
        return True

    def reported(self, part: object) -> None:
        assert isinstance(part, Seen)
        self._seen.update(part.steps)

    def pending(self) -> bool:
        return bool(self.under_way)


class HandOffWorker(WorkerKind):
    name = "handoff"

    def __init__(self, shared: WorkerShared) -> None:
        super().__init__(shared)
        self._steps = 0
        self.brought: list[int] = []
        self.hold = False
        self.held: list[tuple[int, str]] = []
        self.layers: list[str] = []

    def step_begins(self, jobs: StepJobs) -> LayerHook | None:
        part = jobs.others.get(self.name)
        if not isinstance(part, StepPart):
            return None
        if part.count:
            self._steps += 1
            self._shared.reports.others[self.name] = Seen(frozenset({(self._shared.rank, self._steps)}))
        for job, request_id, block in part.bring:
            self.brought.append(block)
            if self.hold:
                self.held.append((job, request_id))
            else:
                self.report(job, request_id, ok=True)
        return self.layers.append

    def report(self, job: int, request_id: str, ok: bool) -> None:
        reports = self._shared.reports
        reports.loaded.add(request_id)
        reports.jobs[job] = JobEnd(1, ok)
        if not ok:
            reports.failed.add(request_id)

    def finished(self, end: Finished) -> bool:
        raise AssertionError("the core was asked for nothing of this kind")


class EngineWithHandOff(Engine):
    """Both sides have the kind of this test before their own, and what travels between them is pickled."""

    def __init__(self, store: FakeCore, workers: int = 2) -> None:
        super().__init__(
            store,
            workers=workers,
            scheduler_kinds=lambda shared: [HandOff(shared), *scheduler_kinds(shared)],
            worker_kinds=lambda shared: [*worker_kinds(shared), HandOffWorker(shared)],
        )
        (self.handoff,) = (kind for kind in self.scheduler.kinds if isinstance(kind, HandOff))
        self.handoff_workers = [
            kind for worker in self.workers for kind in worker.kinds if isinstance(kind, HandOffWorker)
        ]


def test_a_further_kind_holds_a_prompt_back_and_then_brings_its_beginning() -> None:
    store = FakeCore()
    engine = EngineWithHandOff(store)
    # The daemon's blocks of the prompt do not count, because the kind is asked first.
    ours = Request("ours", PROMPT)
    assert engine.run(ours) == 0
    engine.finish(ours)
    theirs = Request("theirs", PROMPT)
    engine.scheduler.add_request(theirs)
    for _ in range(STEPS):
        assert engine.scheduler.matched_tokens(theirs, 0) == (None, False)
        engine.step()
    assert engine.scheduler.matched_tokens(theirs, 0) == (4, True)
    engine.scheduler.allocated(theirs, engine.allocate(theirs, 4), 4)
    assert engine.scheduler.has_pending_work()
    assert not store.leases, "no hit is held for it"
    loaded, failed = engine.step()
    assert (loaded, failed) == ({"theirs"}, set())
    block = engine.tables["theirs"][0][0]
    assert [worker.brought for worker in engine.handoff_workers] == [[block], [block]]
    assert [end for _, end in engine.handoff.ends] == [JobEnd(1, True)] * 2
    theirs.num_computed_tokens = 4
    engine.compute(theirs, theirs.num_tokens - 4)
    engine.finish(theirs)
    engine.step()
    check_nothing_held(engine)


@pytest.mark.parametrize("failed", [False, True], ids=["aborted", "failed"])
def test_blocks_whose_promised_tokens_did_not_come_are_not_saved(failed: bool) -> None:
    """vLLM counts promised tokens as computed before they are there. When such a request ended, its blocks were saved
    under the names of what they were to hold, unless it was a load of ours that was awaited: every engine would have
    hit garbage."""
    store = FakeCore()
    engine = EngineWithHandOff(store)
    engine.handoff._seen = {0: STEPS, 1: STEPS}
    for handoff in engine.handoff_workers:
        handoff.hold = True
    theirs = Request("theirs", PROMPT)
    engine.scheduler.add_request(theirs)
    assert engine.scheduler.matched_tokens(theirs, 0) == (4, True)
    engine.scheduler.allocated(theirs, engine.allocate(theirs, 4), 4)
    theirs.num_computed_tokens = 4
    assert engine.step() == (set(), set())
    if failed:
        report(engine, ok=False)
        assert engine.step() == ({"theirs"}, {"theirs"})
    engine.finish(theirs)
    if not failed:
        report(engine, ok=True)
    engine.step()
    engine.step()
    assert store.block_count() == 0
    check_nothing_held(engine)


def test_blocks_whose_promised_tokens_came_are_saved() -> None:
    """The control of the test above: the same request, and its blocks have what was promised."""
    store = FakeCore()
    engine = EngineWithHandOff(store)
    engine.handoff._seen = {0: STEPS, 1: STEPS}
    theirs = Request("theirs", PROMPT)
    engine.scheduler.add_request(theirs)
    assert engine.scheduler.matched_tokens(theirs, 0) == (4, True)
    engine.scheduler.allocated(theirs, engine.allocate(theirs, 4), 4)
    theirs.num_computed_tokens = 4
    assert engine.step() == ({"theirs"}, set())
    engine.finish(theirs)
    engine.step()
    assert store.block_count() == 1


def report(engine: EngineWithHandOff, ok: bool) -> None:
    """All ranks say how what they held back has ended."""
    for worker in engine.handoff_workers:
        for job, request_id in worker.held:
            worker.report(job, request_id, ok)


def test_other_prompts_are_loaded_and_saved_as_without_it() -> None:
    store = FakeCore()
    engine = EngineWithHandOff(store)
    cold, warm = Request("cold", PROMPT), Request("warm", PROMPT)
    assert engine.run(cold) == 0
    engine.finish(cold)
    assert engine.run(warm) == 20
    engine.finish(warm)
    engine.step()
    assert store.block_count() == 5
    check_nothing_held(engine)
    assert all(not worker.brought and not worker.layers for worker in engine.handoff_workers)


def test_a_hit_that_another_kind_supersedes_is_given_back() -> None:
    """The daemon's hit was promised, vLLM had no room, and then the kind before it had an answer."""
    store = FakeCore()
    engine = EngineWithHandOff(store)
    cold = Request("cold", PROMPT)
    engine.run(cold)
    engine.finish(cold)
    asked = Request("asked", PROMPT)
    engine.scheduler.add_request(asked)
    assert engine.scheduler.matched_tokens(asked, 0) == (20, True)
    assert store.leases
    asked.request_id = "theirs"
    engine.scheduler.requests["theirs"] = engine.scheduler.requests.pop("asked")
    engine.handoff._seen = {0: STEPS, 1: STEPS}
    assert engine.scheduler.matched_tokens(asked, 0) == (4, True)
    engine.scheduler.allocated(asked, engine.allocate(asked, 4), 4)
    assert not store.leases
    assert engine.step() == ({"theirs"}, set())


def test_hooks_of_several_kinds_are_called_one_after_the_other() -> None:
    engine = EngineWithHandOff(FakeCore(), workers=1)
    (worker,), (handoff,) = engine.workers, engine.handoff_workers
    worker.bind(StepJobs(others={"handoff": StepPart(count=True, bring=[])}))
    assert worker.on_layer is not None
    worker.on_layer("layers.0")
    assert handoff.layers == ["layers.0"]
    worker.bind(StepJobs())
    assert worker.on_layer is None


class Broken(SchedulerKind):
    """Fails whatever it is asked."""

    name = "broken"

    def __getattribute__(self, name: str) -> object:
        if name in vars(SchedulerKind) and not name.startswith("_") and name != "name":
            return fail
        return super().__getattribute__(name)


class BrokenWorker(WorkerKind):
    """Fails whatever it is asked."""

    name = "broken"

    def __getattribute__(self, name: str) -> object:
        if name in vars(WorkerKind) and not name.startswith("_") and name != "name":
            return fail
        return super().__getattribute__(name)


def fail(*arguments: object) -> None:
    raise RuntimeError("this kind is broken")


def broken_engine(store: FakeCore) -> Engine:
    """The kind that fails is asked first."""
    return Engine(
        store,
        scheduler_kinds=lambda shared: [Broken(shared), *scheduler_kinds(shared)],
        worker_kinds=lambda shared: [BrokenWorker(shared), *worker_kinds(shared)],
    )


def test_a_kind_that_fails_leaves_the_others_as_they_are() -> None:
    """An error in one kind lost what all kinds had to do in that step: saves were not planned, and a load that had
    arrived at a worker was never started, so its request waited for ever."""
    store = FakeCore()
    engine = broken_engine(store)
    cold, warm = Request("cold", PROMPT), Request("warm", PROMPT)
    assert engine.run(cold) == 0
    engine.finish(cold)
    assert store.block_count() == 5
    assert engine.run(warm) == 20
    engine.finish(warm)
    assert not engine.scheduler.requests
    assert engine.pool.reset_prefix_cache()
    engine.scheduler.reset()
    again = Request("again", PROMPT)
    engine.scheduler.add_request(again)
    assert engine.scheduler.matched_tokens(again, 0) == (None, False), "its weights are not known yet"
    engine.step()
    assert engine.scheduler.matched_tokens(again, 0) == (20, True)
    engine.scheduler.forget_request("again")
    assert not engine.scheduler.has_pending_work()
    assert not engine.scheduler.free_blocks_soon()
    store.restart()
    engine.step()
    assert engine.failures.count > 20
    assert not store.leases and not engine.scheduler.saves.pinned_blocks


def test_jobs_under_way_are_reported_when_a_kind_fails_at_the_end() -> None:
    store = FakeCore()
    engine = broken_engine(store)
    store.hold_saves = True
    cold = Request("cold", PROMPT)
    engine.run(cold)
    engine.finish(cold)
    engine.workers[0].detach()
    engine.scheduler.jobs_ended(engine.workers[0].take_ended())
    assert not engine.scheduler.saves.pinned_blocks


def test_a_core_that_fails_keeps_no_load_from_being_reported() -> None:
    store = FakeCore()
    engine = Engine(store)
    engine.run(Request("cold", PROMPT))
    core = engine.workers[0]._shared.core
    assert isinstance(core, FakeWorker)
    core.step_begins = cast("Any", fail)
    warm = Request("warm", PROMPT)
    assert engine.run(warm) == 20
    core.close = cast("Any", fail)
    store.hold_loads = True
    third = Request("third", PROMPT)
    engine.scheduler.add_request(third)
    assert engine.scheduler.matched_tokens(third, 0) == (20, True)
    engine.scheduler.allocated(third, engine.allocate(third, 20), 20)
    assert engine.step() == (set(), set())
    engine.workers[0].detach()
    assert engine.workers[0].take_loaded() == ({"third"}, {"third"})


def test_what_ranks_say_is_merged_by_kind() -> None:
    one: dict[str, Mergeable] = {"a": Seen(frozenset({(0, 1)})), "b": Seen(frozenset({(0, 2)}))}
    other: dict[str, Mergeable] = {"a": Seen(frozenset({(1, 3)})), "c": Seen(frozenset({(1, 4)}))}
    merged = functools.reduce(merge_others, [one, other, {}])
    assert merged == {
        "a": Seen(frozenset({(0, 1), (1, 3)})),
        "b": Seen(frozenset({(0, 2)})),
        "c": Seen(frozenset({(1, 4)})),
    }
    assert one["a"] == Seen(frozenset({(0, 1)})), "in one process the ranks' objects are still in use"
    assert pickle.loads(pickle.dumps(merged)) == merged
