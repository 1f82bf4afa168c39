"""Figures, tables and files that every benchmark writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvlane.bench import report


def test_summary_of_known_values() -> None:
    assert report.summary(range(1, 101)) == {"mean": 50.5, "p50": 50, "p99": 99}
    assert report.summary([7.0]) == {"mean": 7.0, "p50": 7.0, "p99": 7.0}
    assert all(math.isnan(value) for value in report.summary([]).values())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_values_in_order(values: list[float]) -> None:
    found = report.summary(values)
    assert found["p50"] in values and found["p99"] in values
    assert min(values) <= found["p50"] <= found["p99"] <= max(values)


def test_table_aligns() -> None:
    lines = report.table(["name", "ms"], [["a", 1.0], ["longer", 12345.6], ["none", math.nan], ["ok", True]])
    assert lines.splitlines() == [
        "name       ms",
        "-------------",
        "a           1",
        "longer  12346",
        "none        -",
        "ok        yes",
    ]


def test_json_has_no_nan(tmp_path: Path) -> None:
    report.write_json(tmp_path / "new" / "a.json", {"a": [math.nan, 1.5], "b": {"c": math.inf}})
    assert json.loads((tmp_path / "new" / "a.json").read_text()) == {"a": [None, 1.5], "b": {"c": None}}


def test_cpu_watch_knows_our_children_from_others() -> None:
    burn = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    with report.CpuWatch() as watch:
        subprocess.run([sys.executable, "-c", burn], check=True)
    facts = watch.facts
    assert facts["own_cores"] * facts["seconds"] >= 0.45
    assert facts["other_cores"] >= 0.0


def test_machine_facts_name_the_machine() -> None:
    facts = report.machine_facts()
    assert facts["cpu"] and facts["cores"] >= 1 and facts["memory"].endswith("kB")
