"""Writes the lists of configuration fields into a page, from python/kvlane/connector/config_fields.py.

python scripts/identity_table.py docs/reference/identity-fields.md            writes them
python scripts/identity_table.py docs/reference/identity-fields.md --check    fails if they differ
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

FIELDS = Path(__file__).parents[1] / "python" / "kvlane" / "connector" / "config_fields.py"
BEGIN = "<!-- lists of config_fields.py, by scripts/identity_table.py -->\n"
END = "<!-- end of the lists -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the lists of configuration fields into a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    arguments = parser.parse_args()
    text = arguments.page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + lists() + END + after
    if arguments.check:
        if wanted != text:
            sys.exit(
                f"{arguments.page} is out of date: run python scripts/identity_table.py {arguments.page}"
            )
        return
    arguments.page.write_text(wanted)


def lists() -> str:
    """Both tables."""
    fields = runpy.run_path(str(FIELDS))
    lines = ["", "| counts | at its default, without a trace | when |", "|---|---|---|"]
    for kind in sorted(fields["COUNTED"]):
        for name, default in fields["COUNTED"][kind].items():
            when = fields["WHEN"].get(f"{kind}.{name}", "")
            lines.append(f"| `{kind}.{name}` | {'' if when else f'`{default!r}`'} | {when} |")
    lines += ["", "| left out, because | fields |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for kind in sorted(fields["LEFT_OUT"]):
        for reason, names in fields["LEFT_OUT"][kind]:
            listed = ", ".join(f"`{name}`" for name in names.split())
            reasons.setdefault(reason, []).append(f"{kind}: {listed}")
    lines += [f"| {reason} | {'; '.join(listed)} |" for reason, listed in reasons.items()]
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
