"""The Grafana dashboards: made from the panels, of metrics that exist. Each panel shows something of real programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from busy import stretched
from monitored import Monitored, monitored, program, wait_working
from pages import ROOT, links

sys.path.insert(0, str(ROOT / "scripts"))

import dashboards
from dashboard_panels import DAEMON, DASHBOARDS, Dashboard, Panel, Row

FOLDER = ROOT / "examples/monitoring/dashboards"
NAMES = ("daemon", "engine", "router")
# What Grafana puts in their place, if Prometheus scrapes once a second.
TIMES = {"__rate_interval": "10s", "__range": "1m"}
# Panels that show nothing of the programs in monitored.py, with the reason.
EMPTY = {("daemon", "Loads over each GPU's link"): "the daemons serve no GPU"}
# A counter at 0 is shown too, so these have to have grown.
GROWN = (
    *(f'kvlane_hit_bytes_total{{tier="{tier}"}}' for tier in ("ram", "ssd", "peers")),
    *(f'kvlane_ssd_operation_seconds_count{{operation="{operation}"}}' for operation in ("read", "write")),
    *("kvlane_saved_bytes_total", "kvlane_evicted_residence_seconds_count", "kvlane_engines"),
    *("kvlane_hit_ratio", "kvlane_namespace_hit_ratio", "kvlane_namespace_hit_ceiling_ratio"),
)
RECORDED = ("kvlane:hit_ratio:fleet", "kvlane:hit_ceiling_ratio:fleet")
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class Shown:
    """An expression of a panel, as Prometheus gets it."""

    dashboard: str
    panel: str
    legend: str
    expression: str

    @property
    def place(self) -> str:
        return f"{self.dashboard}, {self.panel}, {self.legend}"


def written(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def filled(text: str, dashboard: dict[str, Any]) -> str:
    """The text with All chosen for each variable. A variable that the dashboard does not have is a KeyError."""
    listed = dashboard["templating"]["list"]
    values = {variable["name"]: variable["allValue"] for variable in listed if variable["type"] == "query"}
    return re.sub(r"\$(\w+)", lambda found: {**values, **TIMES}[found[1]], text)


def shown() -> Iterator[Shown]:
    for name in NAMES:
        dashboard = written(name)
        for panel in dashboards.flat(dashboard["panels"]):
            for target in panel.get("targets", ()):
                yield Shown(name, panel["title"], target["legendFormat"], filled(target["expr"], dashboard))


def complaint(folder: Path, expressions: list[str]) -> str:
    """What promtool says of expressions, each as a rule that records it; "" if they parse."""
    rules = [{"record": f"rule:{number}", "expr": each} for number, each in enumerate(expressions)]
    file = folder / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    command = [str(program("promtool")), "check", "rules", "--lint=none", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def with_panel(*queries: tuple[str, str], unit: str = "short") -> Dashboard:
    panel = Panel("timeseries", "A panel", unit, "It is there to be refused.", queries)
    return Dashboard("test", "test", DAEMON.parts, DAEMON.shared, (), (Row("A row", (panel,)),))


def refusal(dashboard: Dashboard) -> str:
    with pytest.raises(dashboards.Refused) as refused:
        dashboards.build(dashboard, dashboards.known(dashboard, dashboards.reference()))
    return str(refused.value)


def test_the_files_are_what_the_script_writes() -> None:
    command = [sys.executable, "scripts/dashboards.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES) == {each.name for each in DASHBOARDS}


def test_a_stale_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    for name, text in dashboards.texts().items():
        (tmp_path / name).write_text(text.replace("Hit rate", "Rate of hits"))
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["dashboards.py", "--check"])
    with pytest.raises(SystemExit, match=r"^daemon\.json out of date"):
        dashboards.main()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (("a", "sum(kvlane_no_such_bytes)"), "there is no metric kvlane_no_such_bytes"),
        (("a", "sum(kvlane_route_connections)"), "there is no metric kvlane_route_connections"),
        (("a", "sum(kvlane_sealed_blocks_total)"), "only grows"),
        (("a", "sum(rate(kvlane_blocks))"), "a gauge, which has no rate"),
        (("a", "sum(rate(kvlane_hand_off_wait_seconds))"), "is a histogram"),
        (("a", "sum(rate(kvlane_hand_off_wait_seconds_bucket))"), "has to be in histogram_quantile"),
        (("a", "sum(kvlane_hand_off_wait_seconds_count)"), "only grows"),
        (("a", 'kvlane_sessions{method="gpu"}'), "no label method"),
        (("a", "sum by (method) (kvlane_sessions)"), "no label method"),
        (("{{method}}", "sum by (role) (kvlane_sessions)"), "no label method"),
        (("a", "vector(1)"), "names no metric"),
    ],
)
def test_a_panel_that_would_show_nothing_is_refused(query: tuple[str, str], why: str) -> None:
    assert why in refusal(with_panel(query))


def test_units_and_titles_are_looked_at() -> None:
    blocks = ("a", "sum(kvlane_blocks)")
    assert "unknown unit parsecs" in refusal(with_panel(blocks, unit="parsecs"))
    (row,) = with_panel(blocks).rows
    twice = Dashboard("test", "test", DAEMON.parts, DAEMON.shared, (), (row, row))
    assert "one title" in refusal(twice)


def test_matchers_and_ranges_are_added() -> None:
    metrics = dashboards.known(DAEMON, dashboards.reference())
    written_out = 'sum(rate(kvlane_requests_refused_total{job="j", call="Lookup"}[$__rate_interval]))'
    assert (
        dashboards.full('sum(rate(kvlane_requests_refused_total{call="Lookup"}))', 'job="j"', metrics)
        == written_out
    )
    assert dashboards.full("up - time()", 'job="j"', metrics) == 'up{job="j"} - time()'


def test_panels_say_how_to_read_them() -> None:
    for dashboard in DASHBOARDS:
        panels = [panel for row in dashboard.rows for panel in row.panels]
        assert len(panels) >= 15
        for panel in panels:
            assert re.fullmatch(r"[A-Z5`-].*[^.]\.", panel.how), panel.how
            assert len(panel.how.split()) <= 25, panel.how


def test_places_do_not_overlap() -> None:
    for name in NAMES:
        panels = written(name)["panels"]
        # A folded row's panels take their places when it is opened, and move the others down.
        for group in (panels, *(panel.get("panels", []) for panel in panels)):
            taken: set[tuple[int, int]] = set()
            for panel in group:
                place = panel["gridPos"]
                assert place["x"] + place["w"] <= 24
                cells = {
                    (x, y)
                    for x in range(place["x"], place["x"] + place["w"])
                    for y in range(place["y"], place["y"] + place["h"])
                }
                assert not taken & cells, panel["title"]
                taken |= cells


def test_the_readme_names_what_is_there() -> None:
    readme = FOLDER.parent / "README.md"
    named = {(readme.parent / link).resolve() for _, link in links(readme)}
    assert [path for path in named if not path.exists()] == []
    assert set(FOLDER.iterdir()) <= named
    assert [line for line in readme.read_text().splitlines() if len(line) > 130 and line[0] != "|"] == []


def test_the_tour_in_the_docs_names_panels_that_exist() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    stops = re.findall(r'\| (daemon|engine|router), "(.+?)" \|', page)
    assert {name for name, _ in stops} == set(NAMES)
    for name, title in stops:
        assert title in {panel["title"] for panel in written(name)["panels"]}, f"{name}: {title}"


def test_every_expression_parses(tmp_path: Path) -> None:
    assert complaint(tmp_path, [each.expression for each in shown()]) == ""


def test_an_expression_that_does_not_parse_is_noticed(tmp_path: Path) -> None:
    """The control of the test above."""
    assert "unclosed left parenthesis" in complaint(tmp_path, ["sum(up", "up"])


def test_every_metric_is_in_the_reference() -> None:
    """Read from the files, so that a mistake in the script's own look does not hide one."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    names = set(re.findall(r"^\| `(\w+)`", page, re.M))
    names |= set(
        re.findall(r"^\| `(vllm:\w+)`", (ROOT / "docs/reference/engine-metrics.md").read_text(), re.M)
    )
    names |= {f"{name}_{part}" for name in names for part in ("bucket", "sum", "count")}
    names |= set(dashboards.FOREIGN)
    for each in shown():
        used = re.findall(r"\b(?:vllm:|kvlane_|process_)\w+|\bup\b", re.sub(r'"[^"]*"', "", each.expression))
        assert used and set(used) <= names, each


