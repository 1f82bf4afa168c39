"""`kvlane bench ssd`, on tiny sizes: what it measures, what it says of its peers, and that nothing of it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlane import _bench
from kvlane.bench.__main__ import main

TINY = ["--capacity", "16m", "--phase-bytes", "1m", "--blocks", "64k", "--restart-blocks", "50"]


def bench(folder: Path, *flags: str, files: tuple[str, ...] = ("a",)) -> dict[str, Any]:
    """The result of a run on files in `folder`, of which nothing is left."""
    folder.mkdir()
    out = folder.parent / "out"
    paths = [str(folder / name) for name in files]
    assert main(["ssd", *paths, *TINY, *flags, "--out", str(out)]) == 0
    assert list(folder.iterdir()) == []
    assert (out / "ssd.png").stat().st_size > 0
    return json.loads((out / "ssd.json").read_text())


def test_the_tier_is_measured_in_rounds(tmp_path: Path) -> None:
    result = bench(tmp_path / "ssd", "--vs", "crc", "--rounds", "2", "--blocks", "64k,128k")
    assert [size["block_bytes"] for size in result["sizes"]] == [64 << 10, 128 << 10]
    for size in result["sizes"]:
        assert size["devices"][0]["io"] in ("io_uring", "threads")
        for name in ("kvlane write", "kvlane read", "kvlane read beside writes", "crc32c"):
            assert len(size["rounds"][name]) == 2
        read = size["medians"]["kvlane read"]
        assert read["gb_per_s"] > 0 and 0 < read["p50_us"] <= read["p99_us"]
        assert 0 <= read["device_cpu_s_per_gb"] <= read["cpu_s_per_gb"] + 1
    assert result["restart_s"]["tables"] > 0 and result["restart_s"]["headers"] > 0
    figures = {figure["what"]: figure for figure in result["figures"]}
    assert figures["read 64 KiB, CPU"]["at_most"] == 0.15
    assert figures["restart from tables, 50 blocks"]["goal"] == ""
    # Where it was measured stays on the machine.
    assert str(tmp_path) not in json.dumps(result)


def test_several_files_are_one_tier(tmp_path: Path) -> None:
    result = bench(tmp_path / "ssd", "--vs", "none", "--rounds", "1", files=("a", "b"))
    assert result["files"] == 2
    assert len(result["sizes"][0]["devices"]) == 2


def test_without_io_uring_it_says_threads(tmp_path: Path) -> None:
    result = bench(tmp_path / "ssd", "--vs", "none", "--rounds", "1", "--threads")
    assert result["sizes"][0]["devices"][0]["io"] == "threads"


def test_a_file_of_somebody_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "a"
    mine.write_text("mine")
    with pytest.raises(SystemExit, match="exists"):
        main(["ssd", str(mine), *TINY, "--vs", "none"])
    assert mine.read_text() == "mine"
    beside = tmp_path / "b.peers"
    beside.write_text("mine too")
    with pytest.raises(SystemExit, match="exists"):
        main(["ssd", str(tmp_path / "b"), *TINY, "--vs", "none"])
    assert beside.read_text() == "mine too"


def test_it_knows_no_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ssd", str(tmp_path), "--vs", "fio"])
    assert "fio is none of crc" in capsys.readouterr().err


def test_checksums_have_a_rate() -> None:
    assert _bench.crc32c(4096, 1 << 20) > 0
