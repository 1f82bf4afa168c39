"""The fake of the daemon makes a lookup wait for what another engine saves, as the daemon does."""

from __future__ import annotations

import pytest

from kvlane.testing import FakeCore
from kvlane.testing.fake_ends import FakeScheduler

NAMESPACE, LAYOUT = bytes(16), bytes([4]) * 16
NAMES = [bytes([index]) * 16 for index in range(1, 5)]
FOR_EVER_MS = 1 << 31


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def open_engine(core: FakeCore, name: str) -> FakeScheduler:
    core.Worker(None, name, "test", 0, 1, [(NAMESPACE, LAYOUT, [])])
    return core.Scheduler(None, name, "test", [(NAMESPACE, "g", 16, 0)], 1)


def store(core: FakeCore, count: int) -> None:
    for name in NAMES[:count]:
        core.put((NAMESPACE, (LAYOUT,), name), 0, b"block")


def test_it_is_pending_until_what_was_promised_is_there(core: FakeCore) -> None:
    p, d = open_engine(core, "p"), open_engine(core, "d")
    d.lookup_start("r", [NAMES], 64, (p.engine_id, p.run, 50, FOR_EVER_MS))
    store(core, 2)
    assert d.lookup_poll("r") is None
    assert not core.leases
    store(core, 3)
    hit = d.lookup_poll("r")
    assert hit is not None and hit.tokens == 48
    # It is taken.
    again = d.lookup_poll("r")
    assert again is not None and again.tokens == 0


def test_it_is_not_pending_without_a_hand_off_or_its_engine(core: FakeCore) -> None:
    p, d = open_engine(core, "p"), open_engine(core, "d")
    store(core, 1)
    over = (p.engine_id, p.run, 64, 0)
    restarted = (p.engine_id, bytes(16), 64, FOR_EVER_MS)
    unknown = ("q", p.run, 64, FOR_EVER_MS)
    for handoff in (None, over, restarted, unknown):
        d.lookup_start("r", [NAMES], 64, handoff)
        hit = d.lookup_poll("r")
        assert hit is not None and hit.tokens == 16
    assert len(core.leases) == 4


def test_asked_again_or_forgotten_it_does_not_wait(core: FakeCore) -> None:
    p, d = open_engine(core, "p"), open_engine(core, "d")
    handoff = (p.engine_id, p.run, 64, FOR_EVER_MS)
    d.lookup_start("r", [NAMES], 64, handoff)
    assert d.lookup_poll("r") is None
    d.lookup_start("r", [NAMES], 64)
    assert d.lookup_poll("r") is not None
    d.lookup_start("r", [NAMES], 64, handoff)
    d.forget("r")
    assert d.lookup_poll("r") is not None
