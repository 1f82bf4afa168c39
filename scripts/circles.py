"""Fails on circles of files inside a crate: files that import each other, directly or over others.

    python scripts/circles.py crates/client/src crates/server/src

A file imports another where it names something of it, by `use` or in place: `crate::pools::Mapped`,
`super::ids::JobKey`. A name that the crate's lib.rs only passes on counts as the file's that has it. That a file
declares its submodules is no import.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

COMMENT = re.compile(r"//[^\n]*")
TESTS = re.compile(r"^#\[cfg\(test\)\]\nmod \w+ \{.*?^\}", re.DOTALL | re.MULTILINE)
VISIBILITY = re.compile(r"\bpub\((?:crate|super|self|in [\w:]+)\)")
PATH = re.compile(r"\b((?:crate|super|self)(?:::\w+)*)(::\{)?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="src folders of crates")
    found = 0
    for folder in parser.parse_args().folders:
        for circle in circles(imports(folder)):
            found += 1
            print(f"{folder}: these files import each other: {', '.join(circle)}")
    return 1 if found else 0


def imports(folder: Path) -> dict[str, set[str]]:
    """By file of a crate, the files that it imports; all named by their module, such as "links::ids"."""
    texts = {module_of(path.relative_to(folder)): read(path) for path in folder.rglob("*.rs")}
    passed_on = re_exports(texts)
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        named = (file_of(path, texts, passed_on) for path in paths(text, module))
        graph[module] = {target for target in named if target not in (None, module)}  # type: ignore[misc]
    # What lib.rs passes on is meant for users of the crate.
    graph[""] = set()
    return graph


def read(path: Path) -> str:
    return VISIBILITY.sub("pub", TESTS.sub("", COMMENT.sub("", path.read_text())))


def module_of(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] in ("lib", "mod"):
        parts.pop()
    return "::".join(parts)


def paths(text: str, module: str) -> Iterator[list[str]]:
    """What a file names, as paths from the crate's root."""
    at = 0
    while match := PATH.search(text, at):
        stem, at = match.group(1).split("::"), match.end()
        ends: list[list[str]] = [[]]
        if match.group(2):
            group = text[at : closing_brace(text, at)]
            ends, at = list(leaves(group, 0)), at + len(group)
        for end in ends:
            yield absolute([*stem, *end], module)


def closing_brace(text: str, at: int) -> int:
    """Behind the brace that closes the one before this place."""
    depth = 1
    for token in re.finditer(r"[{}]", text[at:]):
        depth += 1 if token.group() == "{" else -1
        if depth == 0:
            return at + token.end()
    return len(text)


def leaves(text: str, at: int) -> Iterator[list[str]]:
    """The paths inside the braces that begin at this place: `a, b::{c, d}` has a, b::c and b::d."""
    stack: list[list[str]] = [[]]
    current: list[str] = []
    for token in re.finditer(r"\w+|[{},]", text[at:]):
        word = token.group()
        if word == "{":
            stack.append([*stack[-1], *current])
            current = []
        elif word in ",}":
            if current:
                yield [*stack[-1], *current]
            current = []
            if word == "}":
                stack.pop()
                if not stack:
                    return
        elif word != "self":
            current.append(word)


def absolute(path: list[str], module: str) -> list[str]:
    here = module.split("::") if module else []
    if path[0] == "crate":
        return path[1:]
    while path and path[0] in ("super", "self"):
        if path[0] == "super":
            here = here[:-1]
        path = path[1:]
    return here + path


def re_exports(texts: dict[str, str]) -> dict[str, list[str]]:
    """Names that a file passes on by `pub use`, each as module::name, and where they are from."""
    passed_on = {}
    for module, text in texts.items():
        for match in re.finditer(r"pub(?:\(\w+\))? use ([\w:]+?)(::\{|;)", text):
            stem = match.group(1).split("::")
            ends = leaves(text, match.end()) if match.group(2) == "::{" else [[]]
            for end in ends:
                path = [*stem, *end]
                full = (
                    absolute(path, module)
                    if path[0] in ("crate", "super", "self")
                    else [*filter(None, [module]), *path]
                )
                passed_on["::".join(filter(None, [module, path[-1]]))] = full
    return passed_on


def file_of(path: list[str], texts: dict[str, str], passed_on: dict[str, list[str]]) -> str | None:
    """The file that has what is named; None for the crate's root."""
    for _ in range(len(passed_on) + 1):
        known = next((n for n in range(len(path), -1, -1) if "::".join(path[:n]) in texts), 0)
        name = "::".join(path[: known + 1])
        if name not in passed_on:
            return "::".join(path[:known]) or ("" if path else None)
        path = passed_on[name] + path[known + 1 :]
    return None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files each of which reaches all the others."""
    reach = {start: reachable(graph, start) for start in graph}
    groups = {tuple(sorted({a} | {b for b in reach[a] if a in reach[b]})) for a in graph if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in graph.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


if __name__ == "__main__":
    sys.exit(main())
