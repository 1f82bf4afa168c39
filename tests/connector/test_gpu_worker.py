"""The worker role with caches on a GPU: when a load is released, and what waits for a released one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlane.connector.assemble import one_layer_ahead
from kvlane.connector.core_protocols import WorkerCore
from kvlane.connector.guard import Failures
from kvlane.connector.jobs import JobEnd, LoadJob, StepJobs
from kvlane.connector.kinds.direct_offer import Computed
from kvlane.connector.kinds.kind import DirectRank
from kvlane.connector.stream import Stream
from kvlane.connector.worker import WorkerSide

LAYERS = [f"layers.{layer}" for layer in range(3)]
# Of two groups: the last layer has full attention, the others have windows.
REGIONS = dict(zip(LAYERS, [(1, 0), (1, 1), (0, 0)], strict=True))
LAYER_BY_LAYER = [(77, region) for region in REGIONS.values()]


class Core:
    """Records what happens; ends are put in by the test."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int, str]] = []  # (job, stream, release)
        self.waits: list[tuple[int, tuple[int, int] | None]] = []  # (stream, group and region)
        self.waited: list[list[int]] = []  # jobs
        self.outstanding: list[int] = []
        self.ends: list[Any] = []
        self.idle_waits = 0

    def step_begins(self, computes: bool, present: bytes | None, gone: list[bytes]) -> None: ...

    def load(self, job: int, boot: bytes, groups: Any, stream: int, release: str) -> None:
        self.loads.append((job, stream, release))

    def wait(self, timeout_ms: float) -> None:
        self.idle_waits += 1

    def poll(self) -> list[Any]:
        ends, self.ends = self.ends, []
        return ends

    def take_stats(self) -> dict[str, float]:
        return {}

    def outstanding_loads(self) -> list[int]:
        return list(self.outstanding)

    def wait_for_loads(self, stream: int, jobs: list[int], region: tuple[int, int] | None = None) -> None:
        self.waits.append((stream, region))
        self.waited.append(list(jobs))

    def end(self, job: int, kind: str, ok: bool = True) -> None:
        """A job's end, or its release."""
        if kind == "released":
            self.outstanding.append(job)
        elif job in self.outstanding:
            self.outstanding.remove(job)
        self.ends.append(
            SimpleNamespace(job=job, kind=kind, ok=ok, blocks=1, present=0, bytes=1, seconds=0.1, detail="")
        )


def worker(
    *,
    regions: dict[str, tuple[int, int]] = REGIONS,
    first: tuple[int, int] | None = None,
    kinds: Sequence[str | None] = (),
) -> tuple[WorkerSide, Core]:
    """A worker whose steps are of these kinds, one after the other; else full graphs."""
    core = Core()
    side = WorkerSide(0, Failures())
    kind = iter(kinds)
    stream = Stream(lambda: 77, regions, first, step_kind=lambda: next(kind, None))
    side.attach(cast("WorkerCore", core), stream)
    return side, core


def load(job: int) -> LoadJob:
    return LoadJob(job, f"request {job}", b"boot", [(0, [1], [b"page"])])


def step(
    side: WorkerSide,
    *loads: LoadJob,
    idle: bool = False,
    hooks: list[str] = LAYERS,
    decodes: int = 0,
) -> tuple[set[str], dict[int, JobEnd]]:
    """One step with the hooks of these layers; what it reports."""
    side.bind(StepJobs(loads=list(loads), idle=idle, computes=not idle, decodes=decodes))
    if not idle:
        for name in hooks:
            if side.on_layer is not None:
                side.on_layer(name)
    side.start_saves()
    side.poll()
    side.unbind()
    return side.take_loaded()[0], side.take_ended()


def test_a_released_load_is_computed_with_at_once_and_ends_later() -> None:
    side, core = worker()
    assert step(side, load(1), idle=True) == (set(), {})
    assert core.loads == [(1, 77, "at_once")]
    core.end(1, "released")
    assert step(side, idle=True) == ({"request 1"}, {}), "its lease is still needed"
    core.end(1, "load")
    assert step(side) == (set(), {1: JobEnd(1, ok=True)})


