"""Figures, tables and files that every benchmark writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvlane.bench import fabric, figures, report


def test_summary_of_known_values() -> None:
    assert report.summary(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert set(report.summary([7.0]).values()) == {7.0}
    assert all(math.isnan(value) for value in report.summary([]).values())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_are_values_in_order(values: list[float]) -> None:
    found = report.summary(values)
    ordered = [found[part] for part in ("p50", "p90", "p95", "p99")]
    assert set(ordered) <= set(values) and ordered == sorted(ordered)
    assert min(values) <= ordered[0] and ordered[-1] <= max(values)


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


@given(
    st.lists(st.text("ab ", min_size=1, max_size=30), min_size=1, max_size=14),
    st.integers(1, 5),
    st.text("abc ", max_size=300),
)
def test_tables_fit_their_width_and_lose_nothing(headers: list[str], rows: int, first: str) -> None:
    cells = [[first, *(f"{row}-{column}" for column in range(1, len(headers)))] for row in range(rows)]
    table = report.table(headers, cells, width=60)
    assert all(len(line) <= 60 for line in table.splitlines())
    for row in range(rows):
        assert all(f"{row}-{column}" in table.split() for column in range(1, len(headers)))
    # Each part of a table has the rows' names anew.
    letters = table.replace("-", "").replace("\n", "").replace(" ", "")
    parts = table.count("\n\n") + 1
    assert letters.count("c") == parts * rows * first.count("c")


def test_what_is_committed_fits_a_terminal() -> None:
    """Tables of `kvlane bench` with a dozen systems or long names ran over the edge of a terminal and could not be
    read: 140 columns for the fabric, 109 for GPUs, more than 150 for `kvlane bench serve`."""
    root = Path(__file__).resolve().parents[2]
    results = [json.loads(path.read_text()) for path in sorted(root.glob("bench/*/results/**/*.json"))]
    tables = []
    for result in results:
        if not isinstance(result, dict):
            continue
        known = [
            {key: each[key] for key in ("what", "value", "unit", "at_most", "at_least")}
            for each in result.get("figures", [])
        ]
        shown = [figures.Figure(**{**each, "value": each["value"] or math.nan}) for each in known]
        if shown:
            tables.append(figures.table(shown))
        if result.get("benchmark") == "fabric":
            tables.append(fabric.table(result["results"]))
    assert len(tables) > 10
    assert max(len(line) for table in tables for line in table.splitlines()) <= report.WIDTH


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
