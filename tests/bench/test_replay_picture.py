"""The picture of `kvlane replay`, and the command as a whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import replay_picture


def _result(policy: str, share: float, hits: float) -> dict[str, Any]:
    return {"policy": policy, "capacity_share": share, "prefix_hit_percent": hits}


def test_lines_are_in_order_of_capacity() -> None:
    report = {"results": [_result("lru", 0.3, 40.0), _result("lru", 0.1, 30.0), _result("arc", 0.1, 31.0)]}
    assert replay_picture.lines(report) == {"lru": [(10.0, 30.0), (30.0, 40.0)], "arc": [(10.0, 31.0)]}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [_result(policy, share, 50 * share) for policy in ("lru", "auto") for share in (0.01, 0.5)]
    report = {"trace": "t.jsonl", "with_scans": True, "ceiling_percent": 36.6, "results": results}
    replay_picture.draw(report, tmp_path / "new" / "t.png")
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")


def _trace(folder: Path) -> Path:
    # Twenty prompts of a shared block and nine of their own, in turns.
    requests = [
        {"timestamp": 1000 * turn, "input_length": 5120, "output_length": 10, "hash_ids": [0, *own]}
        for turn in range(200)
        for own in [range(10 * (turn % 20) + 1, 10 * (turn % 20) + 10)]
    ]
    path = folder / "turns.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def _kvlane(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("kvlane")
    assert binary, "kvlane is not on the PATH"
    return subprocess.run(
        [binary, "replay", *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_json_has_what_is_promised(tmp_path: Path) -> None:
    trace = _trace(tmp_path)
    done = _kvlane(
        tmp_path,
        str(trace),
        "--policy",
        "lru,arc",
        "--capacity",
        "10%,100%,18,1mib",
        "--json",
        "--block-bytes",
        "64kib",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # 181 blocks in 2,000 references.
    assert report["ceiling_percent"] == pytest.approx(100 * (2000 - 181) / 2000)
    found = [(each["policy"], each["capacity_share"], each["capacity_blocks"]) for each in report["results"]]
    expected = [(0.1, 18), (1.0, 181), (18 / 181, 18), (16 / 181, 16)]
    assert found == [(policy, *capacity) for policy in ("lru", "arc") for capacity in expected]
    whole = next(each for each in report["results"] if each["capacity_blocks"] == 181)
    assert whole["prefix_hit_percent"] == whole["block_hit_percent"] == report["ceiling_percent"]
    assert not list(tmp_path.glob("*.png"))


def test_a_table_and_a_picture_named_like_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = _kvlane(tmp_path, str(_trace(tmp_path)), "--ssd", "50%")
    assert done.returncode == 0, done.stderr
    assert "wtinylfu" in done.stdout and done.stdout.splitlines()[-1] == "turns.png"
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    trace = _trace(tmp_path)
    with trace.open("a") as file:
        file.write('{"timestamp": 5}\n')
    done = _kvlane(tmp_path, str(trace))
    assert (
        done.returncode == 1 and "turns.jsonl: line 201, column 16: missing field `hash_ids`" in done.stderr
    )
    assert _kvlane(tmp_path, str(trace), "--policy", "fifo").returncode == 2
