"""Writes the Grafana dashboards in examples/monitoring/dashboards from the panels in scripts/dashboard_panels.py.

    python scripts/dashboards.py            writes them
    python scripts/dashboards.py --check    fails if they differ

Kind, labels and help of each metric come from docs/reference/metrics.md and engine-metrics.md. A panel is refused if it
names a metric or label that is not there, a counter outside of rate() and increase(), a gauge inside of them, or a
histogram other than by its _bucket, _sum and _count.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dashboard_panels import DASHBOARDS, Dashboard, Panel, Row, Variable

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "examples/monitoring/dashboards"
ENGINES: Final = "engines"
UNITS: Final = {"none", "short", "percent", "percentunit", "bytes", "Bps", "cps", "reqps", "s"}
HEIGHTS: Final = {"stat": 4}
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Every scraped series has these.
TARGET_LABELS: Final = {"job", "instance"}
PARTS: Final = ("_bucket", "_sum", "_count")

_METRIC: Final = re.compile(r"(?<![\w:$\"{])((?:vllm:|kvlane_|process_)\w+|up\b)(\{[^}]*\})?(\[[^]]*\])?")
_GROUPING: Final = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
_LEGEND: Final = re.compile(r"\{\{(\w+)\}\}")
_ROW: Final = re.compile(r"\| `([^`]+)` \| (\w+) \| ([^|]*) \| (.*) \|")
_ENGINE_ROW: Final = re.compile(r"\| `(vllm:[^`]+)` \| (.*) \|")


class Refused(Exception):
    """A panel that would show nothing, or something else than it says."""


@dataclass(frozen=True)
class Metric:
    """A row of the reference."""

    kind: str
    labels: frozenset[str]
    help: str


# Neither kvlane's nor in its reference. A test compares those of vLLM with its source.
FOREIGN: Final = {
    "up": Metric("gauge", frozenset(), "1 if Prometheus could read the program's metrics, else 0."),
    "vllm:prompt_tokens_total": Metric(
        "counter", frozenset({"model_name", "engine"}), "vLLM's own: prompt tokens, computed or not."
    ),
    "vllm:prefix_cache_hits_total": Metric(
        "counter", frozenset({"model_name", "engine"}), "vLLM's own: prompt tokens found in its prefix cache."
    ),
}


def reference(root: Path = ROOT) -> dict[str, dict[str, Metric]]:
    """The metrics by the heading of their program."""
    found: dict[str, dict[str, Metric]] = {}
    part = ""
    for line in (root / "docs/reference/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            part = line.removeprefix("## ")
        elif row := _ROW.match(line):
            name, kind, labels, what = row.groups()
            named = frozenset(filter(None, (label.strip() for label in labels.split(","))))
            found.setdefault(part, {})[name] = Metric(kind, named, what)
    page = (root / "docs/reference/engine-metrics.md").read_text()
    engine_labels = frozenset({"model_name", "engine"})
    found[ENGINES] = {
        name: Metric("counter", engine_labels, what)
        for name, what in (row.groups() for row in map(_ENGINE_ROW.match, page.splitlines()) if row)
    }
    return found


def known(dashboard: Dashboard, metrics: dict[str, dict[str, Metric]]) -> dict[str, Metric]:
    """What a dashboard may use."""
    return {**FOREIGN, **{name: row for part in dashboard.parts for name, row in metrics[part].items()}}


def full(expression: str, shared: str, metrics: dict[str, Metric]) -> str:
    """The expression with the matchers that all panels share, and with ranges. Raises `Refused`."""

    def expand(found: re.Match[str]) -> str:
        name, matchers, window = found[1], (found[2] or "")[1:-1], found[3] or ""
        base, suffix = _base(name, metrics)
        metric = metrics[base]
        before = expression[: found.start()]
        is_rated = before.endswith(("rate(", "increase("))
        if metric.kind == "histogram" and not suffix:
            raise Refused(
                f"{name} is a histogram: use histogram_quantile of {name}_bucket, {name}_sum or _count"
            )
        if suffix == "_bucket" and "histogram_quantile" not in expression and "by (le)" not in expression:
            raise Refused(f"{name} has to be in histogram_quantile, or summed by le alone for a heatmap")
        if metric.kind == "gauge" and is_rated:
            raise Refused(f"{name} is a gauge, which has no rate")
        if metric.kind != "gauge" and not is_rated:
            raise Refused(f"{name} only grows: use rate({name}) or increase({name})")
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers))
        _refuse_labels(name, labels, metric.labels | TARGET_LABELS)
        if is_rated and not window:
            window = "[$__rate_interval]"
        every = ", ".join(filter(None, (shared, matchers)))
        return f"{name}{{{every}}}{window}"

    used = {_base(found[1], metrics)[0] for found in _METRIC.finditer(expression)}
    if not used:
        raise Refused(f"{expression} names no metric")
    grouped = {label.strip() for found in _GROUPING.finditer(expression) for label in found[1].split(",")}
    _refuse_labels(expression, grouped, _labels(used, metrics))
    return _METRIC.sub(expand, expression)


def used_metrics(panel: Panel, metrics: dict[str, Metric]) -> list[str]:
    """The metrics of a panel, in order."""
    names = (_base(found[1], metrics)[0] for _, each in panel.queries for found in _METRIC.finditer(each))
    return list(dict.fromkeys(names))


def _base(name: str, metrics: dict[str, Metric]) -> tuple[str, str]:
    """The metric that a series belongs to, and the suffix of a histogram's series."""
    if name in metrics:
        return name, ""
    for suffix in PARTS:
        base = name.removesuffix(suffix)
        if base != name and base in metrics and metrics[base].kind == "histogram":
            return base, suffix
    raise Refused(f"there is no metric {name} in docs/reference")


