"""Rounds of random kills under load: whatever dies when, no wrong byte is ever loaded and nothing is left behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from processes import Daemon, Engine, EngineError

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

PROMPTS, BLOCKS = 12, 32
ENGINES = {"a": "process_vm", "b": "mapped", "c": "auto"}
VICTIMS = ["daemon", *ENGINES, "all engines"]
# So often all engines end, and what is left is counted.
EMPTY_EVERY = 10


@dataclass
class Tally:
    kills: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    loads: int = 0


class Rounds:
    def __init__(self, daemon: Daemon, make_engine: MakeEngine, seed: int) -> None:
        self.daemon, self.make_engine = daemon, make_engine
        self.dice = random.Random(seed)
        self.engines: dict[str, Engine] = {}
        self.tally = Tally()
        # Each of them once at least, in some order.
        self.victims = self.dice.sample(VICTIMS, len(VICTIMS))

    def play(self, number: int) -> None:
        self._fill_up()
        boot = self.engines["a"].call("state")["boot"]
        for engine in self.engines.values():
            seed = self.dice.randrange(1 << 32)
            engine.send("work", seed=seed, seconds=0.15, prompts=PROMPTS, count=BLOCKS)
        time.sleep(self.dice.random() * 0.15)  # the moment of the kill is what is varied
        victim = self.victims.pop() if self.victims else self.dice.choice(VICTIMS)
        self.tally.kills[victim] = self.tally.kills.get(victim, 0) + 1
        if victim == "daemon":
            self.daemon.restart()
        for name in ENGINES:
            if victim in (name, "all engines"):
                self.engines[name].process.kill()
        self._collect(victim)
        if victim == "daemon":
            for engine in self.engines.values():
                engine.wait_connected(boot)
        if not self.engines or number % EMPTY_EVERY == EMPTY_EVERY - 1:
            self._empty()
        else:
            self._look(next(iter(self.engines.values())))

    def _fill_up(self) -> None:
        for name, method in ENGINES.items():
            if name not in self.engines:
                self.engines[name] = self.make_engine(
                    self.daemon, name, save_method=method, blocks=2 * BLOCKS, save_timeout_ms=5000.0
                )
                self.engines[name].wait_connected()

    def _collect(self, victim: str) -> None:
        for name, engine in list(self.engines.items()):
            try:
                done = engine.answer()
            except (EngineError, ValueError):
                assert victim in (name, "all engines"), f"{name} died when {victim} was killed"
                self.engines.pop(name).kill()
                continue
            assert done["wrong"] == [], f"{name} loaded wrong bytes when {victim} was killed"
            assert done["broken"] == [], f"{name} lost a promised load when {victim} was killed"
            self.tally.saves += done["saves"]
            self.tally.loads += done["loads"]
            if victim in (name, "all engines"):
                self.engines.pop(name).kill()

    def _look(self, engine: Engine) -> None:
        """Everything that is visible is right, and what the dead held is free."""
        self.daemon.settle()
        for prompt in range(PROMPTS):
            found = engine.call("check", prompt=f"work-{prompt}", count=BLOCKS)
            assert found["ok"], found
            assert found["wrong"] == [], f"blocks {found['wrong']} of work-{prompt} are wrong"
        self.daemon.wait_unused()

    def _empty(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.engines.clear()
        self.daemon.wait_unused()
        self.daemon.settle()
        status = self.daemon.wait_unused()
        assert status["used_bytes"] == sum(space["bytes"] for space in status["namespaces"])
        # Once the sessions are seen to have ended, and they hold nothing, all ids are free again.
        self._fill_up()
        self._look(self.engines["a"])


def _play(make_daemon: MakeDaemon, make_engine: MakeEngine, rounds: int, seed: int) -> None:
    # Smaller than what the engines save, so that blocks are evicted too.
    daemon = make_daemon("--log", "error", pool="4mib")
    print(f"{rounds} rounds of KVLANE_TEST_SEED={seed}")
    game = Rounds(daemon, make_engine, seed)
    started = time.monotonic()
    for number in range(rounds):
        try:
            game.play(number)
        except AssertionError as error:
            raise AssertionError(f"round {number} of seed {seed}: {error}\n{daemon.log.text()}") from error
    seconds = time.monotonic() - started
    print(f"{rounds} rounds in {seconds:.0f} s: {game.tally}")
    assert set(game.tally.kills) == set(VICTIMS)
    assert game.tally.loads > rounds


def _seed() -> int:
    """Another one each time, unless KVLANE_TEST_SEED names one."""
    return int(os.environ.get("KVLANE_TEST_SEED", time.time_ns() // 1000))


def test_twenty_kill_rounds(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    _play(make_daemon, make_engine, 20, _seed())


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_kill_rounds(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    _play(make_daemon, make_engine, 1000, _seed())
