"""`python -m kvlane.bench.learned_picture FILE.png`: what `--policy learned` has learnt in a replay, as a picture.

The report of `kvlane replay --json` comes from stdin; of several caches the largest is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.bench.drawing import from_stdin, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Lines that can be told from each other: of the kinds of blocks that were seen most.
MOST = 8
# References beyond which the lines say nothing.
LAST_AGE = 1 << 20


def facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """The names and values in the picture, as JSON gives them back."""
    results = [result for result in report["results"] if result.get("learnt")]
    if not results:
        raise ValueError(
            "nothing was learnt: replay with --policy learned, and a trace of more than 4,096 references"
        )
    result = max(results, key=lambda result: result["capacity_blocks"])
    classes = sorted(result["learnt"], key=lambda kind: -kind["seen"])[:MOST]
    scans = ", mixed 1:1 with one-time prompts" if report.get("with_scans") else ""
    below = result.get("ssd_capacity_blocks", 0)
    ssd = f" over an SSD of {below:,}" if below else ""
    shown = {
        "title": f"{Path(report['trace']).name}{scans}: what {result['policy']} has learnt in a cache of "
        f"{result['capacity_blocks']:,} blocks{ssd}",
        # Hits for a million references: a block that is kept for as long brings so many.
        "lines": {
            kind["blocks"]: [
                (age, 1_000_000 * density) for age, density in kind["density_by_age"] if 0 < age <= LAST_AGE
            ]
            for kind in classes
        },
    }
    return json.loads(json.dumps(shown))


def picture(report: Mapping[str, Any]) -> Figure:
    """Hit density against age, a line for each of the kinds of blocks that were seen most."""
    shown = facts(report)
    figure, (axes,) = page(shown["title"], 5.6)
    for blocks, points in shown["lines"].items():
        axes.loglog(*zip(*points, strict=True), label=blocks, linewidth=1.4)
    axes.set_xlabel("block references since the block was asked for")
    axes.set_ylabel("hits for a million references that it is kept")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(frameon=False, loc="outside lower left", ncols=2, fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(from_stdin(picture, facts, sys.argv[1:]))
