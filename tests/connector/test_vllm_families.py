"""Small models of families whose layers do not all keep the same of a token, each in a real engine. Forty answers are
those of the engine alone: warm, in an engine that was started again, and from the SSD. Each kind of layer counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import InProcessEngine, Make, prompt
from processes import until
from stores import DaemonStore, FakeStore

from kvlane.connector import capabilities
from kvlane.demo.families import FAMILIES
from kvlane.demo.model import build_family

PROMPTS, TOKENS = 40, 12

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not capabilities.reports_failed_requests(), reason="this vLLM cannot be told of a failed load"
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp(family) / "model", family)


def options(family: str) -> dict[str, Any]:
    """The flags of the family, as vllm.LLM takes them."""
    flags = FAMILIES[family].flags.split()
    pairs = zip(flags[::2], flags[1::2], strict=True)
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}
    named.pop("block_size", None)
    return {name: int(value) if value.isdigit() else value for name, value in named.items()} | {
        "enable_prefix_caching": True
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonStore]:
    made = DaemonStore(tmp_path, "--ssd", f"{tmp_path / 'blocks'}:1gib")
    yield made
    made.close()


def drawn() -> list[list[int]]:
    """Prompts of all lengths up to a tenth of the pool's blocks, some of which begin as another one does."""
    source, made = random.Random(5), []
    for number in range(PROMPTS):
        begin = source.choice(made)[: source.randint(30, 300)] if made and source.random() < 0.3 else []
        made.append(begin + prompt(1000 + number, source.randint(33, 400)))
    return made


def ask_all(engine: InProcessEngine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The answers, one prompt after the other, and how many prompts had tokens in a cache."""
    found, hits = [], 0
    for each in prompts:
        answer, cached = engine.generate(each, TOKENS)
        found.append(answer)
        hits += cached > 0
    return found, hits


def test_forty_answers_are_those_of_an_engine_alone(
    family: str, path: Path, make: Make, store: DaemonStore
) -> None:
    prompts, settings = drawn(), options(family)
    engine = make(path, **settings)
    alone, _ = ask_all(engine, prompts)
    assert len({tuple(answer) for answer in alone}) >= PROMPTS - 2
    for stage in ("warm", "engine restarted", "daemon restarted"):
        store.settle()
        if stage == "daemon restarted":
            until("all is on the SSD", store.is_all_on_ssd)
            store.restart()
        if stage != "warm":
            engine = make(path, **settings)
        engine.forget()
        loaded = engine.counted["load_blocks"]
        answers, hits = ask_all(engine, prompts)
        wrong = [number for number, pair in enumerate(zip(answers, alone, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"{stage}: answers {wrong} of {PROMPTS}"
        assert hits >= PROMPTS * 3 // 4, stage
        assert engine.counted["load_blocks"] > loaded
        assert engine.errors() == 0


def test_each_group_counts(family: str, path: Path, make_on_fake: Make, fake: FakeStore) -> None:
    """The control: with zeros for what one group keeps, and the rest right, the answer is another one."""
    engine = make_on_fake(path, policy="recompute", **options(family))
    # A hit ends inside a window and a chunk.
    asked = prompt(7, 430)
    cold, _ = engine.generate(asked, TOKENS)
    engine.forget()
    assert engine.generate(asked, TOKENS)[0] == cold
    pages, names = fake.core.pages[fake.core.boot], engine.connector._scheduler._shape.namespaces
    assert len(set(names)) > 1
    kept = dict(pages)
    for name in names:
        for key in [key for key in fake.core.blocks if key[0] == name]:
            for page in fake.core.blocks[key].values():
                pages[page] = bytes(len(pages[page]))
        engine.forget()
        other, cached = engine.generate(asked, TOKENS)
        assert cached > 0
        assert other != cold, f"group {names.index(name)} does not count"
        pages.clear()
        pages.update(kept)
