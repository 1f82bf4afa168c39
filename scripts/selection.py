"""Chooses the stages of `.ci/run` that a change can break, and runs them.

    python scripts/selection.py          shows what would run, and why the rest would not
    python scripts/selection.py --run    runs it
    python scripts/selection.py --all    shows, or with --run runs, every stage

A change is the difference between the working tree and the newest commit in .ci/passed that passed all stages. All
stages run if that commit is unknown here, is older than two days, or has been followed by ten landings.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cargo import TESTED

ROOT = Path(__file__).resolve().parent.parent
PASSED = ROOT / ".ci/passed"
LANDINGS_MAX = 10
AGE_MAX = datetime.timedelta(days=2)

STAGES = (
    "fetch",
    "build",
    "lint",
    "rust",
    "python",
    "engines",
    "packaging",
    "manylinux",
    "oldest",
    "data-parallel",
    "loom",
    "miri",
)
# Stages that a change has to ask for by name: `make soak` runs them too.
BY_NAME = ("manylinux",)
# Environments that a stage needs beside those of `make test`. The stage fetch makes them, so it has all downloads.
ENVIRONMENTS = {"oldest": "vllm-0.24", "manylinux": "wheel"}
# Every run has these, because other stages need them or because they take a minute.
ALWAYS = ("fetch", "build", "lint")
WITH_VLLM = ("engines", "oldest", "data-parallel")
PYTHON_FOLDERS = ("daemon", "connector", "bench", "fabric", "moe", "router", "docs")
ROUTER_FOLDERS = ("router", "bench", "docs")

# The tests of real engines that the router, the benchmarks, the demos and the pages take part in.
PAIRS = "tests/engine"
# No engine and no daemon behaves otherwise because one of these changed; policy decides only which blocks stay.
BESIDE_ENGINES = ("router", "fleet", "kv-events", "zmtp", "policy")
# Files of the program's crate that belong to the router and to replays.
ROUTER_COMMANDS = ("route", "replay", "balance_table", "reference")

# Pages that tests in other folders than tests/docs read, and these folders.
READERS = {
    "configure.md": ("connector",),
    "failures.md": ("daemon",),
    "handoff.md": ("router",),
    "operate.md": ("router",),
    "replay.md": ("bench",),
    "router-reference.md": ("router",),
    "routing.md": ("router",),
}


@dataclass
class Plan:
    """The stages that run. None stands for everything of its kind."""

    stages: dict[str, str] = field(default_factory=dict)
    """Stage: the first file that asked for it."""
    crates: set[str] | None = field(default_factory=set)
    """Crates whose tests run."""
    folders: set[str] | None = field(default_factory=set)
    """Folders of tests/ that `make python` runs."""
    engines: set[str] | None = field(default_factory=set)
    """Paths that `make engines` runs."""

    def ask(self, why: str, *stages: str) -> None:
        for stage in stages:
            self.stages.setdefault(stage, why)

    def ask_rust(self, why: str, crates: Iterable[str]) -> None:
        self.ask(why, "rust")
        if self.crates is not None:
            self.crates.update(crates)

    def ask_python(self, why: str, *folders: str) -> None:
        self.ask(why, "python")
        if self.folders is not None:
            self.folders.update(folders)

    def ask_engines(self, why: str, *paths: str) -> None:
        """Some tests of real engines; without paths all of them, with the oldest and data-parallel ones."""
        self.ask(why, *(("engines",) if paths else WITH_VLLM))
        if not paths:
            self.engines = None
        elif self.engines is not None:
            self.engines.update(paths)

    def ask_all(self, why: str) -> None:
        self.ask(why, *(stage for stage in STAGES if stage not in BY_NAME))
        self.crates = self.folders = self.engines = None

    def targets(self) -> list[str]:
        """Arguments of scripts/stages.py, in the order of the stages."""
        narrowed = {
            "fetch": " ".join(name for stage, name in ENVIRONMENTS.items() if stage in self.stages),
            "rust": "" if self.crates is None else f"--workspace --only {','.join(sorted(self.crates))}",
            "python": ""
            if self.folders is None
            else " ".join(f"tests/{each}" for each in sorted(self.folders)),
            "engines": "" if self.engines is None else " ".join(sorted(self.engines)),
        }
        chosen = [stage for stage in STAGES if stage in self.stages or stage in ALWAYS]
        return [f"{stage}={narrowed[stage]}" if narrowed.get(stage) else stage for stage in chosen]


def plan(files: Iterable[str], uses: dict[str, set[str]]) -> Plan:
    """The plan for a change of these files. `uses` has the crates that each crate is built or tested from."""
    found = Plan()
    for file in sorted(files):
        _add(found, file, uses)
    return found


def _add(found: Plan, file: str, uses: dict[str, set[str]]) -> None:
    match Path(file).parts:
        case ("crates", crate, *rest) if crate in uses:
            _add_crate(found, file, crate, rest, uses)
        case ("python", "kvlane", "testing", "fake_engine", *_):
            found.ask_python(file, *ROUTER_FOLDERS)
        case ("python", "kvlane", "bench" | "demo", *_):
            found.ask_python(file, "bench", "docs")
            found.ask_engines(file, PAIRS)
        case ("python", *_):
            found.ask_python(file, *PYTHON_FOLDERS)
            found.ask_engines(file)
            found.ask(file, "packaging")
        case ("tests", "connector", name) if name.startswith("test_") and not name.startswith("test_vllm_"):
            found.ask_python(file, "connector")
        case ("tests", "connector" | "engine", *_):
            found.ask_python(file, "connector")
            found.ask_engines(file)
        case ("tests", "packaging", "test_manylinux.py") | ("scripts", "wheel.py"):
            found.ask(file, "manylinux")
        case ("tests", "packaging", *_):
            found.ask(file, "packaging", "manylinux")
        case ("tests", "daemon", name) if not name.startswith("test_"):
            # The other folders import its helpers.
            found.ask_python(file, *PYTHON_FOLDERS)
        case ("tests", "router" | "docs" as folder, name) if not name.startswith("test_"):
            # Tests of engines import these helpers, and tests of the dashboards those of the router.
            found.ask_python(file, folder, "docs")
            found.ask_engines(file, PAIRS)
        case ("tests", folder, *_) if folder in PYTHON_FOLDERS:
            found.ask_python(file, folder)
        case ("tests", "defects", *_) | ("LICENSE" | "deny.toml",):
            pass
        case ("fuzz", *_) | ("scripts", "fuzz.py"):
            # `make soak` fuzzes.
            pass
        case ("examples", *_):
            found.ask_python(file, "docs", "bench")
            found.ask_engines(file, PAIRS)
        case ("bench", *_):
            found.ask_python(file, "bench", "docs")
        case ("docs", "reference", "identity-fields.md"):
            found.ask_python(file, "docs", "connector")
        case ("docs", page):
            found.ask_python(file, "docs", *READERS.get(page, ()))
            if page == "start.md":
                # A test of engines walks this page word for word.
                found.ask_engines(file, "tests/engine/test_start_page.py")
            if page == "balance.md":
                found.ask_rust(file, {"cli"})
        case ("docs", *_) | ("CHANGELOG.md" | "CONTRIBUTING.md" | "README.md",):
            found.ask_python(file, "docs")
        case (
            "scripts",
            "soak.py" | "defects.py" | "dynamo_replay.py" | "nixl_pair.py" | "vllm_router_pair.py",
        ):
            found.ask_python(file, "docs")
        case ("scripts", "browser.py"):
            found.ask_python(file, "daemon", "router")
        case ("scripts", "helm.py" | "manifests.py"):
            found.ask_engines(file, PAIRS)
        case ("scripts", "dashboards.py" | "dashboard_panels.py"):
            found.ask_python(file, "docs")
            found.ask_engines(file, PAIRS)
        case ("scripts", "miri.py"):
            found.ask(file, "miri")
        case (".ci", "passed"):
            pass
        case ("Cargo.lock" | "pyproject.toml",):
            found.ask_all(file)
            found.ask(file, "manylinux")
        case _:
            # Files that build, fetch or run the rest, and files that no rule knows.
            found.ask_all(file)


def _add_crate(found: Plan, file: str, crate: str, rest: list[str], uses: dict[str, set[str]]) -> None:
    affected = {each for each in uses if crate in _closure(each, uses)}
    found.ask_rust(file, affected)
    is_router_command = crate == "cli" and len(rest) > 1 and rest[1].startswith(ROUTER_COMMANDS)
    if crate == "policy":
        found.ask_python(file, "daemon", "bench", "docs")
    elif crate in BESIDE_ENGINES or is_router_command:
        found.ask_python(file, *ROUTER_FOLDERS)
        found.ask_engines(file, "tests/engine/test_route_pd.py")
    elif crate == "fake-gpu":
        found.ask_python(file, *PYTHON_FOLDERS)
    elif crate != "fuzz-targets":
        found.ask_python(file, *PYTHON_FOLDERS)
        found.ask_engines(file)
    if crate in ("shm-ring", "moe"):
        found.ask(file, "loom")
    if crate in ("block", "policy", "store"):
        found.ask(file, "miri")
    if crate == "python":
        found.ask(file, "packaging")
        if rest[-1] == "Cargo.toml":
            # Sources are in the tests' own wheel, too; this says what is linked.
            found.ask(file, "manylinux")


def _closure(crate: str, uses: dict[str, set[str]]) -> set[str]:
    """The crate and all that it is built or tested from."""
    reached: set[str] = set()
    waiting = [crate]
    while waiting:
        each = waiting.pop()
        if each not in reached:
            reached.add(each)
            waiting += uses.get(each, ())
    return reached


def crate_graph() -> dict[str, set[str]]:
    """Crates, by their folders' names, and what each is built or tested from."""
    found: dict[str, set[str]] = {}
    for package in _packages(ROOT / "Cargo.toml"):
        # The extension modules in crates/python/core and bench count as crates/python.
        folder = Path(package["manifest_path"]).relative_to(ROOT / "crates").parts[0]
        found.setdefault(folder, set()).update(_used(package) - {folder})
    return found


