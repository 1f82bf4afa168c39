"""Builds the tests of the crates and runs them, several programs at once.

    python scripts/rust_tests.py --workspace
    python scripts/rust_tests.py --workspace --only router,fleet
    python scripts/rust_tests.py -p kvlane-fabric --test simulation -- --nocapture late

`--only` builds what the other arguments name, and runs the tests of these crates alone, by their folders' names.
Everything but --jobs and --only goes to `cargo test`, and what follows `--` to each program. `cargo test` itself runs
one program after the other, and most of ours wait for processes, sockets and disks. What a program prints is shown when
it has ended, as a whole if a test failed. The times of all tests are left in .cache/times/rust.xml, as JUnit XML, which
pytest writes too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import cargo
from cargo import ROOT, Built

TIMES = ROOT / ".cache/times/rust.xml"
JOBS = 3
PATIENCE_S = 900
# A line of libtest: the test's name, its outcome, and its seconds.
LINE = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (\w+)(?:.*?<([\d.]+)s>)?", re.MULTILINE)


def build(arguments: list[str]) -> list[Built]:
    """Builds the programs that these arguments of `cargo test` name."""
    # scripts/environment.py wants all of them too, so they are compiled once.
    everything = arguments == ["--workspace"]
    made = cargo.build(*(cargo.everything() if everything else ("test", "--no-run", "--locked", *arguments)))
    return [each for each in made if each.is_test and each.program]


def _folder(program: Built) -> str:
    """The crate's folder in crates/."""
    return program.crate.relative_to(ROOT / "crates").parts[0]


def _name(program: Built) -> str:
    return f"{program.crate.name} {program.source.relative_to(program.crate)}"


class Run:
    """Programs under way, and what came of those that have ended."""

    def __init__(self, options: list[str]) -> None:
        self._options = options
        self._printing = threading.Lock()
        # libtest has --report-time marked as unstable, and stable toolchains enable it in this way. It changes nothing
        # but the output.
        self._environment = {**os.environ, "RUSTC_BOOTSTRAP": "1"}
        self.failed: list[str] = []
        self.cases: list[tuple[str, str, str, float]] = []
        """Program, test, outcome, seconds."""
        self.left_out: list[str] = []
        """Tests that could not run here: the test, a colon, and the reason."""

    def run(self, program: Built) -> None:
        began = time.monotonic()
        command = [str(program.program), "-Z", "unstable-options", "--report-time", "--show-output"]
        # Output goes into a file, because a process that a hanging test started may outlive it and keep a pipe open.
        with tempfile.TemporaryFile("w+", errors="replace") as written:
            try:
                status = subprocess.run(
                    [*command, *self._options],
                    cwd=program.crate,
                    env=self._environment | {"CARGO_MANIFEST_DIR": str(program.crate)},
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    timeout=PATIENCE_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"none after {PATIENCE_S} s"
            written.seek(0)
            output = written.read()
        seconds = time.monotonic() - began
        with self._printing:
            self._tell(_name(program), output, status, seconds)

    def _tell(self, program: str, output: str, status: int | str, seconds: float) -> None:
        for test, outcome, took in LINE.findall(output):
            self.cases.append((program, test, outcome, float(took or 0)))
        self.left_out += re.findall(r"(?:^|\.\.\. )not tested: (.*)", output, re.MULTILINE)
        results = re.findall(r"^test result: .*", output, re.MULTILINE)
        if status or not results:
            self.failed.append(f"{program} (status {status})")
        if status or not results or "--nocapture" in self._options:
            # What the tests that passed have printed stands between these two lines, and can be long.
            output = re.sub(r"\nsuccesses:\n.*?\n(?=failures:\n)", "\n", output, flags=re.DOTALL)
            print(f"\n==> {program}\n{output}", flush=True)
        else:
            print(f"{seconds:7.1f} s  {program}: {results[-1]}", flush=True)


def report(cases: Iterable[tuple[str, str, str, float]], left_out: list[str], path: Path) -> None:
    """As JUnit XML."""
    suite = ElementTree.Element("testsuite", name="rust")
    for program, name, outcome, seconds in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=program, name=name, time=f"{seconds:.3f}")
        if outcome not in ("ok", "ignored"):
            ElementTree.SubElement(case, "failure", message=outcome)
    for what in left_out:
        test, _, why = what.partition(": ")
        case = ElementTree.SubElement(suite, "testcase", classname="crates", name=test, time="0")
        ElementTree.SubElement(case, "skipped", message=why)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path)


def main() -> None:
    arguments, options = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, options = arguments[:at], arguments[at + 1 :]
    jobs = JOBS
    if "--jobs" in arguments:
        at = arguments.index("--jobs")
        jobs = int(arguments[at + 1])
        del arguments[at : at + 2]
    only: set[str] | None = None
    if "--only" in arguments:
        at = arguments.index("--only")
        only = set(arguments[at + 1].split(","))
        del arguments[at : at + 2]
    programs = [each for each in build(arguments) if only is None or _folder(each) in only]
    if not programs:
        sys.exit("these arguments name no tests")
    run = Run(options)
    # The longest come first, so that none runs alone at the end. The largest files are likely to be the longest.
    programs.sort(key=lambda each: -sum(file.stat().st_size for file in each.files))
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(run.run, programs):
            pass
    report(run.cases, run.left_out, TIMES)
    for what in run.left_out:
        print(f"not tested: {what}")
    if run.failed:
        sys.exit("failed: " + "; ".join(sorted(run.failed)))


if __name__ == "__main__":
    main()
