"""Renders the manifests in examples/kubernetes from the chart in examples/helm/kvlane, so that there is one source.

python scripts/manifests.py            writes them
python scripts/manifests.py --check    fails if they differ

engine.yaml is no part of the chart, because an engine belongs to the user.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import helm
import not_tested

ROOT = Path(__file__).resolve().parents[1]
CHART = "examples/helm/kvlane"
MANIFESTS = ROOT / "examples/kubernetes"
MISSING = "there is no helm: run python scripts/helm.py"
# Each manifest, from the template of the same name, and the settings that differ from the chart's values.
FILES: dict[str, tuple[str, ...]] = {
    "daemon.yaml": (),
    "router.yaml": (),
    "pod-monitor.yaml": ("podMonitor.enabled=true",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the manifests from the Helm chart.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if a manifest is out of date"
    )
    is_check = parser.parse_args().check
    program = helm.find()
    if program is None and is_check:
        not_tested.tell("manifests of Kubernetes", MISSING)
        return
    if program is None:
        sys.exit(MISSING)
    stale: list[str] = []
    for name, settings in FILES.items():
        file, wanted = MANIFESTS / name, render(program, name, settings)
        if not is_check:
            file.write_text(wanted)
        elif not file.exists() or file.read_text() != wanted:
            stale.append(name)
    if stale:
        sys.exit(f"examples/kubernetes is out of date ({', '.join(stale)}): run python scripts/manifests.py")


def render(program: Path, name: str, settings: tuple[str, ...]) -> str:
    """The manifest as a file of its own."""
    command = [str(program), "template", "kvlane", CHART, "--show-only", f"templates/{name}"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip())
    rendered = re.split(r"^---\n", done.stdout, flags=re.MULTILINE)
    documents = [re.sub(r"^# Source: .*\n", "", each).strip() for each in rendered if each.strip()]
    # Helm orders documents by their kinds. The one with the comment about the file comes first.
    documents.sort(key=lambda document: not document.startswith("#"))
    given = "".join(f" --set {setting}" for setting in settings)
    head = f"# Made by `python scripts/manifests.py` from {CHART}{given}; do not edit.\n"
    return head + "\n---\n".join(documents) + "\n"


if __name__ == "__main__":
    main()
