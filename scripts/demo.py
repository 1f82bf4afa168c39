"""Runs a demo where this machine can show most: on its GPUs if there are any, else on the CPU. `make demo`, `make
demo-pd`.

    python scripts/demo.py [--device auto|cpu|cuda] [--program examples/run_pd.py] [arguments of kvlane.demo, or of it]

With a GPU the Python that runs this is taken if it has a vLLM for CUDA and all that the demo needs; else an environment
is made, once. kvlane comes from the wheel in dist/ if that was built from this source tree; else it is built, once.
With a Python of yours it is unpacked in .cache, so that your environment is not changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import environment

UNPACKED = environment.CACHE / "unpacked"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--program", type=Path)
    arguments, others = parser.parse_known_args()
    environment.unpack(UNPACKED)
    sys.path.insert(0, str(UNPACKED))

    from kvlane.demo import device
    from kvlane.demo.__main__ import missing_packages

    gpus = [] if arguments.device == "cpu" else device.visible_gpus(str(UNPACKED / "bin/kvlane"))
    name, why = environment_for(arguments.device, gpus, device.vllm_here(), missing_packages())
    environment.note(why)
    chosen = "cuda" if name != "vllm-0.32" else "cpu"
    if name is None:
        python, extra = Path(sys.executable), {"PYTHONPATH": _before(UNPACKED, "PYTHONPATH")}
        programs = UNPACKED / "bin"
    else:
        environment.make([name], environment.FOR_USERS)
        programs, extra = environment.VENVS / name / "bin", {}
        python = programs / "python"
    program = ["-m", "kvlane.demo"] if arguments.program is None else [str(arguments.program)]
    command = [str(python), *program, "--device", chosen, *others]
    os.execve(python, command, {**os.environ, **extra, "PATH": _before(programs, "PATH")})


def environment_for(
    wanted: str, gpus: list[str], vllm: str | None, missing: list[str]
) -> tuple[str | None, str]:
    """The environment to make, None for the Python that is active; and why, for people. `gpus` are those that kvlane
    can use, `vllm` what the active Python's vLLM computes on, `missing` what it lacks."""
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return "vllm-0.32", "engines on the CPU" + (
            "" if wanted == "cpu" else ": there is no GPU that kvlane can use"
        )
    if not gpus:
        sys.exit("--device cuda: there is no GPU that kvlane can use; `kvlane doctor` says why")
    if vllm == "cuda" and not missing:
        return None, f"engines on {gpus[0]}, with the vLLM of {sys.executable}"
    lacks = f"it has no {', '.join(missing)}" if vllm == "cuda" else "it has no vLLM for CUDA"
    return (
        "vllm-0.32-cuda",
        f"engines on {gpus[0]}, in an environment of their own ({sys.executable}: {lacks})",
    )


def _before(folder: Path, variable: str) -> str:
    return os.pathsep.join(part for part in (str(folder), os.environ.get(variable, "")) if part)


if __name__ == "__main__":
    main()