def _packages(manifest: Path) -> list[dict[str, Any]]:
    command = ("cargo", "metadata", "--no-deps", "--offline", "--locked", "--format-version", "1")
    told = subprocess.run(
        [*command, "--manifest-path", manifest], capture_output=True, text=True, check=True
    ).stdout
    return json.loads(told)["packages"]


def _used(package: dict[str, Any]) -> set[str]:
    """Folders of the crates that a package names, for itself and for its tests."""
    paths = [Path(used["path"]) for used in package["dependencies"] if used.get("path")]
    return {path.relative_to(ROOT / "crates").parts[0] for path in paths}


@dataclass(frozen=True)
class Landing:
    """A line of .ci/passed: a commit on main, when it landed, and whether all stages had run on it."""

    date: datetime.date
    commit: str
    is_whole: bool


def landings(text: str) -> list[Landing]:
    """The lines of .ci/passed, oldest first."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        Landing(datetime.date.fromisoformat(date), commit, stages == "all") for date, commit, stages in lines
    ]


def base(known: list[Landing], today: datetime.date) -> tuple[str | None, str]:
    """The commit to compare with, or None if all stages have to run; and the reason, as a sentence."""
    whole = [number for number, landing in enumerate(known) if landing.is_whole]
    if not whole:
        return None, ".ci/passed names no commit that passed all stages"
    newest, since = known[whole[-1]], len(known) - 1 - whole[-1]
    if since >= LANDINGS_MAX:
        return None, f"{since} landings have followed {newest.commit}, the newest that passed all stages"
    if today - newest.date > AGE_MAX:
        return None, f"all stages last passed on {newest.date}, on {newest.commit}"
    return newest.commit, f"compared with {newest.commit} of {newest.date}, which passed all stages"


def changed(commit: str) -> list[str] | None:
    """Files that differ from that commit; None if the commit is not known here."""
    git = ("git", "-C", str(ROOT))
    is_known = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True)
    if is_known.returncode:
        return None
    # Without renames, so that the former path of a moved file counts too.
    command = [*git, "diff", "--name-only", "--no-renames", commit]
    differing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    command = [*git, "ls-files", "--others", "--exclude-standard"]
    new = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [*differing.splitlines(), *new.splitlines()]


def choose(is_all: bool) -> Plan:
    """The plan for this tree. Prints the commit that it was compared with."""
    commit, why = base(landings(PASSED.read_text()), datetime.datetime.now(datetime.timezone.utc).date())
    files = None if is_all or commit is None else changed(commit)
    if files is None:
        found = Plan()
        found.ask_all(
            "--all" if is_all else why if commit is None else f"{commit} is no ancestor of this commit"
        )
        return found
    print(f"{why}: {len(files)} files differ")
    return plan(files, crate_graph())


def tell(found: Plan) -> None:
    """The stages that run and those that do not, each with its reason."""
    for stage in STAGES:
        if stage in found.stages or stage in ALWAYS:
            print(f"  {stage:14} runs: {found.stages.get(stage, 'always')}")
        else:
            print(f"  {stage:14} skipped: no file that differs can break it")
    if "rust" in found.stages and found.crates is not None:
        print(f"  tests of the crates: {', '.join(sorted(found.crates))}")
    if "python" in found.stages and found.folders is not None:
        print(f"  tests of the folders: {', '.join(sorted(found.folders))}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run the stages")
    parser.add_argument("--all", action="store_true", help="every stage, whatever has changed")
    arguments = parser.parse_args()
    found = choose(arguments.all)
    tell(found)
    if arguments.run:
        if found.crates is not None:
            os.environ[TESTED] = ",".join(sorted(found.crates))
        os.execv(sys.executable, [sys.executable, str(ROOT / "scripts/stages.py"), *found.targets()])


if __name__ == "__main__":
    main()
