"""Compiles the CUDA kernels into files that are part of the source: run it after a change of a `.cu` file.

    python scripts/build_kernels.py

Needs a C++ compiler and no GPU: nvcc comes from packages, into .venvs/kernels. Beside each binary it writes what the
binary was made from, which a test of the crate compares with the source.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venvs/kernels"
REQUIREMENTS = ROOT / "requirements/kernels.txt"
KERNELS = ROOT / "crates/gpu/kernels"
# Machine code for A100, H100 and H200, B200; PTX for everything else since A100.
TARGETS = (
    ("compute_80", "sm_80"),
    ("compute_90", "sm_90"),
    ("compute_100", "sm_100"),
    ("compute_80", "compute_80"),
)


def main() -> None:
    _environment()
    for source in sorted(KERNELS.glob("*.cu")):
        _compile(source)


def _environment() -> None:
    stamp, wanted = VENV / "made-from", _sha256(REQUIREMENTS.read_bytes())
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    _run(sys.executable, "-m", "venv", "--clear", str(VENV))
    # Everything is pinned: the packages' own wishes would bring parts of other releases.
    _run(str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS))
    stamp.write_text(wanted)


def _compile(source: Path) -> None:
    binary = source.with_suffix(".fatbin")
    (nvcc,) = VENV.glob("lib/python*/site-packages/nvidia/cu13/bin/nvcc")
    options = ["-std=c++17", "-O3", "-Werror", "all-warnings", "--fatbin"]
    options += [f"-gencode=arch={arch},code={code}" for arch, code in TARGETS]
    # Names without directories, so that the same source gives the same bytes wherever it is compiled.
    command = ["nvcc", *options, "-o", binary.name, source.name]
    _run(str(nvcc), *command[1:], directory=source.parent)
    made_from = {
        "command": " ".join(command),
        "command_sha256": _sha256(" ".join(command).encode()),
        "nvcc": _version(nvcc),
        "source_sha256": _sha256(source.read_bytes()),
        "source_xxh3_128": _xxh3_128(source),
        "fatbin_xxh3_128": _xxh3_128(binary),
    }
    binary.with_suffix(".fatbin.json").write_text(json.dumps(made_from, indent=2) + "\n")
    print(f"{binary.relative_to(ROOT)}: {binary.stat().st_size} bytes")


def _version(nvcc: Path) -> str:
    said = subprocess.run([str(nvcc), "--version"], check=True, capture_output=True, text=True).stdout
    return said.strip().splitlines()[-1]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _xxh3_128(path: Path) -> str:
    """What the crate's test computes too; the package is in the environment, not in this Python."""
    code = "import sys, xxhash; print(xxhash.xxh3_128_hexdigest(open(sys.argv[1], 'rb').read()))"
    command = [str(VENV / "bin/python"), "-c", code, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run(*command: str, directory: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=directory)
    if done.returncode != 0:
        sys.exit(f"failed with status {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    main()
