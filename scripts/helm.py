"""Builds Helm for the tests of the chart, from its Go module. Installs nothing.

python scripts/helm.py             into .cache/helm, unless it is there or Helm 4 is on the PATH
python scripts/helm.py --path      where it is; fails if it is nowhere

The first build takes about four minutes of one core. Go keeps what it compiled, so a further one takes seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import not_tested

VERSION = "v4.3.2"
BUILT = Path(__file__).resolve().parents[1] / ".cache/helm" / VERSION / "helm"
MAJOR = "v4."


def find() -> Path | None:
    """The program's path, if it was built or the machine has it; else None."""
    if BUILT.exists():
        return BUILT
    installed = shutil.which("helm")
    if installed is None:
        return None
    # Helm 3 words its refusals differently.
    told = subprocess.run([installed, "version", "--short"], capture_output=True, text=True, check=False)
    return Path(installed) if told.stdout.startswith(MAJOR) else None


def build() -> str | None:
    """Builds the pinned version. Returns the reason if that is not possible."""
    go = shutil.which("go")
    if go is None:
        return "helm is built from its Go module, and this machine has no go"
    print(f"building helm {VERSION}: about four minutes, once", file=sys.stderr, flush=True)
    # Without debug information, which is a third of the program. GOBIN cannot be relative.
    command = [go, "install", "-ldflags=-s -w", f"helm.sh/helm/v4/cmd/helm@{VERSION}"]
    environment = {**os.environ, "GOBIN": str(BUILT.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"go install failed: {(done.stderr.strip() or 'no reason').splitlines()[-1]}"
    return None if BUILT.exists() else f"go install left no {BUILT}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build helm, for tests of the chart.")
    parser.add_argument("--path", action="store_true", help="print where it is")
    if parser.parse_args().path:
        found = find()
        if found is None:
            sys.exit("there is no helm: run python scripts/helm.py")
        print(found)
    elif find() is None:
        why = build()
        if why is not None:
            not_tested.tell("Helm chart", why)


if __name__ == "__main__":
    main()
