"""bench/gpu/restart.py: what becomes of its measurements. The engines need vLLM, and are measured by people."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture
def restart(gpu_script: Callable[[str], Any]) -> Any:
    return gpu_script("restart")


def result(restart: Any, *failed: str) -> dict[str, Any]:
    run = {
        "summary": {name: {"p50": 10.0 + place} for place, name in enumerate(restart.TIMES)},
        "controls": {name: name not in failed for name in restart.CONTROLS},
    }
    return {
        "runs": {"eager": run},
        "failures": [],
        "versions": {"vllm": "0.33.0", "torch": "2.11.0"},
        "host": {"gpus": ["a GPU, 580"]},
        "date": "2026-11-23",
        "settings": {"tokens": 10_000},
    }


def test_all_controls_hold(restart: Any, tmp_path: Path) -> None:
    assert restart.publish(result(restart), tmp_path) == 0
    table = (tmp_path / "restart.md").read_text()
    assert "| eager | 10.0 | 11.0 | 12.0 | 13.0 | 14.0 | 15.0 | 16.0 | 17.0 | hold |" in table
    assert "vllm 0.33.0; a GPU, 580; 2026-11-23" in table
    assert (tmp_path / "restart.png").stat().st_size > 1000
    assert json.loads((tmp_path / "restart.json").read_text())["date"] == "2026-11-23"


def test_one_control_that_fails_is_named_and_makes_the_status_one(
    restart: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert restart.publish(result(restart, "restarted_hits"), tmp_path) == 1
    assert "eager: restarted_hits does not hold" in capsys.readouterr().out
    assert "restarted_hits FAILED" in (tmp_path / "restart.md").read_text()


def test_an_engine_that_does_not_start_makes_the_status_one(tmp_path: Path) -> None:
    """Here there is no vLLM."""
    command = [sys.executable, str(FOLDER / "restart.py"), "--modes", "eager", "--shape", "tiny"]
    ended = subprocess.run(
        [*command, "--cache-bytes", "100000000", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "eager: an engine ended by itself; see" in ended.stdout
