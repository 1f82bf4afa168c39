"""bench/builds/two_builds.py: what it makes of the figures of two builds, and the results that are committed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "builds"
LOOKUP, RATE = "lookup, two cores: p50", "copy, 2 MiB: load"
UNITS = {LOOKUP: "us", RATE: "GB/s"}


@pytest.fixture
def turns() -> Any:
    spec = importlib.util.spec_from_file_location("two_builds", FOLDER / "two_builds.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row(turns: Any, what: str, before: float, after: float, again: float) -> Any:
    values = {"before": [before] * 3, "after": [after] * 3, "before again": [again] * 3}
    (found,) = turns.compare({what: values}, UNITS)
    return found


@pytest.mark.parametrize(
    ("what", "after", "holds"),
    [
        (LOOKUP, 102.0, True),
        (LOOKUP, 104.0, False),
        (LOOKUP, 50.0, True),
        (RATE, 96.0, False),
        (RATE, 150.0, True),
    ],
)
def test_a_slower_build_is_found_and_a_faster_one_is_not_blamed(
    turns: Any, what: str, after: float, holds: bool
) -> None:
    assert row(turns, what, 100.0, after, 100.0).holds is holds


def test_what_the_old_build_differs_from_itself_by_is_not_held_against_the_new_one(turns: Any) -> None:
    restless = row(turns, LOOKUP, 100.0, 108.0, 110.0)
    assert restless.spread == pytest.approx(0.1) and restless.holds
    assert not row(turns, LOOKUP, 100.0, 108.0, 101.0).holds


def test_each_run_of_a_round_comes_first_second_and_last_equally_often(turns: Any) -> None:
    orders = [turns.in_order(number) for number in range(6)]
    assert all(sorted(order) == sorted(turns.RUNS) for order in orders)
    for place in range(3):
        assert set(Counter(order[place] for order in orders).values()) == {2}


def test_committed_results_say_what_their_values_say(turns: Any) -> None:
    results = sorted((FOLDER / "results").glob("*.json"))
    assert results
    for path in results:
        result = json.loads(path.read_text())
        rows = turns.compare(result["values"], result["units"])
        assert [[row.what, row.worse, row.spread, row.holds] for row in rows] == [
            [each["what"], each["worse"], each["spread"], each["holds"]] for each in result["compared"]
        ]