def _labels(names: Iterable[str], metrics: dict[str, Metric]) -> set[str]:
    found = set(TARGET_LABELS)
    for name in names:
        found |= metrics[name].labels | ({"le"} if metrics[name].kind == "histogram" else set())
    return found


def _refuse_labels(where: str, labels: set[str], there: Iterable[str]) -> None:
    unknown = labels - set(there)
    if unknown:
        raise Refused(f"{where}: no label {', '.join(sorted(unknown))}")


def build(dashboard: Dashboard, metrics: dict[str, Metric]) -> dict[str, Any]:
    """The dashboard as Grafana reads it. Raises `Refused`."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in dashboard.rows:
        placed, bottom = _place(row, y + 1, dashboard, metrics)
        head = {
            "id": _id(dashboard.name, row.title),
            "type": "row",
            "title": row.title,
            "collapsed": row.is_folded,
            "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
            "panels": placed if row.is_folded else [],
        }
        panels += [head] if row.is_folded else [head, *placed]
        y = y + 1 if row.is_folded else bottom
    ids = [panel["id"] for panel in flat(panels)]
    if len(ids) != len(set(ids)):
        raise Refused(f"{dashboard.name}: two panels have one title, or one id by chance")
    return {
        "uid": f"kvlane-{dashboard.name}",
        "title": dashboard.title,
        "description": "Made by scripts/dashboards.py of kvlane; docs/operate.md says what to do at an alert.",
        "tags": ["kvlane"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [_links()],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": panels,
    }


def flat(panels: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Panels and rows, those in folded rows too."""
    for panel in panels:
        yield panel
        yield from panel.get("panels", ())


def _place(
    row: Row, y: int, dashboard: Dashboard, metrics: dict[str, Metric]
) -> tuple[list[dict[str, Any]], int]:
    """Panels from left to right. A line ends at its right edge, or before a panel of another height."""
    placed: list[dict[str, Any]] = []
    x, height = 0, 0
    for panel in row.panels:
        wanted = HEIGHTS.get(panel.kind, HEIGHT)
        if x + panel.width > 24 or (height and wanted != height):
            x, y = 0, y + height
        height = wanted
        try:
            built = _panel(panel, dashboard, metrics)
        except Refused as refusal:
            raise Refused(f"{dashboard.name}, {panel.title}: {refusal}") from None
        placed.append(
            {
                "id": _id(dashboard.name, row.title, panel.title),
                **built,
                "gridPos": {"h": height, "w": panel.width, "x": x, "y": y},
            }
        )
        x += panel.width
    return placed, y + height


def _id(*names: str) -> int:
    """Follows from the title, so that links to a panel stay right when another one is added before it."""
    return zlib.crc32("/".join(names).encode()) % 1_000_000 + 1


def _panel(panel: Panel, dashboard: Dashboard, metrics: dict[str, Metric]) -> dict[str, Any]:
    if panel.unit not in UNITS or not set(panel.units.values()) <= UNITS:
        raise Refused(f"unknown unit {panel.unit} {panel.units or ''}")
    used = used_metrics(panel, metrics)
    for legend, _ in panel.queries:
        _refuse_labels(legend, set(_LEGEND.findall(legend)), _labels(used, metrics))
    helps = "\n".join(f"- `{name}`: {metrics[name].help}" for name in used)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.how}\n\n{helps}",
        "datasource": SOURCE,
        "targets": [
            _target(chr(ord("A") + number), panel.kind, legend, full(expression, dashboard.shared, metrics))
            for number, (legend, expression) in enumerate(panel.queries)
        ],
        **_look(panel),
    }


