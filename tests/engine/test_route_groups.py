"""`kvlane route` before a real engine whose model has windows beside full attention: what the router knows by events is
what the engine finds."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import until
from routed import COMPLETIONS, Router, ask
from served import Daemon, ServedEngine

from kvlane.demo.model import build_family


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Where an engine publishes, and where a router listens. vLLM binds a port of all addresses, or a file."""
    import zmq

    context: Any = zmq.Context()
    engines, routers = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    file = f"ipc://{tmp_path}/events"
    engines.connect(file)
    port = routers.bind_to_random_port("tcp://127.0.0.1")
    forward = threading.Thread(target=_forward, args=(engines, routers))
    forward.start()
    yield file, f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)
    forward.join()


def _forward(engines: Any, routers: Any) -> None:
    import zmq

    # The end of their context.
    with contextlib.suppress(zmq.error.ContextTerminated, zmq.error.ZMQError):
        zmq.proxy(engines, routers)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("llama4", marks=pytest.mark.soak)])
def test_the_router_expects_the_hits_that_the_engine_has(
    family: str, tmp_path: Path, daemon: Daemon, published: tuple[str, str]
) -> None:
    model = build_family(tmp_path / "model", family)
    own, forwarded = published
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": own}
    flags = ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
    engine = ServedEngine(model, daemon.address, tmp_path / "engine.log", *flags)
    try:
        engine.wait()
        source = ["--kv-events", f"{engine.url}={forwarded}", "--tokenizer", f"tiny={model}"]
        with Router("--worker", engine.url, *source, nodes=1) as router:

            def node() -> dict[str, Any]:
                return ask(router.admin, "/nodes")[1]["nodes"][0]

            def hits(prompt: list[int]) -> tuple[int, int]:
                """What the router expects, and what the engine has."""
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
                json_body = {"Content-Type": "application/json"}
                status, answer, _ = ask(router.address, COMPLETIONS, body, headers=json_body)
                assert status == 200, answer
                decided = ask(router.admin, "/decisions?limit=1")[1]["decisions"][0]
                return decided["cached_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

            # The router did not give these to the engine, so it knows them by events alone.
            prompts = [list(range(first, first + 400)) for first in (100, 600, 1100)]
            for asked in prompts:
                engine.complete(asked, 1)
            daemon.settle()
            # A step tells of what was stored before it.
            engine.complete([5, 6, 7], 1)
            until("all is told", lambda: node()["blocks_stored"] == 2 * 3 * 12)
            until("it is exact", lambda: node()["prefixes"] == "exact")
            again, longer, shorter = prompts
            assert hits(again) == (384, 384)
            assert hits([*longer, *range(1600, 1800)]) == (384, 384)
            # The engine has no window at the end of such a beginning; its daemon has.
            assert hits([*shorter[:230], *range(1800, 1950)]) == (224, 224)
            assert hits(list(range(1600, 1900))) == (0, 0)
    finally:
        engine.close()
