"""docs/walks.md: every function that it names is where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/walks.md"
WALKS = ["A save", "A load", "A routed request", "A direct hand-off"]
STEPS_MIN = 15
CODE = re.compile(r"`(\w+)`")
# `name` (path), `name`, `other` (path), `name` and `other` (path), and in brackets `name`, path.
NAMED = re.compile(
    r"(`\w+`(?:(?:, | and )`\w+`)*)(?: \(|, )((?:crates|python)/[\w./-]+\.(?:rs|py))",
)


def walks(page: str) -> dict[str, str]:
    """Each walk's text, by its heading."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def steps(walk: str) -> list[str]:
    """The numbered lines of a walk, each as one line."""
    return re.findall(r"^\d+\. (.+)", re.sub(r"\n +", " ", walk), flags=re.MULTILINE)


def named(walk: str) -> list[tuple[str, str]]:
    """Each function and the file that it is said to be in. A name may go over the end of a line."""
    found = NAMED.findall(" ".join(walk.split()))
    return [(function, file) for functions, file in found for function in CODE.findall(functions)]


def is_there(function: str, code: str) -> bool:
    """Whether Rust or Python defines it there."""
    return re.search(rf"\b(?:fn|def|struct|class|enum) {function}\b", code) is not None


def test_the_page_has_the_four_walks() -> None:
    assert list(walks(PAGE.read_text())) == WALKS


@pytest.mark.parametrize("name", WALKS)
def test_every_function_of_a_walk_is_where_the_page_says(name: str) -> None:
    walk = walks(PAGE.read_text())[name]
    assert len(steps(walk)) >= STEPS_MIN
    assert [step for step in steps(walk) if named(step) == [] or not step.startswith("`")] == []
    wrong = [(name, file) for name, file in named(walk) if not is_there(name, (ROOT / file).read_text())]
    assert wrong == []


def test_a_function_that_moved_is_noticed() -> None:
    walk = (
        "\n1. `turned`, `fed`\n   (crates/client/src/mover.rs): move.\n- **It ends.** `lost` and `gone` "
        "(crates/client/src/mover.rs), then (`last`,\n  python/kvlane/fabric.py).\n2. Nothing here.\n"
    )
    mover = "crates/client/src/mover.rs"
    assert named(walk) == [
        ("turned", mover),
        ("fed", mover),
        ("lost", mover),
        ("gone", mover),
        ("last", "python/kvlane/fabric.py"),
    ]
    assert [named(step) == [] for step in steps(walk)] == [False, True]
    assert not is_there("turned", "fn turn() {}") and is_there("turn", "    pub(crate) fn turn(&mut self) {")
