"""The failure matrix: daemon and engine killed and stopped at the worst moments, with both ways of saving."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from busy import stretched
from patterns import NAMESPACE
from processes import Daemon, Engine, EngineError, until

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

both_methods = pytest.mark.parametrize("method", ["process_vm", "mapped"])

# A save that takes long enough to be met in the middle: many small pieces, 16 MB.
MANY = {"blocks": 2048, "piece_bytes": 4096}
MANY_BLOCKS = 2048


def _right(engine: Engine, prompt: str, count: int, at_least: int | None = None) -> int:
    """What is visible of a prompt holds the bytes that its names ask for. Answers how many blocks."""
    found = engine.call("check", prompt=prompt, count=count)
    assert found["ok"], found
    assert found["wrong"] == [], f"{len(found['wrong'])} of {found['blocks']} blocks of {prompt} are wrong"
    assert found["blocks"] >= (count if at_least is None else at_least)
    return found["blocks"]


# The daemon dies.


@both_methods
def test_a_promised_load_arrives_although_the_daemon_was_killed(
    daemon: Daemon, make_engine: MakeEngine, method: str
) -> None:
    engine = make_engine(daemon, "a", save_method=method)
    engine.call("save", prompt="p", count=100)
    daemon.settle()
    hit = engine.call("lookup", prompt="p", count=100)
    assert hit["tokens"] == 1600
    daemon.kill()
    end = engine.call("load", prompt="p", lease=hit["lease"])
    assert end["ok"], end
    assert end["blocks"] == 100
    assert end["wrong"] == []
    # From here on misses, at once, and saves that end at once.
    started = time.monotonic()
    assert _right(engine, "p", 100, at_least=0) == 0
    assert not engine.call("save", prompt="q", count=10)["ok"]
    assert time.monotonic() - started < stretched(10)


@both_methods
def test_the_daemon_is_killed_during_saves(daemon: Daemon, make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(daemon, "a", save_method=method, **MANY)
    dice = random.Random(1)
    interrupted = 0
    for turn in range(8):
        engine.call("fill", prompt=f"p{turn}", count=MANY_BLOCKS)
        engine.send("save", prompt=f"p{turn}", count=MANY_BLOCKS, fill=False)
        time.sleep(dice.random() * 0.02)  # the moment of the kill is what is varied
        daemon.kill()
        end = engine.answer()
        interrupted += not end["ok"]
        before = engine.call("state")["boot"]
        daemon.start()
        engine.wait_connected(before or None)
        assert _right(engine, f"p{turn}", MANY_BLOCKS, at_least=0) == 0, "a new daemon has nothing"
        assert engine.call("save", prompt="again", count=50)["blocks"] == 50
        daemon.settle()
        _right(engine, "again", 50)
    assert interrupted > 0


@both_methods
def test_after_the_daemon_died_engines_register_again_and_hit_again(
    daemon: Daemon, make_engine: MakeEngine, method: str
) -> None:
    engines = [make_engine(daemon, name, save_method=method) for name in "ab"]
    for _ in range(3):
        boot = engines[0].call("state")["boot"]
        engines[0].call("save", prompt="p", count=20)
        daemon.settle()
        hit = engines[1].call("lookup", prompt="p", count=20)
        daemon.restart()
        for engine in engines:
            assert engine.wait_connected(boot)["method"] == method
        # The promise of the former daemon holds beside the new one, once.
        assert engines[1].call("load", prompt="p", lease=hit["lease"]) | {"seconds": 0} == {
            "ok": True,
            "blocks": 20,
            "present": 0,
            "bytes": 20 * 16384,
            "seconds": 0,
            "detail": "",
            "wrong": [],
        }
        assert [_right(engine, "p", 20, at_least=0) for engine in engines] == [0, 0]
    assert engines[0].call("save", prompt="p", count=20)["blocks"] == 20
    daemon.settle()
    for engine in engines:
        _right(engine, "p", 20)
    daemon.wait_unused()


# The daemon stops without dying.


def test_a_stopped_daemon_costs_a_lookup_its_timeout_and_no_more(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    at_once = stretched(0.2)
    engine = make_engine(daemon, "a", lookup_timeout_ms=1e3 * at_once, save_timeout_ms=2.5e3 * at_once)
    engine.call("save", prompt="p", count=10)
    daemon.settle()
    until("a hit", lambda: engine.call("check", prompt="p", count=10)["blocks"] == 10)
    hit = until("a promise", lambda: (hit := engine.call("lookup", prompt="p", count=10))["tokens"] and hit)
    daemon.signal(signal.SIGSTOP)
    first = engine.call("lookup", prompt="p", count=10)
    assert (first["tokens"], first["seconds"] < 10 * at_once) == (0, True), first
    # It is known to be silent now: nobody waits again.
    for _ in range(20):
        again = engine.call("lookup", prompt="p", count=10)
        assert again["tokens"] == 0
        assert again["seconds"] < at_once, again
    end = engine.call("save", prompt="q", count=10)
    assert not end["ok"]
    assert end["seconds"] < 15 * at_once
    assert "in time" in end["detail"]
    assert engine.call("save", prompt="q", count=10)["seconds"] < 2.5 * at_once, "nor for saves"
    assert engine.call("load", prompt="p", lease=hit["lease"])["wrong"] == [], "a promise needs no daemon"
    daemon.signal(signal.SIGCONT)
    until("a hit", lambda: _right(engine, "p", 10, at_least=0) == 10)
    # The answers that came too late held leases, which were given back.
    daemon.wait_unused()


@pytest.mark.parametrize("how", ["stopped", "never accepts"])
def test_a_daemon_that_listens_and_does_not_answer_costs_one_lookup_its_timeout(
    daemon: Daemon, make_engine: MakeEngine, how: str
) -> None:
    """A daemon that is started again listens before it has filled its pool: until it served, each request of a running
    engine waited its whole timeout."""
    timeout = stretched(1)
    engine = make_engine(daemon, "a", lookup_timeout_ms=1e3 * timeout)
    engine.wait_connected()
    if how == "stopped":
        daemon.signal(signal.SIGSTOP)
        assert engine.call("cut", how="shutdown") == 2
    else:
        daemon.kill()
        daemon.path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        if how == "never accepts":
            listener.bind(str(daemon.path))
            listener.listen(16)
        # Until it has connected again it waits for nobody.
        until(
            "a lookup that waits",
            lambda: engine.call("lookup", prompt="p", count=1)["seconds"] > 0.9 * timeout,
        )
        for _ in range(20):
            again = engine.call("lookup", prompt="p", count=1)
            assert again["tokens"] == 0
            assert again["seconds"] < timeout / 2, again
    if how == "stopped":
        daemon.signal(signal.SIGCONT)
    else:
        daemon.path.unlink()
        daemon.start()
    engine.wait_connected()
    assert engine.call("save", prompt="p", count=10)["blocks"] == 10
    daemon.settle()
    until("a hit", lambda: _right(engine, "p", 10, at_least=0) == 10)


@both_methods
def test_what_a_stopped_daemon_copies_late_never_becomes_visible(
    daemon: Daemon, make_engine: MakeEngine, method: str
) -> None:
    """The fence. The engine gives a save up and at once fills the blocks with something else; the daemon then goes on.
    Whatever it makes visible must be the bytes that were to be saved."""
    engine = make_engine(daemon, "a", save_method=method, save_timeout_ms=40.0, **MANY)
    dice = random.Random(2)
    given_up = kept = 0
    turns = 40
    for turn in range(turns):
        prompt = f"p{turn}"
        engine.call("fill", prompt=prompt, count=MANY_BLOCKS)
        engine.send("save", prompt=prompt, count=MANY_BLOCKS, fill=False)
        time.sleep(dice.random() * 0.03)  # the moment of the stop is what is varied
        daemon.signal(signal.SIGSTOP)
        end = engine.answer()  # the blocks hold junk by now
        daemon.signal(signal.SIGCONT)
        given_up += not end["ok"]
        until("an answer", lambda: engine.call("state")["worker"])
        daemon.settle()
        kept += _right(engine, prompt, MANY_BLOCKS, at_least=MANY_BLOCKS if end["ok"] else 0)
    daemon.wait_unused()
    assert given_up > 0, "no save was met in the middle: the test shows nothing"
    assert kept <= turns * MANY_BLOCKS


# An engine dies.


@both_methods
def test_an_engine_is_killed_during_saves(daemon: Daemon, make_engine: MakeEngine, method: str) -> None:
    """No lease, no claim and no block with half its bytes is left, and the next engine may have the same id."""
    witness = make_engine(daemon, "witness", **MANY)
    dice = random.Random(3)
    partly = 0
    for turn in range(60):
        # A fast machine may save all before the kill: then once more.
        if turn >= 12 and partly:
            break
        engine = make_engine(daemon, "a", save_method=method, **MANY)
        engine.wait_connected()
        engine.call("fill", prompt=f"p{turn}", count=MANY_BLOCKS)
        engine.send("save", prompt=f"p{turn}", count=MANY_BLOCKS, fill=False, junk=False)
        if method == "mapped":
            # Between claim and commit lies the copy.
            until("claims", lambda: (s := daemon.status())["claimed_blocks"] + s["blocks"] > 0)
        else:
            time.sleep(dice.random() * 0.02)  # the moment of the kill is what is varied
        engine.kill()
        status = daemon.wait_unused()
        daemon.settle()
        visible = _right(witness, f"p{turn}", MANY_BLOCKS, at_least=0)
        partly += visible < MANY_BLOCKS
        status = daemon.wait_unused()
        assert status["used_bytes"] == sum(space["bytes"] for space in status["namespaces"])
        daemon.drop(NAMESPACE)
    assert partly > 0, "no save was met in the middle: the test shows nothing"
    assert {session["engine"] for session in daemon.engines()} == {"witness"}


@both_methods
def test_an_engine_is_killed_during_loads(daemon: Daemon, make_engine: MakeEngine, method: str) -> None:
    witness = make_engine(daemon, "witness", **MANY)
    witness.call("save", prompt="p", count=MANY_BLOCKS)
    daemon.settle()
    for _ in range(4):
        engine = make_engine(daemon, "a", save_method=method, **MANY)
        engine.wait_connected()
        hit = engine.call("lookup", prompt="p", count=MANY_BLOCKS)
        assert daemon.status()["leased_blocks"] == MANY_BLOCKS
        engine.send("load", prompt="p", lease=hit["lease"])
        engine.kill()
        with pytest.raises((EngineError, ValueError)):
            engine.answer()
        daemon.wait_unused()
        _right(witness, "p", MANY_BLOCKS)


def test_an_engine_with_two_workers_loses_one_in_the_middle_of_a_save(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    """A block of which one shard is missing is invisible; the other worker's part is not enough."""
    first = make_engine(daemon, "tp", rank=0, workers=2)
    second = make_engine(daemon, "tp", rank=1, workers=2, scheduler=False)
    assert first.call("save", prompt="p", count=8)["blocks"] == 8
    daemon.settle()
    assert _right(first, "p", 8, at_least=0) == 0
    assert daemon.status()["claimed_blocks"] == 8
    assert second.call("save", prompt="p", count=4)["blocks"] == 4
    daemon.settle()
    assert _right(first, "p", 8, at_least=0) == 4
    second.kill()
    until("a missing worker", lambda: len(daemon.engines()) == 2)
    assert _right(first, "p", 8, at_least=0) == 0, "without its second worker the engine cannot load"
    third = make_engine(daemon, "tp", rank=1, workers=2, scheduler=False)
    assert third.call("save", prompt="p", count=8)["blocks"] == 4
    daemon.settle()
    _right(first, "p", 8)


