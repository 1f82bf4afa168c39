"""Engines that share a pool: each of them gets requests for what the pool holds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import until
from routed import COMPLETIONS, Router, ask, routed, wanted

from kvlane.testing.fake_engine import FakeEngine

RUN, SPACE = "1a" * 16, "2b" * 16
# 4,025 tokens of 4 bytes, as in the report.
PROMPT = "Of ships and harbours, and of the sea. " * 413
SLOW = ["--itl-ms", "50"]


def nodes(router: Router) -> list[dict[str, Any]]:
    return ask(router.admin, "/nodes")[1]["nodes"]


def wait_for_metrics(router: Router) -> None:
    until(
        "its engines' metrics are read",
        lambda: all(node["cache_used_percent"] is not None for node in nodes(router)),
    )


def pools(router: Router) -> list[str | None]:
    named = [node["pool"] for node in nodes(router)]
    return [each and each["name"] for each in named]


def asked_for(engines: Sequence[FakeEngine]) -> list[int]:
    return [len(engine.log()) for engine in engines]


def one_then_six_at_once(router: Router, engines: Sequence[FakeEngine]) -> list[int]:
    """Number of the six requests that each engine got."""
    assert ask(router.address, COMPLETIONS, wanted(PROMPT, max_tokens=1))[0] == 200
    before = asked_for(engines)
    body = wanted(PROMPT, max_tokens=40, stream=True)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(router.address, COMPLETIONS, body)[0]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 6
    return sorted(now - then for now, then in zip(asked_for(engines), before, strict=True))


def test_six_requests_for_a_prompt_that_the_shared_pool_holds_go_to_both_engines() -> None:
    """Two engines on one daemon got one prompt of 4,025 tokens, then six requests with it at once. All six went to the
    first engine; the second one stayed idle."""
    named = [*SLOW, "--pool", f"{RUN}/{SPACE}"]
    with routed(named, named) as (router, engines):
        wait_for_metrics(router)
        fewest, _ = one_then_six_at_once(router, engines)
        assert fewest >= 2
        assert pools(router) == [f"{RUN}/{SPACE}"] * 2
        shared = nodes(router)[0]["pool"]
        assert 0 < shared["load_share"] < 1 and shared["is_learned"] is False


def test_engines_of_different_daemons_or_without_one_share_nothing() -> None:
    """The control: the router does not know of a pool."""
    other = [*SLOW, "--pool", f"{'3c' * 16}/{SPACE}"]
    with routed([*SLOW, "--pool", f"{RUN}/{SPACE}"], other) as (router, engines):
        wait_for_metrics(router)
        assert None not in pools(router)
        assert one_then_six_at_once(router, engines) == [0, 6]
    with routed(SLOW, SLOW) as (router, engines):
        assert pools(router) == [None, None]
        assert one_then_six_at_once(router, engines) == [0, 6]


def test_the_file_names_the_pool_of_engines_with_other_connectors(tmp_path: Path) -> None:
    """The configured pool takes precedence over the engine's metrics."""
    with FakeEngine(*SLOW) as first, FakeEngine(*SLOW, "--pool", f"{RUN}/{SPACE}") as second:
        file = tmp_path / "route.toml"
        tables = [
            f'[[node]]\nurl = "{each.url}"\nrole = "worker"\npool = "store-1"\n' for each in (first, second)
        ]
        file.write_text("".join(tables))
        with Router("--config", str(file), nodes=2) as router:
            wait_for_metrics(router)
            assert pools(router) == ["store-1"] * 2
            assert one_then_six_at_once(router, [first, second])[0] >= 2
