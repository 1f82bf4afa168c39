"""The scenarios of the demo, in order. Each scenario says what must hold, and fails with a sentence when it does not.

Right answers are those of an engine's own prefix cache: 32 tokens with their logprobs, computed from the same blocks
that kvlane has to bring back. A prefill computed anew may round otherwise, so it is no yardstick.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlane._core import Tool
from kvlane.bench.report import summary
from kvlane.demo.device import Setup
from kvlane.demo.processes import Daemon, Engine, ProcessFailed

ANSWER_TOKENS = 32
BLOCK_TOKENS = 32
# The same blocks in the same batch give the same bits. In another batch float32 rounds otherwise, far below this.
SAME_BATCH, OTHER_BATCH = 1e-6, 1e-2
_RECONNECT_S = 30.0


@dataclass
class Scenario:
    """The outcome of one scenario."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def must(self, holds: bool, sentence: str) -> None:
        """Records `sentence` as a problem unless the condition holds."""
        if not holds:
            self.problems.append(sentence)

    def timed(self, ttfts_ms: Iterable[float]) -> None:
        """Records times to first token: each one, and their summary."""
        each = list(ttfts_ms)
        self.figures |= {"ttft_ms": summary(each), "ttft_each_ms": each}


@dataclass(frozen=True)
class Reference:
    """A prompt, the answer from an engine's own prefix cache, and the content of its blocks then."""

    prompt: list[int]
    answer: dict[str, Any]
    digests: list[str]
    cold: dict[str, Any]


