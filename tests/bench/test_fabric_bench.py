"""`kvlane bench fabric`, on tiny sizes: what it measures, what it prints, and that nothing of it stays."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvlane.bench import fabric, fabric_sides
from kvlane.bench.__main__ import main
from kvlane.bench.children import Child, Failed
from kvlane.bench.fabric_sides import Cell

SMALL = ["--sizes", "64,4k", "--pages", "16", "--page-bytes", "8k", "--rounds", "1"]
TINY = [*SMALL, "--transports", "tcp"]


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


def test_between_processes_of_one_host_the_bare_system_call_is_beside_it(tmp_path: Path) -> None:
    assert main(["fabric", *SMALL, "--vs", "process_vm", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "fabric.json").read_text())
    systems = {(each["system"], each["transport"]) for each in result["results"]}
    if ("process_vm", "cma") in systems:
        assert systems == {("kvlane", "tcp"), ("kvlane-cma", "cma"), ("process_vm", "cma")}
        assert "cma read paged / process_vm" in {figure["what"] for figure in result["figures"]}
    else:
        # No process may read another's memory here.
        assert systems == {("kvlane", "tcp")}


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
            "memory",
        ]
        assert (each["transport"], each["pattern"], each["system"]) == ("tcp", "contiguous", "kvlane")
        assert each["gb_per_s"] > 0 and 0 < each["p50_us"] <= each["p99_us"]
    assert not (tmp_path / "no").exists()


def test_a_peer_that_fails_at_something_is_begun_anew_for_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser)
    arguments = parser.parse_args(TINY)
    small, large = Cell("contiguous", 64), Cell("contiguous", 4096)

    def fail(op: str, cell: Cell) -> None:
        raise Failed("too much for it")

    with closing(fabric._System("loop", arguments)) as peer, peer.turn():
        before = [child.pid for child in peer._children]
        assert peer.attempt(fail, "write", large) is None
        assert not set(before) & {child.pid for child in peer._children}
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        assert peer.attempt(peer.measure, "write", large) is None, "it is not tried again"
        assert peer.attempt(peer.measure, "write", small)
        assert peer.failures == {("write", large): "too much for it"}
    with (
        closing(fabric._System("kvlane", arguments)) as own,
        own.turn(),
        pytest.raises(SystemExit, match="too much"),
    ):
        own.attempt(fail, "write", large)
    rows = [
        fabric._row("kvlane", "tcp", "write", large, {"gb_per_s": 2.0, "p50_us": 3.0, "p99_us": 4.0}, None),
        fabric._row("loop", "tcp", "write", large, {}, "too much for it"),
    ]
    assert [line.split() for line in fabric.table(rows).splitlines() if "4 KiB" in line] == [
        ["write", "contiguous", "4", "KiB", "2", "failed"],
        ["write", "contiguous", "4", "KiB", "3", "failed"],
        ["failed:", "loop,", "write", "contiguous", "4", "KiB:", "too", "much", "for", "it"],
    ]


def test_each_address_of_the_far_side_and_each_connection_is_a_path(
    capfd: pytest.CaptureFixture[str],
) -> None:
    nics = ["--nics", "127.0.0.1,127.0.0.2", "--connections", "2"]
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser)
    far, near = fabric_sides.Kvlane(), fabric_sides.Kvlane()
    far.open(1 << 16, listen=fabric._listen(parser.parse_args(nics)))
    near.open(1 << 16, connections=2)
    near.connect(far.listen())
    # A transfer waits until there are paths for bytes.
    near.peer.read(near.region, near.remote, [(0, 0, 1)]).wait(30)
    hosts = [str(path.address).rpartition(":")[0] for path in near.peer.paths if path.carrier == "tcp"]
    assert sorted(hosts) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2
    assert fabric._listen(parser.parse_args(["--nics", "::1", "--listen", "h:7"])) == ["[::1]:7"]
    assert main(["fabric", *TINY, *nics, "--vs", "none", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["results"]) == 6


def test_a_server_is_measured_by_its_address(capfd: pytest.CaptureFixture[str]) -> None:
    with server(*TINY, "--token", "t") as address:
        assert main(["fabric", address, *TINY, "--token", "t", "--paths", "2", "--json"]) == 0
        assert len(json.loads(capfd.readouterr().out)["results"]) == 6
        with pytest.raises(SystemExit, match="give the server the same --sizes"):
            main(["fabric", address, "--sizes", "1m", "--token", "t"])


def test_what_cannot_be_measured_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="not one that"):
        main(["fabric", "kvf1:!"])
    with pytest.raises(SystemExit):
        main(["fabric", "--vs", "nixl,loop"])


def test_a_wrong_byte_is_found_inside_and_beside_a_run() -> None:
    side = fabric_sides.Memcpy()
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
    child = Child(["-m", "kvlane.bench.fabric_sides", "loop"], {})
    try:
        with pytest.raises(SystemExit, match="Connection refused"):
            child.ask("connect", address="127.0.0.1:1")
        with pytest.raises(SystemExit, match="AttributeError"):
            child.ask("nothing of the kind")
    finally:
        child.end()


@pytest.mark.fake_gpus
def test_gpus_memory_is_measured_beside_a_socket_and_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    sizes = ["--sizes", "64,1m", "--pages", "16", "--page-bytes", "8k", "--rounds", "1"]
    for memory in ("cuda:1", "cuda:0,cuda:1"):
        main(["fabric", *sizes, "--memory", memory, "--out", str(tmp_path)])
        assert f"memcpy is not measured with --memory {memory}" in capfd.readouterr().err
        result = json.loads((tmp_path / "fabric.json").read_text())
        assert {(each["system"], each["memory"]) for each in result["results"]} == {
            ("kvlane", memory),
            ("kvlane-cuda", memory),
            ("gpu-copies", memory),
            ("peer-copy", memory),
            ("loop", "host"),
        }
        assert all(each["gb_per_s"] > 0 for each in result["results"])
        figures = [figure["what"] for figure in result["figures"]]
        assert any("GPU memory / slower of" in what for what in figures)
        assert {"cuda read 1 MiB / peer-copy", "cuda write 1 MiB / peer-copy"} <= set(figures)
    for wrong, why in (
        (["--vs", "memcpy"], "memcpy is not measured with"),
        (["--transports", "cma"], "kvlane-cma is not measured with"),
    ):
        with pytest.raises(SystemExit, match=why):
            main(["fabric", *sizes, "--memory", "cuda:1", *wrong])
    with pytest.raises(SystemExit, match="goes with --memory cuda:N"):
        main(["fabric", *sizes, "--transports", "cuda"])
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "off")
    with pytest.raises(SystemExit, match="KVLANE_GPU_DRIVER is off"):
        main(["fabric", *sizes, "--memory", "cuda:0", "--vs", "none"])


@pytest.mark.fake_gpus
def test_a_server_with_a_gpus_memory_is_measured_from_the_hosts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    with server("--memory", "cuda:0", *SMALL) as address:
        assert main(["fabric", address, *TINY, "--json"]) == 0
    results = json.loads(capfd.readouterr().out)["results"]
    assert {each["memory"] for each in results} == {"host"} and results[0]["gb_per_s"] > 0
