"""The programs and libraries that cargo builds of the crates, and their paths.

    python scripts/cargo.py    the flags that choose the crates under test

The variable KVLANE_TEST_CRATES names the folders of the crates whose tests will run, as "fleet,router": `.ci/run` sets
it. Without it those of all crates are built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTED = "KVLANE_TEST_CRATES"
# Python's tests need their examples.
ALWAYS = ("cli", "python")


def chosen(tested: str | None) -> list[str]:
    """Flags for cargo that name the crates under test, and those that the environments hold."""
    if tested is None:
        return ["--workspace"]
    folders = {*filter(None, tested.split(",")), *ALWAYS}
    packages = ("kvlane" if folder == "cli" else f"kvlane-{folder}" for folder in sorted(folders))
    return [word for package in packages for word in ("-p", package)]


def everything() -> tuple[str, ...]:
    """All that tests need, at once: cargo then chooses the features of each crate once, and compiles it once."""
    return ("build", "--locked", "--all-targets", *chosen(os.environ.get(TESTED)))


@dataclass
class Built:
    """One target of a crate, as a file."""

    crate: Path
    """Its folder."""
    name: str
    source: Path
    is_test: bool
    """Whether it is a program that runs tests."""
    files: list[Path]
    program: Path | None


def build(*arguments: str) -> list[Built]:
    """The files that `cargo ARGUMENTS` makes. If cargo fails, ends this process with its status."""
    command = ["cargo", *arguments, "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        sys.exit(built.returncode)
    messages = (json.loads(line) for line in built.stdout.splitlines() if line.startswith("{"))
    return [_built(message) for message in messages if message["reason"] == "compiler-artifact"]


def _built(message: dict[str, Any]) -> Built:
    target, program = message["target"], message["executable"]
    return Built(
        crate=Path(message["manifest_path"]).parent,
        name=target["name"],
        source=Path(target["src_path"]),
        is_test=message["profile"]["test"],
        files=[Path(file) for file in message["filenames"]],
        program=Path(program) if program else None,
    )


if __name__ == "__main__":
    print(*chosen(os.environ.get(TESTED)))
