"""kvlane.moe on fake GPUs, among processes: the kernels' own source, compiled for CPUs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "moe_gpu_ranks.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, so fake GPUs have no kernels")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def said(tmp_path: Path, ranks: int, work: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of each rank."""
    begun = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(ranks), str(tmp_path / "store"), work],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    for rank in begun:
        out, errors = rank.communicate(timeout=120)
        found.append((rank.returncode, out.strip(), errors))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_gpus_give_what_the_host_gives(tmp_path: Path, ranks: int) -> None:
    found = said(tmp_path, ranks, "compare")
    assert [each[:2] for each in found] == [(0, "right")] * ranks, found


def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path) -> None:
    found = said(tmp_path, 3, "killed")
    assert [each[:2] for each in found] == [(0, "right"), (0, "right"), (-9, "")], found


def test_wrong_calls_are_refused_with_a_sentence(tmp_path: Path) -> None:
    found = said(tmp_path, 2, "refused")
    assert [each[:2] for each in found] == [(0, "right")] * 2, found
