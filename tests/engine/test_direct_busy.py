"""Two engines that hand over directly, without a daemon, on a host whose processors are busy. Part of `make soak`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from direct_served import Pair, served_pair
from pairs import PROMPT_TOKENS, alone, complete, prompt
from test_route_direct import routed

from kvlane.connector.prefill_rate import SECONDS_MIN, TIMES, UNKNOWN_RATE

PROMPTS = 14
BUSY = 16
# Until an end is noticed: a step of the decode engine, which shares two processors with 16 others.
MARGIN_SECONDS = 3.0
pytestmark = pytest.mark.soak


def metric(url: str, name: str) -> float:
    """The sum of a counter of kvlane's, 0 before it counts."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvlane_{name}_total"))


@contextmanager
def busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


@pytest.fixture(scope="module", params=["auto", "nobind"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(f"busy-{request.param}")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": request.param, "XDG_RUNTIME_DIR": str(folder)}
    with served_pair(folder, environment) as pair:
        yield pair


def test_no_prompt_waits_longer_than_its_budget_beside_sixteen_busy_loops(pair: Pair, tmp_path: Path) -> None:
    """With both workers on one processor, hand-offs stalled for 30 s each: 9 of 14 were computed after that."""
    texts = [prompt(f"busy {number}") for number in range(PROMPTS)]
    waited, times, answers = [], [], []
    with routed(pair, "both at once", tmp_path) as router, busy_loops():
        for text in texts:
            before, begun = metric(pair.decode.url, "direct_wait_seconds"), time.monotonic()
            answers.append(complete(f"http://{router.address}", text))
            times.append(time.monotonic() - begun)
            waited.append(metric(pair.decode.url, "direct_wait_seconds") - before)
        fallbacks = metric(pair.decode.url, "direct_fallbacks")
        assert metric(pair.decode.url, "direct_landings") == PROMPTS
        assert not metric(pair.decode.url, "unavailable")
    print(f"first tokens and answers took {[round(each, 2) for each in times]} s")
    print(f"hand-offs took {[round(each, 2) for each in waited]} s, {fallbacks} fell back")
    # The decode engine assumes a low rate until it has computed a prompt.
    budget = max(SECONDS_MIN, TIMES * PROMPT_TOKENS / UNKNOWN_RATE)
    assert max(waited) < budget + MARGIN_SECONDS, (budget, waited)
    assert answers == [alone(pair.prefill, text) for text in texts]


def test_the_logs_say_nothing_of_a_daemon_and_of_peers_that_time_out(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        log = engine.log.read_text()
        assert "no kvlane daemon answers" not in log and "uses no daemon" in log
        assert not re.findall(r".*timed out.*", log), re.findall(r".*timed out.*", log)[:3]
        assert "PeerId" not in log