def test_where_others_compute_a_load_is_released_when_it_is_near() -> None:
    side, core = worker()
    step(side, load(1), idle=False)
    assert core.loads == [(1, 77, "when_near")]
    core.end(1, "released")
    assert step(side) == ({"request 1"}, {})
    core.end(1, "load")
    assert step(side) == (set(), {1: JobEnd(1, ok=True)})


def test_where_layers_cannot_wait_one_by_one_nothing_is_released_before_its_end() -> None:
    side, core = worker(regions={})
    step(side, load(1), idle=True)
    assert core.loads == [(1, 77, "at_end")]


def test_steps_wait_for_everything_where_graphs_leave_hooks_out() -> None:
    side, core = worker()
    step(side, load(1), idle=True)
    core.end(1, "released")
    step(side)
    step(side)
    assert core.waits == [(77, None)] * 2, "each step until its end"
    core.end(1, "load")
    step(side)
    assert core.waits == [(77, None)] * 2


def release(side: WorkerSide, core: Core, job: int) -> None:
    step(side, load(job), idle=True)
    core.end(job, "released")
    step(side, idle=True)


def test_each_layer_waits_for_its_own_part() -> None:
    side, core = worker(kinds=["NONE"] * 9)
    step(side)  # every layer calls its hook: that can be relied on from now on
    release(side, core, 1)
    step(side)
    assert core.waits == LAYER_BY_LAYER
    core.end(1, "load")
    step(side)
    core.waits.clear()
    step(side)
    assert core.waits == []
    assert side.on_layer is None, "a hook with nothing to do costs nothing"


def test_a_layers_part_is_there_before_the_layer_writes_the_last_token_of_a_prompt() -> None:
    """Without CUDA graphs the pool's bytes of the token came over those that the engine had just computed. Answers
    differed from those of a hit in GPU memory."""
    regions, first = one_layer_ahead({name: (0, place) for place, name in enumerate(LAYERS)})
    side, core = worker(regions=regions, first=first, kinds=["NONE"] * 9)
    step(side)
    release(side, core, 1)
    side.bind(StepJobs())
    for place, name in enumerate(LAYERS):
        waited = [region for _, region in core.waits if region is not None]
        assert max(waited, default=(0, -1)) >= (0, place), (
            f"vLLM writes the token in {name}, then calls its hook"
        )
        assert side.on_layer is not None
        side.on_layer(name)
    assert core.waits[0] == (77, (0, 0)), "no layer waits for what only later ones read"


def test_a_kind_of_step_is_waited_for_as_a_whole_until_every_layer_was_seen_to_call_its_hook() -> None:
    side, core = worker(kinds=["PIECEWISE", "NONE", "PIECEWISE", "PIECEWISE"])
    step(side, hooks=LAYERS[:2])
    release(side, core, 1)
    step(side)
    assert core.waits == [(77, None)], "another kind"
    step(side)
    assert core.waits == [(77, None)] * 2, "one layer was missing"
    step(side)
    assert core.waits[2:] == LAYER_BY_LAYER


def test_one_step_has_to_call_all_hooks_before_its_kind_is_waited_for_by_layer() -> None:
    side, core = worker(kinds=["NONE"] * 9)
    step(side, hooks=LAYERS[:2])
    step(side, hooks=LAYERS[2:])
    release(side, core, 1)
    step(side)
    step(side)
    assert core.waits == [(77, None), *LAYER_BY_LAYER]


def test_a_full_graph_waits_for_everything_whatever_other_steps_do() -> None:
    side, core = worker(kinds=["PIECEWISE", None, "PIECEWISE"])
    step(side)
    release(side, core, 1)
    step(side, hooks=[])
    assert core.waits == [(77, None)]
    step(side)
    assert core.waits[1:] == LAYER_BY_LAYER


