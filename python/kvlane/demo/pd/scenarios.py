"""The scenarios of the demo of prefill and decode engines, in order. Each scenario says what must hold.

Right answers are those of one prefill engine that is asked alone, under a cache salt of its own: so it computes the
whole prompt, and none of its blocks serves the same prompt without a salt.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvlane.bench.report import summary
from kvlane.demo.direct.wrong_cache import make_cache_wrong
from kvlane.demo.pd import asking, bench
from kvlane.demo.pd.asking import Answer, AskFailed, PromptTokens
from kvlane.demo.pd.cluster import Cluster
from kvlane.demo.pd.comparing import Comparing
from kvlane.demo.pd.plan import BLOCK_TOKENS
from kvlane.demo.pd.processes import wait_until
from kvlane.demo.scenarios import Scenario

ANSWER_TOKENS = 16
SPLIT = "prefill, then decode"
"""The router's reason for a request that two engines serve."""
MOST_COMPUTED = BLOCK_TOKENS + 1
"""Prompt tokens that a decode engine may have to compute: the last block, which may not be whole, and one token."""
_KILLED_WHILE = 16
_WORK_TIMEOUT_S = 30.0
_JOIN_TIMEOUT_S = 60.0


class Demo:
    """The cluster, and the requests so far."""

    def __init__(
        self, cluster: Cluster, prompts: int, prompt_tokens: int, out: Path, with_vllm_bench: bool
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        """Each request: its id, its prefill node, the node that answered, and the reason."""
        self._cluster = cluster
        self._plan = cluster.plan
        self._router = cluster.plan.router_url
        self._one = cluster.plan.prefill[0].url
        self._count, self._prompt_tokens, self._out = prompts, prompt_tokens, out
        self._with_vllm_bench = with_vllm_bench
        self._words = prompt_tokens
        self._numbers = itertools.count(1)
        self._comparing = Comparing(cluster.plan.joins.gpu is None)
        self._computed: list[PromptTokens] = []

    def all(self) -> Sequence[Callable[[Callable[[str], object]], Scenario]]:
        """The scenarios in their order."""
        direct_control = () if self._plan.joins.gpu is not None else (self.direct_control,)
        return (
            self.who_and_why,
            self.equal_answers,
            self.decode_computes,
            *(direct_control if self._cluster.is_direct else (self.control,)),
            self.prefill_killed,
            self.engine_joins,
            self.bench_serve,
            *((self.vllm_bench,) if self._with_vllm_bench else ()),
        )

    def who_and_why(self, step: Callable[[str], object]) -> Scenario:
        """Sends requests of several kinds, and checks the router's decision and reason for each."""
        scenario = Scenario("who serves what, and why")
        step("requests of several kinds")
        # A model with another tokenizer makes more tokens of a word.
        self._words = max(1, self._words * 100 // asking.tokens_of(self._one, self._prompt("words", 100)))
        long = self._prompt("who")
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("short prompt", self._prompt("short", 20), {}),
            ("long prompt", long, {}),
            ("the same again", long, {}),
            ("begins like it", long + " " + self._prompt("more", 20), {}),
            ("with prompt_logprobs", self._prompt("logprobs"), {"prompt_logprobs": 1}),
            *((f"long prompt {at}", self._prompt(f"who {at}"), {}) for at in range(2, 6)),
        ]
        for what, prompt, more in asked:
            self._ask(prompt, what, **more)
        seen = {each["request"]: each for each in self.requests}
        split = seen["long prompt"]
        scenario.must(split["why"] == SPLIT, f"a long prompt went to {split['decode']}: {split['why']}")
        scenario.must(
            split["prefill"] in self._names("prefill") and split["decode"] in self._names("decode"),
            f"a long prompt was prefilled by {split['prefill']} and answered by {split['decode']}",
        )
        for what in ("short prompt", "the same again", "with prompt_logprobs"):
            scenario.must(seen[what]["prefill"] == "-", f"{what}: two engines served it, {seen[what]['why']}")
        return scenario

    def equal_answers(self, step: Callable[[str], object]) -> Scenario:
        """Sends the same prompts to one engine alone, and to the router: the answers must be alike."""
        scenario = Scenario("answers equal those of one engine")
        alone, routed = [], []
        for number in range(1, self._count + 1):
            step(f"prompt {number} of {self._count}")
            prompt = self._prompt(f"equal {number}")
            alone.append(self._alone(scenario, prompt))
            before = self._decode_counters()
            routed.append(self._ask(prompt, f"equal {number}"))
            # One request at a time, so that the counters' growth is its own.
            grown = self._grown(before, routed[-1].prompt_tokens)
            self._computed.append(grown)
            self.requests[-1] |= {"decode_computed": grown.computed, "prompt_tokens": grown.total}
        pairs = list(zip(alone, routed, strict=True))
        alike = self._comparing.count(pairs)
        differ = [number for number, pair in enumerate(pairs, 1) if not self._comparing.are_alike(*pair)]
        scenario.must(
            self._comparing.are_enough(alike, len(pairs)),
            f"the answers to {len(differ)} of {len(pairs)} prompts differ: {', '.join(map(str, differ))}",
        )
        different = len({tuple(answer.tokens) for answer in alone})
        scenario.must(different == len(alone), "different prompts got the same answer")
        split = sum(each["why"] == SPLIT for each in self.requests[-self._count :])
        scenario.must(split == self._count, f"{self._count - split} prompts were not served by two engines")
        scenario.figures |= {
            "prompts": self._count,
            "equal": sum(one.tokens == other.tokens for one, other in pairs),
            "alike": alike,
            "compared": self._comparing.word,
            "alone_ms": summary(answer.seconds * 1e3 for answer in alone),
            "routed_ms": summary(answer.seconds * 1e3 for answer in routed),
        }
        return scenario

    def decode_computes(self, step: Callable[[str], object]) -> Scenario:
        """Checks how many tokens of these prompts the decode engines computed, by their own counters."""
        scenario = Scenario("the decode engine computes a block and a token at most")
        step("counters of the decode engines")
        computed = [each.computed for each in self._computed]
        few = sum(tokens <= MOST_COMPUTED for tokens in computed)
        scenario.figures |= {
            "prompts": len(computed),
            "within": few,
            "computed_tokens_each": computed,
            "computed_tokens": summary(map(float, computed)),
            "from_connector_tokens": sum(each.connector for each in self._computed),
        }
        scenario.must(
            few == len(computed),
            f"for {len(computed) - few} of {len(computed)} prompts more than {MOST_COMPUTED} tokens were computed, at "
            f"most {max(computed, default=0)} of {self._prompt_tokens}: what the prefill engine saved came too late, "
            "or was not handed over",
        )
        return scenario

    def control(self, step: Callable[[str], object]) -> Scenario:
        """Makes the pool's bytes wrong: the answer must change, or equal answers prove nothing."""
        scenario = Scenario("control: wrong bytes give a wrong answer")
        step("a prompt is saved, its bytes are made wrong")
        prompt = self._prompt("control")
        right = self._alone(scenario, prompt)
        # Its blocks in the pool, before the decode engine asks for them.
        for node in self._plan.prefill:
            asking.complete(node.url, prompt, 1, f"control-{node.name}")
        self._cluster.settle()
        self._cluster.make_pool_wrong()
        before = self._decode_counters()
        wrong = self._ask(prompt, "control")
        grown = self._grown(before, wrong.prompt_tokens)
        self._cluster.forget_all()
        changed = sum(one != other for one, other in zip(right.tokens, wrong.tokens, strict=True))
        scenario.figures |= {"changed_tokens": changed, "loaded_tokens": grown.connector}
        scenario.must(
            grown.computed <= MOST_COMPUTED,
            f"the decode engine loaded {grown.connector} of {grown.total} tokens only, so nothing was controlled",
        )
        scenario.must(not self._comparing.are_alike(right, wrong), "wrong bytes did not change the answer")
        return scenario

    def direct_control(self, step: Callable[[str], object]) -> Scenario:
        """Makes the bytes that have landed wrong, and asks again. A GPU's memory is out of this program's reach."""
        scenario = Scenario("control: wrong bytes give a wrong answer")
        step("a prompt lands, its bytes are made wrong, and it is asked again")
        prompt = self._prompt("control")
        right = self._ask(prompt, "control")
        url = self._url_of_last()
        bytes_changed = sum(
            make_cache_wrong(self._cluster.engines[node.name].processes(), self._cluster.kv_cache)
            for node in self._plan.decode
        )
        before = asking.prompt_tokens(url)
        wrong = asking.complete(url, prompt, ANSWER_TOKENS, "control-wrong")
        grown = asking.counted(lambda: asking.prompt_tokens(url), before, wrong.prompt_tokens)
        changed = sum(one != other for one, other in zip(right.tokens, wrong.tokens, strict=True))
        scenario.figures |= {"changed_tokens": changed, "loaded_tokens": grown.own_cache}
        scenario.must(bytes_changed > 0, "no KV cache was found in the decode engines' memory")
        scenario.must(
            grown.computed <= MOST_COMPUTED,
            f"the decode engine had cached {grown.own_cache} of {grown.total} tokens only: nothing was controlled",
        )
        scenario.must(changed > 0, "wrong bytes did not change the answer")
        return scenario

    def prefill_killed(self, step: Callable[[str], object]) -> Scenario:
        """Kills the first prefill engine with SIGKILL while it has requests: all of them are answered, and rightly."""
        scenario = Scenario("P1 killed -9 at work: all requests are answered")
        prompts = [self._prompt(f"killed {number}") for number in range(_KILLED_WHILE)]
        step("right answers")
        right = [self._alone(scenario, prompt) for prompt in prompts]
        victim = self._plan.prefill[0]
        step(f"{len(prompts)} requests at once, and {victim.name} is killed")
        at_work: list[int] = []

        def has_work() -> bool:
            at_work[:] = [self._cluster.router.requests(victim)]
            return at_work[0] >= min(4, _KILLED_WHILE // len(self._plan.prefill))

        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(partial(self._ask_only, prompt, f"killed-{number}"))
                for number, prompt in enumerate(prompts)
            ]
            try:
                wait_until(f"{victim.name} has work", has_work, _WORK_TIMEOUT_S)
            finally:
                self._cluster.engines[victim.name].kill()
            answers = [each.exception() or each.result() for each in asked]
        answered = [answer for answer in answers if isinstance(answer, Answer)]
        pairs = [(each, one) for each, one in zip(answers, right, strict=True) if isinstance(each, Answer)]
        alike = self._comparing.count(pairs)
        interrupted = 0
        for number in range(len(prompts)):
            decision = self._decision(f"killed-{number}")
            interrupted += decision["attempt"] > 0
            self._note(f"killed {number + 1}", decision)
        scenario.figures |= {
            "requests": len(prompts),
            "had_when_killed": at_work[0],
            "answered": len(answered),
            "alike": alike,
            "tried_again": interrupted,
        }
        failed = [str(answer) for answer in answers if not isinstance(answer, Answer)]
        scenario.must(not failed, f"{len(failed)} requests were not answered, first: {failed[:1]}")
        scenario.must(
            self._comparing.are_enough(alike, len(prompts)),
            f"{len(prompts) - alike} answers are not those of one engine",
        )
        # A decode engine that was handed a part of a prompt computes the rest by itself.
        scenario.must(
            interrupted > 0 or self._cluster.is_direct,
            f"{victim.name} was killed between requests: nothing was interrupted",
        )
        return scenario

    def engine_joins(self, step: Callable[[str], object]) -> Scenario:
        """Starts a further prefill engine, and `kvlane route add` names it: it gets work, and nothing else is
        restarted."""
        joins = self._plan.joins
        scenario = Scenario(f"{joins.name} joins while the others serve")
        step(f"{joins.name} starts")
        before = self._cluster.router.states().get(joins.name)
        scenario.must(before is None, f"{joins.name} was {before} before the router was told of it")
        began = time.monotonic()
        engine = self._cluster.start_joining()
        wait_until(f"{joins.name} answers", engine.is_ready)
        answers = time.monotonic()
        wait_until(
            f"the router finds {joins.name} ready",
            lambda: self._cluster.router.states().get(joins.name) == "ready",
            _JOIN_TIMEOUT_S,
        )
        scenario.figures |= {
            "started_s": answers - began,
            "found_ready_s": time.monotonic() - answers,
        }
        step(f"requests until {joins.name} gets one")
        for number in range(2 * (len(self._plan.prefill) + 1)):
            prompt = self._prompt(f"joined {number}")
            answer = self._ask(prompt, f"joined {number + 1}")
            if self.requests[-1]["prefill"] == joins.name:
                right = asking.complete(joins.url, prompt, ANSWER_TOKENS, "joined-alone", salt="alone")
                # A single pair may part at its first token on GPUs, and enough others are compared.
                scenario.must(
                    self._comparing.are_alike(answer, right) or not self._comparing.is_exact,
                    f"the answer by {joins.name} is not that of one engine",
                )
                break
        else:
            scenario.must(False, f"{joins.name} got no request")
        return scenario

    def bench_serve(self, step: Callable[[str], object]) -> Scenario:
        """Measures the times that a client sees, by `kvlane bench serve` against the router."""
        scenario = Scenario("kvlane bench serve at the router")
        step("kvlane bench serve")
        bench.kvlanes(scenario, self._router, self._prompt_tokens, self._out)
        return scenario

    def vllm_bench(self, step: Callable[[str], object]) -> Scenario:
        """Measures the times by vLLM's own client."""
        scenario = Scenario("vllm bench serve at the router")
        step("vllm bench serve")
        bench.vllms(scenario, self._router, self._prompt_tokens, self._cluster.model, self._out)
        return scenario

    # Steps of the scenarios.

    def _names(self, role: str) -> set[str]:
        return {node.name for node in self._plan.engines if node.role == role}

    def _prompt(self, seed: str, words: int | None = None) -> str:
        return asking.prompt_text(words or self._words, seed)

    def _alone(self, scenario: Scenario, prompt: str) -> Answer:
        before = asking.prompt_tokens(self._one)
        answer = asking.complete(self._one, prompt, ANSWER_TOKENS, "alone", salt="alone")
        grown = asking.counted(lambda: asking.prompt_tokens(self._one), before, answer.prompt_tokens)
        scenario.must(
            grown.computed == answer.prompt_tokens, "the engine alone had cached what it was to compute"
        )
        return answer

    def _ask_only(self, prompt: str, request_id: str, **more: Any) -> Answer:
        return asking.complete(self._router, prompt, ANSWER_TOKENS, request_id, **more)

    def _ask(self, prompt: str, what: str, **more: Any) -> Answer:
        """Sends a request to the router, and notes the decision."""
        request_id = f"demo-{next(self._numbers)}"
        answer = self._ask_only(prompt, request_id, **more)
        self._note(what, self._decision(request_id))
        return answer

    def _decision(self, request_id: str) -> dict[str, Any]:
        """The router's last decision about this request."""
        for decision in asking.page(self._plan.admin_url, "/decisions?limit=200")["decisions"]:
            if decision["client_id"] == request_id:
                return decision
        raise AskFailed(f"{self._plan.admin_url}/decisions does not name {request_id}")

    def _url_of_last(self) -> str:
        """The URL of the engine that answered the last request."""
        name = self.requests[-1]["decode"]
        return next(node.url for node in self._plan.engines if node.name == name)

    def _note(self, what: str, decision: dict[str, Any]) -> None:
        prefill = decision["prefill"]
        self.requests.append(
            {
                "request": what,
                "id": decision["id"],
                "prefill": self._plan.name_of(prefill),
                "decode": self._plan.name_of(decision["node"]),
                "why": decision["why"],
                "attempt": decision["attempt"],
            }
        )

    def _decode_counters(self) -> PromptTokens:
        return sum((asking.prompt_tokens(node.url) for node in self._plan.decode), PromptTokens())

    def _grown(self, before: PromptTokens, tokens: int) -> PromptTokens:
        return asking.counted(self._decode_counters, before, tokens)
