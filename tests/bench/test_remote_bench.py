"""`kvlane bench remote`, on tiny sizes: between network namespaces where they may be made, else over loopback."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlane.bench import network, remote
from kvlane.bench.remote_hosts import Peer, Settings

# The tests' daemons are a debug build, whose answers take longer than the millisecond that daemons wait for each other.
TINY = ["--bytes", "16MiB", "--rounds", "1", "--lookups", "10", "--seconds", "0.1", "--answer-ms", "100"]


def test_it_measures_all_parts_and_says_what_was_predicted(tmp_path: Path) -> None:
    one_host = ["--one-host"] if network.refusal() else []
    # In a process of its own, because it goes on in a network namespace.
    command = [sys.executable, "-m", "kvlane.bench", "remote", *TINY, *one_host, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "remote.png").stat().st_size > 0
    result = json.loads((tmp_path / "remote.json").read_text())
    parts, left_out = result["parts"], result["left_out"]
    # A wire can be paced where the kernel has the module for it.
    assert set(parts) | set(left_out) == set(remote.PARTS) and set(left_out) <= {"paced"}
    figures = {figure["what"]: figure for figure in result["figures"]}
    with_goals = [what for what, figure in figures.items() if figure["goal"]]
    assert set(with_goals) <= set(remote.PREDICTED)
    assert all(f"{what} " in done.stdout for what in with_goals)
    for name in ("tcp", "tls"):
        (took,) = parts[name]["rounds"]
        assert took["ratio"] == pytest.approx((took["read"] + took["crc"]) / took["fetch"])
    if "paced" in parts:
        (paced,) = parts["paced"]["rounds"]
        assert sum(paced["bytes"]) >= parts["paced"]["bytes"] == 16 << 20
        assert figures["one killed half-way: blocks found"]["value"] == 100
    assert parts["owner"]["medians"]["lending"]["gb_per_s"] > 0
    assert len(parts["cold"]["stopped"][0]["on"]) == 10
    assert parts["seen"]["blocks"] == 10 <= parts["seen"]["lookups"]
    assert parts["index"]["lookups"] >= 10 and len(parts["index"]["killed"][0]["on"]) == 10
    assert parts["ssd"]["missing_blocks"] == 0


def test_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    remote.add_arguments(parser)
    assert parser.parse_args(["--parts", "seen,cold"]).parts == ["seen", "cold"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "all"])
    assert "all is none of tcp, tls," in capsys.readouterr().err


def test_peers_take_turns_with_fetches_and_one_that_fails_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    @contextmanager
    def slow(settings: Settings) -> Iterator[Callable[[], float]]:
        yield lambda: calls.append(settings.blocks) or 1000.0

    @contextmanager
    def broken(settings: Settings) -> Iterator[Callable[[], float]]:
        raise OSError("no master")
        yield

    peers = {
        "slow": Peer(slow, lambda: None, "", goal=1.1),
        "broken": Peer(broken, lambda: None, "", goal=1.1),
        "absent": Peer(slow, lambda: "no such module", "pip install absent", goal=1.1),
    }
    parser = argparse.ArgumentParser()
    remote.add_arguments(parser, peers)
    arguments = parser.parse_args([*TINY, "--one-host", "--parts", "tcp", "--rounds", "2"])
    figures = {figure.what: figure for figure in remote.measure(arguments, peers).figures}
    assert calls == [8, 8]
    assert figures["fetch, TCP / slow"].value > 1 and figures["fetch, TCP / slow"].passed
    assert not any("broken" in what or "absent" in what for what in figures)
    said = capsys.readouterr().err
    assert "broken is not measured: no master" in said
    assert "absent is not measured, no such module: pip install absent" in said
    with pytest.raises(SystemExit, match="no such module"):
        remote.measure(parser.parse_args(["--vs", "absent"]), peers)


def test_the_script_with_peers_has_the_same_flags() -> None:
    script = Path(__file__).resolve().parents[2] / "bench" / "remote" / "peers.py"
    said = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--parts" in said.stdout and "mooncake or none" in said.stdout