@pytest.mark.parametrize("kinds", [["NONE"] * 9, []])
def test_a_step_that_was_planned_before_a_release_does_not_wait_for_it(kinds: list[str]) -> None:
    """The load was released so early that it ends before its request's step, two steps later."""
    side, core = worker(kinds=kinds)
    step(side)
    release(side, core, 1)
    release(side, core, 2)
    for unplanned, waited in (([1, 2], []), ([2], [1]), ([], [1, 2])):
        core.waits.clear()
        core.waited.clear()
        side.bind(StepJobs(unplanned=unplanned))
        for name in LAYERS:
            if side.on_layer is not None:
                side.on_layer(name)
        side.start_saves()
        side.unbind()
        assert core.waited == [waited] * (len(LAYERS) if kinds else 1) if waited else core.waited == []
    assert (side.take_stats() or {}).get("errors", 0) == 0


def test_a_hook_that_is_left_out_is_told_and_such_steps_are_not_trusted_again() -> None:
    side, core = worker(kinds=["NONE"] * 9)
    step(side)
    release(side, core, 1)
    step(side, hooks=LAYERS[:1])
    assert core.waits == LAYER_BY_LAYER[:1]
    stats = side.take_stats()
    assert stats is not None
    assert stats["errors"] == 1
    step(side)
    assert core.waits[1:] == [(77, None)]
    step(side)
    assert core.waits[2:] == [(77, None)], "although every layer called its hook in the step before"


def test_steps_of_one_token_each_are_trusted_by_themselves() -> None:
    """vLLM 0.33 has a model that computes them without hooks for up to eight requests, and other steps of the same kind
    with hooks."""
    side, core = worker(kinds=["NONE"] * 9)
    step(side)
    step(side, decodes=9)
    release(side, core, 1)
    step(side, hooks=[], decodes=8)
    assert core.waits == [(77, None)]
    step(side, decodes=9)
    step(side)
    assert core.waits[1:] == LAYER_BY_LAYER * 2
    assert (side.take_stats() or {}).get("errors", 0) == 0


def test_an_idle_step_waits_for_copies_but_not_when_one_was_just_released() -> None:
    side, core = worker()
    step(side, load(1), idle=True)
    assert core.idle_waits == 1
    core.end(1, "released")
    step(side, idle=True)
    before = core.idle_waits
    step(side, idle=True)
    assert core.idle_waits == before, "the engine learns of it in the step after"
    step(side, idle=True)
    assert core.idle_waits == before + 1, "nobody computes: no spinning until the load has ended"


class Hook:
    """Of an agent, called with each layer."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.stream = agent, 0

    def begin(self, stream: int) -> None:
        self.stream = stream

    def __call__(self, layer: str) -> None:
        if not self.agent.refuses:
            self.agent.events.append((layer, self.stream))

    def check(self) -> None:
        if self.agent.refuses:
            raise OSError("the driver refuses")


class Agent:
    """A rank's agent for direct hand-offs; its driver may refuse."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.events: list[tuple[Any, ...]] = []

    def step_begins(self, filled: Any) -> None:
        self.events.append(("begins",))

    def layer_hook(self) -> Any:
        return Hook(self)

    def step_ends(self, stream: int) -> None:
        self.events.append(("ends", stream))

    def take_counts(self) -> tuple[int, ...]:
        return (0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_hand_off_is_told_of_layers_in_the_engines_stream_and_a_refusal_ends_nothing(refuses: bool) -> None:
    side, _ = worker()
    agent, copied = Agent(refuses), []
    copy = cast("Any", lambda source, target: copied.append((source, target)))
    side.can_copy_by(copy)
    side.attach_direct(DirectRank(cast("Any", agent), agent.layer_hook(), lambda: 77))
    filled = [Computed(b"i" * 16, 0, [1, 2], None)]
    side.bind(StepJobs(others={"direct": filled}, copies=[(3, 4)]))
    assert side.on_layer_computed is not None
    for name in LAYERS:
        side.on_layer_computed(name)
    side.start_saves()
    side.unbind()
    layers = [] if refuses else [(name, 77) for name in LAYERS]
    assert agent.events == [("begins",), *layers, ("ends", 77)]
    assert copied == [(3, 4)]
    errors = (side.take_stats() or {}).get("errors", 0)
    assert errors == (1 if refuses else 0)
    side.bind(StepJobs())
    assert side.on_layer_computed is None, "a hook with nothing to do costs nothing"
    side.unbind()
