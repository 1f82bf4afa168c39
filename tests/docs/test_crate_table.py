"""docs/ARCHITECTURE.md's table of crates: the same crates as in the workspace, each with what its manifest names."""

from __future__ import annotations

import json
import subprocess

from pages import ROOT

PREFIX = "kvlane-"
HEAD = "| crate | what it is | may use |"


def of_the_page(text: str) -> dict[str, set[str]]:
    rows = text.split(HEAD)[1].split("\n\n")[0].strip().splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {crate: {used.strip() for used in uses.split(",") if used.strip()} for crate, _, uses in cells}


def of_the_manifests() -> dict[str, set[str]]:
    """What each crate is built from. What only its tests use is no part of it."""
    command = ("cargo", "metadata", "--no-deps", "--offline", "--locked", "--format-version", "1")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        name(package["name"]): {
            name(used["name"])
            for used in package["dependencies"]
            if used["kind"] != "dev" and used.get("path") is not None
        }
        for package in json.loads(found.stdout)["packages"]
    }


def name(package: str) -> str:
    """The program's crate is called as the program is."""
    return "cli" if package == "kvlane" else package.removeprefix(PREFIX)


def test_the_table_of_crates_is_what_the_manifests_say() -> None:
    page, manifests = of_the_page((ROOT / "docs/ARCHITECTURE.md").read_text()), of_the_manifests()
    differing = {crate for crate in page | manifests if page.get(crate) != manifests.get(crate)}
    assert {crate: (page.get(crate), manifests.get(crate)) for crate in sorted(differing)} == {}


def test_a_row_that_names_too_much_or_too_little_is_seen() -> None:
    text = f"{HEAD}\n|---|---|---|\n| block | blocks. Pure | |\n| store | the cache | block, memory |\n\n| a | b | c |"
    assert of_the_page(text) == {"block": set(), "store": {"block", "memory"}}
