"""README.md and the pages of docs/, taken apart: fenced blocks, shell commands, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# Made by `kvlane reference`; CI compares them with the program.
GENERATED = ROOT / "docs" / "reference"
SHELL = ("sh", "console", "bash")
HEREDOC = re.compile(r"<<\s*'?(\w+)'?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line, counted from 1."""
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A shell command as a page has it, without its comment, on one line."""

    place: str
    text: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    language: str | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line.removeprefix("```").strip(), []
        else:
            yield Block(page, number - len(lines), language, "\n".join(lines) + "\n")
            language = None
    assert language is None, f"{name(page)} has a block without an end"


def prose(page: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page that are in no fenced block."""
    kept, is_inside = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            is_inside = not is_inside
        elif not is_inside:
            kept.append((number, line))
    return kept


def commands(block: Block) -> list[Command]:
    """The commands of a shell block. One may go over several lines: by a backslash, a quote, or a here-document."""
    found: list[Command] = []
    rest = block.text.splitlines()
    number = block.line
    while rest:
        began, text = number, rest.pop(0)
        number += 1
        while rest and not _is_whole(text):
            text += "\n" + rest.pop(0)
            number += 1
        words = _without_comment(text)
        if words:
            found.append(Command(f"{name(block.page)}:{began}", words))
    return found


def _is_whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    document = HEREDOC.search(text)
    if document is not None:
        return text.splitlines()[-1] == document[1] and "\n" in text
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def _without_comment(text: str) -> str:
    """A `#` begins a comment where a word begins, outside of quotes."""
    if HEREDOC.search(text):
        return " ".join(text.split("\n")[0].split())
    quote, kept = "", ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (position == 0 or text[position - 1].isspace()):
            break
        kept += character
    return " ".join(kept.replace("\\\n", " ").split())


def all_commands() -> list[Command]:
    return [
        command
        for page in PAGES
        for block in blocks(page)
        if block.language in SHELL
        for command in commands(block)
    ]


def anchors(page: Path) -> set[str]:
    """What `#...` in a link to this page may name, as GitHub makes it of headings."""
    found: set[str] = set()
    for _, line in prose(page):
        if line.startswith("#"):
            title = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            while anchor in found:
                anchor += "-1"
            found.add(anchor)
    return found


def links(page: Path) -> Iterator[tuple[int, str]]:
    """What a page links to, or shows, outside of code; a link may go over the end of a line."""
    text = "\n".join(line for _, line in prose(page))
    numbers = [number for number, _ in prose(page)]
    plain = re.sub(r"`[^`]*`", lambda code: re.sub(r"[^\n]", "x", code[0]), text)
    for link in re.finditer(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", plain):
        yield numbers[plain.count("\n", 0, link.start())], link[1] or link[2]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def table(page: str, header: str) -> list[list[str]]:
    """The cells of the rows of the table that begins with this header."""
    lines = read(page).splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows
