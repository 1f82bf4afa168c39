"""docs/failures.md: each of its rows names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (?P<what>[^|]+) \| (?P<then>[^|]+) \| \[(?P<name>\w+)\]\(\.\./(?P<path>[^)]+)\) \|")


def test_each_row_has_its_test() -> None:
    lines = (ROOT / "docs/failures.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and not line.startswith(("| what", "| **"))]
    assert len(table) > 30
    for line in table:
        row = ROW.fullmatch(line)
        assert row is not None, f"a row without a test: {line}"
        text = (ROOT / row["path"]).read_text()
        assert re.search(rf"(def|fn) {row['name']}\(", text), f"{row['path']} has no {row['name']}"