def test_every_panel_of_running_programs_shows_something() -> None:
    """Daemons, a router and engines run and work; Prometheus reads them, and gets what Grafana would ask."""
    counters = [
        name
        for name, metric in (*dashboards.reference()[dashboards.ENGINES].items(), *dashboards.FOREIGN.items())
        if metric.kind == "counter"
    ]
    expected = [each for each in shown() if (each.dashboard, each.panel) not in EMPTY]
    silent = [each for each in shown() if (each.dashboard, each.panel) in EMPTY]
    assert {(each.dashboard, each.panel) for each in silent} == set(EMPTY)
    wanted = (*RECORDED, *(f"{name} > 0" for name in GROWN))
    with monitored(counters) as programs:
        left = expected + [Shown("beside the panels", "", each, each) for each in wanted]

        def all_show() -> bool:
            nonlocal left
            left = [each for each in left if not shows(programs, each)]
            return not left

        wait_working(programs, stretched(30), all_show)
        assert [each.place for each in left] == []
        assert [each.place for each in silent if programs.query(each.expression)] == []
        for name in NAMES:
            assert variables_without_values(programs, written(name)) == []
        rules = programs.rules()
        assert len(rules) == (ROOT / "examples/prometheus/kvlane-alerts.yaml").read_text().count("expr:")
        assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
        assert {rule["name"] for rule in rules if rule["type"] == "recording"} == set(RECORDED)


def shows(programs: Monitored, each: Shown) -> bool:
    """Whether there are samples, with the labels that the legend names."""
    samples = programs.query(each.expression)
    # The group of engines without a group is empty, and Prometheus leaves out empty labels.
    labels = set(re.findall(r"\{\{(\w+)\}\}", each.legend)) - {"group"}
    return any(all(label in sample["metric"] for label in labels) for sample in samples)


def variables_without_values(programs: Monitored, dashboard: dict[str, Any]) -> list[str]:
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = LABEL_VALUES.fullmatch(filled(variable["definition"], dashboard))
            assert asked is not None
            if not programs.label_values(asked[1], asked[2]):
                found.append(f"{dashboard['title']}: {variable['name']}")
    return found
