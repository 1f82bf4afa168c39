"""`python -m kvlane.bench NAME`: the one place where the subcommands are registered."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from kvlane.bench import extra

SUBCOMMANDS = (
    "serve",
    "lookup",
    "journal",
    "copy",
    "gpu_copy",
    "hooks",
    "identity",
    "idle",
    "memory_use",
    "overhead",
    "share",
    "fabric",
    "handoff",
    "handoff_scale",
    "all_to_all",
    "index",
    "ssd",
    "remote",
    "all",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    parser = argparse.ArgumentParser(
        prog="kvlane bench", description="Measure; each prints a table and writes JSON and a figure."
    )
    choices = parser.add_subparsers(metavar="NAME", required=True)
    for name in SUBCOMMANDS:
        module = importlib.import_module(f"kvlane.bench.{name}")
        subparser = choices.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    if lacks := extra.lacks():
        print(lacks, file=sys.stderr)
        return 2
    return parsed.run(parsed)


def _main_with_sentences() -> int:
    # Also a terminated benchmark ends the engines and daemons that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(_main_with_sentences())
