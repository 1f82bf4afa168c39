"""Engines served over HTTP share one daemon, and go on whatever happens to it."""

from __future__ import annotations

import concurrent.futures
import random
import signal

from served import BLOCK, ServedEngine, wait_for
from shared_pair import SharedPair

HITS = "vllm:external_prefix_cache_hits"
PROMPT_TOKENS = 300
HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
BLOCKS = (PROMPT_TOKENS + 15) // BLOCK


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2000) for _ in range(PROMPT_TOKENS)]


def test_two_engines_share_a_daemon_that_is_stopped_killed_and_restarted(shared_pair: SharedPair) -> None:
    """Kills an engine of the pair, so whoever asks for it afterwards gets another one."""
    served = shared_pair.whole()
    daemon, (first, second) = served.daemon, served.engines
    had, hits_before = daemon.block_count(), {each: each.metric(HITS) for each in (first, second)}

    def hits(engine: ServedEngine) -> float:
        return engine.metric(HITS) - hits_before[engine]

    # One engine loads what the other computed.
    cold = first.complete(prompt(1))
    assert hits(first) == 0
    wait_for(f"{BLOCKS} more blocks in the pool", lambda: daemon.block_count() >= had + BLOCKS)
    assert second.complete(prompt(1)) == cold
    assert hits(second) == HIT_TOKENS

    # Both at once, from the pool.
    def both_hit() -> bool:
        # A lookup that a busy machine leaves unanswered for too long is a miss.
        first.reset_prefix_cache()
        second.reset_prefix_cache()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda engine: engine.complete(prompt(1)), [first, second] * 2))
        assert answers == [cold] * 4
        # The second already had a hit.
        return hits(first) >= HIT_TOKENS and hits(second) >= 2 * HIT_TOKENS

    wait_for("hits of both engines", both_hit)

    # A stopped daemon: a lookup waits for it until its timeout, and the engine answers.
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
    before = hits(second)

    def second_hits() -> bool:
        second.reset_prefix_cache()
        assert second.complete(prompt(2)) == other
        return hits(second) >= before + HIT_TOKENS

    wait_for("hits of the new daemon", second_hits)

    # An engine is killed; its leases go and the other one goes on.
    first.kill()
    wait_for("the dead engine's sessions to go", lambda: len(daemon.sessions("worker")) == 1)
    assert second.complete(prompt(2)) == other
    # The engine does not wait until the daemon has taken a lease back: its answer may come first.
    wait_for("the leases to go", lambda: daemon.lease_count() == 0)
    assert first.complaints() == [] and second.complaints() == []
