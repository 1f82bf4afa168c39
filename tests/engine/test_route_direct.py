"""A pair of kvlane's engines that hand over directly, behind `kvlane route`, with no daemon. Part of `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from direct_served import Pair, served_pair
from pairs import SPLIT, alone, complete, counted, counters, prompt
from routed import Router, ask

PROMPTS = 20
pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with served_pair(tmp_path_factory.mktemp("direct")) as pair:
        yield pair


@contextmanager
def routed(pair: Pair, way: str, folder: Path) -> Iterator[Router]:
    flags = ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
    if way == "both at once":
        config = folder / "route.toml"
        config.write_text(
            f'[[node]]\nurl = "{pair.prefill.url}"\nrole = "prefill"\nconnector = "direct"\n'
            f'handoff = "{pair.handoff}"\n'
            f'[[node]]\nurl = "{pair.decode.url}"\nrole = "decode"\nconnector = "direct"\n'
        )
        flags = ["--config", str(config)]
    with Router(*flags, nodes=2) as router:
        yield router


@pytest.mark.parametrize("way", ["one after the other", "both at once"])
def test_the_decode_engine_computes_one_token_and_answers_are_those_of_one_engine(
    pair: Pair, way: str, tmp_path: Path
) -> None:
    answers = []
    with routed(pair, way, tmp_path) as router:
        for number in range(PROMPTS):
            text = prompt(f"{way} {number}")
            answers.append(alone(pair.prefill, text))
            before = counters(pair.decode)
            assert complete(f"http://{router.address}", text) == answers[-1]
            grown = counted(pair.decode, before)
            assert grown.computed == 1, grown
        assert len({tuple(answer) for answer in answers}) == PROMPTS
        _, page, _ = ask(router.admin, f"/decisions?limit={PROMPTS}")
        assert [each["why"] for each in page["decisions"]] == [SPLIT] * PROMPTS
