"""`kvlane bench fabric`, on tiny sizes: what it measures, what it prints, and that nothing of it stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlane.bench import fabric, fabric_peers
from kvlane.bench.__main__ import main
from kvlane.bench.fabric_peers import Cell

TINY = ["--sizes", "64,4k", "--pages", "16", "--page-bytes", "8k", "--rounds", "1"]


@pytest.fixture(autouse=True)
def short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "IDLE_SECONDS", 0.1)


@contextmanager
def server(*flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "kvlane.bench", "fabric", "--server", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_loopback_compares_with_a_loop_and_memcpy(tmp_path: Path) -> None:
    assert main(["fabric", "--loopback", *TINY, "--vs", "loop,memcpy", "--out", str(tmp_path)]) == 0
    for picture in ("fabric.png", "fabric-latency.png"):
        assert (tmp_path / picture).stat().st_size > 0
    result = json.loads((tmp_path / "fabric.json").read_text())
    assert {each["system"] for each in result["results"]} == {"kvlane", "loop", "memcpy"}
    ratios = {figure["what"]: figure["value"] for figure in result["figures"]}
    rates = {
        (each["system"], each["op"]): each["gb_per_s"]
        for each in result["results"]
        if each["pattern"] == "paged"
    }
    assert ratios["TCP write paged / loop"] == rates["kvlane", "write"] / rates["loop", "write"]
    assert ratios["TCP read paged / own write"] == rates["kvlane", "read"] / rates["kvlane", "write"]
    assert "token" not in result["settings"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
def test_encrypted_connections_are_a_transport_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fabric", *TINY, "--vs", "none", "--tls", "--json"]) == 0
    results = json.loads(capfd.readouterr().out)["results"]
    cells = [(each["transport"], each["op"], each["pattern"], each["bytes"]) for each in results]
    assert sorted(cells) == sorted(
        (transport, *cell[1:]) for transport in ("tcp", "tls") for cell in cells if cell[0] == "tls"
    )
    with pytest.raises(SystemExit, match="three files"):
        main(["fabric", "--server", "--tls"])


def test_json_is_all_that_goes_to_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--patterns", "contiguous", "--vs", "none", "--json", "--out", str(tmp_path / "no")]
    assert main(["fabric", *TINY, *flags]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert list(printed) == ["results"]
    assert [(each["op"], each["bytes"]) for each in printed["results"]] == [
        ("write", 64),
        ("write", 4096),
        ("read", 64),
        ("read", 4096),
    ]
    for each in printed["results"]:
        assert list(each) == [
            "op",
            "transport",
            "pattern",
            "bytes",
            "gb_per_s",
            "p50_us",
            "p99_us",
            "system",
        ]
        assert (each["transport"], each["pattern"], each["system"]) == ("tcp", "contiguous", "kvlane")
        assert each["gb_per_s"] > 0 and 0 < each["p50_us"] <= each["p99_us"]
    assert not (tmp_path / "no").exists()


def test_nixl_is_measured_over_both_of_its_transports_or_said_to_be_missing(tmp_path: Path) -> None:
    command = ["fabric", *TINY, "--vs", "nixl", "--out", str(tmp_path)]
    if fabric_peers.nixl_module() is None:
        with pytest.raises(SystemExit, match="pip install --no-deps nixl-cu12"):
            main(command)
        return
    assert main(command) == 0
    result = json.loads((tmp_path / "fabric.json").read_text())
    assert {(each["system"], each["transport"]) for each in result["results"]} == {
        ("kvlane", "tcp"),
        ("nixl-tcp", "tcp"),
        ("nixl-cma", "cma"),
    }
    assert "TCP write 64 B, p50 / nixl-tcp" in {figure["what"] for figure in result["figures"]}


def test_a_server_is_measured_by_its_address(capfd: pytest.CaptureFixture[str]) -> None:
    with server(*TINY, "--token", "t") as address:
        assert main(["fabric", address, *TINY, "--token", "t", "--connections", "2", "--json"]) == 0
        assert len(json.loads(capfd.readouterr().out)["results"]) == 6
        with pytest.raises(SystemExit, match="give the server the same --sizes"):
            main(["fabric", address, "--sizes", "1m", "--token", "t"])


def test_what_cannot_be_measured_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="not one that"):
        main(["fabric", "kvf1:!"])
    monkeypatch.setattr(fabric, "nixl_module", lambda: None)
    with pytest.raises(SystemExit, match="pip install --no-deps nixl-cu12"):
        main(["fabric", "--vs", "nixl,loop"])


def test_a_wrong_byte_is_found_inside_and_beside_a_run() -> None:
    side = fabric_peers.Memcpy()
    side.open(1 << 16)
    cell = Cell("contiguous", 4096)
    ((source, target, length),) = runs = cell.first_runs(1 << 16, whole=True)
    side.fill(0, 1 << 16, salt=3)
    for spoiled in (None, target, target + length - 1, target - 1, target + length):
        side.poison(0, 1 << 16, far=True)
        side.once("write", cell)
        if spoiled is not None:
            side.bytes_of(True)[spoiled] ^= 1
        assert side.wrong(0, 1 << 16, 3, runs, far=True) == spoiled
    assert source == target > 0


def test_pages_are_shuffled_on_each_side_and_all_there() -> None:
    runs = Cell("paged", 64 * 4096, 64).first_runs(1 << 20, whole=False)
    near, far = ([run[side] for run in runs] for side in (0, 1))
    assert sorted(near) == sorted(far) == [page * 4096 for page in range(64)]
    assert near != far and near != sorted(near)


def test_a_process_that_ends_or_fails_ends_the_benchmark_with_its_text() -> None:
    child = fabric._Child("loop", {})
    try:
        with pytest.raises(SystemExit, match="Connection refused"):
            child.ask("connect", address="127.0.0.1:1")
        with pytest.raises(SystemExit, match="AttributeError"):
            child.ask("nothing of the kind")
    finally:
        child.end()
