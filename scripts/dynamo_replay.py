"""Builds the replay with Dynamo's selector, whose dependencies are its own, and replays a generated trace.

Nothing else builds it: what it needs of our crates is compiled, and what it prints is looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cargo import ROOT

sys.path.insert(0, str(ROOT / "bench/replay"))

import shapes


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = shapes.write(Path(folder))["prefill-heavy"]
        report = Path(folder) / "report.json"
        command = ["cargo", "run", "--release", "--locked", "--quiet", "--manifest-path"]
        arguments = [str(trace), "--loads", "0.5", "--json", str(report)]
        manifest = str(ROOT / "bench/replay/dynamo/Cargo.toml")
        subprocess.run([*command, manifest, "--", *arguments], check=True)
        results = {result["policy"]: result for result in json.loads(report.read_text())["results"]}
    served = {policy: result["lost"] for policy, result in results.items()}
    if not {"dynamo", "least-delay", "least-work"} <= served.keys() or any(served.values()):
        sys.exit(f"requests lost by policy: {served}")


if __name__ == "__main__":
    main()
