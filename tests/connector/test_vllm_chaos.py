"""A real vLLM with more prompts than blocks, whose daemon is killed, stopped and restarted at the worst moments: no
request ends with an error or with wrong tokens, by vLLM's default policy for failed loads (`fail`).

Each of four moments meets each of three faults. `KVLANE_TEST_ROUNDS` says how often; `make soak PARTS=chaos` makes it
50 times.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy import stretched
from engine import BLOCK, InProcessEngine, engines, prompt
from stores import DaemonStore

pytestmark = pytest.mark.old_vllm_soak
ROUNDS = int(os.environ.get("KVLANE_TEST_ROUNDS", "1"))
# A hundred requests for each round of all meetings: 5,000 in a soak.
REQUESTS = 100 * ROUNDS
MOMENTS = ("hit-waiting", "promised", "loading", "saving")
FAULTS = ("kill", "stop", "restart")
# Blocks of the engine: two or three requests fill them, the others wait.
ROOM = 28
AT_ONCE = 10
PROMPTS = 60
ANSWER = 4
# How long a lookup waits. A lookup that is out of time is a miss, and a test without hits never meets a load.
LOOKUP_SECONDS = stretched(0.1)
# A stop is over after so many seconds at most: longer than a lookup waits.
STOPPED_SECONDS = 4 * LOOKUP_SECONDS


def asked(number: int) -> list[int]:
    """One of the prompts: some share their beginning, and every other one has whole blocks only."""
    family = prompt(1000 + number // 3, 4 * BLOCK)
    return family + prompt(2000 + number, (1 + number % 5) * BLOCK + 7 * (number % 2))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[list[int]]:
    """What an engine without kvlane answers to each prompt."""
    with engines(None) as start:
        engine = start(model)
        return [engine.generate(asked(number), ANSWER)[0] for number in range(PROMPTS)]


class Chaos:
    """Breaks the daemon at the moments that have met the fewest faults."""

    def __init__(self, engine: InProcessEngine, store: DaemonStore, dice: random.Random) -> None:
        self.met: Counter[tuple[str, str]] = Counter()
        self._engine = engine
        self._store = store
        self._dice = dice
        self._mend: Callable[[], None] | None = None
        """What ends the present fault."""
        self._mend_at = 0.0
        self._is_over = False
        side: Any = engine.connector._scheduler
        self._side = side
        take_loads = side.take_loads

        def take_and_break() -> Any:
            # The promise is given, and the workers have not heard of it.
            loads = take_loads()
            if loads:
                self._maybe("promised")
            return loads

        side.take_loads = take_and_break

    def between_steps(self) -> None:
        """Break or mend something."""
        if self._mend is not None and time.monotonic() >= self._mend_at:
            mend, self._mend = self._mend, None
            mend()
        states = self._side.requests.values()
        running = {request.request_id for request in self._engine.scheduler.running}
        waiting = [each for each in states if each.request.request_id not in running and each.loading is None]
        if any(each.hit is not None and each.hit.tokens for each in waiting):
            self._maybe("hit-waiting")
        if self._side.loads.under_way:
            self._maybe("loading")
        if self._side.saves.pinned_blocks:
            self._maybe("saving")

    def end(self) -> None:
        """The daemon is there again, and stays: also promises of the last steps break nothing any more."""
        self._is_over = True
        if self._mend is not None:
            mend, self._mend = self._mend, None
            mend()

    def missing(self) -> int:
        """Meetings that are still to come."""
        return sum(max(0, ROUNDS - self.met[each]) for each in itertools.product(MOMENTS, FAULTS))

    def _maybe(self, moment: str) -> None:
        if self._is_over or self._mend is not None or self._dice.random() < 0.7:
            return
        fault = min(FAULTS, key=lambda each: (self.met[moment, each], self._dice.random()))
        # Moments that come often leave some to those that do not.
        fewest = min(self.met[each] for each in itertools.product(MOMENTS, FAULTS))
        if self.met[moment, fault] > fewest + 2:
            return
        self.met[moment, fault] += 1
        later = self._dice.random() * STOPPED_SECONDS
        if fault == "kill":
            self._store.kill()
            self._mend, self._mend_at = self._store.start, time.monotonic() + later
        elif fault == "stop":
            self._store.stop()
            self._mend, self._mend_at = self._store.resume, time.monotonic() + later
        else:
            self._store.restart()
            if self._dice.random() < 0.3:
                # Twice in a row, before the engine makes a step.
                self._store.restart()


@pytest.mark.timeout(3 * 3600)
def test_no_request_is_lost_whatever_becomes_of_the_daemon(
    model: Path, tmp_path: Path, answers: list[list[int]]
) -> None:
    seed = int(os.environ.get("KVLANE_TEST_SEED") or time.time_ns())
    print(f"KVLANE_TEST_SEED={seed}")
    dice = random.Random(seed)
    # With an SSD blocks outlive kills, so that there are hits again soon.
    store = DaemonStore(tmp_path, "--ssd", f"{tmp_path / 'blocks'}:256mib")
    ended, wrong, failed = 0, [], []
    try:
        with engines(store.address) as start:
            waits = {"kvlane.lookup_timeout_ms": 1e3 * LOOKUP_SECONDS}
            engine = start(model, blocks=ROOM, max_model_len=512, extra=waits, policy="fail")
            chaos = Chaos(engine, store, dice)
            live: dict[str, int] = {}
            deadline = time.monotonic() + 2 * 3600
            while ended < REQUESTS or chaos.missing():
                assert time.monotonic() < deadline, f"not met yet: {chaos.met}"
                while len(live) < AT_ONCE:
                    number = dice.randrange(PROMPTS)
                    live[engine.add(asked(number), ANSWER)] = number
                for output in engine.llm.llm_engine.step():
                    if not output.finished:
                        continue
                    number = live.pop(output.request_id)
                    ended += 1
                    answer = output.outputs[0]
                    if answer.finish_reason != "length":
                        failed.append((output.request_id, answer.finish_reason))
                    elif list(answer.token_ids) != answers[number]:
                        wrong.append((output.request_id, number))
                chaos.between_steps()
            chaos.end()
            engine.run()
            table = "\n".join(
                f"{moment:12} " + "  ".join(f"{fault} {chaos.met[moment, fault]:4}" for fault in FAULTS)
                for moment in MOMENTS
            )
            names = ("hit_tokens", "load_blocks", "copied_last_blocks", "failed_loads")
            counted = {name: int(engine.counted[name]) for name in names}
            print(f"{ended} requests, {len(failed)} failed, {len(wrong)} wrong; {counted}\n{table}")
            assert not failed and not wrong, (failed[:5], wrong[:5])
            assert engine.counted["hit_tokens"] > 0
            assert engine.errors() == 0
    finally:
        store.close()


def test_the_comparison_would_notice_wrong_blocks(
    model: Path, tmp_path: Path, answers: list[list[int]]
) -> None:
    store = DaemonStore(tmp_path)
    try:
        with engines(store.address) as start:
            engine = start(model)
            assert engine.generate(asked(0), ANSWER)[0] == answers[0]
            engine.forget()
            store.settle()
            store.corrupt()
            answer, cached = engine.generate(asked(0), ANSWER)
            assert cached > 0
            assert answer != answers[0]
    finally:
        store.close()
