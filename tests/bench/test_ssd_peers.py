"""bench/ssd/peers.py, on tiny sizes: `kvlane bench ssd` with peers, which the package knows nothing of."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench.ssd import Phase

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "ssd" / "peers.py"
TINY = ["--capacity", "16m", "--phase-bytes", "1m", "--blocks", "64k", "--restart-blocks", "50"]


@pytest.fixture
def peers() -> Any:
    spec = importlib.util.spec_from_file_location("ssd_peers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench(peers: Any, folder: Path, *flags: str) -> dict[str, Any]:
    """The result of a run on a file in `folder`, of which nothing is left."""
    folder.mkdir()
    out = folder.parent / "out"
    assert peers.main([str(folder / "a"), *TINY, *flags, "--out", str(out)]) == 0
    assert list(folder.iterdir()) == []
    assert (out / "ssd.png").stat().st_size > 0
    return json.loads((out / "ssd.json").read_text())


@pytest.mark.parametrize("name", ["fio", "nixl"])
def test_a_peer_takes_turns_or_is_said_to_be_missing(peers: Any, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ssd"
    if peers.PEERS[name].missing():
        with pytest.raises(SystemExit, match=peers.PEERS[name].install.split("=")[0]):
            bench(peers, folder, "--vs", name)
        return
    result = bench(peers, folder, "--vs", name, "--rounds", "1")
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


def test_what_fio_says_is_taken_in_our_units(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fio"
    part = '{"io_bytes": 4000000000, "runtime": 2000, "lat_ns": {"percentile": {"50.000000": 7000, "99.000000": 9000}}}'
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "a note"\n'
        f'echo \'{{"jobs": [{{"error": 0, "usr_cpu": 10, "sys_cpu": 30, "read": {part}}}]}}\'\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    phase = Phase("read", ("/x/a:b", "/x/c"), 1 << 20, 4096, 16, 8, huge=False)
    assert peers.fio(phase) == {"gb_per_s": 2.0, "p50_us": 7.0, "p99_us": 9.0, "cpu_s_per_gb": 0.2}
    asked = (tmp_path / "asked").read_text().split()
    assert {"--filename=/x/a\\:b:/x/c", "--iodepth=8", "--io_size=65536", "--rw=randread"} <= set(asked)
    assert "--mem=shmhuge" not in asked
    for reserved, is_huge in ((8 * 4096 - 1, False), (8 * 4096, True)):
        monkeypatch.setattr(peers, "_reserved_huge_bytes", lambda reserved=reserved: reserved)
        peers.fio(dataclasses.replace(phase, huge=True, first=3))
        asked = (tmp_path / "asked").read_text().split()
        assert "--offset=12288" in asked
        assert ("--mem=shmhuge" in asked) == is_huge, "fio fails where its memory cannot be had"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 1\n")
    with pytest.raises(OSError, match="no such engine"):
        peers.fio(phase)


def test_a_peers_writes_go_on_where_they_are_told_to(peers: Any) -> None:
    phase = Phase("write", ("/x/a", "/x/b"), 8 * 4096, 4096, 6, 2, huge=False, first=6)
    places = peers._places(phase, [3, 4])
    assert places == [(3, 6 * 4096), (4, 6 * 4096), (3, 7 * 4096), (4, 7 * 4096), (3, 0), (4, 0)]


def test_a_peer_that_fails_is_left_out_of_the_figures(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(phase: Phase) -> dict[str, float]:
        raise OSError("no room")

    fio = dataclasses.replace(peers.PEERS["fio"], does=fails, missing=lambda: None)
    monkeypatch.setitem(peers.PEERS, "fio", fio)
    result = bench(peers, tmp_path / "ssd", "--vs", "fio", "--rounds", "2")
    assert result["sizes"][0]["failures"] == {"fio write": "no room", "fio read": "no room"}
    assert not any("fio" in figure["what"] for figure in result["figures"])
    assert capfd.readouterr().err.count("failed: no room") == 2


def test_what_is_not_installed_is_left_out_and_said(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, peer in peers.PEERS.items():
        monkeypatch.setitem(peers.PEERS, name, dataclasses.replace(peer, missing=lambda: "it is not there"))
    result = bench(peers, tmp_path / "ssd", "--rounds", "1")
    assert not any("fio" in name or "nixl" in name for name in result["sizes"][0]["medians"])
    printed = capfd.readouterr().err
    for name, peer in peers.PEERS.items():
        assert f"{name} is not measured, it is not there: {peer.install}" in printed
