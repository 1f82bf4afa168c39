"""A pair with vLLM's own NixlConnector behind `kvlane route`, without kvlane's connector or daemon.
scripts/nixl_pair.py makes NIXL importable and runs it, which is a part of `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pairs import SPLIT, alone, complete, counted, counters, prompt
from ports import free_port
from routed import Router, ask
from served import BLOCK, ServedEngine
from tiny_model import build_tiny_model

PROMPTS = 20
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
pytestmark = pytest.mark.soak


@dataclass(frozen=True)
class Pair:
    """All processes of the test."""

    prefill: ServedEngine
    decode: ServedEngine
    router: Router


def engine(model: Path, log: Path) -> ServedEngine:
    # NIXL's agents exchange metadata over a port of each engine. The bytes go by UCX, here over TCP and shm.
    own = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,shm,self"}
    return ServedEngine(model, "", log, transfer=TRANSFER, environment=own)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    model = build_tiny_model(folder / "tiny")
    engines = [engine(model, folder / f"{name}.log") for name in ("prefill", "decode")]
    try:
        for each in engines:
            each.wait()
        prefill, decode = engines
        with Router("--prefill", prefill.url, "--decode", decode.url, nodes=2) as router:
            yield Pair(prefill, decode, router)
    finally:
        for each in engines:
            each.close()


def test_nixl_hands_over_and_answers_are_those_of_one_engine(pair: Pair) -> None:
    answers = []
    for number in range(PROMPTS):
        text = prompt(f"nixl {number}")
        answers.append(alone(pair.prefill, text))
        before = counters(pair.decode)
        assert complete(f"http://{pair.router.address}", text) == answers[-1]
        grown = counted(pair.decode, before)
        assert grown.computed <= BLOCK + 1, grown
    assert len({tuple(answer) for answer in answers}) == PROMPTS
    _, page, _ = ask(pair.router.admin, f"/decisions?limit={PROMPTS}")
    assert [each["why"] for each in page["decisions"]] == [SPLIT] * PROMPTS
    assert pair.prefill.complaints() == [] and pair.decode.complaints() == []
