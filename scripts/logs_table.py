"""Writes the page of log lines from the comments that stand above them in the sources.

python scripts/logs_table.py docs/reference/logs.md            writes it
python scripts/logs_table.py docs/reference/logs.md --check    fails if it differs

The comment above a statement says what its line means and what an operator does then:

    // Log: the socket was removed while the daemon ran; it made the socket again. Do: find out who removed it.
    tracing::warn!(address, "socket was gone; the daemon made it again");

`Do:` is left out if there is nothing to do. If all of the text varies, the comment quotes the texts that occur, one
`Log` for each: `// Log "kvlane: <who> lost the daemon at <address>: <why>": the connection ended.`
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The parts of the page, and the sources of each. The longest path that fits a file decides.
PARTS = {
    "The daemon: `kvlane serve`": (
        "crates/cli/src/serve",
        "crates/cluster",
        "crates/engine-memory/src/gpu_pool.rs",
        "crates/server",
        "crates/ssd",
        "crates/store",
    ),
    "The router: `kvlane route`": ("crates/cli/src/route", "crates/router"),
    "The index: `kvlane index`": ("crates/cli/src/index.rs", "crates/cluster/src/replica.rs"),
    "Daemon and router": ("crates/cli", "crates/door", "crates/otlp"),
    "Engines: the connector": (
        "python/kvlane/connector",
        "python/kvlane/moe",
        "python/kvlane/plugin.py",
        "crates/python",
    ),
    "Engines: the connection to the daemon": ("crates/client", "crates/engine-memory/src/gpu_worker.rs"),
    "Engines: direct hand-offs": ("crates/handoff",),
    "The fabric, between engines and between daemons": ("crates/fabric",),
    "All programs: memory, sockets and GPUs": ("crates/memory", "crates/gpu"),
    "Simulated GPUs, which only tests use": ("crates/fake-gpu",),
}
LEVELS = ("error", "warn", "info")
PYTHON_LEVELS = {
    "critical": "error",
    "error": "error",
    "exception": "error",
    "warning": "warn",
    "info": "info",
}
# These do not begin a sentence with a capital letter.
NAMES = ("kvlane", "vLLM", "systemd")
# Longer explanations belong into docs/troubleshoot.md.
WORDS_MAX = 25
HEAD = """<!-- Made by `python scripts/logs_table.py docs/reference/logs.md`; do not edit. -->

# Log lines
To look up a line of a log, search this page for a few words of it that are not a name, a number or an address.

`kvlane serve` and `kvlane route` write `TIME LEVEL PART: text field=value ...` to stderr. With `--log-format json` each
line is an object with `timestamp`, `level`, `target` (the part) and `fields` (`message` is the text). Engines write
`kvlane: text (field: value, ...)` to vLLM's own log, with the logger `vllm.kvlane`; there warn is `WARNING`.

`<...>` and other words in angle brackets stand for what varies. A line with the field `once` comes once for each thing
that it is about. Lines at debug and trace are left out. [troubleshoot.md](../troubleshoot.md) explains the commonest.
"""

_RUST = re.compile(r"(?<![\w!])(?:tracing::)?(info|warn|error|event)!\s*[(\[{]")
_TESTS = re.compile(r"^#\[cfg\((?:all\()?test\b[^\n]*\]\n(?:pub(?:\([a-z]+\))? )?mod \w+ \{", re.MULTILINE)
_FIELD = re.compile(r"([%?]?)([A-Za-z_][\w.]*)(?:\s*=[^=].*)?", re.DOTALL)
_LOG = re.compile(r'Log(?: "(?P<quoted>.+)")?: (?P<meaning>.+?\.)(?: Do: (?P<action>.+\.))?')


class Problem(Exception):
    """A statement that cannot stand on the page as it is."""


@dataclass(frozen=True)
class Note:
    """A comment `Log: meaning. Do: action.`"""

    quoted: str | None
    meaning: str
    action: str


@dataclass(frozen=True)
class Line:
    """A line that may come in a log."""

    part: str
    level: str
    text: str
    fields: tuple[str, ...]
    meaning: str
    action: str


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of log lines.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    arguments = parser.parse_args()
    lines, problems = collect(sources(ROOT))
    if problems:
        sys.exit("\n".join(problems))
    wanted = page(lines)
    if not arguments.check:
        arguments.page.write_text(wanted)
    elif not arguments.page.exists() or arguments.page.read_text() != wanted:
        sys.exit(f"{arguments.page} is out of date: run python scripts/logs_table.py {arguments.page}")


def sources(root: Path) -> dict[str, str]:
    """The programs' sources by their paths, without tests."""
    paths = [*root.glob("crates/*/src/**/*.rs"), *root.glob("python/kvlane/**/*.py")]
    of_programs = (path for path in paths if path.name != "tests.rs" and "tests" not in path.parts[:-1])
    return {str(path.relative_to(root)): path.read_text() for path in sorted(of_programs)}


