"""bench/fabric/peers.py, on tiny sizes: `kvlane bench fabric` with peers, which the package knows nothing of."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import fabric
from kvlane.bench.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "fabric" / "peers.py"
SMALL = ["--sizes", "64,4k", "--pages", "16", "--page-bytes", "8k", "--rounds", "1"]
TINY = [*SMALL, "--transports", "tcp"]

# NIXL's calls, over kvlane.fabric: descriptors are (address, bytes, device).
NIXL = """
import json, os
from pathlib import Path
from kvlane import fabric

class nixl_agent_config:
    def __init__(self, enable_prog_thread, backends):
        self.has_thread = enable_prog_thread

class nixl_agent:
    def __init__(self, name, config):
        self.engine = fabric.Engine()
        with Path(os.environ["NIXL_LOG"]).open("a") as log:
            log.write(f"{config.has_thread}\\n")

    def register_memory(self, regions, kind):
        ((self.base, size, self.device, _),) = regions
        self.kind = kind
        device = {"DRAM": "cpu", "VRAM": f"cuda:{self.device}"}[kind]
        self.region = self.engine.register(self.base, size, device=device)

    def get_agent_metadata(self):
        facts = [self.engine.describe().hex(), self.region.number, self.base, self.device, self.kind]
        return json.dumps(facts).encode()

    def add_remote_agent(self, metadata):
        described, self.remote, self.far_base, self.far_device, kind = json.loads(metadata)
        self.peer = self.engine.connect(bytes.fromhex(described))
        assert kind == self.kind
        return b"far"

    def get_xfer_descs(self, descriptors, kind):
        assert kind == self.kind
        return descriptors

    def prep_xfer_dlist(self, agent, descriptors, kind):
        assert agent in ("NIXL_INIT_AGENT", "far")
        return self.get_xfer_descs(descriptors, kind)

    def make_prepped_xfer(self, op, near, near_indices, far, far_indices):
        return self.initialize_xfer(op, [near[at] for at in near_indices], [far[at] for at in far_indices], "far")

    def initialize_xfer(self, op, near, far, agent):
        assert agent == "far"
        assert {each[2] for each in near} == {self.device} and {each[2] for each in far} == {self.far_device}
        runs = [(a[0] - self.base, b[0] - self.far_base, a[1]) for a, b in zip(near, far, strict=True)]
        return {"READ": self.peer.read, "WRITE": self.peer.write}[op], runs

    def transfer(self, handle):
        move, runs = handle
        self.moving = move(self.region, self.remote, runs)
        return "PROC"

    def check_xfer_state(self, handle):
        self.moving.wait(30)
        return "DONE"
"""
# As much of torch as makes a GPU current.
TORCH = """
class cuda:
    set_device = staticmethod(lambda number: None)
    synchronize = staticmethod(lambda: None)
"""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fabric, "IDLE_SECONDS", 0.1)
    spec = importlib.util.spec_from_file_location("fabric_peers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_package_runs_no_peer(capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel had 870 lines that ran NIXL, Mooncake, iperf3 and fio, and `kvlane bench` told its users to install
    them."""
    named = [
        f"{path.name}: {word}"
        for path in (ROOT / "python" / "kvlane" / "bench").glob("*.py")
        for word in ("nixl", "mooncake.engine", "iperf3", "ioengine")
        if word in path.read_text().lower()
    ]
    assert named == []
    with pytest.raises(SystemExit):
        main(["fabric", "--vs", "nixl"])
    assert "'nixl' is none of loop, process_vm, memcpy" in capsys.readouterr().err


def test_its_help_has_the_flags_of_the_benchmark() -> None:
    told = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "--page-bytes" in told.stdout and "nixl,mooncake,iperf3" in told.stdout


def test_nixl_is_measured_over_both_of_its_transports_or_said_to_be_missing(
    peers: Any, tmp_path: Path
) -> None:
    command = [*TINY, "--vs", "nixl", "--out", str(tmp_path)]
    if peers.nixl_module() is None:
        with pytest.raises(SystemExit, match="pip install --no-deps nixl-cu12"):
            peers.main(command)
        return
    assert peers.main(command) == 0
    result = json.loads((tmp_path / "fabric.json").read_text())
    assert {(each["system"], each["transport"]) for each in result["results"]} == {
        ("kvlane", "tcp"),
        ("nixl-tcp", "tcp"),
        ("nixl-cma", "cma"),
    }
    assert "TCP write 64 B, p50 / nixl-tcp" in {figure["what"] for figure in result["figures"]}


