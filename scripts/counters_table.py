"""Writes the page of the connector's counters, which vLLM serves, from python/kvlane/connector/counters.py.

python scripts/counters_table.py docs/reference/engine-metrics.md            writes it
python scripts/counters_table.py docs/reference/engine-metrics.md --check    fails if it differs
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

COUNTERS = Path(__file__).parents[1] / "python" / "kvlane" / "connector" / "counters.py"
HEAD = """<!-- Made by `python scripts/counters_table.py docs/reference/engine-metrics.md`; do not edit. -->

# Metrics of engines

vLLM serves what the connector counts at its own `/metrics`. All are counters, with vLLM's labels `model_name` and
`engine`; they are summed over the engine's scheduler and its workers.

| name | what |
|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page of the connector's counters.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    arguments = parser.parse_args()
    wanted = page(COUNTERS.read_text())
    if not arguments.check:
        arguments.page.write_text(wanted)
    elif not arguments.page.exists() or arguments.page.read_text() != wanted:
        sys.exit(f"{arguments.page} is out of date: run python scripts/counters_table.py {arguments.page}")


def page(source: str) -> str:
    """The source is read, not run: it needs no other package."""
    (counters,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COUNTERS"
    )
    return HEAD + "".join(f"| `vllm:kvlane_{name}_total` | {what}. |\n" for name, what in counters.items())


if __name__ == "__main__":
    main()