# An engine stops without dying, or loses its connection.


@both_methods
def test_a_stopped_engine_keeps_its_leases(
    make_daemon: MakeDaemon, make_engine: MakeEngine, method: str
) -> None:
    daemon = make_daemon(pool="4mib")
    engine = make_engine(daemon, "a", save_method=method)
    other = make_engine(daemon, "b", save_method=method)
    engine.call("save", prompt="p", count=100)
    daemon.settle()
    hit = engine.call("lookup", prompt="p", count=100)
    engine.signal(signal.SIGSTOP)
    # More than the pool has room for, several times: everything but the promise is evicted.
    for turn in range(6):
        assert other.call("save", prompt=f"q{turn}", count=128)["ok"]
        daemon.settle()
    assert daemon.status()["leased_blocks"] == 100
    engine.signal(signal.SIGCONT)
    end = engine.call("load", prompt="p", lease=hit["lease"])
    assert (end["ok"], end["wrong"]) == (True, [])
    daemon.wait_unused()


def _roles(daemon: Daemon) -> list[str]:
    return sorted(session["role"] for session in daemon.engines())


def _until_lost(daemon: Daemon) -> None:
    until("lost sessions", lambda: all(s["role"].endswith("(lost)") for s in daemon.engines()))


@pytest.mark.parametrize("how", ["garbage", "shutdown"])
@both_methods
def test_a_lost_connection_of_a_living_process_costs_nothing(
    daemon: Daemon, make_engine: MakeEngine, method: str, how: str
) -> None:
    """What it holds is kept as it is until the same process is there again; then it goes on with its leases."""
    engine = make_engine(daemon, "a", save_method=method)
    engine.call("save", prompt="p", count=50)
    daemon.settle()
    hit = engine.call("lookup", prompt="p", count=50)
    dropped = engine.call("lookup", prompt="p", count=20)
    assert hit["tokens"] == 800
    before = {session["session"] for session in daemon.engines()}
    engine.send("cut", how=how, freeze=True)
    _until_lost(daemon)
    assert {session["session"] for session in daemon.engines()} == before
    assert daemon.status()["leased_blocks"] == 50, "quarantined"
    # The daemon may hear of the loss first; a process that is told to go on before it stops would stop for ever.
    stat = Path(f"/proc/{engine.process.pid}/stat")
    until("it has stopped itself", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    engine.signal(signal.SIGCONT)
    assert engine.answer() == 2
    # Its own view may be older than the loss, so the daemon's is asked.
    until("both are adopted", lambda: engine.call("state") and _roles(daemon) == ["scheduler", "worker"])
    engine.wait_connected()
    now = daemon.engines()
    assert not before & {session["session"] for session in now}
    assert daemon.status()["leased_blocks"] == 50
    for lease in (hit["lease"], dropped["lease"]):
        end = engine.call("load", prompt="p", lease=lease)
        assert (end["ok"], end["wrong"]) == (True, []), end
    daemon.wait_unused()
    assert engine.call("save", prompt="q", count=5)["blocks"] == 5


@both_methods
def test_a_connection_is_lost_again_and_again_under_load(
    daemon: Daemon, make_engine: MakeEngine, method: str
) -> None:
    engine = make_engine(daemon, "a", save_method=method)
    for turn in range(10):
        engine.call("cut", how="garbage" if turn % 2 else "shutdown")
        done = engine.call("work", seed=turn, seconds=0.2, prompts=4, count=16)
        assert (done["wrong"], done["broken"]) == ([], [])
    engine.wait_connected()
    daemon.settle()
    status = daemon.wait_unused()
    assert len(daemon.engines()) == 2
    assert status["used_bytes"] == sum(space["bytes"] for space in status["namespaces"])


@both_methods
def test_a_process_that_dies_while_its_connection_is_lost_is_noticed(
    daemon: Daemon, make_engine: MakeEngine, method: str
) -> None:
    engine = make_engine(daemon, "a", save_method=method)
    engine.call("save", prompt="p", count=50)
    daemon.settle()
    assert engine.call("lookup", prompt="p", count=50)["tokens"] == 800
    engine.send("cut", how="shutdown", freeze=True)
    _until_lost(daemon)
    engine.kill()
    daemon.wait_unused()
    until("no session", lambda: not daemon.engines())
    again = make_engine(daemon, "a", save_method=method)
    again.wait_connected()
    _right(again, "p", 50)


def test_saves_can_be_cancelled_whatever_becomes_of_the_connection(
    daemon: Daemon, make_engine: MakeEngine
) -> None:
    """Before vLLM overwrites blocks that are being saved: only if nobody reads them any more, for certain."""
    engine = make_engine(daemon, "engine")
    engine.wait_connected()
    assert engine.call("save", prompt="p", count=4)["ok"]
    assert engine.call("cancel", timeout_ms=10_000)
    # Cut off with the daemon alive, it asks again over another connection.
    assert engine.call("cut", how="shutdown") == 2
    assert engine.call("cancel", timeout_ms=10_000)
    daemon.signal(signal.SIGSTOP)
    assert not engine.call("cancel", timeout_ms=200), "it may still read them"
    daemon.kill()
    assert engine.call("cancel", timeout_ms=10_000), "the dead read nothing"
    daemon.start()
    engine.wait_connected()
    assert engine.call("cancel", timeout_ms=10_000)
    assert engine.call("save", prompt="p", count=4)["blocks"] == 4, "later saves are none of those"
    daemon.settle()
    assert engine.call("check", prompt="p", count=4)["blocks"] == 4
