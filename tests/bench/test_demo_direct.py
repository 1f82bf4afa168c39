"""The demo of direct hand-offs: what it prints and draws, and that it finds what it makes wrong. `make demo-direct`
runs it with real engines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import pictures
from kvlane.demo.direct.wrong_cache import make_cache_wrong
from kvlane.demo.scenarios import Scenario

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import direct_pd


def found(**more: Any) -> dict[str, Any]:
    one = {"prefill": "P1", "decode": "D1", "landed_tokens": 1000, "computed_tokens": 1}
    handed_over = [
        one | {"prefill_ms": 100.0, "first_token_ms": 120.0},
        one | {"prefill_ms": None, "first_token_ms": 900.0, "landed_tokens": 512},
    ]
    scenario = {
        "name": "answers equal those",
        "passed": False,
        "figures": {},
        "problems": ["1 answers differ"],
    }
    return {
        "title": "1 prefill and 1 decode engines",
        "handed_over": handed_over,
        "scenarios": [scenario],
        "prompt_tokens": 1000,
        "seconds": 3.0,
        **more,
    }


def test_it_prints_each_hand_off_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    direct_pd.publish(found(), tmp_path)
    shown = capsys.readouterr().out
    assert "FAILED: answers equal those" in shown and "1 answers differ" in shown
    assert "512" in shown
    assert (tmp_path / "demo-direct.json").is_file() and (tmp_path / "demo-direct.png").is_file()


def test_the_picture_has_the_prompts_whose_prefill_engine_answered() -> None:
    (times,) = pictures.direct(found()).panels
    assert [bar.text for bar in times.bars] == ["100 ms", "120 ms"]
    assert pictures.direct(found(handed_over=[])).panels == ()


def test_a_scenario_that_did_not_come_has_not_passed() -> None:
    well, badly = Scenario("control: x"), Scenario("control: x", problems=["no"])
    assert direct_pd.passed([well], "control")
    assert not direct_pd.passed([badly], "control") and not direct_pd.passed([], "control")


ENGINE = """
import mmap, sys
memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
numbers = bytes(range(256)) * 16
memory[: len(numbers)] = numbers
print("ready", flush=True)
sys.stdin.read()
sys.exit(0 if memory[: len(numbers)] != numbers and any(memory[: 1 << 20]) else 3)
"""


@pytest.mark.parametrize("is_made_wrong", [True, False])
def test_an_engines_cache_is_made_wrong_in_its_memory(is_made_wrong: bool) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
    if is_made_wrong:
        assert make_cache_wrong([engine.pid], 256 << 20) == 1 << 20, "only where something is"
    engine.communicate(timeout=30)
    assert engine.returncode == (0 if is_made_wrong else 3)
