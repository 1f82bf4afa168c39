"""The demo of two hosts: what it prints, writes and draws. `make demo-cluster` runs it with real engines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlane.demo.scenarios import Scenario

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import cluster

from kvlane.bench import pictures

ARGUMENTS = argparse.Namespace(one_host=False, prompt_tokens=2000)


def timed(name: str, ms: float, **more: Any) -> Scenario:
    scenario = Scenario(name, figures=more)
    scenario.timed([ms, ms + 2])
    return scenario


def scenarios() -> list[Scenario]:
    return [
        timed("cold: computed at A", 100),
        timed("remote: A's prompts are hits at B", 30, blocks_from_a=62),
        timed("local: the same again at B", 10),
        Scenario("control: at the owner", problems=["B did not notice that the block was changed"]),
        Scenario("control: at the reader"),
        Scenario("daemon A killed", figures={"ttft_ms": 55.0}),
    ]


def test_it_prints_where_blocks_came_from_and_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cluster.result(scenarios(), 6, ARGUMENTS, 12.0)
    assert not found["passed"] and not found["controls_failed_as_they_must"]
    cluster.publish(found, tmp_path)
    shown = capsys.readouterr().out
    assert "62" in shown and "FAILED" in shown and "B did not notice" in shown
    assert (tmp_path / "demo-cluster.png").is_file()
    assert json.loads((tmp_path / "demo-cluster.json").read_text())["ttft_ms"]["remote"]["mean"] == 31


def test_the_picture_has_the_three_ways_to_the_first_token() -> None:
    found = cluster.result(scenarios(), 6, ARGUMENTS, 12.0)
    (panel,) = pictures.hosts(found).panels
    assert [bar.text for bar in panel.bars] == ["101 ms", "31 ms", "11 ms"]
    nothing = cluster.result([], 6, ARGUMENTS, 12.0)
    assert not nothing["passed"] and pictures.hosts(nothing).panels == ()


def test_daemons_get_a_token_and_certificates_of_their_own(tmp_path: Path) -> None:
    (a, b), (at_a, at_b) = cluster.start(("127.0.0.1", "127.0.0.2"), ["nsenter"], tmp_path, tmp_path, "1gb")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "certificate.pem").is_file()
    assert a.address != b.address and a.log != b.log
    assert at_a.address.startswith("127.0.0.1:") and at_b.address.startswith("127.0.0.2:")