def collect(files: dict[str, str]) -> tuple[list[Line], list[str]]:
    """The lines of these sources, and what is wrong with them: `file:line: sentence`."""
    lines: list[Line] = []
    problems: list[str] = []
    comment = re.compile(r"^\s*(?://|#).*$", re.MULTILINE)
    known = _plain(comment.sub("", "\n".join(files.values())))
    for name, source in files.items():
        read = rust_statements if name.endswith(".rs") else python_statements
        for number, statement in read(source):
            try:
                lines += _lines(name, statement, known)
            except Problem as problem:
                problems.append(f"{name}:{number}: {problem}")
    return lines, problems


@dataclass(frozen=True)
class Statement:
    """A statement that writes to the log. `text` is None if its message is not a literal."""

    level: str
    text: str | None
    fields: tuple[str, ...]
    comment: str


def _lines(name: str, statement: Statement, known: str) -> Iterator[Line]:
    """The rows of a statement. Raises Problem."""
    part = max(
        ((path, part) for part, paths in PARTS.items() for path in paths if name.startswith(path)),
        key=lambda found: len(found[0]),
        default=(None, None),
    )[1]
    if part is None:
        raise Problem("PARTS in scripts/logs_table.py has no part for this file")
    if statement.level not in LEVELS:
        raise Problem(f"{statement.level} has no level of its own: write info!, warn! or error!")
    if statement.text is None:
        raise Problem("the message is not a literal: write its text here, and what varies as {name} or %s")
    has_words = re.search(r"[A-Za-z]", re.sub(r"<[^>]*>", "", statement.text)) is not None
    for note in notes(statement.comment):
        if has_words and note.quoted is not None:
            raise Problem("the message has a text of its own: write `Log:` without a quotation")
        if not has_words and note.quoted is None:
            raise Problem(
                f'all of the message {statement.text} varies: quote what is logged, `Log "text": ..`'
            )
        for fragment in re.split(r"<[^>]*>", note.quoted or ""):
            if _plain(fragment) not in known:
                raise Problem(f"the quoted text {fragment.strip()!r} is in no source")
        text = statement.text if note.quoted is None else note.quoted
        yield Line(part, statement.level, text, statement.fields, note.meaning, note.action)


def notes(comment: str) -> list[Note]:
    """The notes in a comment. Raises Problem if there is none, or one that does not have the form."""
    texts = re.split(r"(?=\bLog(?:: | \"))", comment)[1:]
    if not texts:
        raise Problem("there is no comment `Log: meaning. Do: action.` above this statement")
    found = []
    for text in texts:
        form = _LOG.fullmatch(text.strip())
        if form is None:
            raise Problem(f"the comment is not of the form `Log: meaning. Do: action.`: {text.strip()}")
        note = Note(form["quoted"], form["meaning"], form["action"] or "")
        for sentence in (note.meaning, note.action):
            if len(sentence.split()) > WORDS_MAX:
                raise Problem(f"more than {WORDS_MAX} words: {sentence}")
        found.append(note)
    return found


def rust_statements(source: str) -> Iterator[tuple[int, Statement]]:
    """`tracing`'s macros in a Rust source, each with the number of its line."""
    tests = _TESTS.search(source)
    source = source[: tests.start()] if tests else source
    code = _without_texts(source)
    for found in _RUST.finditer(code):
        number = source.count("\n", 0, found.start()) + 1
        arguments = _arguments(source, code, found.end())
        fields: list[str] = []
        text: str | None = None
        while arguments and text is None:
            argument = arguments.pop(0)
            text = _literal(argument)
            field = _FIELD.fullmatch(argument)
            if re.match(r"(target|parent|name):(?!:)", argument):
                continue
            if text is None and field is None:
                break
            if text is None and field is not None:
                fields.append(field[2])
        if text is not None:
            text = _placeholders(text)
        yield (
            number,
            Statement(found[1], text, tuple(fields), _comment_above(source.splitlines(), number, "//")),
        )


