"""The picture of `kvlane replay`, and the command as a whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvlane.bench import drawing, learned_picture, replay_picture, route_replay_picture


def _result(policy: str, share: float, hits: float) -> dict[str, Any]:
    return {"policy": policy, "capacity_share": share, "prefix_hit_percent": hits}


def test_lines_are_in_order_of_capacity() -> None:
    report = {"results": [_result("lru", 0.3, 40.0), _result("lru", 0.1, 30.0), _result("arc", 0.1, 31.0)]}
    assert replay_picture.lines(report) == {"lru": [(10.0, 30.0), (30.0, 40.0)], "arc": [(10.0, 31.0)]}


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [_result(policy, share, 50 * share) for policy in ("lru", "auto") for share in (0.01, 0.5)]
    report = {"trace": "t.jsonl", "with_scans": True, "ceiling_percent": 36.6, "results": results}
    path = tmp_path / "new" / "t.png"
    drawing.write(replay_picture.picture(report), replay_picture.facts(report), path)
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


def test_what_a_policy_has_learnt_is_told_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # Prompts that come back, beside as many that do not.
    prompts = [number for turn in range(700) for number in (turn % 20, 20 + turn)]
    lines = [
        {"timestamp": 100 * at, "hash_ids": list(range(10 * prompt, 10 * prompt + 10))}
        for at, prompt in enumerate(prompts)
    ]
    trace = tmp_path / "both.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--policy", "lru,learned", "--capacity", "300", "--json", "--plot-learned", "learned.png")
    done = _kvlane(tmp_path, str(trace), *flags)
    assert done.returncode == 0, done.stderr
    lru, learned = json.loads(done.stdout)["results"]
    assert "learnt" not in lru and learned["prefix_hit_percent"] > lru["prefix_hit_percent"]
    at_400 = {
        kind["blocks"]: max(density for age, density in kind["density_by_age"] if age <= 400)
        for kind in learned["learnt"]
    }
    once = at_400["asked for once, of a prompt of 4 to 15 new blocks"]
    # Each comes back after 400 references.
    again = at_400["asked for 33 or more times, 256 to 1,023 references apart"]
    assert again > 10 * once
    assert (tmp_path / "learned.png").read_bytes().startswith(b"\x89PNG")
    nothing = _kvlane(tmp_path, str(_trace(tmp_path)), "--policy", "learned", "--plot-learned", "no.png")
    assert nothing.returncode == 1 and "more than 4,096 references" in nothing.stderr
    assert "clairvoyant" in nothing.stdout, "the table comes all the same"
    other = _kvlane(tmp_path, str(trace), "--policy", "lru", "--plot-learned", "no.png")
    assert other.returncode == 1 and "needs --policy learned" in other.stderr
    named = _kvlane(tmp_path, str(trace), "--plot", "all.pdf")
    assert named.returncode == 1 and "name it all.png" in named.stderr


def test_the_kinds_that_were_seen_most_are_drawn() -> None:
    kinds = [
        {"blocks": f"kind {number}", "seen": number, "density_by_age": [[0, 0.5], [64, 0.25], [1 << 21, 0.1]]}
        for number in range(12)
    ]
    small = {"policy": "learned", "capacity_blocks": 10, "learnt": kinds[:1]}
    large = {"policy": "learned", "capacity_blocks": 1000, "learnt": kinds}
    report = {
        "trace": "folder/t.jsonl",
        "results": [small, {"policy": "lru", "capacity_blocks": 9999}, large],
    }
    facts = learned_picture.facts(report)
    assert list(facts["lines"]) == [f"kind {number}" for number in range(11, 3, -1)]
    assert facts["lines"]["kind 11"] == [[64, 250_000.0]]
    assert "1,000 blocks" in facts["title"] and "folder" not in facts["title"]


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    trace = _trace(tmp_path)
    with trace.open("a") as file:
        file.write('{"timestamp": 5}\n')
    done = _kvlane(tmp_path, str(trace))
    assert (
        done.returncode == 1 and "turns.jsonl: line 201, column 16: missing field `hash_ids`" in done.stderr
    )
    assert _kvlane(tmp_path, str(trace), "--policy", "fifo").returncode == 2


def test_a_trace_goes_through_a_simulated_fleet(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    route = tmp_path / "fleet.toml"
    route.write_text('policies = ["round-robin", "least-work"]\nloads = [0.2, 0.9]\n[[node]]\ncount = 3\n')
    trace = str(_trace(tmp_path))
    done = _kvlane(tmp_path, trace, "--route", str(route), "--json", "--plot", "fleet.png")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(each["load"], each["policy"]) for each in report["results"]] == [
        (load, policy) for load in (0.2, 0.9) for policy in ("round-robin", "least-work")
    ]
    by_turns, by_work = report["results"][:2]
    assert by_work["found_percent"] > by_turns["found_percent"] > 50
    assert all(each["lost"] == 0 and each["ttft_p50_ms"] > 0 for each in report["results"])
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    assert route_replay_picture.lines(report, "lost") == {
        "round-robin": [(20.0, 0), (90.0, 0)],
        "least-work": [(20.0, 0), (90.0, 0)],
    }
    table = _kvlane(tmp_path, trace, "--route", str(route))
    assert "3 worker h100-llama-8b can serve" in table.stdout and table.stdout.splitlines()[-1] == "turns.png"
    # The same arguments give the same answers.
    assert json.loads(_kvlane(tmp_path, trace, "--route", str(route), "--json").stdout) == report


def test_mistakes_with_a_fleet_are_one_sentence(tmp_path: Path) -> None:
    trace, route = _trace(tmp_path), tmp_path / "fleet.toml"
    route.write_text("loads = [0.5, -1]\n")
    done = _kvlane(tmp_path, str(trace), "--route", str(route))
    assert done.returncode == 1 and "loads: -1 is no share of what the fleet can serve" in done.stderr
    with trace.open("a") as file:
        file.write('{"timestamp": 5, "hash_ids": [1]}\n')
    done = _kvlane(tmp_path, str(trace), "--route", str(route))
    assert done.returncode == 1 and "line 201: it has no input_length and output_length" in done.stderr
    assert _kvlane(tmp_path, str(trace), "--route", str(route), "--policy", "lru").returncode == 2


def test_the_file_of_the_docs_is_taken(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/replay.md").read_text()
    _, begin, rest = page.partition("policies = [")
    (tmp_path / "fleet.toml").write_text(begin + rest.partition("```")[0])
    shutil.copy(root / "bench/gpu/results/2026-11-26-h100-steps.json", tmp_path / "steps.json")
    done = _kvlane(tmp_path, str(_trace(tmp_path)), "--route", "fleet.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fleet"] == "3 prefill h100, 5 decode h100"
