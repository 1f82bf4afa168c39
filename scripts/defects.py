"""Puts each defect of tests/defects back into a copy of this tree, and runs the part of the tests that has to fail.

    python scripts/defects.py                          all of them
    python scripts/defects.py 07-store-leased-block    those whose name begins so

First that part has to pass without the defect. The copy is in .cache/defects and keeps what it has built. The exit
status is 1 if a defect is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from cargo import ROOT

DEFECTS = ROOT / "tests/defects"
COPY = ROOT / ".cache/defects"
# What a run that could not begin says, or that named no test: then red proves nothing.
NOT_A_TEST = re.compile(
    r"^error: could not compile|no tests ran|name no tests|error: patch failed", re.MULTILINE
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all if none is named")
    wanted = tuple(parser.parse_args().names)
    patches = [path for path in sorted(DEFECTS.glob("*.patch")) if path.stem.startswith(wanted or "")]
    if not patches:
        parser.error(f"no defect's name begins with {', '.join(wanted)}")
    copy()
    told = [found(patch) for patch in patches]
    print("\n==> defects")
    for patch, (verdict, seconds, part) in zip(patches, told, strict=True):
        print(f"{seconds:8.0f} s  {verdict:9}  {patch.stem}  ({part})")
    missed = sum(verdict != "found" for verdict, *_ in told)
    print(f"{len(told) - missed} passed, {missed} failed")
    sys.exit(1 if missed else 0)


def copy() -> None:
    """This tree's tracked and new files, as they are."""
    COPY.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    existing = b"\0".join(name for name in files.split(b"\0") if name and (ROOT / os.fsdecode(name)).exists())
    archive = subprocess.Popen(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    unpack = subprocess.Popen(["tar", "-x", "-C", str(COPY)], stdin=archive.stdout)
    assert archive.stdin is not None
    archive.stdin.write(existing)
    archive.stdin.close()
    if archive.wait() or unpack.wait():
        sys.exit("this tree could not be copied")


def found(patch: Path) -> tuple[str, float, str]:
    """The verdict on one defect, the seconds of the red run, and the part of the tests that was asked."""
    part = re.search(r"^Found by: (.+)$", patch.read_text(), re.MULTILINE)
    assert part is not None, f"{patch.name} does not say what finds it"
    print(f"==> {patch.stem}: {part[1]}", flush=True)
    status, output = run(part[1])
    if status:
        print(output[-4000:])
        return "red before", 0, part[1]
    try:
        apply(patch)
        began = time.monotonic()
        status, output = run(part[1])
        seconds = time.monotonic() - began
    finally:
        apply(patch, "--reverse")
    failed = re.findall(r"^(?:FAILED .*|test .* FAILED.*|ERROR .*)$", output, re.MULTILINE)
    print("\n".join(f"    {line[:160]}" for line in failed[:8]), flush=True)
    if NOT_A_TEST.search(output):
        print(output[-4000:])
        return "no answer", seconds, part[1]
    return ("found" if status and failed else "missed"), seconds, part[1]


def apply(patch: Path, *options: str) -> None:
    """Outside of any repository, so that git does not look for the copy's files in this one."""
    command = ["git", "apply", *options, str(patch)]
    subprocess.run(
        command, cwd=COPY, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(COPY.parent)}, check=True
    )


def run(part: str) -> tuple[int, str]:
    """The status of a command in the copy, and all that it printed."""
    done = subprocess.run(
        shlex.split(part),
        cwd=COPY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    main()
