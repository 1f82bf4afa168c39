"""Compiles the CUDA kernels into files that are part of the source: run it after a change of a `.cu` or `.cuh` file.

    python scripts/build_kernels.py

Needs neither a GPU nor a compiler: NVRTC comes from a package, into .venvs/kernels. Of each kernel it makes machine
code for some architectures and PTX for the rest, and writes what they were made from, which a test of the crate
compares with the source.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venvs/kernels"
REQUIREMENTS = ROOT / "requirements/kernels.txt"
KERNELS = (ROOT / "crates/gpu/kernels", ROOT / "crates/moe/kernels")
# Machine code for A100, H100 and H200, B200; PTX for everything else since A100. NVRTC optimises as -O3 does.
CUBINS = ("sm_80", "sm_90", "sm_100")
PTX = "compute_80"
# The header that all kernels include; NVRTC has none of its own.
CSTDINT = """
namespace std {
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
}
"""


def main() -> None:
    _environment()
    nvrtc = Nvrtc()
    for source in sorted(source for folder in KERNELS for source in folder.glob("*.cu")):
        _compile(nvrtc, source)


def _environment() -> None:
    stamp, wanted = VENV / "made-from", _sha256(REQUIREMENTS.read_bytes())
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    _run(sys.executable, "-m", "venv", "--clear", str(VENV))
    _run(str(VENV / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(REQUIREMENTS))
    stamp.write_text(wanted)


class Nvrtc:
    """The compiler."""

    def __init__(self) -> None:
        (path,) = VENV.glob("lib/python*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
        self._library = ctypes.CDLL(str(path))

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: Path, options: list[str], kind: str) -> bytes:
        """Machine code (`kind` is CUBIN) or PTX of a source."""
        program = ctypes.c_void_p()
        headers = {"cstdint": CSTDINT} | {header.name: header.read_text() for header in _headers(source)}
        # A name without directories, so that the same source gives the same bytes wherever it is compiled.
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers.keys()),
        )
        done = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
        said = self._get(program, "ProgramLog").rstrip(b"\0").decode()
        if done != 0 or said:
            sys.exit(f"{source.name} with {' '.join(options)}:\n{said}")
        return self._get(program, kind)

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        done = getattr(self._library, function)(*arguments)
        if done != 0:
            sys.exit(f"{function} failed with {done}")


def _headers(source: Path) -> list[Path]:
    """The headers beside a source."""
    return sorted(source.parent.glob("*.cuh"))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _compile(nvrtc: Nvrtc, source: Path) -> None:
    options = ["--std=c++17"]
    made = {}
    for architecture in CUBINS:
        code = nvrtc.compile(source, [*options, f"--gpu-architecture={architecture}"], "CUBIN")
        made[source.with_suffix(f".{architecture}.cubin")] = code
    # NVRTC returns a string of C; the zero at its end does not belong into a text file.
    text = nvrtc.compile(source, [*options, f"--gpu-architecture={PTX}"], "PTX").rstrip(b"\0")
    made[source.with_suffix(".ptx")] = text
    for path, content in made.items():
        path.write_bytes(content)
        print(f"{path.relative_to(ROOT)}: {len(content)} bytes")
    made_from = {
        "nvrtc": nvrtc.version(),
        "options": options,
        "source_xxh3_128": {path.name: _xxh3_128(path) for path in (source, *_headers(source))},
        "xxh3_128": {path.name: _xxh3_128(path) for path in made},
    }
    source.with_suffix(".json").write_text(json.dumps(made_from, indent=2) + "\n")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _xxh3_128(path: Path) -> str:
    """The digest that the crate's test compares, by the environment's Python, because that one has the package."""
    code = "import sys, xxhash; print(xxhash.xxh3_128_hexdigest(open(sys.argv[1], 'rb').read()))"
    command = [str(VENV / "bin/python"), "-c", code, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run(*command: str, directory: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=directory)
    if done.returncode != 0:
        sys.exit(f"failed with status {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    main()