@pytest.mark.fake_gpus
def test_nixl_moves_the_memory_of_gpus_beside_the_carrier_cuda(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    modules = tmp_path / "modules"
    (modules / "nixl_cu12").mkdir(parents=True)
    (modules / "nixl_cu12" / "__init__.py").touch()
    (modules / "nixl_cu12" / "_api.py").write_text(NIXL)
    (modules / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(modules))
    path = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("NIXL_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    cells = ["--sizes", "1m", "--pages", "16", "--page-bytes", "8k", "--rounds", "1", "--transports", "cuda"]
    out = ["--out", str(tmp_path)]
    assert peers.main([*cells, "--memory", "cuda:0,cuda:1", "--vs", "nixl,peer-copy", *out]) == 0
    result = json.loads((tmp_path / "fabric.json").read_text())
    systems = ["kvlane-cuda", "peer-copy", "nixl-cuda", "nixl-cuda-thread"]
    assert list(dict.fromkeys(each["system"] for each in result["results"])) == systems
    assert all(each["memory"] == "cuda:0,cuda:1" and each["gb_per_s"] > 0 for each in result["results"])
    goals = {figure["what"]: figure["goal"] for figure in result["figures"]}
    for other in systems[2:]:
        assert goals[f"cuda read 1 MiB / {other}"] == "at least 2.5x"
        assert goals[f"cuda read paged / {other}"] == "at least 30x"
        assert goals[f"cuda write 1 MiB / {other}"] == ""
    # The far agent of each pair, and its near one.
    assert (tmp_path / "log").read_text().split() == ["True", "False", "True", "True"]
    for wrong in ("mooncake", "iperf3"):
        with pytest.raises(SystemExit, match=f"{wrong} is not measured with --memory cuda:0"):
            peers.main([*cells, "--memory", "cuda:0", "--vs", wrong])
    # Between hosts' memory NIXL is as before.
    systems = fabric._systems(_parse(peers, [*TINY, "--vs", "nixl"]), peers.FIELD)
    assert systems == ["kvlane", "nixl-tcp", "nixl-cma"]


def _parse(peers: Any, words: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser, peers.FIELD)
    return parser.parse_args(words)


def test_nixl_for_gpus_is_said_to_be_missing(peers: Any) -> None:
    field = dataclasses.replace(
        peers.FIELD, missing=lambda name: "it is not there" if name == "nixl" else None
    )
    with pytest.raises(SystemExit, match="nixl is not measured, it is not there: pip install"):
        fabric._systems(_parse(peers, ["--memory", "cuda:0", "--vs", "nixl"]), field)
    assert "nixl-cuda" not in fabric._systems(_parse(peers, ["--memory", "cuda:0"]), field)


def test_mooncake_is_measured_as_it_comes_and_tuned_or_said_to_be_missing(
    peers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    many_pages = ["--sizes", "64,4k", "--pages", "4096", "--page-bytes", "4k", "--rounds", "1"]
    many_pages += ["--transports", "tcp"]
    command = [*many_pages, "--vs", "mooncake", "--out", str(tmp_path)]
    if peers.missing("mooncake"):
        with pytest.raises(SystemExit, match="pip install mooncake-transfer-engine-non-cuda"):
            peers.main(command)
        return
    assert peers.main(command) == 0
    assert "failed: mooncake, read paged 16 MiB" in capfd.readouterr().out
    results = json.loads((tmp_path / "fabric.json").read_text())["results"]
    assert {each["system"] for each in results} == {"kvlane", "mooncake", "mooncake-tuned"}
    # These pages are too many for its default queues, and spoil the process for later cells.
    failed = [each for each in results if "error" in each]
    assert {(each["system"], each["op"], each["pattern"]) for each in failed} == {
        ("mooncake", "write", "paged"),
        ("mooncake", "read", "paged"),
    }
    assert all("4096 pages" in each["error"] and each["gb_per_s"] is None for each in failed)
    assert all(each["gb_per_s"] > 0 for each in results if each not in failed)


def test_iperf3_has_a_rate_of_its_own_or_is_said_to_be_missing(peers: Any, tmp_path: Path) -> None:
    command = [*TINY, "--vs", "iperf3", "--out", str(tmp_path)]
    if peers.missing("iperf3"):
        with pytest.raises(SystemExit, match="apt-get install iperf3"):
            peers.main(command)
        return
    assert peers.main(command) == 0
    results = json.loads((tmp_path / "fabric.json").read_text())["results"]
    streams = [each for each in results if each["system"] == "iperf3"]
    assert [(each["op"], each["pattern"], each["bytes"]) for each in streams] == [
        ("write", "stream", 1 << 20),
        ("read", "stream", 1 << 20),
    ]
    assert all(each["gb_per_s"] > 0 and each["p50_us"] is None for each in streams)


def test_what_iperf3_says_is_taken_as_the_rate_at_which_bytes_come(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "iperf3"
    listens = '#!/bin/sh\nif [ "$1" = -s ]; then echo "Server listening on $4"; exec sleep 60; fi\n'
    program.write_text(
        listens + 'case "$*" in *" -R") rate=16e9;; *) rate=8e9;; esac\n'
        'echo "{\\"end\\": {\\"sum_received\\": {\\"bits_per_second\\": $rate}}}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert peers.main([*TINY, "--vs", "iperf3", "--json"]) == 0
    results = json.loads(capfd.readouterr().out)["results"]
    assert [each["gb_per_s"] for each in results if each["system"] == "iperf3"] == [1.0, 2.0]
    program.write_text(listens + 'echo "{\\"error\\": \\"no route\\"}"\n')
    assert peers.main([*TINY, "--vs", "iperf3", "--json"]) == 0
    results = json.loads(capfd.readouterr().out)["results"]
    errors = [each["error"] for each in results if each["system"] == "iperf3"]
    assert len(errors) == 2 and all("no route" in each for each in errors)


def test_what_is_not_installed_is_left_out_and_said(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    field = dataclasses.replace(
        peers.FIELD, missing=lambda name: "it is not there" if name in peers.INSTALL else None
    )
    monkeypatch.setattr(peers, "FIELD", field)
    assert peers.main([*TINY, "--patterns", "contiguous", "--json"]) == 0
    printed = capfd.readouterr()
    # Not everywhere may a process read another's memory.
    systems = {each["system"] for each in json.loads(printed.out)["results"]} - {"process_vm"}
    assert systems == {"kvlane", "loop", "memcpy"}
    for name, install in peers.INSTALL.items():
        assert f"{name} is not measured, it is not there: {install}" in printed.err
