"""Engines served over HTTP share one daemon, and go on whatever happens to it."""

from __future__ import annotations

import concurrent.futures
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import BLOCK, Daemon, ServedEngine, wait_for
from tiny_model import build_tiny_model

PROMPT_TOKENS = 300
HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
BLOCKS = (PROMPT_TOKENS + 15) // BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("daemon"))
    yield made
    made.close()


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(PROMPT_TOKENS)]


def saved(daemon: Daemon, blocks: int) -> None:
    wait_for(f"{blocks} blocks in the pool", lambda: daemon.block_count() >= blocks)


@pytest.fixture
def serve(model: Path, daemon: Daemon, tmp_path: Path) -> Iterator[Callable[..., list[ServedEngine]]]:
    """Starts engines at the same time and ends them."""
    running: list[ServedEngine] = []

    def start(count: int, *arguments: str) -> list[ServedEngine]:
        started = [
            ServedEngine(model, daemon.address, tmp_path / f"engine-{len(running) + number}.log", *arguments)
            for number in range(count)
        ]
        running.extend(started)
        for engine in started:
            engine.wait()
        return started

    yield start
    for engine in running:
        engine.close()


def test_two_engines_share_a_daemon_that_is_stopped_killed_and_restarted(
    serve: Callable[..., list[ServedEngine]], daemon: Daemon
) -> None:
    first, second = serve(2)
    wait_for("both engines' workers", lambda: len(daemon.sessions("worker")) == 2)

    # What one computed the other loads.
    cold = first.complete(prompt(1))
    assert first.metric("vllm:external_prefix_cache_hits") == 0
    saved(daemon, BLOCKS)
    assert second.complete(prompt(1)) == cold
    assert second.metric("vllm:external_prefix_cache_hits") == HIT_TOKENS

    # Both at once, from the pool.
    def both_hit() -> bool:
        # A lookup that a busy machine leaves unanswered for 250 ms is a miss.
        first.reset_prefix_cache()
        second.reset_prefix_cache()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda engine: engine.complete(prompt(1)), [first, second] * 2))
        assert answers == [cold] * 4
        # The second already had a hit.
        return (
            first.metric("vllm:external_prefix_cache_hits") >= HIT_TOKENS
            and second.metric("vllm:external_prefix_cache_hits") >= 2 * HIT_TOKENS
        )

    wait_for("hits of both engines", both_hit)

    # A stopped daemon: nobody waits for it.
    first.reset_prefix_cache()
    daemon.signal(signal.SIGSTOP)
    assert first.complete(prompt(1)) == cold
    other = first.complete(prompt(2))
    daemon.signal(signal.SIGCONT)

    # Killed while requests run, and restarted: hits come back without anybody's help.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        first.reset_prefix_cache()
        running = [
            pool.submit(engine.complete, prompt(1), 48) for engine in (first, second) for _ in range(2)
        ]
        daemon.restart()
        assert [future.result()[:16] for future in running] == [cold] * 4
    wait_for("both engines' workers", lambda: len(daemon.sessions("worker")) == 2)

    def first_saves() -> bool:
        # An engine's scheduler looks for a daemon as it steps: an idle one hears of none.
        assert first.complete(prompt(2)) == other
        return daemon.block_count() >= BLOCKS

    wait_for(f"{BLOCKS} blocks in the new daemon's pool", first_saves)
    before = second.metric("vllm:external_prefix_cache_hits")

    def second_hits() -> bool:
        second.reset_prefix_cache()
        assert second.complete(prompt(2)) == other
        return second.metric("vllm:external_prefix_cache_hits") >= before + HIT_TOKENS

    wait_for("hits of the new daemon", second_hits)

    # An engine is killed; its leases go and the other one goes on.
    first.kill()
    wait_for("the dead engine's sessions to go", lambda: len(daemon.sessions("worker")) == 1)
    assert second.complete(prompt(2)) == other
    # The engine does not wait until the daemon has taken a lease back: its answer may come first.
    wait_for("the leases to go", lambda: daemon.lease_count() == 0)
    assert first.complaints() == [] and second.complaints() == []
