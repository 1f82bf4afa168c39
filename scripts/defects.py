"""Puts each defect of tests/defects back into a copy of this tree, and runs the part of the tests that has to fail.

    python scripts/defects.py                          all of them
    python scripts/defects.py 07-store-leased-block    those whose name begins so

First that part has to pass without the defect; then the test that the patch names has to fail. The copy is in
.cache/defects: it makes environments of its own there (6 GB), and keeps what it has built. The exit status is 1 if a
defect is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cargo import ROOT

DEFECTS = ROOT / "tests/defects"
COPY = ROOT / ".cache/defects"
# A failed test in pytest's and in libtest's output.
FAILED = re.compile(r"^(?:FAILED (\S+)|test (\S+) \.\.\. FAILED)", re.MULTILINE)


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
        print(f"{seconds:8.0f} s  {verdict:10}  {patch.stem}  ({part})")
    missed = sum(verdict != "found" for verdict, *_ in told)
    print(f"{len(told) - missed} passed, {missed} failed")
    sys.exit(1 if missed else 0)


def copy() -> None:
    """Copies this tree's tracked and new files. Equal files are left alone, because cargo goes by times."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    wanted = {name for name in names if (ROOT / name).is_file()}
    manifest = COPY / ".copied"
    COPY.mkdir(parents=True, exist_ok=True)
    for old in set(manifest.read_text().split("\0") if manifest.exists() else ()) - wanted:
        (COPY / old).unlink(missing_ok=True)
    for name in wanted:
        source, target = ROOT / name, COPY / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    manifest.write_text("\0".join(wanted))


def found(patch: Path) -> tuple[str, float, str]:
    """The verdict on one defect, the seconds of the run with it, and the part of the tests that was asked."""
    text = patch.read_text()
    part = re.search(r"^Found by: (.+)$", text, re.MULTILINE)
    test = re.search(r"^Test: (.+)$", text, re.MULTILINE)
    assert part is not None and test is not None, f"{patch.name} does not say what finds it"
    print(f"==> {patch.stem}: {part[1]}", flush=True)
    status, output = run(part[1])
    if status:
        print(output[-4000:])
        return "red before", 0, part[1]
    if apply(patch):
        return "no patch", 0, part[1]
    try:
        began = time.monotonic()
        status, output = run(part[1])
        seconds = time.monotonic() - began
    finally:
        apply(patch, "--reverse")
    failed = ["".join(names) for names in FAILED.findall(output)]
    print("\n".join(f"    failed: {name}" for name in failed), flush=True)
    if status and any(test[1] in name for name in failed):
        return "found", seconds, part[1]
    print(output[-4000:])
    return "missed", seconds, part[1]


def apply(patch: Path, *options: str) -> int:
    """Runs git on the copy, which git must not take for a part of this repository. Returns its status."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(COPY.parent)}
    return subprocess.run(
        ["git", "apply", *options, str(patch)], cwd=COPY, env=environment, check=False
    ).returncode


def run(part: str) -> tuple[int, str]:
    """Runs a command in the copy. Returns its status and output."""
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