class Demo:
    """Engines, daemon and references, passed from scenario to scenario."""

    def __init__(
        self,
        model: Path,
        daemon: Daemon,
        logs: Path,
        setup: Setup,
        prompt_tokens: int,
        prompts: int,
        seed: int,
    ) -> None:
        self.daemon = daemon
        self.engines: list[Engine] = []
        self.tokens_equal = True
        self._model = model
        self._logs = logs
        self._setup = setup
        # With the 8 bits of bfloat16 another rounding alone may change the answer.
        self._other_batch = OTHER_BATCH if setup.shape.dtype == "float32" else None
        self._source = random.Random(seed)
        self._prompt_tokens = prompt_tokens
        # At least one token is always computed, and a part of a block is never kept.
        self.hit_blocks = (prompt_tokens - 1) // BLOCK_TOKENS
        self.hit_tokens = self.hit_blocks * BLOCK_TOKENS
        self._prompts = [self._new_prompt() for _ in range(prompts)]
        self._references: list[Reference] = []

    # The scenarios.

    def cold(self, step: Callable[[str], object]) -> Scenario:
        """Engine A computes every prompt."""
        scenario = Scenario("cold: engine A computes")
        step("engine A starts")
        a = self._start_engine("A")
        a.wait_ready()
        self._warm_up(a)
        for number, prompt in enumerate(self._prompts, 1):
            step(f"engine A computes prompt {number}")
            reference = self._reference(a, prompt)
            scenario.must(
                reference.cold["cached_tokens"] == 0, f"prompt {number} was cached before it was computed"
            )
            scenario.must(
                reference.answer["cached_tokens"] == self.hit_tokens,
                f"the own prefix cache gave {reference.answer['cached_tokens']} of {self.hit_tokens} tokens",
            )
            self._references.append(reference)
        answers = {tuple(reference.answer["tokens"]) for reference in self._references}
        scenario.must(len(answers) == len(self._references), "different prompts got the same answer")
        scenario.timed(reference.cold["ttft_ms"] for reference in self._references)
        return scenario

    def warm(self, step: Callable[[str], object]) -> Scenario:
        """Engine A forgets and gets everything back from the daemon."""
        scenario = Scenario("warm: after reset_prefix_cache")
        (a,) = self.engines
        step("saves settle")
        self._forget(scenario, a)
        hits_before = _external_hits(a)
        answers = []
        for number, reference in enumerate(self._references, 1):
            step(f"engine A loads prompt {number}")
            answers.append(self._answer(a, reference.prompt))
            self._compare(scenario, "engine A", answers[-1], reference, SAME_BATCH)
            self._compare_bytes(scenario, a, reference)
        scenario.timed(answer["ttft_ms"] for answer in answers)
        scenario.figures["hit_tokens"] = _external_hits(a) - hits_before
        expected = self.hit_tokens * len(self._references)
        scenario.must(
            scenario.figures["hit_tokens"] == expected,
            f"{scenario.figures['hit_tokens']} tokens came from the daemon instead of {expected}",
        )
        return scenario

    def control(self, step: Callable[[str], object]) -> Scenario:
        """One block is overwritten in the pool: the answer must change, or all these comparisons prove nothing."""
        scenario = Scenario("control: one corrupted block")
        (a,) = self.engines
        step("engine B starts, A computes the control's prompt")
        self._start_engine("B")
        reference = self._reference(a, self._new_prompt())
        before = a.ask("blocks", prompt=reference.prompt)["blocks"]
        self._forget(scenario, a)
        step("a block is overwritten in the pool")
        victim, other = len(before) // 2, len(before) // 4
        with open_tool(self.daemon.address) as tool:
            PoolBytes(tool).overwrite(before[victim], before[other])
        step("engine A loads it")
        answer = self._answer(a, reference.prompt)
        after = a.ask("blocks", prompt=reference.prompt)["blocks"]
        changed = [
            index
            for index, (x, y) in enumerate(zip(before, after, strict=False))
            if index < self.hit_blocks and x["digest"] != y["digest"]
        ]
        wrong = sum(x != y for x, y in zip(answer["tokens"], reference.answer["tokens"], strict=True))
        scenario.figures |= {"changed_blocks": changed, "changed_tokens": wrong}
        scenario.must(
            answer["cached_tokens"] == self.hit_tokens,
            f"{answer['cached_tokens']} tokens were loaded instead of {self.hit_tokens}, so nothing was controlled",
        )
        scenario.must(
            changed == [victim], f"the loaded blocks {changed} differ instead of block {victim} alone"
        )
        scenario.must(wrong > 0, "a corrupted block did not change the answer")
        return scenario

    def together(self, step: Callable[[str], object]) -> Scenario:
        """Starts engine B while A lives, and both load the same prompts at the same time."""
        scenario = Scenario("shared: engines A and B at once")
        a, b = self.engines
        step("engine B gets ready")
        b.wait_ready()
        self._warm_up(b)
        joined = self._wait_for_status(lambda status: len(_sessions(status)) == 4)
        scenario.must(joined, "the daemon does not count two sessions of each engine")
        self._forget(scenario, a)
        ttfts: list[float] = []
        for number, reference in enumerate(self._references[:2], 1):
            step(f"A and B load prompt {number}")
            asked = [(engine, _ask_answer(engine, [reference.prompt])) for engine in (a, b)]
            for engine, command in asked:
                (answer,) = engine.result(command)["answers"]
                self._compare(scenario, f"engine {engine.name}", answer, reference, SAME_BATCH)
                ttfts.append(answer["ttft_ms"])
            for engine in (a, b):
                self._compare_bytes(scenario, engine, reference)
        scenario.timed(ttfts)
        return scenario

    def engine_killed(self, step: Callable[[str], object]) -> Scenario:
        """Kills A while it works on a prompt, after it computed one that B never saw; B hits what A left."""
        scenario = Scenario("engine A killed -9: B hits its prefix")
        a, b = self.engines
        step("engine A computes a new prompt")
        reference = self._reference(a, self._new_prompt())
        self._settle(a)
        step("engine A is killed at work")
        a.wait_first_token(_ask_answer(a, [self._new_prompt()]))
        a.kill()
        step("engine B loads what A computed")
        answer = self._answer(b, reference.prompt)
        self._compare(scenario, "engine B", answer, reference, SAME_BATCH)
        self._compare_bytes(scenario, b, reference)
        scenario.figures |= {"ttft_ms": answer["ttft_ms"], "cold_ttft_ms": reference.cold["ttft_ms"]}
        gone = self._wait_for_status(lambda status: len(_sessions(status)) == 2)
        scenario.must(gone, "the daemon still counts the killed engine's sessions")
        return scenario

    def from_ssd(self, step: Callable[[str], object]) -> Scenario:
        """The daemon is stopped and started: its pool is empty, and every prompt comes from its SSD tier."""
        scenario = Scenario("ssd: daemon stopped and started")
        b = self.engines[1]
        step("the daemon stops and starts")
        self._forget(scenario, b)
        self.daemon.close()
        self.daemon.start()
        ready = self._wait_for_status(_engine_is_ready, between=lambda: self._warm_up(b))
        scenario.must(ready, f"engine B did not register again within {_RECONNECT_S} s")
        with open_tool(self.daemon.address) as tool:
            scenario.must(tool.status()["blocks"] == 0, "the pool was not empty after the start")
        answers = []
        for number, reference in enumerate(self._references, 1):
            step(f"engine B gets prompt {number} from the SSD")
            answers.append(self._answer(b, reference.prompt))
            self._compare(scenario, "from the SSD", answers[-1], reference, SAME_BATCH)
            self._compare_bytes(scenario, b, reference)
        scenario.timed(answer["ttft_ms"] for answer in answers)
        return scenario

    def daemon_restarted(self, step: Callable[[str], object]) -> Scenario:
        """Kills the daemon while B works, and starts it again later."""
        scenario = Scenario("daemon killed and restarted under load")
        b = self.engines[1]
        known, newcomer = self._references[:2], self._new_prompt()
        step("engine B works, the daemon is killed")
        self._forget(scenario, b)
        command = _ask_answer(b, [*(reference.prompt for reference in known), newcomer])
        b.wait_first_token(command)
        self.daemon.kill()
        *answers, new_answer = b.result(command)["answers"]
        for answer, reference in zip(answers, known, strict=True):
            self._compare(scenario, "under load", answer, reference, self._other_batch, hit_tokens=None)
        repeated = self._answer(b, newcomer)
        if self._other_batch is not None:
            same = repeated["tokens"] == new_answer["tokens"]
            scenario.must(same, "a new prompt's answer changed when asked again")

        step("engine B works without a daemon")
        b.ask("drain")
        scenario.must(b.ask("reset_prefix_cache")["reset"], "without a daemon blocks stay pinned")
        alone = self._answer(b, known[0].prompt)
        self._compare(scenario, "without a daemon", alone, known[0], self._other_batch, hit_tokens=0)

        step("the daemon is back")
        self.daemon.start()
        started = time.monotonic()
        ready = self._wait_for_status(_engine_is_ready, between=lambda: self._warm_up(b))
        scenario.figures |= {
            "reconnect_s": time.monotonic() - started,
            "ttft_without_daemon_ms": alone["ttft_ms"],
        }
        scenario.must(ready, f"engine B did not register again within {_RECONNECT_S} s")
        step("engine B saves and loads again")
        reference = self._reference(b, self._new_prompt())
        self._forget(scenario, b)
        answer = self._answer(b, reference.prompt)
        self._compare(scenario, "after the restart", answer, reference, SAME_BATCH)
        self._compare_bytes(scenario, b, reference)
        scenario.figures["ttft_ms"] = answer["ttft_ms"]
        return scenario

    def no_exceptions(self, step: Callable[[str], object]) -> Scenario:
        """Checks that no exception reached vLLM in all of it."""
        scenario = Scenario("no exception in vLLM's logs")
        step("logs are read")
        for engine in self.engines:
            found = engine.exceptions()
            scenario.must(
                not found, f"engine {engine.name} logged {len(found)}, first: {found[:1]}; see {engine.log}"
            )
        return scenario

    def all(self) -> Sequence[Callable[[Callable[[str], object]], Scenario]]:
        """The scenarios in their order."""
        return (
            self.cold,
            self.warm,
            self.control,
            self.together,
            self.engine_killed,
            self.from_ssd,
            self.daemon_restarted,
            self.no_exceptions,
        )

    # Steps of the scenarios.

    def _start_engine(self, name: str) -> Engine:
        engine = Engine(name, self._model, self.daemon.address, self._logs, self._setup)
        self.engines.append(engine)
        return engine

    def _new_prompt(self) -> list[int]:
        return [self._source.randrange(4, 32_000) for _ in range(self._prompt_tokens)]

    def _warm_up(self, engine: Engine) -> None:
        """Has the engine do its one-time work, with a prompt too short to be kept."""
        engine.ask("generate", prompts=[self._new_prompt()[: BLOCK_TOKENS // 2]], tokens=2)

    def _answer(self, engine: Engine, prompt: list[int]) -> dict[str, Any]:
        (answer,) = engine.result(_ask_answer(engine, [prompt]))["answers"]
        return answer

    def _reference(self, engine: Engine, prompt: list[int]) -> Reference:
        cold = self._answer(engine, prompt)
        own = self._answer(engine, prompt)
        digests = [block["digest"] for block in engine.ask("blocks", prompt=prompt)["blocks"]]
        return Reference(prompt, own, digests, cold)

    def _daemon_of(self, engine: Engine) -> Daemon:
        """The daemon that the engine uses."""
        return self.daemon

    def _settle(self, engine: Engine) -> None:
        """Waits until all that the engine computed is saved and visible."""
        engine.ask("drain")
        with open_tool(self._daemon_of(engine).address) as tool:
            tool.settle(30_000)

    def _forget(self, scenario: Scenario, engine: Engine) -> None:
        """Saves everything, then empties the engine's own prefix cache."""
        self._settle(engine)
        scenario.must(engine.ask("reset_prefix_cache")["reset"], f"engine {engine.name} keeps blocks pinned")

    def _compare(
        self,
        scenario: Scenario,
        who: str,
        answer: dict[str, Any],
        reference: Reference,
        tolerance: float | None,
        hit_tokens: int | None = -1,
    ) -> None:
        """Compares the answer with the reference's: equal, with logprobs within the tolerance. Without a tolerance the
        logprobs are only reported. -1 means that it must come from a full hit, None from any source."""
        agreeing = agreeing_tokens(answer, reference.answer)
        if tolerance is None:
            fewest = scenario.figures.get("agreeing_tokens", ANSWER_TOKENS)
            scenario.figures["agreeing_tokens"] = min(fewest, agreeing)
        else:
            equal = agreeing == len(reference.answer["tokens"])
            logprobs = zip(answer["logprobs"], reference.answer["logprobs"], strict=True)
            apart = max(abs(x - y) for x, y in logprobs)
            self.tokens_equal &= equal
            scenario.must(equal, f"{who}: the answer's tokens differ from those of the own prefix cache")
            scenario.must(
                apart <= tolerance, f"{who}: a logprob is {apart:.2g} away from the own prefix cache's"
            )
            scenario.figures["logprobs_apart"] = max(scenario.figures.get("logprobs_apart", 0.0), apart)
        wanted = self.hit_tokens if hit_tokens == -1 else hit_tokens
        if wanted is not None:
            scenario.must(
                answer["cached_tokens"] == wanted,
                f"{who}: {answer['cached_tokens']} tokens hit instead of {wanted}",
            )

    def _compare_bytes(self, scenario: Scenario, engine: Engine, reference: Reference) -> None:
        digests = [block["digest"] for block in engine.ask("blocks", prompt=reference.prompt)["blocks"]]
        # A prompt's last token is always computed again, and with it a block that it fills.
        hit = self.hit_blocks
        same = len(digests) >= hit and digests[:hit] == reference.digests[:hit]
        scenario.must(
            same, f"engine {engine.name}: the bytes of a prompt's blocks are not those that were computed"
        )

    def _wait_for_status(
        self,
        holds: Callable[[Mapping[str, Any]], bool],
        between: Callable[[], object] = lambda: time.sleep(0.05),
    ) -> bool:
        deadline = time.monotonic() + _RECONNECT_S
        with open_tool(self.daemon.address) as tool:
            while not holds(tool.status()):
                if time.monotonic() > deadline:
                    return False
                between()
        return True


def agreeing_tokens(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """The number of equal tokens at the start of two answers."""
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(one["tokens"]))


def _ask_answer(engine: Engine, prompts: list[list[int]]) -> int:
    return engine.start("generate", prompts=prompts, tokens=ANSWER_TOKENS)


def _external_hits(engine: Engine) -> int:
    return engine.ask("metrics")["external_hits"]


def _sessions(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [session for session in status["sessions"] if session["role"] != "tool"]


def _engine_is_ready(status: Mapping[str, Any]) -> bool:
    return {session["role"] for session in _sessions(status)} == {"scheduler", "worker"}


@contextmanager
def open_tool(address: str) -> Iterator[Tool]:
    """A tool's connection to a daemon."""
    tool = Tool(address, 5000.0)
    try:
        yield tool
    finally:
        tool.close()


class PoolBytes:
    """Finds blocks in the pool by the bytes that an engine says they begin with, without knowing its layout."""

    _WINDOW = 64 << 20

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._bytes = int(str(tool.status()["pool_bytes"]))

    def overwrite(self, victim: dict[str, Any], other: dict[str, Any]) -> None:
        """Writes the bytes of `other` into every layer of `victim`: as well-formed as before, and wrong."""
        places = self._find([*victim["layers"], *other["layers"]])
        for wrong, right in zip(victim["layers"], other["layers"], strict=True):
            content = self._tool.read_pool(places[right], victim["layer_bytes"])
            self._tool.write_pool(places[wrong], content)

    def _find(self, fingerprints: list[str]) -> dict[str, int]:
        """Pool offset of each fingerprint."""
        places: dict[str, int] = {}
        missing = {bytes.fromhex(fingerprint) for fingerprint in fingerprints}
        overlap = len(fingerprints[0]) // 2
        for offset in range(0, self._bytes, self._WINDOW):
            window = self._tool.read_pool(offset, min(self._WINDOW + overlap, self._bytes - offset))
            for fingerprint in list(missing):
                if (at := window.find(fingerprint)) >= 0:
                    places[fingerprint.hex()] = offset + at
                    missing.discard(fingerprint)
            if not missing:
                return places
        raise ProcessFailed(
            f"{len(missing)} of {len(fingerprints)} layers of the control's blocks are not in the pool"
        )