def _without_texts(source: str) -> str:
    """The same length, with spaces for comments, strings and characters."""
    pattern = re.compile(
        r"""//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n]+?|[^'\\\n])'""",
        re.DOTALL,
    )
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def _arguments(source: str, code: str, start: int) -> list[str]:
    """The arguments between the brackets that open before `start`."""
    found, depth, begin = [], 1, start
    for position in range(start, len(code)):
        character = code[position]
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 or (depth == 1 and character == ","):
            found.append(_without_comments(source[begin:position]))
            begin = position + 1
        if depth == 0:
            break
    return [argument for argument in found if argument]


def _without_comments(argument: str) -> str:
    return re.sub(r"^\s*//[^\n]*\n", "", argument, flags=re.MULTILINE).strip()


def _literal(argument: str) -> str | None:
    """The text of a Rust string literal; None if the argument is something else."""
    raw = re.fullmatch(r'r(#*)"(.*)"\1', argument, re.DOTALL)
    if raw:
        return raw[2]
    plain = re.fullmatch(r'"((?:\\.|[^"\\])*)"', argument, re.DOTALL)
    if plain is None:
        return None
    joined = re.sub(r"\\\n\s*", "", plain[1])
    return re.sub(r"\\(.)", lambda escaped: {"n": " ", "t": " "}.get(escaped[1], escaped[1]), joined)


def _placeholders(text: str) -> str:
    """`{name:.1}` as `<name>`, and one without a name as `<...>`."""

    def shown(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        return f"<{found[1]}>" if found[1] and not found[1].isdigit() else "<...>"

    return re.sub(r"\{\{|\}\}|\{(\w*)(?::[^}]*)?\}", shown, text)


def python_statements(source: str) -> Iterator[tuple[int, Statement]]:
    """Calls of the connector's logger in a Python source, each with the number of its line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id not in ("logger", "logging"):
            continue
        # `log` passes on lines of the crates, which have rows of their own.
        level = PYTHON_LEVELS.get(node.func.attr)
        if level is None:
            continue
        message = node.args[0] if node.args else None
        text = message.value if isinstance(message, ast.Constant) and isinstance(message.value, str) else None
        if text is not None:
            text = re.sub(r"%[-+ #0]*[\d.]*[a-z]", "<...>", text).replace("%%", "%")
        yield node.lineno, Statement(level, text, (), _comment_above(source.splitlines(), node.lineno, "#"))


def _comment_above(lines: list[str], number: int, sign: str) -> str:
    """The comment directly above the line with this number, as one line."""
    found: list[str] = []
    for line in reversed(lines[: number - 1]):
        if not re.match(rf"\s*{sign}(?![/!\[])", line):
            break
        found.insert(0, line.strip().removeprefix(sign).strip())
    return " ".join(found)


def _plain(text: str) -> str:
    """Letters and digits only, to find a text in a source whatever its quotes and line breaks are."""
    return re.sub(r"[\W_]+", "", re.sub(r"\{[\w.()]*(?::[^}\s]*)?\}", "", text))


def page(lines: list[Line]) -> str:
    return HEAD + "".join(_table(part, [line for line in lines if line.part == part]) for part in PARTS)


def _table(part: str, lines: list[Line]) -> str:
    ordered = sorted(
        set(lines), key=lambda line: (LEVELS.index(line.level), line.text.casefold(), line.meaning)
    )
    rows = [
        f"| {line.level} | {_cell_of_text(line)} | {_sentence(line.meaning)} | {_sentence(line.action) or '-'} |\n"
        for line in ordered
    ]
    return (
        f"\n## {part}\n| level | line, and its fields | meaning | what to do |\n|---|---|---|---|\n"
        + "".join(rows)
    )


def _cell_of_text(line: Line) -> str:
    mark = "``" if "`" in line.text else "`"
    edge = " " if line.text.startswith("`") or line.text.endswith("`") else ""
    fields = f" ({', '.join(line.fields)})" if line.fields else ""
    return f"{mark}{edge}{line.text}{edge}{mark}{fields}".replace("|", r"\|")


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with code or a name, and with links to pages."""
    if not text.startswith(NAMES):
        text = text[:1].upper() + text[1:]
    return re.sub(r"\bdocs/([\w-]+\.md)(#[\w-]+)?", r"[\1](../\1\2)", text).replace("|", r"\|")


if __name__ == "__main__":
    main()
