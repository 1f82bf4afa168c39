"""Runs the tests of the crates without I/O under miri, which finds undefined behaviour and forgotten memory.

Needs a nightly toolchain with the components miri and rust-src; where they are missing, this says so and ends well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import not_tested

ROOT = Path(__file__).resolve().parent.parent
MIRI = ("cargo", "+nightly", "miri")
# The model drives the store's index without an arena.
TESTS = (("-p", "kvlane-block", "-p", "kvlane-policy"), ("-p", "kvlane-store", "--test", "all", "model::"))
# Property tests read their seeds; a case takes hundreds of times as long as it does natively.
SETTINGS = {"MIRIFLAGS": "-Zmiri-disable-isolation", "PROPTEST_CASES": "4"}


def main() -> None:
    try:
        found = subprocess.run((*MIRI, "--version"), cwd=ROOT, capture_output=True, text=True, check=False)
        missing = found.stderr.strip().splitlines()[:1] if found.returncode else []
    except FileNotFoundError:
        missing = ["there is no cargo"]
    if missing:
        not_tested.tell("miri", missing[0])
        return
    for tests in TESTS:
        command = (*MIRI, "test", "--locked", "--target-dir", "target/miri", *tests)
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **SETTINGS}, check=False).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
