"""Counts what makes our prose hard to read, and holds it below ceilings.

    python scripts/prose.py                  the counts beside their ceilings
    python scripts/prose.py --check          the same; status 1 above a ceiling
    python scripts/prose.py crates/fabric    each place that counts, in these files and folders

Comments: sentences that begin with Of, What, Who, Whoever, Nobody or So many, because the actor is missing. Doc
comments of at most 15 letters, because they repeat the name. Docs: their words, but for docs/reference, which the
program makes; and sentences of more than 25 words in guides. Ceilings only fall, except that a new page adds its words:
lower one when its count is far below.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = {"beginnings": 10, "short": 10, "words": 45_300, "long": 0}
SAYS = {
    "beginnings": "comment sentences that begin with Of, What, Who, Whoever, Nobody or So many",
    "short": "doc comments of at most 15 letters",
    "words": "words of README and docs",
    "long": "sentences of more than 25 words in guides",
}
# Pages that say what to do.
GUIDES = ("start", "routing", "replay", "containers", "operate", "sizing", "weights", "troubleshoot")
WORDS_MAX = 25
_BEGINNING = re.compile(r"(?:^|[.:] )(?:Of|What|Who|Whoever|Nobody|So many)\b(?! ?\?)")
_COMMENT = re.compile(r"^\s*(?:///|//!|//|#)(?!\[)\s?(.*)$")
_SHORT = 15


@dataclass(frozen=True)
class Find:
    """A place that counts."""

    kind: str
    place: str
    text: str
    count: int = 1


def in_code(name: str, text: str) -> Iterator[Find]:
    """Finds in the comments of a source file."""
    previous = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _COMMENT.match(line)
        if found is None:
            previous = ""
            continue
        comment = found.group(1).strip()
        goes_on = previous != "" and not previous.endswith((".", ":", "!"))
        begins = len(_BEGINNING.findall(f"x {comment}" if goes_on else comment))
        if begins:
            yield Find("beginnings", f"{name}:{number}", comment, begins)
        is_first = line.lstrip().startswith("/// ") and previous == ""
        if is_first and 0 < len(comment) <= _SHORT and not comment.startswith(("`", "|", "#")):
            yield Find("short", f"{name}:{number}", comment)
        previous = comment


def in_page(name: str, text: str) -> Iterator[Find]:
    """Counts a page's words, and finds a guide's long sentences."""
    yield Find("words", name, "", len(text.split()))
    if Path(name).stem in GUIDES:
        for sentence in sentences(text):
            if len(sentence.split()) > WORDS_MAX:
                yield Find("long", name, sentence)


def sentences(page: str) -> Iterator[str]:
    """The sentences of paragraphs and lists, without tables, fences and pictures. A link or a code span is a word."""
    plain = re.sub(r"^```.*?^```", "\n", page, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"^(?:\||#|!|<).*$", "\n", plain, flags=re.MULTILINE)
    plain = re.sub(r"`[^`]*`", "code", plain)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", lambda link: link.group(1).replace(" ", "-"), plain)
    plain = re.sub(r"^\s*(?:[-*]|\d+\.)\s", "\n\n", plain, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", plain):
        yield from filter(None, (part.strip() for part in re.split(r"(?<=[.:!?])\s", paragraph)))


def finds(paths: list[str]) -> list[Find]:
    """All finds in the committed files under the paths, or everywhere."""
    listed = subprocess.run(
        ["git", "ls-files", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    found: list[Find] = []
    for name in listed:
        if re.fullmatch(r"crates/.*\.rs|python/kvlane/.*\.py", name) and "/tests/" not in name:
            found += in_code(name, (ROOT / name).read_text())
        elif re.fullmatch(r"README\.md|docs/[^/]*\.md", name):
            found += in_page(name, (ROOT / name).read_text())
    return found


def main() -> int:
    """See the module."""
    paths = [each for each in sys.argv[1:] if each != "--check"]
    found = finds(paths)
    if paths:
        for each in found:
            print(f"{each.place}: {each.kind}: {each.text or each.count}")
        return 0
    counts = {kind: sum(each.count for each in found if each.kind == kind) for kind in CEILINGS}
    above = [kind for kind, count in counts.items() if count > CEILINGS[kind]]
    for kind, count in counts.items():
        print(f"{count:7,} of at most {CEILINGS[kind]:6,}  {SAYS[kind]}")
    for kind in above:
        print(
            f"too many {SAYS[kind]}: python scripts/prose.py PATH names them; CONTRIBUTING.md says why",
            file=sys.stderr,
        )
    return 1 if "--check" in sys.argv[1:] and above else 0


if __name__ == "__main__":
    sys.exit(main())
