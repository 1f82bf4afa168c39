"""`python -m kvlane.bench.replay_picture FILE.png`: the report of `kvlane replay --json`, from stdin, as a picture."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.bench.drawing import from_stdin, page

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
    """The names and values in the picture, as JSON gives them back."""
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
    """Hit rate against capacity: a line for each policy, one for a cache that knows the future, and one for a cache
    without limit."""
    shown = facts(report)
    figure, (axes,) = page(shown["title"], 4.8)
    for policy, points in shown["lines"].items():
        # The policy that chooses among the others lies on one of them, so it is dashed and both are seen.
        style = {"color": "black", "linestyle": "--", "marker": "x"} if policy == "auto" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=policy, markersize=4, **style)
    if shown["clairvoyant"]:
        axes.plot(
            *zip(*shown["clairvoyant"], strict=True), "x-.", label="clairvoyant", color="black", markersize=4
        )
    axes.axhline(shown["ceiling"], color="#1f2328", linestyle=":", label="ceiling: no limit")
    axes.set_xscale("log")
    ticks = sorted({share for points in shown["lines"].values() for share, _ in points})
    axes.set_xticks(ticks, [f"{share:.3g} %" for share in ticks])
    axes.minorticks_off()
    # The axis does not begin at 0, or lines that lie close together could not be told apart.
    least = min(hits for points in shown["lines"].values() for _, hits in points)
    axes.set_ylim(bottom=math.floor(0.9 * least) if 2 * least > shown["ceiling"] else 0)
    axes.set_xlabel("RAM, share of the different blocks")
    axes.set_ylabel("prefix hits, % of block references")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # A number that would cover the one before is left out.
    figure.draw_without_rendering()
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