def _target(letter: str, kind: str, legend: str, expression: str) -> dict[str, Any]:
    is_instant = kind in ("stat", "table")
    return {
        "refId": letter,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": expression,
        "legendFormat": legend,
        "format": {"table": "table", "heatmap": "heatmap"}.get(kind, "time_series"),
        "instant": is_instant,
        "range": not is_instant,
    }


def _look(panel: Panel) -> dict[str, Any]:
    """What differs between kinds of panels."""
    defaults: dict[str, Any] = {"unit": panel.unit}
    match panel.kind:
        case "timeseries":
            if panel.unit in ("percent", "percentunit"):
                defaults["max"] = 100 if panel.unit == "percent" else 1
            defaults |= {
                "min": 0,
                "custom": {
                    "drawStyle": "line",
                    "fillOpacity": 30 if panel.is_stacked else 0,
                    "lineWidth": 1,
                    "showPoints": "auto",
                    "stacking": {"group": "A", "mode": "normal" if panel.is_stacked else "none"},
                },
            }
            options: dict[str, Any] = {
                "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
            if panel.is_alarm:
                # increase() extrapolates, so one event may read 0.9.
                steps.append({"color": "red", "value": 0.5})
            defaults |= {
                "color": {"mode": "thresholds"},
                "thresholds": {"mode": "absolute", "steps": steps},
            }
            if panel.unit == "none":
                defaults["decimals"] = 0
            options = {
                "colorMode": "value" if panel.is_alarm else "none",
                "graphMode": "none",
                "justifyMode": "auto",
                "orientation": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "textMode": "value_and_name" if len(panel.queries) > 1 else "value",
            }
        case "heatmap":
            options = {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "legend": {"show": True},
                "tooltip": {"mode": "single", "yHistogram": False},
                "yAxis": {"unit": panel.unit},
            }
            return {
                "fieldConfig": {"defaults": {}, "overrides": []},
                "options": options,
                "maxDataPoints": 100,
            }
        case "table":
            return _table_look(panel)
        case _:
            raise Refused(f"unknown kind {panel.kind}")
    return {"fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def _table_look(panel: Panel) -> dict[str, Any]:
    """Columns of several queries are joined by their labels, and get the legends as names."""
    is_one = len(panel.queries) == 1
    values = [
        "Value" if is_one else f"Value #{chr(ord('A') + number)}" for number in range(len(panel.queries))
    ]
    renamed = dict(zip(values, (legend for legend, _ in panel.queries), strict=True))
    overrides = [
        {
            "matcher": {"id": "byName", "options": legend},
            "properties": [{"id": "unit", "value": unit}],
        }
        for legend, unit in panel.units.items()
    ]
    organize = {"excludeByName": {"Time": True, "job": True}, "indexByName": {}, "renameByName": renamed}
    return {
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": overrides},
        "options": {"cellHeight": "sm", "showHeader": True},
        "transformations": [{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    }


def _links() -> dict[str, Any]:
    """The other dashboards of kvlane, for the same time."""
    return {
        "type": "dashboards",
        "title": "kvlane",
        "tags": ["kvlane"],
        "asDropdown": False,
        "icon": "external link",
        "includeVars": False,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.label,
        "label": variable.label.replace("_name", ""),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": variable.values, "refId": "StandardVariableQuery"},
        "definition": variable.values,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": variable.every,
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
    }


def texts() -> dict[str, str]:
    """The files by name. Raises `Refused`."""
    metrics = reference()
    return {
        f"{dashboard.name}.json": json.dumps(
            build(dashboard, known(dashboard, metrics)), indent=2, ensure_ascii=False
        )
        + "\n"
        for dashboard in DASHBOARDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is out of date")
    is_check = parser.parse_args().check
    try:
        wanted = texts()
    except Refused as refusal:
        sys.exit(f"scripts/dashboard_panels.py: {refusal}")
    there = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    if not is_check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            (FOLDER / name).write_text(text)
        for name in there.keys() - wanted.keys():
            (FOLDER / name).unlink()
    elif there != wanted:
        stale = sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))
        sys.exit(f"{', '.join(stale)} out of date: run python scripts/dashboards.py")


if __name__ == "__main__":
    main()
