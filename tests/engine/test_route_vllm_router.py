"""kvlane's engines that hand over directly behind vllm-router as it is: a pair, told that it is NixlConnector's, and
engines that register by P2P NCCL's pings. Part of `make soak`: scripts/vllm_router_pair.py installs the router."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import p2p_engines
import pytest
from direct_served import Pair, served_pair
from pairs import alone, complete, counted, counters, prompt
from ports import free_port
from served import wait_for

from kvlane.demo.pd.asking import AskFailed

PROMPTS = 20
START_SECONDS = 60.0
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with served_pair(tmp_path_factory.mktemp("direct")) as pair:
        yield pair


@contextmanager
def vllm_router(log: Path, *arguments: str) -> Iterator[str]:
    """Its URL, once it answers."""
    program = os.environ.get("KVLANE_VLLM_ROUTER")
    assert program, "name vllm-router's program: KVLANE_VLLM_ROUTER=.../bin/vllm-router"
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--vllm-pd-disaggregation", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not answers(f"{url}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:  # its end would come first; there is no event for its being up
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def test_prompts_land_and_answers_are_those_of_one_engine(pair: Pair, tmp_path: Path) -> None:
    answered = []
    engines = ("--kv-connector", "nixl", "--prefill", pair.prefill.url, "--decode", pair.decode.url)
    with vllm_router(tmp_path / "router.log", *engines) as url:
        for number in range(PROMPTS):
            text = prompt(f"behind vllm-router {number}")
            answered.append(alone(pair.prefill, text))
            before = counters(pair.decode)
            assert complete(url, text) == answered[-1]
            grown = counted(pair.decode, before)
            assert grown.computed == 1, grown
    assert len({tuple(answer) for answer in answered}) == PROMPTS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (3, 1)])
def test_engines_that_ping_as_p2p_nccls_serve(prefill: int, decode: int, tmp_path: Path) -> None:
    with p2p_engines.engines(tmp_path, prefill, decode) as engines:
        address = f"127.0.0.1:{engines.ping_port}"
        with vllm_router(tmp_path / "router.log", "--vllm-discovery-address", address) as url:
            wait_for("all engines to register", lambda: is_served(url))
            p2p_engines.check_prompts(engines, url, "vllm-router")


def is_served(url: str) -> bool:
    """It answers requests of clients once it knows engines of both kinds."""
    try:
        complete(url, prompt("is it there"))
    except AskFailed:
        return False
    return True
