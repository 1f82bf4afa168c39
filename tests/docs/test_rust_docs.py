"""No doc comment of the crates has an example in Rust, because `make rust` runs no doctests."""

from __future__ import annotations

import re
from pathlib import Path

from pages import ROOT

FENCE = re.compile(r"^\s*//[/!] ```(\S*)", re.MULTILINE)


def openings(text: str) -> list[str]:
    """The language of each block of code in the doc comments of a file, "" where none is named."""
    return FENCE.findall(text)[::2]


def test_examples_in_rust_are_tests() -> None:
    files = sorted(ROOT.glob("crates/**/src/**/*.rs"))
    assert len(files) > 300
    found = {str(path.relative_to(ROOT)): openings(path.read_text()) for path in files}
    named = {"text", "sh", "toml", "json"}
    assert {path: languages for path, languages in found.items() if not set(languages) <= named} == {}


def test_an_example_in_rust_is_seen() -> None:
    text = "/// ```text\n/// a\n/// ```\n///\n/// ```\n/// assert!(true);\n/// ```\n"
    assert openings(text) == ["text", ""]
    assert openings(Path(__file__).read_text()) == []
