"""A prefill and a decode engine, real ones, that share a daemon behind `kvlane route`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from pairs import PROMPT_TOKENS, SPLIT, alone, complete, counted, counters, prompt
from routed import COMPLETIONS, Router, ask
from served import BLOCK, Daemon, ServedEngine, wait_for
from shared_pair import SharedPair

PROMPTS = 40
JSON = {"Content-Type": "application/json"}
IGNORED = "vllm:kvlane_ignored_hand_offs"
AWAITED = "vllm:kvlane_awaited_hand_offs"


@dataclass(frozen=True)
class Pair:
    """All processes of the test."""

    daemon: Daemon
    prefill: ServedEngine
    decode: ServedEngine
    router: Router


@pytest.fixture(scope="module")
def pair(shared_pair: SharedPair) -> Iterator[Pair]:
    served = shared_pair.whole()
    prefill, decode = served.engines
    with Router("--prefill", prefill.url, "--decode", decode.url, nodes=2) as router:
        yield Pair(served.daemon, prefill, decode, router)


def test_answers_are_those_of_one_engine_and_little_is_computed_twice(pair: Pair) -> None:
    router = f"http://{pair.router.address}"
    ignored, awaited = pair.decode.metric(IGNORED), pair.decode.metric(AWAITED)
    expected, computed = [], []
    for number in range(PROMPTS):
        text = prompt(f"equal {number}")
        expected.append(alone(pair.prefill, text))
        before = counters(pair.decode)
        assert complete(router, text, f"equal-{number}") == expected[-1]
        computed.append(counted(pair.decode, before).computed)
    assert len({tuple(answer) for answer in expected}) == PROMPTS, "answers do not depend on the prompt"

    _, page, _ = ask(pair.router.admin, f"/decisions?limit={PROMPTS}")
    served = [(each["prefill"], each["node"], each["why"]) for each in page["decisions"]]
    assert served == [(pair.prefill.url, pair.decode.url, SPLIT)] * PROMPTS

    # The control: the same comparison on bytes of the daemon that are wrong. They come to the decode engine only by
    # the daemon, since the prefill engine has its own.
    text = prompt("control")
    right = alone(pair.prefill, text)
    complete(pair.prefill.url, text)
    pair.daemon.settle()
    pair.daemon.corrupt()
    before = counters(pair.decode)
    wrong = complete(router, text)
    assert counted(pair.decode, before).connector >= PROMPT_TOKENS - BLOCK - 1
    assert wrong != right, "wrong bytes did not change the answer"

    assert pair.prefill.complaints() == [] and pair.decode.complaints() == []

    # The hand-off takes effect: the decode engine waits for the prefill engine's save. Without that this is a race.
    within = sum(tokens <= BLOCK + 1 for tokens in computed)
    assert within == PROMPTS, f"{within} of {PROMPTS} prompts; computed: {computed}"
    # It does not wait where vLLM's hashes of the two engines differ. That none of these did says that they were equal.
    assert pair.decode.metric(IGNORED) == ignored
    assert pair.decode.metric(AWAITED) - awaited == PROMPTS + 1


def test_a_prompt_that_is_another_one_at_the_decode_engine_is_not_waited_for(pair: Pair) -> None:
    text, before, ignored = prompt("other"), counters(pair.decode), pair.decode.metric(IGNORED)
    leg = {"model": "tiny", "prompt": text, "max_tokens": 1, "cache_salt": "of the prefill engine"}
    leg |= {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    status, answered, _ = ask(pair.prefill.url.removeprefix("http://"), COMPLETIONS, leg, JSON)
    assert status == 200
    handed_over = answered["kv_transfer_params"]
    assert handed_over["kvlane"]["tokens"] == PROMPT_TOKENS // BLOCK * BLOCK
    assert len(handed_over["kvlane"]["last"]) == 32

    leg |= {"cache_salt": "of the decode engine", "kv_transfer_params": handed_over}
    assert ask(pair.decode.url.removeprefix("http://"), COMPLETIONS, leg, JSON)[0] == 200
    assert counted(pair.decode, before).computed == PROMPT_TOKENS
    wait_for("it is counted", lambda: pair.decode.metric(IGNORED) - ignored == 1)
    assert "start both with the same weights" in pair.decode.log.read_text(errors="replace")
