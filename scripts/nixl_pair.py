"""Two vLLM engines with NixlConnector behind `kvlane route`. Part of `make soak`.

NIXL is 340 MB and no part of the environment that all tests use: it goes into a folder of its own, once. Its wheels
bring UCX, which copies over TCP and shared memory where there is no InfiniBand.
"""

from __future__ import annotations

import os
import subprocess
import sys

import environment

# The meta package, and the one that it imports: which of the two that is depends on torch's CUDA.
PACKAGES = ("nixl==1.5.1", "nixl-cu12==1.5.1", "nixl-cu13==1.5.1")
FOLDER = environment.CACHE / "nixl"


def main() -> None:
    environment.make(["vllm-0.32"], environment.FOR_USERS)
    programs = environment.VENVS / "vllm-0.32" / "bin"
    python = programs / "python"
    stamp, wanted = FOLDER / "made-from", " ".join(PACKAGES)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        uv = environment.BOOT / "bin/uv"
        install = [str(uv), "pip", "install", "--no-deps", "--target", str(FOLDER), "--python", str(python)]
        if status := subprocess.run([*install, *PACKAGES], check=False).returncode:
            sys.exit(status)
        stamp.write_text(wanted)
    variables = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(FOLDER),
    }
    test = [str(python), "-m", "pytest", "-m", "soak", "tests/engine/test_route_nixl.py"]
    sys.exit(subprocess.run(test, cwd=environment.ROOT, env=variables, check=False).returncode)


if __name__ == "__main__":
    main()
