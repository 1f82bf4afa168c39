"""Builds the wheel that users get: for Python 3.10 and newer on Linux with glibc 2.28 or newer. `make wheel`.

    python scripts/wheel.py --out dist

zig links them all against the symbols of glibc 2.28, whatever this machine has. auditwheel checks that they need
nothing newer, names the wheel for it, and prints its report.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import environment

ENVIRONMENT = environment.VENVS / "wheel"
TARGET, PLATFORM = "x86_64-unknown-linux-gnu", "manylinux_2_28_x86_64"
GLIBC = "2.28"
MOST_BYTES = 16_500_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=environment.ROOT / "dist", help="folder (default dist)")
    out = parser.parse_args().out
    if os.uname().machine != "x86_64":
        sys.exit(f"the wheel is built on x86_64 only; this is {os.uname().machine}")
    environment.fetch(["wheel"])
    sources = environment.sources_digest()
    with tempfile.TemporaryDirectory() as folder:
        environment.note(
            f"building the wheel for glibc {GLIBC}, two extensions and a program: {environment.BUILD_TIME}"
        )
        environment.build_wheel(
            Path(folder),
            CARGO=str(ENVIRONMENT / "bin/cargo-zigbuild"),
            CARGO_BUILD_TARGET=f"{TARGET}.{GLIBC}",
            PATH=os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ["PATH"]]),
        )
        (built,) = Path(folder).glob("kvlane-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("kvlane-*.whl"):
            old.unlink()
        (out / "made-from").unlink(missing_ok=True)
        auditwheel("repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", str(out), str(built))
        environment.sign(out, sources)
    (wheel,) = out.glob("kvlane-*.whl")
    auditwheel("show", str(wheel))
    size = wheel.stat().st_size
    print(f"{wheel}: {size / 1e6:.1f} MB")
    if PLATFORM not in wheel.name or size > MOST_BYTES:
        sys.exit(f"the wheel is to be for {PLATFORM}, and of {MOST_BYTES / 1e6:.1f} MB at most")


def auditwheel(*arguments: str) -> None:
    """Fails where auditwheel does."""
    path = os.pathsep.join([str(ENVIRONMENT / "bin"), os.environ["PATH"]])
    command = [str(ENVIRONMENT / "bin/python"), "-m", "auditwheel", *arguments]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, check=False)
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}: auditwheel {' '.join(arguments)}")


if __name__ == "__main__":
    main()
