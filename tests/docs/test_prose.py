"""scripts/prose.py counts what it says, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import prose


def kinds(found: list[prose.Find]) -> list[str]:
    return [each.kind for each in found for _ in range(each.count)]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("/// Of these the oldest goes.\nfn f() {}", ["beginnings"]),
        ("// The oldest goes. Who stays is young.", ["beginnings"]),
        ("    # Nobody knows. What is known: nothing.", ["beginnings", "beginnings"]),
        # The second line goes on with the sentence of the first.
        ("/// The address of the peer\n/// Of whom I speak.\nfn f() {}", []),
        ("/// Which one.\nfn f() {}", ["short"]),
        ("/// `Done`.\nfn f() {}", []),
        ('//! What?\n#[derive(Who)]\nlet text = "Of this";', []),
    ],
)
def test_comments(code: str, wanted: list[str]) -> None:
    assert kinds(list(prose.in_code("a.rs", code))) == wanted


def test_a_guides_long_sentences_are_found_wherever_they_stand() -> None:
    long = "one " * (prose.WORDS_MAX + 1)
    page = f"# Title\n{long}.\n\n- {long}.\n\n| {long} | cell |\n```sh\n{long}\n```\nShort, `{long}`. [{long}](x.md).\n"
    found = list(prose.in_page("docs/start.md", page))
    assert [each.kind for each in found] == ["words", "long", "long"]
    assert found[0].count == len(page.split())
    # A concept or a reference may have them.
    assert kinds(list(prose.in_page("docs/fabric.md", "word"))) == ["words"]
    assert "long" not in kinds(list(prose.in_page("docs/fabric.md", page)))


def test_a_count_above_its_ceiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prose.py", "--check"])
    assert prose.main() == 0
    for kind in prose.CEILINGS:
        with monkeypatch.context() as lower:
            lower.setitem(prose.CEILINGS, kind, -1)
            assert prose.main() == 1, kind
