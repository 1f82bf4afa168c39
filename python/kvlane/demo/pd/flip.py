"""The demo of changing roles: as the work changes, a worker prefills or decodes.

Right answers are those of one prefill engine that is asked alone, under a cache salt of its own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlane.demo.pd import asking
from kvlane.demo.pd.asking import Answer, AskFailed
from kvlane.demo.pd.cluster import Cluster
from kvlane.demo.pd.comparing import Comparing
from kvlane.demo.pd.processes import wait_until
from kvlane.demo.scenarios import Scenario

BALANCE = """# Of the router in this demo. Limits and sizes are those of small engines on a CPU.
[balance]
ttft-ms = 500
prefill-rate = 4000
step-tokens = 2000
requests-max = 6
role-dwell-ms = 3000
# One worker beside one engine of each role: decode engines that help out would do without a change.
relief = 0
"""
_COMPARED = 4
_CHANGE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Work:
    """The requests of the clients."""

    name: str
    role: str
    """The role that the work needs more of."""
    clients: int
    prompt_words: int
    answer_tokens: int


@dataclass
class Done:
    """The outcome of one work."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """Answers by prompt."""
    failed: list[str] = field(default_factory=list)
    changed_s: float = 0.0
    """Seconds from the first request until the worker had the role."""


class FlipDemo:
    """The cluster, and the requests so far."""

    def __init__(self, cluster: Cluster, prompt_tokens: int) -> None:
        self.requests: list[dict[str, Any]] = []
        """Each request that the router remembers: its prefill node, the node that answered, and the reason."""
        self._cluster, self._plan = cluster, cluster.plan
        self._words = prompt_tokens
        self._numbers = itertools.count(1)
        self._done: list[tuple[Work, Done]] = []

    def all(self) -> Sequence[Callable[[Callable[[str], object]], Scenario]]:
        """The scenarios in their order."""
        return (self.roles_change, self.equal_answers)

    def roles_change(self, step: Callable[[str], object]) -> Scenario:
        """Runs work that is mostly decode, mostly prefill, and decode again: each time the worker gets the role that
        the work needs."""
        worker = self._plan.workers[0]
        scenario = Scenario(f"{worker.name} prefills or decodes as the work needs it")
        decode = Work("long answers", "decode", 12, max(64, self._words // 5), 64)
        prefill = Work("long prompts", "prefill", 6, self._words, 1)
        for work in (decode, prefill, decode):
            step(f"{work.name}, until {worker.name} has the role {work.role}")
            done = self._until_it_has(work)
            self._done.append((work, done))
            scenario.must(
                not done.failed, f"{len(done.failed)} requests failed, the first with: {done.failed[:1]}"
            )
        page = asking.page(self._plan.admin_url, "/decisions?limit=1000")
        changes = [
            each for each in page["balance"] if each["what"] == "changes to" and each["node"] == worker.url
        ]
        roles = [each["role"] for each in reversed(changes)]
        scenario.must(roles[-2:] == ["prefill", "decode"], f"the router says that it had the roles {roles}")
        self.requests += [self._served(each) for each in reversed(page["decisions"])]
        prefilled = sum(each["prefill"] == worker.url for each in page["decisions"])
        answered = sum(each["node"] == worker.url for each in page["decisions"])
        scenario.must(prefilled > 0, f"{worker.name} has prefilled nothing")
        scenario.must(answered > 0, f"{worker.name} has answered nothing")
        requests = sum(len(done.answers) for _, done in self._done)
        scenario.figures |= {
            "roles": roles,
            "requests": requests + sum(len(done.failed) for _, done in self._done),
            "answered": requests,
            "seconds_until_it_changed": [done.changed_s for _, done in self._done],
            "balance": page["balance"],
        }
        return scenario

    def equal_answers(self, step: Callable[[str], object]) -> Scenario:
        """Compares answers from before, during and after changes of roles with those of one engine: they are alike."""
        scenario = Scenario("answers equal those of one engine")
        alone = self._plan.prefill[0]
        comparing = Comparing(self._plan.joins.gpu is None)
        prompts = alike = 0
        for work, done in self._done:
            given = list(done.answers.items())
            # The last requests ran while the role changed.
            for prompt, answer in {**dict(given[:_COMPARED]), **dict(given[-_COMPARED:])}.items():
                prompts += 1
                step(f"prompt {prompts}")
                right = asking.complete(alone.url, prompt, work.answer_tokens, "alone", salt="alone")
                alike += comparing.are_alike(answer, right)
        scenario.figures |= {"prompts": prompts, "alike": alike, "compared": comparing.word}
        scenario.must(prompts >= _COMPARED * len(self._done), f"only {prompts} answers are there to compare")
        scenario.must(comparing.are_enough(alike, prompts), f"{prompts - alike} of {prompts} answers differ")
        return scenario

    def _until_it_has(self, work: Work) -> Done:
        """Clients send one request after the other until the worker has the role, and each some more."""
        done, over, lock = Done(), threading.Event(), threading.Lock()

        def client() -> None:
            asked = 0
            while not over.is_set() or asked < 2:
                number = next(self._numbers)
                prompt = asking.prompt_text(work.prompt_words, f"{work.name} {number}")
                try:
                    answer = asking.complete(
                        self._plan.router_url, prompt, work.answer_tokens, f"{work.name} {number}"
                    )
                except AskFailed as error:
                    with lock:
                        done.failed.append(str(error))
                    return
                with lock:
                    done.answers[prompt] = answer
                asked += 1

        threads = [threading.Thread(target=client) for _ in range(work.clients)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            wait_until(
                f"{self._plan.workers[0].name} has the role {work.role}",
                lambda: bool(done.failed) or self._role() == work.role,
                _CHANGE_TIMEOUT_S,
            )
            done.changed_s = time.monotonic() - began
        finally:
            over.set()
            for thread in threads:
                thread.join(asking.ANSWER_TIMEOUT_S)
        return done

    def _served(self, decision: dict[str, Any]) -> dict[str, Any]:
        prefill = decision["prefill"]
        return {
            "request": decision["client_id"],
            "id": decision["id"],
            "prefill": self._plan.name_of(prefill),
            "decode": self._plan.name_of(decision["node"]),
            "why": decision["why"],
            "attempt": decision["attempt"],
        }

    def _role(self) -> str:
        nodes = asking.page(self._plan.admin_url, "/nodes")["nodes"]
        return next(each["role"] for each in nodes if each["node"] == self._plan.workers[0].url)
