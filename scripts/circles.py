"""Fails on circles of files inside a crate: files that import each other, directly or over others.

    python scripts/circles.py                      every crate of the workspace
    python scripts/circles.py crates/client/src    one of them

A file imports the file whose name stands in a path: `crate::pools::Mapped`, `super::ids::JobKey`, or `ids::JobKey`
where `ids` is its own submodule. A file that re-exports a name counts like one that defines it: `super::Error` imports
the parent even if the parent has the name from elsewhere, and the parent imports that file. A declaration of a
submodule is no import. A name that lib.rs only re-exports counts as the file's that lib.rs takes it from: lib.rs lists
such names for users of the crate.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMENT = re.compile(r"//[^\n]*")
TESTS = re.compile(
    r"^#\[cfg\((?:test|all\(test\b.*?\))\)\]\n(?:pub )?mod \w+ \{.*?^\}", re.DOTALL | re.MULTILINE
)
VISIBILITY = re.compile(r"\bpub\((?:crate|super|self|in [\w:]+)\)")
PATH = re.compile(r"(?<![\w:])(\w+(?:::\w+)*)(::[{*])?")
USE = re.compile(r"^(pub )?use ([^;]+);", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, help="src folders of crates; none stands for all")
    found = 0
    for folder in parser.parse_args().folders or every_crate():
        for circle in circles(imports(folder)):
            found += 1
            print(f"{folder}: these files import each other: {', '.join(name or 'lib' for name in circle)}")
    return 1 if found else 0


def every_crate() -> list[Path]:
    sources = [*ROOT.glob("crates/*/src"), *ROOT.glob("crates/*/*/src")]
    here = Path.cwd()
    return sorted(path.relative_to(here) if path.is_relative_to(here) else path for path in sources)


def imports(folder: Path) -> dict[str, set[str]]:
    """By file of a crate, the files that it imports; all named by their module, such as "links::ids"."""
    texts = {module_of(path.relative_to(folder)): read(path) for path in folder.rglob("*.rs")}
    listed = passed_on(texts.get("", ""), texts)
    # Names that lib.rs passes on are for users of the crate.
    texts[""] = USE.sub(lambda use: "" if use.group(1) else use.group(), texts.get("", ""))
    return {
        module: {file_of(path, texts, listed) for path in paths(text, module, texts)} - {module}
        for module, text in texts.items()
    }


def read(path: Path) -> str:
    return TESTS.sub("", VISIBILITY.sub("pub", COMMENT.sub("", path.read_text())))


def module_of(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] in ("lib", "mod"):
        parts.pop()
    return "::".join(parts)


def joined(*names: str) -> str:
    return "::".join(filter(None, names))


def paths(text: str, module: str, texts: dict[str, str]) -> Iterator[list[str]]:
    """The names of its crate that a file uses, as paths from the crate's root."""
    at = 0
    while match := PATH.search(text, at):
        stem, at = match.group(1).split("::"), match.end()
        ends: list[list[str]] = [[]]
        if match.group(2) == "::{":
            group = text[at : closing_brace(text, at)]
            ends, at = [end for end, _ in leaves(group)], at + len(group)
        if starts_here(stem, module, texts) and (len(stem) > 1 or match.group(2)):
            for end in ends:
                yield absolute([*stem, *end], module)


def starts_here(path: list[str], module: str, texts: dict[str, str]) -> bool:
    """Whether a path that stands in a file leads to files of the same crate."""
    return path[0] in ("crate", "super", "self") or joined(module, path[0]) in texts


def closing_brace(text: str, at: int) -> int:
    """The position behind the brace that closes the one before `at`."""
    depth = 1
    for token in re.finditer(r"[{}]", text[at:]):
        depth += 1 if token.group() == "{" else -1
        if depth == 0:
            return at + token.end()
    return len(text)


def leaves(text: str) -> Iterator[tuple[list[str], str]]:
    """The paths inside the braces that end this text, each with the name that it gets: `a, b::{c, d as e}}` has a, b::c
    and b::d, the latter as e."""
    stack: list[list[str]] = [[]]
    current: list[str] = []
    for token in re.finditer(r"\w+|[{},]", text):
        word = token.group()
        if word == "{":
            stack.append([*stack[-1], *current])
            current = []
        elif word in ",}":
            if current:
                path, name = renamed(current)
                yield [*stack[-1], *path], name
            current = []
            if word == "}":
                stack.pop()
                if not stack:
                    return
        else:
            current.append(word)


def renamed(words: list[str]) -> tuple[list[str], str]:
    """The words of a path without a leading alias."""
    path, name = (words[:-2], words[-1]) if "as" in words else (words, words[-1])
    return [word for at, word in enumerate(path) if at == 0 or word != "self"], name


def absolute(path: list[str], module: str) -> list[str]:
    here = module.split("::") if module else []
    if path[0] == "crate":
        return path[1:]
    while path and path[0] in ("super", "self"):
        if path[0] == "super":
            here = here[:-1]
        path = path[1:]
    return here + path


def passed_on(text: str, texts: dict[str, str]) -> dict[str, list[str]]:
    """Names that lib.rs takes from other files, each with its path."""
    listed = {}
    for use in USE.finditer(text):
        for path, name in leaves(use.group(2) + "}"):
            if starts_here(path, "", texts):
                listed[name] = absolute(path, "")
    return listed


def file_of(path: list[str], texts: dict[str, str], listed: dict[str, list[str]]) -> str:
    """The file that a path names: the longest part of it that is a module, "" for lib.rs."""
    while path and path[0] in listed and path[0] not in texts:
        path = listed[path[0]] + path[1:]
    return next(name for n in range(len(path), -1, -1) if (name := joined(*path[:n])) in texts)


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
