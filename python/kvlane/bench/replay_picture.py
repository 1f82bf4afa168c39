"""`python -m kvlane.bench.replay_picture FILE.png`: the report of `kvlane replay --json`, from stdin, as a picture."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.bench.drawing import COLOURS, WIDTH, from_stdin

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def lines(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The prefix hits of each policy in percent, by capacity in percent of the different blocks, ascending."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in report["results"]:
        point = (100 * result["capacity_share"], result["prefix_hit_percent"])
        found.setdefault(result["policy"], []).append(point)
    return {policy: sorted(points) for policy, points in found.items()}


def facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the picture shows, as JSON gives it back."""
    scans = ", mixed 1:1 with one-time prompts" if report["with_scans"] else ""
    below = {result.get("ssd_capacity_blocks", 0) for result in report["results"]} - {0}
    ssd = f", {max(below):,} blocks in the tier below" if below else ""
    bounds = {
        100 * result["capacity_share"]: result["clairvoyant_prefix_hit_percent"]
        for result in report["results"]
        if "clairvoyant_prefix_hit_percent" in result
    }
    shown = {
        "title": f"{Path(report['trace']).name}{scans}{ssd}",
        "lines": lines(report),
        "clairvoyant": sorted(bounds.items()),
        "ceiling": report["ceiling_percent"],
    }
    return json.loads(json.dumps(shown))


def picture(report: Mapping[str, Any]) -> Figure:
    """Hit rate against capacity: a line for each policy, for a cache that knows the future, for one without limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = facts(report)
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (policy, points) in enumerate(shown["lines"].items()):
        shares, hits = zip(*points, strict=True)
        # The policy that chooses among the others lies on one of them: dashed, both are seen.
        colour, line, marker = (
            ("black", "--", "x") if policy == "auto" else (COLOURS[index % len(COLOURS)], "-", "o")
        )
        axes.plot(shares, hits, label=policy, color=colour, linestyle=line, marker=marker, markersize=4)
    if shown["clairvoyant"]:
        shares, hits = zip(*shown["clairvoyant"], strict=True)
        axes.plot(
            shares, hits, label="clairvoyant", color="#1f2328", linestyle="-.", marker="x", markersize=4
        )
    axes.axhline(shown["ceiling"], color="#1f2328", linestyle=":", label="ceiling: no limit")
    axes.set_xscale("log")
    ticks = sorted({share for points in shown["lines"].values() for share, _ in points})
    axes.set_xticks(ticks, [f"{share:.3g} %" for share in ticks])
    axes.minorticks_off()
    # Lines that lie close together far from 0 could not be told apart.
    least = min(hits for points in shown["lines"].values() for _, hits in points)
    axes.set_ylim(bottom=math.floor(0.9 * least) if 2 * least > shown["ceiling"] else 0)
    axes.set_xlabel("RAM, share of the different blocks")
    axes.set_ylabel("prefix hits, % of block references")
    figure.suptitle(textwrap.fill(shown["title"], 90), fontsize=11, x=0.02, ha="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # Capacities may lie close together: what would be written over the one before is left out.
    canvas.draw()
    texts, end = [], -math.inf
    for label in axes.get_xticklabels():
        box = label.get_window_extent()
        fits = box.x0 > end + 4
        texts.append(label.get_text() if fits else "")
        end = box.x1 if fits else end
    axes.set_xticks(ticks, texts)
    return figure


if __name__ == "__main__":
    sys.exit(from_stdin(picture, facts, sys.argv[1:]))
