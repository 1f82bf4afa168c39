"""bench/serve/agree.py: what it makes of the figures of two tools, and the result that is committed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "serve"


@pytest.fixture
def agree() -> Any:
    spec = importlib.util.spec_from_file_location("serve_agree", FOLDER / "agree.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(agree: Any, kvlane: list[float], vllm: list[float]) -> Any:
    """Values in which every figure is the same."""
    names = [f"{time} {part}" for time in agree.TIMES for part in agree.PARTS]
    by_tool = zip(agree.TOOLS, (kvlane, vllm), strict=True)
    return {tool: {phase: dict.fromkeys(names, each) for phase in agree.PHASES} for tool, each in by_tool}


@pytest.mark.parametrize(
    ("kvlane", "vllm", "agrees"),
    [
        ([10.0, 11.0, 12.0], [12.5, 12.5, 12.5], True),
        ([12.5, 12.5, 12.5], [10.0, 11.0, 12.0], True),
        ([10.0, 11.0, 12.0], [14.0, 14.0, 14.5], False),
        ([11.0, 11.0, 11.0], [11.0, 11.0, 11.0], True),
    ],
)
def test_medians_agree_within_the_larger_spread(
    agree: Any, kvlane: list[float], vllm: list[float], agrees: bool
) -> None:
    rows = agree.compare(measured(agree, kvlane, vllm))
    assert len(rows) == len(agree.PHASES) * len(agree.TIMES) * len(agree.PARTS)
    assert {row["agrees"] for row in rows} == {agrees}
    assert max(map(len, agree.table(rows).splitlines())) <= 100


def test_the_committed_results_are_of_cold_and_warm_rounds(agree: Any) -> None:
    results = sorted((FOLDER / "results").glob("*.json"))
    assert results
    for path in results:
        result = json.loads(path.read_text())
        assert agree.compare(result["ms"]) == result["compared"]
        for phases in result["tokens_from_kvlane"].values():
            assert all(tokens == 0 for tokens in phases["cold"]) and all(
                tokens > 0 for tokens in phases["warm"]
            )
