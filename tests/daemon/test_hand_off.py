"""One engine computes a prompt, and another one looks it up before its blocks are saved; each is a process."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from patterns import TOKENS
from processes import Daemon, Engine, until

from kvlane import _core

MakeEngine = Callable[..., Engine]

FOR_EVER_MS = (1 << 32) - 1
BLOCKS = 40
# A lookup without an answer is a miss after this: so a wait that ends with what is there was told to be one.
TIMEOUT_MS = 250.0


def waiting(daemon: Daemon) -> int:
    """Lookups that wait for another engine."""
    page = daemon.http("/metrics")[1]
    (count,) = (line.split()[1] for line in page.splitlines() if line.startswith("kvlane_hand_offs_waiting "))
    return int(count)


def outcomes(daemon: Daemon) -> dict[str, int]:
    name = 'kvlane_hand_offs_total{outcome="'
    lines = [line for line in daemon.http("/metrics")[1].splitlines() if line.startswith(name)]
    return {line.split('"')[1]: int(line.split()[1]) for line in lines}


@pytest.fixture
def engines(daemon: Daemon, make_engine: MakeEngine) -> tuple[Engine, Engine]:
    """P, which has saved the first half of a prompt, and D."""
    p, d = (make_engine(daemon, name, lookup_timeout_ms=TIMEOUT_MS) for name in ("p", "d"))
    p.call("save", prompt="prompt", count=BLOCKS // 2)
    daemon.settle()
    return p, d


def begin(daemon: Daemon, p: Engine, d: Engine, wait_ms: int = FOR_EVER_MS) -> None:
    handoff = p.call("hand_over", count=BLOCKS, wait_ms=wait_ms)
    d.send("lookup", prompt="prompt", count=BLOCKS, handoff=handoff)
    until("it waits", lambda: waiting(daemon) == 1)


def test_what_is_saved_after_the_lookup_is_found_and_right(
    daemon: Daemon, engines: tuple[Engine, Engine]
) -> None:
    p, d = engines
    begin(daemon, p, d)
    for first in range(BLOCKS // 2, BLOCKS, 5):
        p.call("save", prompt="prompt", count=5, first=first)
    hit = d.answer()
    assert hit["tokens"] == BLOCKS * TOKENS
    end = d.call("load", prompt="prompt", lease=hit["lease"])
    assert end["ok"] and end["wrong"] == [] and end["blocks"] == BLOCKS
    daemon.wait_unused()
    assert outcomes(daemon) == {"complete": 1} and waiting(daemon) == 0


def test_without_a_hand_off_the_same_lookup_finds_half(engines: tuple[Engine, Engine]) -> None:
    _, d = engines
    assert d.call("lookup", prompt="prompt", count=BLOCKS)["tokens"] == BLOCKS // 2 * TOKENS


def test_a_prefill_engine_that_is_killed_ends_the_wait(
    daemon: Daemon, engines: tuple[Engine, Engine]
) -> None:
    p, d = engines
    begin(daemon, p, d)
    p.kill()
    hit = d.answer()
    assert hit["tokens"] == BLOCKS // 2 * TOKENS
    assert outcomes(daemon) == {"gone": 1}
    assert "is not connected to this daemon" in daemon.log.wait_for("prompt not handed over as a whole")


def test_a_prefill_engine_that_stands_still_costs_the_wait(
    daemon: Daemon, engines: tuple[Engine, Engine]
) -> None:
    p, d = engines
    handoff = p.call("hand_over", count=BLOCKS, wait_ms=400)
    p.signal(signal.SIGSTOP)
    hit = d.call("lookup", prompt="prompt", count=BLOCKS, handoff=handoff)
    assert hit["tokens"] == BLOCKS // 2 * TOKENS and hit["seconds"] >= 0.4
    assert outcomes(daemon) == {"stalled": 1}


def test_a_daemon_that_is_slow_to_answer_is_waited_for_as_long_as_the_blocks_would_be(
    daemon: Daemon, engines: tuple[Engine, Engine]
) -> None:
    """On a busy machine 3 of 40 lookups of a decode engine had no answer within the lookup timeout, and it computed
    whole prompts again."""
    p, d = engines
    handoff = p.call("hand_over", count=BLOCKS // 2, wait_ms=30_000)
    daemon.signal(signal.SIGSTOP)
    try:
        d.send("lookup", prompt="prompt", count=BLOCKS, handoff=handoff)
        # The control: without a hand-off the timeout passes.
        assert p.call("lookup", prompt="prompt", count=BLOCKS)["tokens"] == 0
    finally:
        daemon.signal(signal.SIGCONT)
    assert d.answer()["tokens"] == BLOCKS // 2 * TOKENS


def test_a_decode_engine_that_is_killed_while_it_waits_leaves_nothing(
    daemon: Daemon, engines: tuple[Engine, Engine]
) -> None:
    p, d = engines
    begin(daemon, p, d)
    d.kill()
    until("nobody waits", lambda: waiting(daemon) == 0)
    daemon.wait_unused()
    assert outcomes(daemon) == {"abandoned": 1}


def test_the_daemon_is_killed_while_a_lookup_waits(daemon: Daemon, engines: tuple[Engine, Engine]) -> None:
    p, d = engines
    begin(daemon, p, d)
    daemon.kill()
    assert d.answer()["tokens"] == 0


@pytest.mark.parametrize(
    ("handoff", "error", "said"),
    [
        (("p", bytes(15), 16, 1), ValueError, "a run has 16 bytes, this one 15"),
        (("p", bytes(16), -1, 1), OverflowError, None),
        (("p", bytes(16), 16, 1 << 32), OverflowError, None),
        (("p", bytes(16), 16), (TypeError, ValueError), None),
        ((1, bytes(16), 16, 1), TypeError, None),
    ],
)
def test_a_wrong_hand_off_raises_and_asks_nothing(
    daemon: Daemon, handoff: tuple, error: type[Exception], said: str | None
) -> None:
    scheduler = _core.Scheduler(daemon.address, "d", "test", [(bytes(16), "group", 16, 0)], 1)
    try:
        assert scheduler.engine_id == "d" and len(scheduler.run) == 16
        assert scheduler.run == scheduler.run and any(scheduler.run)
        with pytest.raises(error, match=said):
            scheduler.lookup_start("r", [[bytes(16)]], 16, handoff)
        assert scheduler.take_stats()["lookups"] == 0
    finally:
        scheduler.close()
