"""What cargo builds of the crates, and where it lies."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# All that tests need, at once: cargo then chooses the features of each crate once, and compiles it once.
EVERYTHING = ("build", "--locked", "--workspace", "--all-targets")


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
    """What `cargo ARGUMENTS` makes. Ends this process with cargo's status where that fails."""
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
