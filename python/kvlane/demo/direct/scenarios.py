"""The scenarios of the demo of direct hand-offs, in order. Each scenario says what must hold.

Right answers are those of one prefill engine that is asked alone, under a cache salt of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvlane.bench.report import summary
from kvlane.demo.direct.asking import counters, hand_over, stream
from kvlane.demo.direct.cluster import CHUNK_TOKENS, Cluster, Side
from kvlane.demo.direct.wrong_cache import make_cache_wrong
from kvlane.demo.pd.asking import ANSWER_TIMEOUT_S, PromptTokens, counted, prompt_text, prompt_tokens
from kvlane.demo.scenarios import Scenario

ANSWER_TOKENS = 16
KILLED_PROMPT = 3
"""The prompt during which a prefill engine is killed is so many times as long as the others, so that a part of it lands
before."""
_MOMENT_S = 0.03


class Demo:
    """The engines, and the hand-offs so far."""

    def __init__(self, cluster: Cluster, prompts: int, prompt_tokens: int, kv_cache: int) -> None:
        self.handed_over: list[dict[str, Any]] = []
        """Each prompt with its prefill engine, its decode engine and the times."""
        self._cluster, self._count, self._kv_cache = cluster, prompts, kv_cache
        self._tokens = prompt_tokens
        self._pairs = itertools.cycle(
            [(prefill, decode) for decode in cluster.decode for prefill in cluster.prefill]
        )
        self._pool = ThreadPoolExecutor(4)

    def all(self) -> Sequence[Callable[[Callable[[str], object]], Scenario]]:
        """The scenarios in their order."""
        return (self.equal_answers, self.control, self.prefill_killed)

    def _alone(self, prompt: str) -> list[int]:
        return stream(self._cluster.prefill[-1], prompt, ANSWER_TOKENS, None, salt="alone").tokens

    def equal_answers(self, step: Callable[[str], object]) -> Scenario:
        """Sends each prompt to a prefill and a decode engine at once: the tokens must equal those of one engine."""
        scenario = Scenario("answers equal those of one engine, and decode engines compute one token")
        equal, computed, exposed = 0, [], []
        # The first prompt makes the connections.
        hand_over(self._pool, *next(self._pairs), prompt_text(self._tokens, "warm"), 1)
        for number in range(1, self._count + 1):
            step(f"prompt {number} of {self._count}")
            prompt = prompt_text(self._tokens, f"direct {number}")
            right = self._alone(prompt)
            prefill, decode = next(self._pairs)
            before, landed = prompt_tokens(decode.node.url), counters(decode)
            made = hand_over(self._pool, prefill, decode, prompt, ANSWER_TOKENS)
            grown = self._grown(decode, before, self._tokens)
            now = counters(decode)
            equal += made.answer.tokens == right
            computed.append(grown.computed)
            name = "direct_landed_tokens"
            one = {
                "prefill": prefill.node.name,
                "decode": decode.node.name,
                "landed_tokens": int(now.get(name, 0) - landed.get(name, 0)),
                "computed_tokens": grown.computed,
                "prefill_ms": None if made.prefill_s is None else made.prefill_s * 1e3,
                "first_token_ms": made.answer.first_s * 1e3,
            }
            if made.prefill_s is not None:
                exposed.append((made.answer.first_s - made.prefill_s) * 1e3)
            self.handed_over.append(one)
        landed_tokens = sum(each["landed_tokens"] for each in self.handed_over)
        scenario.must(equal == self._count, f"{self._count - equal} answers differ")
        few = sum(each == 1 for each in computed)
        scenario.must(
            few == self._count,
            f"for {self._count - few} prompts the decode engine computed more than one token, at most {max(computed)}",
        )
        scenario.figures |= {
            "prompts": self._count,
            "equal": equal,
            "landed_tokens": landed_tokens,
            "computed_tokens_each": computed,
            "prefill_ms": summary(
                each["prefill_ms"] for each in self.handed_over if each["prefill_ms"] is not None
            ),
            "first_token_ms": summary(each["first_token_ms"] for each in self.handed_over),
            "after_the_prefill_ms": summary(exposed),
        }
        return scenario

    def _token_bytes(self) -> float:
        """Bytes of a token's KV, from the prompts that were handed over."""
        sides = self._cluster.decode
        landed = sum(counters(side).get("direct_landed_tokens", 0) for side in sides)
        return sum(_read_bytes(side) for side in sides) / landed

    def _grown(self, decode: Side, before: PromptTokens, tokens: int) -> PromptTokens:
        return counted(lambda: prompt_tokens(decode.node.url), before, tokens)

    def control(self, step: Callable[[str], object]) -> Scenario:
        """Makes the bytes that have landed wrong: the answer must change, or equal answers prove nothing."""
        scenario = Scenario("control: wrong bytes give a wrong answer")
        step("a prompt lands, its bytes are made wrong, and it is asked again")
        prompt = prompt_text(self._tokens, "control")
        prefill, decode = next(self._pairs)
        made = hand_over(self._pool, prefill, decode, prompt, ANSWER_TOKENS)
        before = prompt_tokens(decode.node.url)
        again = stream(decode, prompt, ANSWER_TOKENS, None)
        scenario.must(again.tokens == made.answer.tokens, "the answer from what had landed is another one")
        bytes_changed = make_cache_wrong(decode.engine.processes(), self._kv_cache)
        wrong = stream(decode, prompt, ANSWER_TOKENS, None)
        changed = sum(one != other for one, other in zip(again.tokens, wrong.tokens, strict=True))
        cached = (prompt_tokens(decode.node.url) - before).own_cache
        scenario.figures |= {"changed_tokens": changed, "bytes": bytes_changed, "cached_tokens": cached}
        scenario.must(bytes_changed > 0, "the decode engine's KV cache was not found in its memory")
        scenario.must(changed > 0, "wrong bytes did not change the answer")
        return scenario

    def prefill_killed(self, step: Callable[[str], object]) -> Scenario:
        """Kills a prefill engine with SIGKILL during a prompt: the decode engine uses what had landed, and the answer
        is right."""
        victim, decode = self._cluster.prefill[0], self._cluster.decode[-1]
        scenario = Scenario(f"{victim.node.name} killed -9 amid a prompt: the answer is right")
        step("right answer")
        tokens = KILLED_PROMPT * self._tokens
        prompt = prompt_text(tokens, "killed")
        right = self._alone(prompt)
        before, landed = prompt_tokens(decode.node.url), counters(decode)
        part = max(tokens / 4, CHUNK_TOKENS)
        step(f"{victim.node.name} is killed once {decode.node.name} has read {part:.0f} of {tokens} tokens")
        goal = _read_bytes(decode) + part * self._token_bytes()
        killing = self._pool.submit(_kill_once_read, victim, decode, goal)
        began = time.monotonic()
        made = hand_over(self._pool, victim, decode, prompt, ANSWER_TOKENS)
        seconds = time.monotonic() - began
        killing.result()
        grown, name = self._grown(decode, before, tokens), "direct_landed_tokens"
        landed_tokens = int(counters(decode).get(name, 0) - landed.get(name, 0))
        scenario.figures |= {
            "prompt_tokens": tokens,
            "landed_tokens": landed_tokens,
            "computed_tokens": grown.computed,
            "seconds": seconds,
        }
        scenario.must(made.prefill_s is None, f"{victim.node.name} had answered before it was killed")
        scenario.must(made.answer.tokens == right, "the answer differs")
        scenario.must(landed_tokens > 0, "nothing of what it had computed was used")
        return scenario


def _read_bytes(side: Side) -> float:
    """Bytes that an engine has read of other engines' blocks; all of them have landed."""
    counted = counters(side)
    carriers = ("direct_cuda_bytes", "direct_cma_bytes", "direct_tcp_bytes")
    return sum(counted.get(name, 0) for name in carriers)


def _kill_once_read(victim: Side, decode: Side, goal: float) -> None:
    """Kills an engine once another one reports that it has read so many bytes. The engine computes for a moment at a
    time, so that on a busy machine it is not done before the report."""
    end = time.monotonic() + ANSWER_TIMEOUT_S
    while _read_bytes(decode) < goal and time.monotonic() < end:
        victim.engine.resume()
        time.sleep(_MOMENT_S)
        victim.engine.pause()
    victim.engine.kill()
