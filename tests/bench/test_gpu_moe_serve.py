"""bench/gpu/moe_serve.py: what is kept of an engine, and how two compare. Engines are played."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def moe_serve(gpu_script: Callable[[str], Any]) -> Any:
    return gpu_script("moe_serve")


class Played:
    """An engine whose answers are made from prompts and weights, and which ends at a call."""

    rank: int | None = None

    def __init__(self, ends_at: str = "") -> None:
        self.ends_at = ends_at
        self.swapped = 0

    def shutdown(self) -> None:
        pass

    async def answer(self, prompt: list[int], tokens: int) -> tuple[list[float], tuple[int, ...]]:
        return [float(each) for each in range(tokens)], tuple([prompt[0] + self.swapped] * tokens)

    async def on_workers(self, function: Any, *_: Any) -> list[Any]:
        if function.__name__ == self.ends_at:
            raise TimeoutError(self.ends_at)
        self.swapped += function.__name__ == "swap_experts"
        if function.__name__ == "all_to_all_facts":
            return [(["DeepEPLLAll2AllManager"], 3), (["DeepEPLLAll2AllManager"], 4)]
        return [{"a_kernel": (2000.0, 3)}] * 2


def measured(moe_serve: Any, engine: Played, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the file of an engine says."""
    result = folder / "engine.json"
    settings = argparse.Namespace(
        shape="tiny", rounds=1, running=2, tokens=5, new_tokens=3, engine="kvlane", result=result
    )
    monkeypatch.setattr(moe_serve, "start", lambda _: (engine, 1.0))
    with pytest.raises(TimeoutError) if engine.ends_at else contextlib.nullcontext():
        moe_serve.one(settings)
    return dict(json.loads(result.read_text()))


def test_a_run_that_is_cut_off_keeps_answers_and_times(
    moe_serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was cut off while its engine answered for the last time, and left nothing of seven minutes."""
    kept = measured(moe_serve, Played("begin_profile"), tmp_path, monkeypatch)
    whole = measured(moe_serve, Played(), tmp_path, monkeypatch)
    assert kept["answers"] == whole["answers"] and kept["tpot"]["p50"] == 1.0
    found = {"kvlane": kept, "deepep": whole}
    assert moe_serve.compared(found) == {"deepep": {"equal_answers": 4, "of": 4, "tpot_p50": 1.0}}
    assert not moe_serve.controls_hold(found), "no control has run"
    assert moe_serve.controls_hold({"kvlane": whole, "deepep": whole})


def test_figures_count_only_with_all_controls_and_dispatches_by_kvlane(
    moe_serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(moe_serve, Played(), tmp_path, monkeypatch)
    assert whole["control_experts_matter"] and whole["same_again"]
    assert not moe_serve.controls_hold({"kvlane": whole | {"control_experts_matter": False}})
    assert not moe_serve.controls_hold({"kvlane": whole | {"dispatches_of_kvlane": [0, 4]}})
    assert not moe_serve.controls_hold({"deepep": whole}), "kvlane's engine left nothing"
