"""Writes the table of the connector's keys into docs/configure.md, from python/kvlane/connector/settings.py.

python scripts/settings_table.py docs/configure.md            writes it
python scripts/settings_table.py docs/configure.md --check    fails if it differs
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

SETTINGS = Path(__file__).parents[1] / "python" / "kvlane" / "connector" / "settings.py"
BEGIN = "<!-- keys of settings.py, by scripts/settings_table.py -->\n"
END = "<!-- end of the keys -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the table of the connector's keys into a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    arguments = parser.parse_args()
    text = arguments.page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + table(SETTINGS.read_text()) + END + after
    if arguments.check:
        if wanted != text:
            sys.exit(
                f"{arguments.page} is out of date: run python scripts/settings_table.py {arguments.page}"
            )
        return
    arguments.page.write_text(wanted)


def table(source: str) -> str:
    """Each key with its default and its documentation. The source is read, not run: it needs no other package."""
    tree = ast.parse(source)
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    (settings,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    plain = constants["PLAIN"]
    assert isinstance(plain, tuple), plain
    lines = ["", "| key | default | what |", "|---|---|---|"]
    for field, documentation in zip(settings.body, settings.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        assert field.value is not None and isinstance(documentation, ast.Expr), ast.unparse(field)
        what = " ".join(ast.literal_eval(documentation.value).split())
        # In JSON a key is left out.
        what = what.replace("None takes", "without it")
        # A name of this file, such as LAYOUTS, stands for the words that it lists.
        what = re.sub(r"\b[A-Z]+(?:_[A-Z]+)*\b", lambda name: _words(name[0], constants), what)
        # As key_name of settings.py, and PLAIN.
        key = field.target.id
        if key not in plain:
            key = "kvlane." + key.replace("direct_", "direct.", 1)
        lines.append(f"| `{key}` | {_default(ast.literal_eval(field.value))} | {what} |")
    return "\n".join(lines) + "\n\n"


def _words(name: str, constants: dict[str, object]) -> str:
    words = constants.get(name)
    return ", ".join(f"`{word}`" for word in words) if isinstance(words, tuple) else name


def _default(value: object) -> str:
    """As a user would write it in JSON; nothing where there is none."""
    if value is None or value == "":
        return "none"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    main()
