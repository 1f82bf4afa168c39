"""A pair behind `kvlane route` of which one engine still has the wheel of the release before. The daemon and the router
are today's: they are upgraded first. `make soak` runs it where somebody gives that wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import alone, complete, prompt
from routed import Router
from served import Daemon, ServedEngine, wait_for
from tiny_model import build_tiny_model

PROMPTS = 10
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What makes an engine's processes import that wheel."""
    wheel = os.environ.get("KVLANE_FORMER_WHEEL")
    assert wheel, "name the wheel of the release before: KVLANE_FORMER_WHEEL=kvlane-0.1.0-....whl"
    folder = tmp_path_factory.mktemp("former")
    zipfile.ZipFile(wheel).extractall(folder)
    environment = {"PYTHONPATH": str(folder)}
    shown = subprocess.run(
        [sys.executable, "-c", "import kvlane._core; print(kvlane._core.__file__)"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(shown.stdout.strip()).is_relative_to(folder), shown.stdout
    return environment


@pytest.fixture(scope="module", params=["off", "on"])
def engines(
    request: pytest.FixtureRequest, former: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServedEngine, ServedEngine]]:
    """One of the release before, and one of today, without direct hand-offs and with them."""
    folder = tmp_path_factory.mktemp("pd")
    model = build_tiny_model(folder / "tiny")
    daemon = Daemon(folder)
    started = [
        ServedEngine(model, daemon.address, folder / "former.log", environment=former),
        ServedEngine(
            model,
            daemon.address,
            folder / "today.log",
            transfer={
                "kv_connector": "KVLaneConnector",
                "kv_connector_module_path": "kvlane.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "kvlane.address": daemon.address,
                    "kvlane.direct": request.param,
                },
            },
        ),
    ]
    try:
        for engine in started:
            engine.wait()
        wait_for("both engines' workers", lambda: len(daemon.sessions("worker")) == 2)
        yield started[0], started[1]
    finally:
        for engine in started:
            engine.close()
        daemon.close()


@pytest.mark.parametrize("former_is", ["prefill", "decode"])
def test_answers_are_right_with_one_side_of_the_release_before(
    former_is: str, engines: tuple[ServedEngine, ServedEngine]
) -> None:
    """How much the decode engine computes is not asked: a hand-over takes both sides."""
    old, new = engines
    prefill, decode = (old, new) if former_is == "prefill" else (new, old)
    with Router("--prefill", prefill.url, "--decode", decode.url, nodes=2) as router:
        answers = []
        for number in range(PROMPTS):
            text = prompt(f"{former_is} {number}")
            answers.append(alone(prefill, text))
            assert complete(f"http://{router.address}", text) == answers[-1]
        assert len({tuple(answer) for answer in answers}) == PROMPTS
    assert old.complaints() == [] and new.complaints() == []
