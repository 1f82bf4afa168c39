"""Daemons of several hosts, of which some are cut off, killed, stopped or out of blocks: each lookup stays within its
bound, no hit has a wrong byte, and hits come back by themselves."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from network_hosts import Hosts
from patterns import NAMESPACE
from processes import Daemon, Engine, until
from test_cluster import cluster_of, right, wait_until_reached

MakeEngine = Callable[..., Engine]
MakeHosts = Callable[..., tuple[Hosts, list[Daemon]]]

BLOCKS = 64
PORT = 9555
ANSWER_MS, FETCH_MS = 200, 1000
# Beyond what a lookup waits for: a loaded machine.
SLACK_S = 3.0
BOUND_S = (ANSWER_MS + FETCH_MS) / 1000 + SLACK_S


@pytest.fixture
def make_hosts(folder: Path, cleanup: ExitStack) -> MakeHosts:
    """Hosts with a daemon each, all of which name each other."""

    def make(count: int, *flags: str, each: list[dict[str, Any]] | None = None) -> tuple[Hosts, list[Daemon]]:
        hosts = cleanup.enter_context(Hosts(count))
        token = folder / "token"
        token.write_text("the token of these tests\n")
        token.chmod(0o600)
        daemons = []
        for number, (address, inside) in enumerate(zip(hosts.addresses, hosts.inside, strict=True)):
            home = folder / str(number)
            home.mkdir()
            daemon = Daemon(
                home,
                *("--peers", ",".join(f"{other}:{PORT}" for other in hosts.addresses)),
                *("--cluster-listen", f"{address}:{PORT}", "--cluster-token-file", str(token)),
                *("--cluster-transport", "tcp", "--cluster-socket-threads", "2"),
                *("--cluster-answer-ms", str(ANSWER_MS), "--fetch-wait-ms", str(FETCH_MS)),
                *flags,
                inside=inside,
                **(each[number] if each else {}),
            )
            cleanup.callback(daemon.kill)
            daemon.start()
            daemons.append(daemon)
        wait_until_reached(daemons)
        return hosts, daemons

    return make


def engines_of(make_engine: MakeEngine, daemons: list[Daemon], **options: Any) -> list[Engine]:
    engines = [make_engine(daemon, f"engine-{number}", **options) for number, daemon in enumerate(daemons)]
    for engine in engines:
        engine.wait_connected()
    return engines


def save(engine: Engine, daemon: Daemon, prompt: str, blocks: int = BLOCKS) -> None:
    assert engine.call("save", prompt=prompt, count=blocks)["ok"]
    daemon.settle()


def check(engine: Engine, prompt: str, blocks: int = BLOCKS) -> int:
    """Looks up and loads, within the bound. Returns how many blocks are a hit, with the right bytes."""
    began = time.monotonic()
    found = engine.call("check", prompt=prompt, count=blocks)
    took = time.monotonic() - began
    assert took < BOUND_S, f"a lookup took {took:.1f} s"
    assert found == right(found["blocks"])
    return found["blocks"]


def is_reached(daemon: Daemon) -> bool:
    return any(member["is_reached"] for member in cluster_of(daemon)["members"])


@pytest.mark.hosts
def test_a_wire_that_loses_everything_costs_each_lookup_its_bound_and_hits_come_back(
    make_hosts: MakeHosts, make_engine: MakeEngine
) -> None:
    hosts, (a, b) = make_hosts(2)
    at_a, at_b = engines_of(make_engine, [a, b])
    for prompt in ("one", "two", "three"):
        save(at_a, a, prompt)
    assert check(at_b, "one") == BLOCKS
    hosts.drop_all(0, 1)
    assert [check(at_b, f"unknown-{number}") for number in range(8)] == [0] * 8
    assert check(at_b, "two") == 0
    assert check(at_b, "one") == BLOCKS, "B has it itself"
    until("the loss is noticed", lambda: not is_reached(b) and not is_reached(a))
    began = time.monotonic()
    assert check(at_b, "two") == 0
    assert time.monotonic() - began < SLACK_S, "a daemon that is not reached is not waited for"
    hosts.mend(0, 1)
    until("the other daemon's blocks are hits again", lambda: check(at_b, "two") == BLOCKS)
    save(at_b, b, "four")
    until("so are those of this one", lambda: check(at_a, "four") == BLOCKS)
    for engine in (at_a, at_b):
        engine.call("close")


@pytest.mark.hosts
@pytest.mark.soak
def test_a_wire_that_is_unplugged_and_plugged_in_again_is_used_by_itself(
    make_hosts: MakeHosts, make_engine: MakeEngine
) -> None:
    hosts, (a, b) = make_hosts(2)
    at_a, at_b = engines_of(make_engine, [a, b])
    for unplugged in ((0, 1), (1, 0)):
        save(at_a, a, f"first-{unplugged}")
        hosts.unplug(*unplugged)
        assert [check(at_b, f"first-{unplugged}") for _ in range(8)] == [0] * 8
        # For a short while nobody notices, and for a longer one both do.
        if unplugged == (1, 0):
            until("the loss is noticed", lambda: not is_reached(b))
        hosts.plug_in(*unplugged)
        save(at_a, a, f"second-{unplugged}")
        for prompt in (f"first-{unplugged}", f"second-{unplugged}"):
            until("it is a hit", lambda prompt=prompt: check(at_b, prompt) == BLOCKS)


@pytest.mark.hosts
@pytest.mark.soak
def test_another_owner_serves_while_the_wire_to_one_is_cut(
    make_hosts: MakeHosts, make_engine: MakeEngine
) -> None:
    hosts, (a, b, c) = make_hosts(3)
    at_a, at_b, at_c = engines_of(make_engine, [a, b, c])
    save(at_a, a, "one")
    save(at_a, a, "two")
    assert check(at_c, "one") == BLOCKS
    hosts.drop_all(0, 1)
    assert check(at_b, "one") == BLOCKS, "C has it too"
    assert check(at_b, "two") == 0
    assert check(at_c, "two") == BLOCKS, "C reaches A"
    assert check(at_b, "two") == BLOCKS
    hosts.mend(0, 1)
    save(at_a, a, "three")
    until("A is reached again", lambda: check(at_b, "three") == BLOCKS)


@pytest.mark.hosts
@pytest.mark.soak
def test_blocks_for_which_the_pool_has_no_room_are_misses_and_nothing_waits(
    make_hosts: MakeHosts, make_engine: MakeEngine
) -> None:
    _, (a, b) = make_hosts(2, each=[{}, {"pool": "1mib"}])
    at_a, at_b = engines_of(make_engine, [a, b])
    save(at_a, a, "one")
    save(at_b, b, "own")
    held = at_b.call("lookup", prompt="own", count=BLOCKS)
    assert held["tokens"]
    assert check(at_b, "one") < BLOCKS
    at_b.call("release", lease=held["lease"])
    until("there is room again", lambda: check(at_b, "one") == BLOCKS)


class Rounds:
    """Rounds in which the owner of a prompt fails while another host reads it."""

    PIECE_BYTES = 128 << 10
    """So large that a prompt takes some milliseconds on its way."""

    def __init__(self, hosts: Hosts, daemons: list[Daemon], engines: list[Engine], seed: int) -> None:
        self.hosts, self.daemons, self.engines = hosts, daemons, engines
        self.boots = [engine.call("state")["boot"] for engine in engines]
        self.dice = random.Random(seed)
        self.hits: dict[str, list[int]] = {}

    def play(self, number: int) -> None:
        (a, _, c), (at_a, at_b, at_c) = self.daemons, self.engines
        for name, engine, daemon in (("A", at_a, a), ("C", at_c, c)):
            save(engine, daemon, f"{name}-{number}", 2)
            until("the last round is over", lambda name=name: check(at_b, f"{name}-{number}", 2) == 2)
        save(at_a, a, f"prompt-{number}")
        has_two_owners = self.dice.random() < 0.5
        if has_two_owners:
            until("C has it too", lambda: check(at_c, f"prompt-{number}") == BLOCKS)
        fails = [self.stops, self.restarts, self.is_cut_off, self.drops, self.evicts, self.loses_its_reader]
        fail = self.dice.choice(fails)
        began = time.monotonic()
        at_b.send("check", prompt=f"prompt-{number}", count=BLOCKS)
        time.sleep(self.dice.random() * 0.04)  # the moment is what is varied
        recover = fail()
        found = at_b.answer()
        took = time.monotonic() - began
        recover()
        assert took < BOUND_S, f"round {number}, {fail.__name__}: a lookup took {took:.1f} s"
        assert found == right(found["blocks"]), f"round {number}, {fail.__name__}"
        name = f"{fail.__name__}, {1 + has_two_owners} owners"
        self.hits.setdefault(name, []).append(found["blocks"])

    def stops(self) -> Callable[[], None]:
        a = self.daemons[0]
        a.signal(signal.SIGSTOP)
        return lambda: a.signal(signal.SIGCONT)

    def restarts(self) -> Callable[[], None]:
        return self._killed(0)

    def loses_its_reader(self) -> Callable[[], None]:
        return self._killed(1)

    def _killed(self, host: int) -> Callable[[], None]:
        daemon, engine = self.daemons[host], self.engines[host]
        daemon.kill()

        def back() -> None:
            daemon.start()
            self.boots[host] = engine.wait_connected(self.boots[host])["boot"]
            wait_until_reached(self.daemons)

        return back

    def is_cut_off(self) -> Callable[[], None]:
        self.hosts.drop_all(0, 1)
        return lambda: self.hosts.mend(0, 1)

    def drops(self) -> Callable[[], None]:
        self.daemons[0].drop(NAMESPACE)
        return lambda: None

    def evicts(self) -> Callable[[], None]:
        for prompt in ("some", "more", "others", "yet others"):
            assert self.engines[0].call("save", prompt=prompt, count=BLOCKS)["ok"]
        return lambda: None


@pytest.mark.hosts
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_whatever_becomes_of_an_owner_while_it_lends_lookups_end_in_time_with_the_right_bytes(
    make_hosts: MakeHosts, make_engine: MakeEngine
) -> None:
    hosts, daemons = make_hosts(3)
    engines = engines_of(make_engine, daemons, piece_bytes=Rounds.PIECE_BYTES)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rounds = Rounds(hosts, daemons, engines, seed)
    for number in range(int(os.environ.get("KVLANE_TEST_ROUNDS", "30"))):
        rounds.play(number)
    save(engines[0], daemons[0], "the last")
    until("hits come back", lambda: check(engines[1], "the last") == BLOCKS)
    for name, hits in sorted(rounds.hits.items()):
        print(f"{name}: {hits}")
    for daemon in daemons:
        until("all is returned", lambda daemon=daemon: cluster_of(daemon)["lent_bytes_now"] == 0)
        daemon.wait_unused()
