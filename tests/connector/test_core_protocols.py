"""What the connector calls of its core is what the core has, and the stand-in for it too."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvlane import _core
from kvlane.connector.core_protocols import Core, Finished, Hit, LogSource, SchedulerCore, WorkerCore
from kvlane.testing import FakeCore, FakeFinished, FakeHit, FakeScheduler, FakeWorker

# pyright compares these types with the protocols; the tests below do it for those who run without it.
CORES: list[Core] = [_core, FakeCore()]
LOGS: list[LogSource] = [_core]
SCHEDULERS: list[type[SchedulerCore]] = [_core.Scheduler, FakeScheduler]
WORKERS: list[type[WorkerCore]] = [_core.Worker, FakeWorker]
HITS: list[type[Hit]] = [_core.Hit, FakeHit]
ENDS: list[type[Finished]] = [_core.Finished, FakeFinished]

PAIRS = [
    (protocol, made)
    for protocol, classes in (
        (Core, CORES),
        (LogSource, LOGS),
        (SchedulerCore, SCHEDULERS),
        (WorkerCore, WORKERS),
        (Hit, HITS),
        (Finished, ENDS),
    )
    for made in classes
]


def members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def names_of(made: object) -> set[str]:
    """Attributes of a class and of its objects, or of a module."""
    return set(dir(made)) | set(getattr(made, "__annotations__", ()))


def missing(protocol: type, made: object) -> list[str]:
    """What the protocol has and the class has not, or takes otherwise."""
    wrong = [name for name in members(protocol) if name not in names_of(made)]
    for name in members(protocol):
        asked: Any = vars(protocol)[name]
        if name in wrong or isinstance(asked, property):
            continue
        wanted = list(inspect.signature(asked).parameters)[1:]
        # The signature of a module's function or a bound method has no `self`.
        found = [each for each in inspect.signature(getattr(made, name)).parameters if each != "self"]
        if found[: len(wanted)] != wanted:
            wrong.append(f"{name}{tuple(found)} instead of {name}{tuple(wanted)}")
    return wrong


@pytest.mark.parametrize(
    ("protocol", "made"),
    PAIRS,
    ids=[f"{protocol.__name__}-{index}" for index, (protocol, _) in enumerate(PAIRS)],
)
def test_the_core_and_its_stand_in_have_what_the_connector_calls(protocol: type, made: object) -> None:
    assert members(protocol), "a protocol without members says nothing"
    assert not missing(protocol, made)


def test_a_core_without_a_call_or_with_other_parameters_is_noticed() -> None:
    class Renamed:
        ready = True
        boot = None
        gone = ()

        def lookup_start(self, request: str, hashes: list[list[bytes]], max_tokens: int) -> None: ...

    wrong = missing(SchedulerCore, Renamed)
    assert {"tick", "close"} <= set(wrong) and "ready" not in wrong
    assert any(each.startswith("lookup_start(") for each in wrong)
    assert {"engine_id", "run"} <= set(wrong)
