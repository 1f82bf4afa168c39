"""Fetches promtool and Prometheus for tests of alert rules and dashboards. Unpacks Debian's package, installs nothing.

python scripts/promtool.py                     into .cache/promtool, unless both are there or on the PATH
python scripts/promtool.py --path              where promtool is; fails if it is nowhere
python scripts/promtool.py --path prometheus   the same of Prometheus
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import not_tested

UNPACKED = Path(__file__).resolve().parents[1] / ".cache/promtool"
PROGRAMS = ("promtool", "prometheus")


def find(program: str) -> Path | None:
    """The program's path, if it was fetched or the machine has it; else None."""
    fetched = UNPACKED / "usr/bin" / program
    installed = shutil.which(program)
    return fetched if fetched.exists() else Path(installed) if installed else None


def fetch() -> str | None:
    """Downloads and unpacks them. Returns the reason if that is not possible."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "promtool comes in Debian's package prometheus, and this machine has no apt-get"
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        download = ["apt-get", "download", "-qq", "prometheus"]
        done = _run(download, folder)
        if done.returncode:
            # A fresh machine has no lists of packages, and only root can fetch them.
            _run(["apt-get", "update", "-qq"], folder)
            done = _run(download, folder)
        packages = list(Path(folder).glob("prometheus_*.deb"))
        if not packages:
            return f"apt-get download prometheus failed: {(done.stderr.strip() or 'no package').splitlines()[-1]}"
        shutil.rmtree(UNPACKED, ignore_errors=True)
        UNPACKED.mkdir(parents=True)
        subprocess.run(["dpkg", "-x", str(packages[0]), str(UNPACKED)], check=True)
    missing = [program for program in PROGRAMS if find(program) is None]
    return f"Debian's package prometheus has no {' and no '.join(missing)} any more" if missing else None


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch promtool and Prometheus, for tests.")
    parser.add_argument(
        "--path", nargs="?", const="promtool", choices=PROGRAMS, help="print where a program is"
    )
    program = parser.parse_args().path
    if program is not None:
        found = find(program)
        if found is None:
            sys.exit(f"there is no {program}: run python scripts/promtool.py")
        print(found)
    elif not all(map(find, PROGRAMS)):
        why = fetch()
        if why is not None:
            not_tested.tell("alert rules", why)


if __name__ == "__main__":
    main()
