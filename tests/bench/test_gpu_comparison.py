"""bench/gpu: what becomes of its measurements. The engines themselves need vLLM, and are measured by people."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "gpu"


@pytest.fixture
def compare(gpu_script: Callable[[str], Any]) -> Any:
    return gpu_script("compare")


def timed(p50: float, p99: float | None = None) -> dict[str, float]:
    return {"p50": p50, "mean": p50, "p99": p99 or p50, "count": 8}


def run(system: str, warm: list[float] | None = None, **found: Any) -> dict[str, Any]:
    measured: dict[str, Any] = {"ready_s": 7.0, "cold": timed(280), "in_gpu": timed(16)} | found
    if warm is not None:
        measured["warm"] = [timed(each) for each in warm]
    return {"system": system, "mode": "eager", "repeat": 0, "found": measured}


def pair(**found: Any) -> dict[str, Any]:
    both = {
        "ready": {"kvlane": [7.0, 7.4], "none": [6.8, 6.8]},
        "cold": {"kvlane": timed(281), "none": timed(280)},
        "in_gpu": {"kvlane": timed(16.5), "none": timed(16)},
        "decode": {"quiet": timed(8, 10), "beside": timed(8, 10.2)},
        "client_gb_per_s": [10.0],
    }
    return {"system": "pair", "mode": "eager", "repeat": 0, "found": both | found}


def published(compare: Any, runs: list[dict[str, Any]], folder: Path) -> tuple[int, dict[str, Any]]:
    code = compare.publish({"runs": runs, "host": {"gpus": "a GPU"}, "date": "2026-11-21"}, folder)
    return code, json.loads((folder / "gpu.json").read_text())


def test_ratios_are_to_the_better_peer_of_the_same_series(compare: Any, tmp_path: Path) -> None:
    runs = [
        run("kvlane", [33, 31, 32], open_loop=timed(40, 60)),
        run("pegaflow", [45, 46, 44], open_loop=timed(50, 80)),
        run("offload", [47, 48, 49]),
        pair(),
    ]
    code, result = published(compare, runs, tmp_path)
    assert code == 0
    figures = {figure["what"]: figure for figure in result["figures"]}
    warm = figures["eager: warm TTFT / better peer, 32.0 / 45.0 ms"]
    assert warm["value"] == pytest.approx(32 / 45)
    assert warm["passed"]
    assert figures["eager: hit in GPU memory, above no connector (16.5 and 16.0 ms)"]["value"] == 0.5
    assert figures["eager: open loop, warm TTFT p99 / PegaFlow, 60.0 / 80.0 ms"]["value"] == 0.75
    beside = figures["eager: ITL p99 beside another client of the daemon / quiet, 10.2 / 10.0 ms"]
    assert beside["value"] == pytest.approx(1.02)
    assert figures["eager: engine start above no connector (7.2 and 6.8 s)"]["value"] == pytest.approx(0.4)
    assert (tmp_path / "gpu-eager.png").stat().st_size > 1000
    assert "0.711x" in (tmp_path / "gpu.md").read_text()


def test_what_was_not_measured_is_no_figure(compare: Any, tmp_path: Path) -> None:
    code, result = published(compare, [run("kvlane", [33], decode_warm=[{}])], tmp_path)
    assert (code, result["figures"]) == (0, [])


@pytest.mark.parametrize(
    "found",
    [
        {"same_tokens": False},
        {"control_distinct": False},
        {"control_block_matters": False},
        # LMCache's connector inside a CPU engine loads nothing, and answers alike: all is computed.
        {"control_loaded": False},
        {"control_decodes_last": False},
        {"loaded_blocks_that_differ": 9},
        {"loaded_blocks_that_differ": 33, "kv_cache_groups": 4},
    ],
)
def test_a_series_with_a_control_that_fails_counts_for_nothing(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], found: dict[str, Any]
) -> None:
    code, _ = published(compare, [run("none"), run("kvlane", [33], **found)], tmp_path)
    assert code == 1
    assert "WRONG: kvlane" in capsys.readouterr().err


def test_each_group_computes_the_last_block_of_a_prompt_again(compare: Any, tmp_path: Path) -> None:
    runs = [run("kvlane", [33], loaded_blocks_that_differ=32, kv_cache_groups=4)]
    assert published(compare, runs, tmp_path)[0] == 0


def test_a_loaded_block_has_the_bytes_of_some_group(compare: Any) -> None:
    """The first group keeps whole blocks. A state of the second one is shorter: what is behind it may differ."""
    block, state = (10, 11), (20, 21)
    computed = [block, state]
    assert compare.model.blocks_that_differ([state, block], computed) == 0
    assert compare.model.blocks_that_differ([block, (99, state[1])], computed) == 0
    assert compare.model.blocks_that_differ([block, (state[0] + 1, state[1] + 1)], computed) == 1
    assert compare.model.blocks_that_differ([(state[1], block[0])], computed) == 1
    assert compare.model.blocks_that_differ([block], []) == 1


def test_the_servers_flags_and_connectors_are_there(compare: Any, tmp_path: Path) -> None:
    kvlane = compare.SYSTEMS["kvlane"]
    command = kvlane.server(1 << 30, tmp_path)
    known = subprocess.run(["kvlane", "serve", "--help"], capture_output=True, text=True, check=True).stdout
    assert [flag for flag in command if flag.startswith("--") and flag not in known] == []
    for system in compare.SYSTEMS.values():
        config = system.connector(1 << 30, tmp_path)
        assert not config or json.loads(config)["kv_role"] == "kv_both"


@pytest.mark.parametrize("script", ["compare.py", "turns.py"])
def test_a_dry_run_says_what_would_be_started(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / script), "--dry-run", "--out", str(tmp_path / "out")]
    command += ["--systems", "kvlane", "lmcache", "lmcache-mp", "--cache-bytes", str(3 << 30)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not (tmp_path / "out").exists()
    assert "server: kvlane serve --pool-size 3221225472" in told
    assert "lmcache.v1.multiprocess.http_server" in told and "--l1-size-gb 3.0" in told
    flags = [json.loads(shlex.split(line)[-1]) for line in told.splitlines() if "vllm serve:" in line]
    assert [flag["kv_connector"] for flag in flags] == [
        "KVLaneConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
    ]
    assert flags[1]["kv_connector_extra_config"]["lmcache.max_local_cpu_size"] == 3.0


def test_lmcache_is_one_of_the_peers(compare: Any, tmp_path: Path) -> None:
    runs = [run("kvlane", [32]), run("pegaflow", [45]), run("lmcache", [48]), run("lmcache-mp", [40])]
    _, result = published(compare, runs, tmp_path)
    assert [figure["what"] for figure in result["figures"]] == [
        "eager: warm TTFT / better peer, 32.0 / 40.0 ms"
    ]


def test_without_a_connector_an_engine_runs_beside_kvlane_where_both_are_asked_for(compare: Any) -> None:
    assert compare._order(["none", "kvlane", "offload"]) == ["pair", "kvlane", "offload"]
    assert compare._order(["none", "offload"]) == ["none", "offload"]


def test_a_series_goes_on_when_one_engine_fails(compare: Any, tmp_path: Path) -> None:
    """Here there is no vLLM, so each engine fails at once."""
    command = [sys.executable, str(FOLDER / "compare.py"), "--systems", "none", "offload", "--modes", "eager"]
    ended = subprocess.run(
        [*command, "--shape", "tiny", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.count("FAILED: the engine ended with 1; see") == 2


def test_what_a_connector_adds_is_told_beside_how_much_engines_of_one_kind_differ(
    gpu_script: Callable[[str], Any],
) -> None:
    hits = gpu_script("hits")
    rounds = [
        {"none 1": [10.0, 12.0], "kvlane 1": [12.0, 12.0], "none 2": [15.0, 15.0], "kvlane 2": [13.0, 13.0]},
        {"none 1": [11.0, 11.0], "kvlane 1": [12.0, 99.0], "none 2": [15.0, 15.0], "kvlane 2": [13.0, 13.0]},
    ]
    found = hits.differences(rounds)
    assert found["by_engine"]["kvlane 1"]["p50"] == 12.0
    assert found["kvlane_adds_ms"] == pytest.approx((12 + 13) / 2 - (11 + 15) / 2)
    assert found["same_kind_differs_by_ms"] == {"none": 4.0, "kvlane": 1.0}
    assert found["kvlane_adds_by_round_ms"] == [12.5 - 13.5, 13.0 - 13.0]


class Decoding:
    """Answers at once, with a token a millisecond."""

    async def answer(self, _: list[int], tokens: int) -> tuple[list[float], tuple[int, ...]]:
        return [float(token) for token in range(tokens)], (0,) * tokens

    async def ttft(self, _: list[int]) -> float:
        return 30.0


def test_decodes_have_to_last_while_prompts_come_beside_them(gpu_script: Callable[[str], Any]) -> None:
    """Ten prompts took longer than decodes of 500 tokens, so the last ones came to an engine that had nothing else."""
    measure = gpu_script("measure")

    found: dict[str, Any] = {}
    for tokens, lasted in ((60_000, True), (500, False), (60_000, False)):
        settings = SimpleNamespace(decodes=2, decode_tokens=tokens, rate=50.0)
        asyncio.run(measure.gaps(Decoding(), settings, [[1], [2]], lambda count: [0] * count, found))
        assert found == {"control_decodes_last": lasted}, "a round that failed counts for all"
