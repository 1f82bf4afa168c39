"""Makes targets of the Makefile one after the other, and tells at the end what each took, which tests took longest, and
what was not tested.

    python scripts/stages.py lint rust python
    python scripts/stages.py lint "python=tests/router tests/docs"

What follows = is the target's ARGS. The first target that fails is the last one. Test runners leave their times as
JUnit XML in .cache/times.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / ".cache/times"
SLOWEST = 15
# Its time depends on the network.
DOWNLOADS = "fetch"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    targets = parser.parse_args().targets
    TIMES.mkdir(parents=True, exist_ok=True)
    for old in TIMES.glob("*.xml"):
        old.unlink()
    took: list[tuple[str, float]] = []
    status = 0
    try:
        for target in targets:
            target, _, arguments = target.partition("=")
            print(f"==> make {target}" + (f' ARGS="{arguments}"' if arguments else ""), flush=True)
            began = time.monotonic()
            try:
                status = make(target, arguments)
            finally:
                took.append((target, time.monotonic() - began))
            if status:
                break
    finally:
        tell(took, cases())
    if status:
        print(f"==> make {took[-1][0]} failed", flush=True)
    sys.exit(status)


def make(target: str, arguments: str = "") -> int:
    """Runs one target and returns its status. If this process ends, all that the target has started ends too."""
    # ARGS are for one target, not for all.
    made = subprocess.Popen(["make", target, f"ARGS={arguments}"], cwd=ROOT, start_new_session=True)

    def stop(number: int, _: object) -> None:
        os.killpg(made.pid, signal.SIGTERM)
        made.wait()
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return made.wait()


@dataclass
class Case:
    """A test, as its runner left it."""

    seconds: float
    name: str
    skipped: str | None
    """Why it did not run."""


def cases() -> list[Case]:
    """All tests of this run, without those of a runner that was stopped while it wrote."""
    found: list[Case] = []
    for path in sorted(TIMES.glob("*.xml")):
        try:
            found += map(_case, ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError as error:
            print(f"{path}: {error}")
    return found


def _case(element: ElementTree.Element) -> Case:
    skipped = element.find("skipped")
    return Case(
        seconds=float(element.get("time", 0)),
        name=f"{element.get('classname')} {element.get('name')}",
        skipped=None if skipped is None else skipped.get("message", ""),
    )


def tell(took: list[tuple[str, float]], tests: list[Case]) -> None:
    """Prints the tables."""
    print("\n==> slowest tests")
    for case in sorted(tests, key=lambda case: -case.seconds)[:SLOWEST]:
        print(f"{case.seconds:8.1f} s  {case.name}")
    print("==> not tested")
    for case in tests:
        if case.skipped is not None:
            print(f"  {case.name}: {case.skipped}")
    print("==> time of each stage")
    for target, seconds in took:
        print(f"{seconds:8.1f} s  {target}")
    together = sum(seconds for _, seconds in took)
    local = sum(seconds for target, seconds in took if target != DOWNLOADS)
    print(f"{together:8.1f} s  together ({together / 60:.1f} min)")
    if local != together:
        print(f"{local:8.1f} s  without {DOWNLOADS} ({local / 60:.1f} min)")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
