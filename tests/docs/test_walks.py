"""docs/a-save.md and docs/a-load.md: every function that they name is where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("a-save.md", "a-load.md")]
CODE = re.compile(r"`(\w+)`")
# `name` (path), and `name`, path: functions that are named in a sentence.
IN_A_SENTENCE = re.compile(r"`(\w+)`(?: \(|,\s+)((?:crates|python)/[\w./-]+\.(?:rs|py))")


def named(page: str) -> list[tuple[str, str]]:
    """Each function and the file that it is said to be in."""
    found = list(IN_A_SENTENCE.findall(page))
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and cells[2].startswith(("crates/", "python/")):
            found += [(function, cells[2]) for function in CODE.findall(cells[1])]
    return found


def is_there(function: str, code: str) -> bool:
    """Whether Rust or Python defines it there."""
    return re.search(rf"\b(?:fn|def|struct|class|enum) {function}\b", code) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_of_a_walk_is_where_the_page_says(page: Path) -> None:
    steps = named(page.read_text())
    assert len(steps) >= 30
    wrong = [(name, file) for name, file in steps if not is_there(name, (ROOT / file).read_text())]
    assert wrong == []


def test_a_function_that_moved_is_noticed() -> None:
    steps = named(
        "| 1 | `turned` | crates/client/src/mover.rs | moves |\nand `lost` (crates/client/src/mover.rs)."
    )
    assert steps == [("lost", "crates/client/src/mover.rs"), ("turned", "crates/client/src/mover.rs")]
    assert not is_there("turned", "fn turn() {}") and is_there("turn", "    pub(crate) fn turn(&mut self) {")
