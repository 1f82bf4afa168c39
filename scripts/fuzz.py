"""Runs the fuzz targets, each for so many seconds; on a stable toolchain, without cargo-fuzz. Needs a C++ compiler.

    python scripts/fuzz.py                             all targets, 5 s each
    python scripts/fuzz.py --seconds 3600 ssd_file     one of them, for an hour

The targets are functions of crates/fuzz-targets, which `make test` calls with the inputs in its corpus/. Inputs that
reach new code are kept in fuzz/corpus and used again. A find ends the run, which says what broke and keeps the input in
fuzz/artifacts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
# A folder of inputs for each target, in the repository.
SEEDS = ROOT / "crates/fuzz-targets/corpus"
# The compiler flags that libFuzzer needs, as cargo-fuzz passes them. Stable toolchains have no address sanitizer.
COVERAGE = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
)
MEMORY_MIB = 2048
INPUT_BYTES = 1 << 16
SECONDS_FOR_AN_INPUT = 20


def host() -> str:
    """The toolchain's own target: flags for an explicit one do not reach build scripts."""
    told = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"^host: (\S+)$", told, re.MULTILINE)
    if found is None:
        sys.exit("rustc does not say which host it is for")
    return found[1]


def fuzz(target: str, seconds: int, environment: dict[str, str], triple: str) -> str:
    """Runs one target, and returns libFuzzer's last line of progress."""
    corpus, artifacts = FUZZ / "corpus" / target, FUZZ / "artifacts" / target
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    command = ["cargo", "run", "--quiet", "--locked", "--release", "--target", triple, "--"]
    command += [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={INPUT_BYTES}",
        f"-timeout={SECONDS_FOR_AN_INPUT}",
        f"-artifact_prefix={artifacts}/",
        str(corpus),
        str(SEEDS / target),
    ]
    environment = {**environment, "KVLANE_FUZZ_TARGET": target}
    ran = subprocess.run(command, cwd=FUZZ, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.stderr.write(ran.stderr[-8000:])
        sys.exit(f"{target}: exit {ran.returncode}; inputs that broke something are in {artifacts}")
    done = [line for line in ran.stderr.splitlines() if "DONE" in line]
    if not done:
        sys.exit(f"{target} did not run:\n{ran.stderr[-2000:]}")
    return done[-1]


def main() -> None:
    """Runs the chosen targets, one after the other."""
    known = sorted(path.name for path in SEEDS.iterdir())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(known)}; all if none is named"
    )
    parser.add_argument("--seconds", type=int, default=5, help="for each target (default %(default)s)")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(known)
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        sys.exit("fuzzing takes a C++ compiler, for libFuzzer: install one (Debian: g++), or name it in CXX")
    # Its own flags and its own target folder: nothing else is built anew because of them.
    environment = {key: value for key, value in os.environ.items() if key != "CARGO_TARGET_DIR"}
    environment["RUSTFLAGS"] = " ".join(COVERAGE)
    triple = host()
    print("==> building the fuzz targets", flush=True)
    build = ["cargo", "build", "--quiet", "--locked", "--release", "--target", triple]
    subprocess.run(build, cwd=FUZZ, env=environment, check=True)
    for target in arguments.targets or known:
        print(f"{target}: {fuzz(target, arguments.seconds, environment, triple)}", flush=True)


if __name__ == "__main__":
    main()
