"""Engines that hand over directly behind vllm-router, which knows nothing of kvlane. Part of `make soak`.

vllm-router gets an environment of its own, once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import environment

PACKAGE = "vllm-router==0.1.17"
FOLDER = environment.VENVS / "vllm-router"


def main() -> None:
    environment.make(["vllm-0.32"], environment.FOR_USERS)
    stamp = FOLDER / "made-from"
    if not (stamp.is_file() and stamp.read_text() == PACKAGE):
        uv = str(environment.BOOT / "bin/uv")
        subprocess.run([uv, "venv", "--clear", "--python", sys.executable, str(FOLDER)], check=True)
        install = [uv, "pip", "install", "--python", str(FOLDER / "bin/python"), PACKAGE]
        if status := subprocess.run(install, check=False).returncode:
            sys.exit(status)
        stamp.write_text(PACKAGE)
    programs = environment.VENVS / "vllm-0.32" / "bin"
    variables = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "KVLANE_VLLM_ROUTER": str(FOLDER / "bin/vllm-router"),
    }
    test = [str(programs / "python"), "-m", "pytest", "-m", "soak", "tests/engine/test_route_vllm_router.py"]
    sys.exit(subprocess.run(test, cwd=environment.ROOT, env=variables, check=False).returncode)


if __name__ == "__main__":
    main()
