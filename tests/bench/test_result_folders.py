"""The folders of committed results: their tables name every file, and no link of theirs leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDERS = sorted((Path(__file__).resolve().parents[2] / "bench").glob("*/results"))
LINK = re.compile(r"\]\(([^)#]+)")


def links(page: Path) -> set[str]:
    return {link for link in LINK.findall(page.read_text()) if "://" not in link}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_every_result_stands_in_the_table(folder: Path) -> None:
    """A file that no table names is a measurement that nobody finds."""
    there = {each.name for each in folder.iterdir() if each.suffix in (".json", ".png") or each.is_dir()}
    assert there - links(folder / "README.md") == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_no_link_of_a_table_or_a_lab_book_leads_nowhere(folder: Path) -> None:
    for page in ("README.md", "LABBOOK.md"):
        assert {link for link in links(folder / page) if not (folder / link).exists()} == set()
