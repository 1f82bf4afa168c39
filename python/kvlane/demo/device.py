"""Chooses the CPU or a GPU for the demo's engines, with the smallest setup that shows the same."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvlane.demo.model import DEMO, GPU_DEMO, ModelShape

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Setup:
    """How the engines are set up on one kind of device."""

    device: str
    shape: ModelShape
    model_name: str
    prompt_tokens: int
    max_tokens: int
    """Longest prompt and answer together."""
    kv_cache_bytes: int
    pool_size: str


SETUPS = {
    "cpu": Setup("cpu", DEMO, "demo-model", 2000, 2560, 1 << 30, "1gb"),
    # A block of 32 tokens has 2 MiB. The pool keeps all prompts of the demo, and an engine a few of them.
    "cuda": Setup("cuda", GPU_DEMO, "demo-model-gpu", 8000, 10_240, 3 << 30, "6gb"),
}


class NoSuchDevice(Exception):
    """The device that the user chose cannot be had; the message says why."""


def visible_gpus(kvlane: str) -> list[str]:
    """Names of the GPUs that the daemon could use, as the program `kvlane` reports them."""
    asked = subprocess.run([kvlane, "doctor", "--json"], capture_output=True, text=True, check=False)
    try:
        return usable_gpus(json.loads(asked.stdout)["findings"])
    except (ValueError, KeyError):
        return []


def usable_gpus(findings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The GPUs that the doctor's findings show as usable: a real driver answers, and each GPU can be opened."""
    verdicts = {finding["subject"]: finding for finding in findings}
    if verdicts.get("gpu driver", {}).get("verdict") != "ok":
        return []
    return [
        finding["found"].partition(",")[0]
        for subject, finding in verdicts.items()
        if re.fullmatch(r"gpu \d+", subject) and finding["verdict"] != "problem"
    ]


def vllm_here() -> str | None:
    """The device of the vLLM beside this Python: `cpu` or `cuda`; None if there is none, or one for something else.

    vLLM itself tells CPU builds by the local part of their version.
    """
    try:
        local = version("vllm").partition("+")[2]
    except PackageNotFoundError:
        return None
    if "cpu" in local:
        return "cpu"
    return None if re.search("rocm|xpu|tpu", local) else "cuda"


def choose(wanted: str, gpus: list[str], vllm: str | None) -> Setup:
    """The setup for `wanted`, one of DEVICES, and the installed vLLM. Raises NoSuchDevice."""
    if wanted == "auto":
        wanted = "cuda" if vllm == "cuda" else "cpu"
    if vllm not in (None, wanted):
        raise NoSuchDevice(
            f"the vLLM beside this Python computes on {vllm}, not on {wanted}; `make demo` makes an environment for it"
        )
    if wanted == "cuda" and not gpus:
        raise NoSuchDevice("there is no GPU that kvlane can use; `kvlane doctor` says why")
    return SETUPS[wanted]
