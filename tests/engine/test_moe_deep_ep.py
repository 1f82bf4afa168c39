"""vLLM's own classes for DeepEP over kvlane.moe.deep_ep, on CPU tensors: 4 processes and a reference of the layer. With
cuda each has a fake GPU, which runs the kernels' own source on CPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.old_vllm
SCRIPT = Path(__file__).with_name("deep_ep_ranks.py")


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each rank says of each scenario. vLLM is imported once for all."""
    if request.param == "cuda" and shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so fake GPUs have no kernels")
    folder = tmp_path_factory.mktemp("deep_ep")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder / "store"), request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=180)
    finally:
        # The ranks, too.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    "scenario",
    [
        "low latency",
        "low latency, fp8",
        "high throughput",
        "hooks",
        "normal calls",
        "scales of fp8",
        "a rank that dies",
    ],
)
def test_every_rank_has_the_layer_of_the_reference(scenario: str, said: dict[str, list[str]]) -> None:
    assert said[scenario] == [""] * 4


@pytest.mark.parametrize("layer", ["low latency", "low latency, fp8", "high throughput"])
def test_the_comparison_finds_experts_that_are_swapped(layer: str, said: dict[str, list[str]]) -> None:
    found = said[f"{layer}, experts swapped"]
    assert all(each.startswith("round") for each in found), found
