"""The scenarios of two hosts whose daemons lend each other blocks, in order. Each scenario says what must hold."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvlane.bench.processes import beside_python
from kvlane.bench.replica import Replica
from kvlane.demo.device import Setup
from kvlane.demo.processes import Daemon, Engine, ProcessFailed
from kvlane.demo.scenarios import (
    BLOCK_TOKENS,
    OTHER_BATCH,
    SAME_BATCH,
    Demo,
    PoolBytes,
    Scenario,
    open_tool,
)

_PATIENCE_S = 60.0


class Hosts(Demo):
    """Engine and daemon A on this host, B on the other one; a replica of the index on each."""

    def __init__(
        self,
        model: Path,
        daemons: tuple[Daemon, Daemon],
        replicas: tuple[Replica, Replica],
        inside: Sequence[str],
        logs: Path,
        setup: Setup,
        prompt_tokens: int,
        prompts: int,
    ) -> None:
        super().__init__(model, daemons[0], logs, setup, prompt_tokens, prompts, seed=0)
        self._daemons = dict(zip("AB", daemons, strict=True))
        self._inside = {"A": (), "B": tuple(inside)}
        self._replicas = replicas

    def all(self) -> Sequence[Callable[[Callable[[str], object]], Scenario]]:
        """The scenarios in their order."""
        return (
            self.computed_at_a,
            self.hit_at_b,
            self.local_hit_at_b,
            self.changed_at_the_owner,
            self.changed_at_the_reader,
            self.owner_killed,
            self.with_replicas,
            self.replica_killed,
            self.owner_and_replica_killed,
            self.no_exceptions,
        )

    def computed_at_a(self, step: Callable[[str], object]) -> Scenario:
        """Engine A computes every prompt."""
        self._start_engine("B")
        scenario = self.cold(step)
        scenario.name = "cold: computed at A"
        step("engine B gets ready")
        b = self._engine("B")
        b.wait_ready()
        self._warm_up(b)
        self._settle(self._engine("A"))
        self._wait_until_reached()
        return scenario

    def hit_at_b(self, step: Callable[[str], object]) -> Scenario:
        """Engine B gets what A has computed, over the wire."""
        scenario = Scenario("remote: A's prompts are hits at B")
        before, b, answers = self._cluster("B"), self._engine("B"), []
        for number, reference in enumerate(self._references, 1):
            step(f"engine B gets prompt {number}")
            answers.append(self._answer(b, reference.prompt))
            self._compare(scenario, "engine B", answers[-1], reference, SAME_BATCH)
            self._compare_bytes(scenario, b, reference)
        scenario.timed(answer["ttft_ms"] for answer in answers)
        fetched = self._cluster("B")["fetched_blocks"] - before["fetched_blocks"]
        scenario.figures |= {
            "blocks_from_a": fetched,
            "bytes_from_a": self._cluster("B")["fetched_bytes"] - before["fetched_bytes"],
        }
        wanted = self.hit_blocks * len(self._references)
        scenario.must(fetched == wanted, f"{fetched} blocks came from A instead of {wanted}")
        return scenario

    def local_hit_at_b(self, step: Callable[[str], object]) -> Scenario:
        """The same prompts again: B has them in its own pool now."""
        scenario = Scenario("local: the same again at B")
        before, b, answers = self._cluster("B"), self._engine("B"), []
        self._forget(scenario, b)
        for number, reference in enumerate(self._references, 1):
            step(f"engine B gets prompt {number} again")
            answers.append(self._answer(b, reference.prompt))
            self._compare(scenario, "engine B", answers[-1], reference, SAME_BATCH)
        scenario.timed(answer["ttft_ms"] for answer in answers)
        again = self._cluster("B")["fetched_blocks"] - before["fetched_blocks"]
        scenario.must(again == 0, f"{again} blocks were read from A once more")
        return scenario

    def changed_at_the_owner(self, step: Callable[[str], object]) -> Scenario:
        """A block is overwritten in A's pool: at B it is a miss, and the answer is right."""
        scenario = Scenario("control: a block changed at A is a miss at B")
        step("engine A computes, and a block is overwritten in its daemon's pool")
        reference, victim = self._overwritten("A", None)
        before = self._cluster("B")["damaged_blocks"]
        step("engine B asks for it")
        answer = self._answer(self._engine("B"), reference.prompt)
        damaged = self._cluster("B")["damaged_blocks"] - before
        scenario.figures |= {"hit_tokens": answer["cached_tokens"], "damaged_blocks": damaged}
        wanted = victim * BLOCK_TOKENS
        self._compare(scenario, "engine B", answer, reference, OTHER_BATCH, hit_tokens=wanted)
        scenario.must(damaged >= 1, "B did not notice that the block was changed")
        return scenario

    def changed_at_the_reader(self, step: Callable[[str], object]) -> Scenario:
        """A block is overwritten in B's pool after it was checked: the answer must change, or equal answers prove
        nothing."""
        scenario = Scenario("control: a block changed at B after the check")
        step("engine A computes, B gets it, and a block is overwritten in B's pool")
        reference, _ = self._overwritten("B", scenario)
        step("engine B loads it")
        answer = self._answer(self._engine("B"), reference.prompt)
        wrong = sum(x != y for x, y in zip(answer["tokens"], reference.answer["tokens"], strict=True))
        scenario.figures |= {"changed_tokens": wrong, "hit_tokens": answer["cached_tokens"]}
        scenario.must(
            answer["cached_tokens"] == self.hit_tokens,
            f"{answer['cached_tokens']} tokens were loaded instead of {self.hit_tokens}, so nothing was controlled",
        )
        scenario.must(wrong > 0, "a changed block did not change the answer")
        return scenario

    def owner_killed(self, step: Callable[[str], object]) -> Scenario:
        """Daemon A is killed: B computes what only A had. It comes back, and its prompts are hits again."""
        scenario = Scenario("daemon A killed -9, and started again")
        a, b = self._engine("A"), self._engine("B")
        step("engine A computes a prompt, its daemon is killed")
        lost = self._reference(a, self._new_prompt())
        self._settle(a)
        self._daemons["A"].kill()
        step("engine B computes it")
        answer = self._answer(b, lost.prompt)
        self._compare(scenario, "without A", answer, lost, OTHER_BATCH, hit_tokens=0)
        scenario.figures["ttft_without_a_ms"] = answer["ttft_ms"]
        step("daemon A is back")
        self._daemons["A"].start()
        scenario.must(self._is_registered("A"), "engine A did not register again")
        self._wait_until_reached()
        reference = self._reference(a, self._new_prompt())
        self._settle(a)
        step("engine B hits what A computed since")
        answer = self._answer(b, reference.prompt)
        self._compare(scenario, "after the restart", answer, reference, SAME_BATCH)
        scenario.figures["ttft_ms"] = answer["ttft_ms"]
        return scenario

    def with_replicas(self, step: Callable[[str], object]) -> Scenario:
        """Both daemons start again with `--index`: what A has computed since is a hit at B."""
        scenario = Scenario("index: with two replicas instead of --peers")
        step("two replicas start, and both daemons with --index")
        for replica in self._replicas:
            replica.start()
        addresses = ",".join(replica.address for replica in self._replicas)
        for daemon in self._daemons.values():
            daemon.close()
            daemon.flags = ("--index", addresses, *daemon.flags[2:])
            daemon.start()
        for name in self._daemons:
            scenario.must(self._is_registered(name), f"engine {name} did not register again")
        self._wait_until_reached()
        self._hit_by_index(scenario, step, 2)
        return scenario

    def replica_killed(self, step: Callable[[str], object]) -> Scenario:
        """One replica is killed: hits go on, by the other one."""
        scenario = Scenario("index: one replica killed -9")
        step("one replica is killed")
        self._replicas[0].kill()
        self._hit_by_index(scenario, step, 1)
        return scenario

    def owner_and_replica_killed(self, step: Callable[[str], object]) -> Scenario:
        """Then daemon A is killed: B computes what only A had. Both come back, and so do hits."""
        scenario = Scenario("index: daemon A killed -9 as well, and both started again")
        a, b = self._engine("A"), self._engine("B")
        step("engine A computes a prompt, its daemon is killed")
        lost = self._reference(a, self._new_prompt())
        self._settle(a)
        self._daemons["A"].kill()
        answer = self._answer(b, lost.prompt)
        self._compare(scenario, "without A", answer, lost, OTHER_BATCH, hit_tokens=0)
        scenario.figures["ttft_without_a_ms"] = answer["ttft_ms"]
        step("daemon A and the replica are back")
        self._replicas[0].start()
        self._daemons["A"].start()
        scenario.must(self._is_registered("A"), "engine A did not register again")
        self._wait_until_reached()
        self._hit_by_index(scenario, step, 2)
        return scenario

    def _hit_by_index(self, scenario: Scenario, step: Callable[[str], object], replicas: int) -> None:
        """Engine A computes a prompt, and B hits it once so many replicas know of it."""
        a, b = self._engine("A"), self._engine("B")
        step("engine A computes a prompt")
        reference = self._reference(a, self._new_prompt())
        self._settle(a)
        deadline = time.monotonic() + _PATIENCE_S
        while sum(replica["is_reached"] for replica in self._cluster("A")["replicas"]) != replicas:
            if time.monotonic() > deadline:
                raise ProcessFailed(f"daemon A reaches other replicas: {self._cluster('A')['replicas']}")
            time.sleep(0.1)
        # They count once a second, after all changes.
        while self._cluster("A")["announced_blocks"] != self._status_of("A")["blocks"]:
            if time.monotonic() > deadline:
                raise ProcessFailed("daemon A does not announce its blocks")
            time.sleep(0.1)
        step("engine B hits it")
        before = self._cluster("B")["fetched_blocks"]
        answer = self._answer(b, reference.prompt)
        self._compare(scenario, "engine B", answer, reference, SAME_BATCH)
        scenario.figures["ttft_ms"] = answer["ttft_ms"]
        fetched = self._cluster("B")["fetched_blocks"] - before
        scenario.figures["blocks_from_a"] = fetched
        scenario.must(
            fetched == self.hit_blocks, f"{fetched} blocks came from A instead of {self.hit_blocks}"
        )

    def _is_registered(self, host: str) -> bool:
        """Waits until the host's engine has registered with its daemon again."""
        engine, deadline = self._engine(host), time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            sessions = self._status_of(host)["sessions"]
            if len([session for session in sessions if session["role"] != "tool"]) == 2:
                return True
            self._warm_up(engine)
        return False

    def _overwritten(self, host: str, scenario: Scenario | None) -> tuple[Any, int]:
        """A prompt that A has computed, and the number of its block that is overwritten in the pool of `host`."""
        a = self._engine("A")
        reference = self._reference(a, self._new_prompt())
        blocks = a.ask("blocks", prompt=reference.prompt)["blocks"]
        self._settle(a)
        if scenario is not None:
            b = self._engine("B")
            self._compare(scenario, "engine B", self._answer(b, reference.prompt), reference, SAME_BATCH)
            self._forget(scenario, b)
        victim, other = len(blocks) // 2, len(blocks) // 4
        with open_tool(self._daemons[host].address) as tool:
            PoolBytes(tool).overwrite(blocks[victim], blocks[other])
        return reference, victim

    def _engine(self, name: str) -> Engine:
        (found,) = (engine for engine in self.engines if engine.name == name)
        return found

    def _start_engine(self, name: str) -> Engine:
        daemon = self._daemons[name]
        engine = Engine(name, self._model, daemon.address, self._logs, self._setup, self._inside[name])
        self.engines.append(engine)
        return engine

    def _daemon_of(self, engine: Engine) -> Daemon:
        return self._daemons[engine.name]

    def _cluster(self, host: str) -> dict[str, Any]:
        """What a daemon says of its cluster."""
        return self._status_of(host)["cluster"]

    def _status_of(self, host: str) -> dict[str, Any]:
        command = [beside_python("kvlane"), "status", "--json", "--addr", self._daemons[host].address]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise ProcessFailed(f"daemon {host}: {asked.stderr.strip()}")
        return json.loads(asked.stdout)

    def _wait_until_reached(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for host in self._daemons:
            while not any(member["is_reached"] for member in self._cluster(host)["members"]):
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"daemon {host} reaches no other: {self._cluster(host)['members']}")
                time.sleep(0.1)
