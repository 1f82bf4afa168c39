"""Tensor and data parallelism, with all processes of vLLM and a real daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from script_with_vllm import result_of
from stores import DaemonStore
from tiny_model import build_tiny_model

# Each engine is four processes that import vLLM, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(1800)


def serve(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    store = DaemonStore(tmp_path)
    try:
        model = build_tiny_model(tmp_path / "model")
        log = tmp_path / "engine.log"
        arguments = ("--model", str(model), "--address", store.address, *arguments)
        result = result_of("served_engine.py", *arguments, log=log)
        lines = [line for line in log.read_text().splitlines() if "kvlane: " in line]
        assert not any("ERROR" in line for line in lines), lines
        given_up = sum("gives up its saves" in line for line in lines)
        # A prompt that is not stored has a save that was given up.
        assert result["attempts"] - 1 <= given_up, (result, lines)
        return result
    finally:
        store.close()


def check(result: dict[str, Any]) -> None:
    """All of the cold prompt was stored, and the warm one found it."""
    assert result["stored"] == 315 // 32, result
    assert result["cold"]["cached"] == 0, result
    assert all(result["paused"]), result
    assert result["warm"] == {"tokens": result["cold"]["tokens"], "cached": 288}, result


@pytest.mark.alone
def test_tensor_parallel(tmp_path: Path) -> None:
    result = serve(tmp_path, "--tensor", "2")
    assert result["workers"] == 2
    check(result)


@pytest.mark.gate
def test_data_parallel_engines_share(tmp_path: Path) -> None:
    result = serve(tmp_path, "--data", "2")
    assert len(result["engines"]) == 2
    check(result)
