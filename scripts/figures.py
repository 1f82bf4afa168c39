"""Puts the figures of docs/figures.json into bench/builds/results/README.md, between its markers.

python scripts/figures.py            after `kvlane bench all`
python scripts/figures.py --check    fails when that page does not show docs/figures.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "bench" / "builds" / "results" / "README.md"
FIGURES = ROOT / "docs" / "figures.json"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"


def main() -> int:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = _table(json.loads(FIGURES.read_text())) if FIGURES.exists() else ""
    wanted = before + BEGIN + table + END + after
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print(
                f"{PAGE.relative_to(ROOT)} does not show docs/figures.json: run python scripts/figures.py",
                file=sys.stderr,
            )
            return 1
        return 0
    PAGE.write_text(wanted)
    return 0


def _table(figures: dict[str, Any]) -> str:
    lines = ["| what | measured | goal | command |", "|---|---|---|---|"]
    for figure in figures["figures"]:
        reached = "" if figure["passed"] else " (missed)"
        lines.append(
            f"| {figure['what']} | {figure['value']}{reached} | {figure['goal']} | `{figure['command']}` |"
        )
    busy = [figure["other_cores"] for figure in figures["figures"]]
    lines += ["", f"{figures['machine']} Other work used {min(busy)} to {max(busy)} cores meanwhile.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
