"""A pair of kvlane's engines that hand over directly, behind `kvlane route`, with no daemon. Part of `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from pairs import SPLIT, alone, complete, counted, counters, prompt
from routed import Router, ask
from served import ServedEngine
from tiny_model import build_tiny_model

PROMPTS = 20
pytestmark = pytest.mark.soak


@dataclass(frozen=True)
class Pair:
    """All processes of the test."""

    prefill: ServedEngine
    decode: ServedEngine
    router: Router


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("direct")
    model = build_tiny_model(folder / "tiny")
    transfer = {
        "kv_connector": "KVLaneConnector",
        "kv_connector_module_path": "kvlane.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvlane.address": f"unix:{folder}/nobody.sock", "kvlane.direct": "on"},
    }
    engines = [
        ServedEngine(model, "", folder / f"{name}.log", transfer=transfer) for name in ("prefill", "decode")
    ]
    try:
        for each in engines:
            each.wait()
        prefill, decode = engines
        with Router("--prefill", prefill.url, "--decode", decode.url, nodes=2) as router:
            yield Pair(prefill, decode, router)
    finally:
        for each in engines:
            each.close()


def test_the_decode_engine_computes_one_token_and_answers_are_those_of_one_engine(pair: Pair) -> None:
    answers = []
    for number in range(PROMPTS):
        text = prompt(f"direct {number}")
        answers.append(alone(pair.prefill, text))
        before = counters(pair.decode)
        assert complete(f"http://{pair.router.address}", text) == answers[-1]
        grown = counted(pair.decode, before)
        assert grown.computed == 1, grown
    assert len({tuple(answer) for answer in answers}) == PROMPTS
    _, page, _ = ask(pair.router.admin, f"/decisions?limit={PROMPTS}")
    assert [each["why"] for each in page["decisions"]] == [SPLIT] * PROMPTS
