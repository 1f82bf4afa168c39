"""`kvlane bench ssd`, on tiny sizes: what it measures, what it says of its peers, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvlane import _core
from kvlane.bench import ssd, ssd_peers
from kvlane.bench.__main__ import main
from kvlane.bench.ssd_peers import Phase

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


@pytest.mark.parametrize("name", ["fio", "nixl"])
def test_a_peer_takes_turns_or_is_said_to_be_missing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ssd"
    if ssd_peers.missing(name):
        with pytest.raises(SystemExit, match=ssd_peers.INSTALL[name].split("=")[0]):
            bench(folder, "--vs", name)
        return
    result = bench(folder, "--vs", name, "--rounds", "1")
    medians = result["sizes"][0]["medians"]
    # Not every file system lets it go past the page cache.
    failed = result["sizes"][0]["failures"]
    for op in ("read", "write"):
        peer = medians.get(f"{name} {op}")
        assert (peer is None) == (f"{name} {op}" in failed)
        if peer:
            assert peer["gb_per_s"] > 0 and 0 < peer["p50_us"] <= peer["p99_us"] and peer["cpu_s_per_gb"] >= 0
            figures = {figure["what"] for figure in result["figures"]}
            assert f"{op} 64 KiB / {name}" in figures


def test_what_fio_says_is_taken_in_our_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    part = '{"io_bytes": 4000000000, "runtime": 2000, "lat_ns": {"percentile": {"50.000000": 7000, "99.000000": 9000}}}'
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "a note"\n'
        f'echo \'{{"jobs": [{{"error": 0, "usr_cpu": 10, "sys_cpu": 30, "read": {part}}}]}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    phase = Phase("read", ("/x/a:b", "/x/c"), 1 << 20, 4096, 16, 8, huge=False)
    assert ssd_peers.fio(phase) == {"gb_per_s": 2.0, "p50_us": 7.0, "p99_us": 9.0, "cpu_s_per_gb": 0.2}
    asked = (tmp_path / "asked").read_text().split()
    assert {"--filename=/x/a\\:b:/x/c", "--iodepth=8", "--io_size=65536", "--rw=randread"} <= set(asked)
    assert "--mem=shmhuge" not in asked
    for reserved, is_huge in ((8 * 4096 - 1, False), (8 * 4096, True)):
        monkeypatch.setattr(ssd_peers, "_reserved_huge_bytes", lambda reserved=reserved: reserved)
        ssd_peers.fio(dataclasses.replace(phase, huge=True, first=3))
        asked = (tmp_path / "asked").read_text().split()
        assert "--offset=12288" in asked
        assert ("--mem=shmhuge" in asked) == is_huge, "fio fails where its memory cannot be had"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 1\n")
    with pytest.raises(OSError, match="no such engine"):
        ssd_peers.fio(phase)


def test_a_peers_writes_go_on_where_they_are_told_to() -> None:
    phase = Phase("write", ("/x/a", "/x/b"), 8 * 4096, 4096, 6, 2, huge=False, first=6)
    places = ssd_peers._places(phase, [3, 4])
    assert places == [(3, 6 * 4096), (4, 6 * 4096), (3, 7 * 4096), (4, 7 * 4096), (3, 0), (4, 0)]


def test_a_peer_that_fails_is_left_out_of_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(phase: Phase) -> dict[str, float]:
        raise OSError("no room")

    monkeypatch.setattr(ssd, "missing", lambda name: None)
    monkeypatch.setattr(ssd_peers, "fio", fails)
    result = bench(tmp_path / "ssd", "--vs", "fio", "--rounds", "2")
    assert result["sizes"][0]["failures"] == {"fio write": "no room", "fio read": "no room"}
    assert not any("fio" in figure["what"] for figure in result["figures"])
    assert capfd.readouterr().err.count("failed: no room") == 2


def test_what_is_not_installed_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssd, "missing", lambda name: None if name == "crc" else "it is not there")
    result = bench(tmp_path / "ssd", "--rounds", "1")
    assert not any("fio" in name or "nixl" in name for name in result["sizes"][0]["medians"])
    printed = capfd.readouterr().err
    for name, install in ssd.INSTALL.items():
        assert f"{name} is not measured, it is not there: {install}" in printed


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


def test_checksums_have_a_rate() -> None:
    assert _core.bench_crc32c(4096, 1 << 20) > 0
