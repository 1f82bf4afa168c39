"""`python -m kvlane.bench.route_replay_picture FILE.png`: a report of `kvlane replay --route FILE --json` as a picture.

The report comes from stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvlane.bench.drawing import from_stdin, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The letters that fit beside each other below the panels: policies' names, each with its line before it.
LEGEND_LETTERS = 125
PANELS = (
    ("ttft_p50_ms", "first token, ms: half of the requests"),
    ("ttft_p99_ms", "first token, ms: 99 of 100 requests"),
    ("within_limits_percent", "requests within the limits, %"),
)


def lines(report: Mapping[str, Any], figure: str) -> dict[str, list[tuple[float, float]]]:
    """A figure of each policy, by load in percent, ascending."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in report["results"]:
        found.setdefault(result["policy"], []).append((100 * result["load"], result[figure]))
    return {policy: sorted(points) for policy, points in found.items()}


def facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """The names and values in the picture, as JSON gives them back."""
    shown = {
        "title": f"{Path(report['trace']).name}, simulated: {report['fleet']}; 100 % are "
        f"{report['capacity_requests_per_second']:.3g} requests a second",
        "panels": [[label, lines(report, figure)] for figure, label in PANELS],
    }
    return json.loads(json.dumps(shown))


def picture(report: Mapping[str, Any]) -> Figure:
    """A panel for each figure, with a line for each policy."""
    shown = facts(report)
    figure, every = page(shown["title"], 4.2, columns=len(PANELS))
    for axes, (label, policies) in zip(every, shown["panels"], strict=True):
        for policy, points in policies.items():
            axes.plot(*zip(*points, strict=True), label=policy, marker="o", markersize=3)
        axes.set_title(fill(label, 26), fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("load, %")
    handles, labels = every[0].get_legend_handles_labels()
    rows = -(-sum(len(label) + 6 for label in labels) // LEGEND_LETTERS)
    columns = -(-len(labels) // max(rows, 1))
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(from_stdin(picture, facts, sys.argv[1:]))
