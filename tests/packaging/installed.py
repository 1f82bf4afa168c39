"""Programs of an environment that has kvlane's wheel, and nothing else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def only(programs: Path) -> dict[str, str]:
    """This machine's environment, with no other programs on PATH: no cargo, no rustc, no compiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVLANE_", "PYTHON"))}
    return {**kept, "PATH": str(programs)}


def run(programs: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs / command[0], *command[1:]],
        env=only(programs),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
