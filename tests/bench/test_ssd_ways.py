"""bench/ssd/ways.py, on tiny sizes: all ways take turns, and nothing of them stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "ssd" / "ways.py"


def test_all_ways_take_turns(tmp_path: Path) -> None:
    folder, out = tmp_path / "ssd", tmp_path / "out"
    folder.mkdir()
    command = [
        sys.executable,
        SCRIPT,
        folder,
        "--capacity",
        "64m",
        "--blocks",
        "256k",
        "--rounds",
        "2",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    result = json.loads((out / "ssd-ways.json").read_text())
    for size in result["sizes"]:
        assert {way: len(rates["read"]) for way, rates in size["rates"].items()} == {
            "auto": 2,
            "direct": 2,
            "staged": 2,
        }
        assert len(size["chosen"]) == 2
    assert any("/ the better way" in figure["what"] for figure in result["figures"])
