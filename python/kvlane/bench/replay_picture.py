"""`python -m kvlane.bench.replay_picture FILE.png`: the report of `kvlane replay --json`, from stdin, as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlane.bench.report import COLOURS


def lines(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The prefix hits of each policy in percent, by capacity in percent of the different blocks, ascending."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in report["results"]:
        point = (100 * result["capacity_share"], result["prefix_hit_percent"])
        found.setdefault(result["policy"], []).append(point)
    return {policy: sorted(points) for policy, points in found.items()}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Hit rate against capacity, a line for each policy and one for the ceiling."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.6))
    for index, (policy, points) in enumerate(lines(report).items()):
        shares, hits = zip(*points, strict=True)
        # The policy that chooses among the others lies on one of them: dashed, both are seen.
        style = {"color": "black", "linestyle": "--", "marker": "x"} if policy == "auto" else {"marker": "o"}
        style.setdefault("color", COLOURS[index % len(COLOURS)])
        axes.plot(shares, hits, label=policy, markersize=4, **style)
    axes.axhline(report["ceiling_percent"], color="#b5545f", linestyle=":", label="ceiling: no limit")
    axes.set_xscale("log")
    ticks = sorted({share for points in lines(report).values() for share, _ in points})
    axes.set_xticks(ticks, [f"{share:.3g} %" for share in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("RAM, share of the different blocks")
    axes.set_ylabel("prefix hits, % of block references")
    scans = ", mixed 1:1 with one-time prompts" if report["with_scans"] else ""
    below = {result.get("ssd_capacity_blocks", 0) for result in report["results"]} - {0}
    ssd = f", {max(below):,} blocks in the tier below" if below else ""
    axes.set_title(f"{Path(report['trace']).name}{scans}{ssd}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Draw what comes in by stdin."""
    (path,) = arguments
    draw(json.load(sys.stdin), Path(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
