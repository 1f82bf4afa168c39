"""The benchmarks of single figures, small: that they measure what they say, and publish it."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from kvlane import _bench, _core
from kvlane.bench import all as all_figures
from kvlane.bench import daemon, overhead, trace
from kvlane.bench.__main__ import main
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.roundtrip import echo_process, ping_pong


def bench(out: Path, name: str, *flags: str) -> dict[str, Any]:
    assert main([name, *flags, "--out", str(out)]) == 0
    result = json.loads((out / f"{name}.json").read_text())
    # A picture is of goals: where none is set there is none, and not an empty one.
    assert (out / f"{name}.png").exists() == any(figure["goal"] for figure in result["figures"])
    return result


def value(result: dict[str, Any], what: str) -> float:
    (found,) = [figure["value"] for figure in result["figures"] if figure["what"] == what]
    return found


def test_lookup_compares_with_two_ping_pongs_and_with_sessions(tmp_path: Path) -> None:
    flags = ["--rounds", "50", "--sessions", "4", "--rate", "80", "--processes", "2", "--seconds", "1"]
    result = bench(tmp_path, "lookup", *flags)
    placements = {"one core"} if len(os.sched_getaffinity(0)) == 1 else {"one core", "two cores"}
    for placement in placements:
        p50 = {name: each["p50"] for name, each in result[placement]["microseconds"].items()}
        assert all(0 < each < 1e6 for each in p50.values())
        ratio = value(result, f"{placement}: lookup / ping-pong from Python, p50")
        assert math.isclose(ratio, p50["lookup"] / p50["python"])
    assert result["sessions"]["lookups"] == {"one": 40, "many": 80, "many_while_saving": 80}
    assert result["sessions"]["blocks_saved_meanwhile"] > 0


def test_lookup_beside_saves_and_computing_threads_has_a_control(tmp_path: Path) -> None:
    flags = ["--rounds", "0", "--busy", "--busy-rounds", "4", "--busy-phases", "2", "--blocks", "50"]
    result = bench(tmp_path, "lookup", *flags)
    busy = result["busy"]
    assert busy["threads"] == 4 and busy["blocks_saved_meanwhile"] > 0
    for phase in ("quiet", "busy"):
        for kind in ("lookup", "python", "rust"):
            p99s = sorted(each["p99"] for each in busy["phases"][phase][kind])
            assert len(p99s) == 2 and p99s[0] > 0
            assert math.isclose(busy["microseconds"][phase][kind]["p99"], sum(p99s) / 2)
    p99 = {phase: busy["microseconds"][phase]["lookup"]["p99"] for phase in ("quiet", "busy")}
    ratio = value(result, "busy engine: lookup of 50 hashes, p99 / quiet")
    assert math.isclose(ratio, p99["busy"] / p99["quiet"])
    # The interpreter is handed on every 5 ms, and a bare ping-pong waits for it.
    assert busy["microseconds"]["busy"]["python"]["p50"] > 2000


@pytest.mark.parametrize("how", ["recorded", "traced"])
def test_a_daemon_that_watches_is_compared_with_one_that_does_not(tmp_path: Path, how: str) -> None:
    result = bench(tmp_path, "lookup", "--rounds", "30", f"--{how}", "--blocks", "50")
    pairs = [each["one core"] for each in result[how]["pairs_microseconds"]]
    ratios = sorted(us[how]["p50"] / us["alone"]["p50"] for us in pairs)
    ratio = value(result, f"one core: lookup of 50 hashes {how} / not {how}, p50")
    assert len(ratios) == 6 and math.isclose(ratio, (ratios[2] + ratios[3]) / 2)


def test_journal_compares_a_daemon_with_a_reader_to_one_without(tmp_path: Path) -> None:
    result = bench(tmp_path, "journal", "--blocks", "40", "--block-kib", "4", "--rounds", "6")
    assert len(result["pairs_seconds"]) == 6
    for kind, what in (("lookup", "lookup"), ("daemon", "daemon CPU time")):
        ratios = sorted(mine[kind] / plain[kind] for mine, plain in result["pairs_seconds"])
        above = value(result, f"{what}, above that without a reader")
        assert math.isclose(above, ((ratios[2] + ratios[3]) / 2 - 1) * 100, abs_tol=1e-6)


def test_copy_compares_each_way_with_its_loop(tmp_path: Path) -> None:
    result = bench(tmp_path, "copy", "--mib", "16", "--rounds", "2")
    assert set(result["shapes"]) == {"2 MiB", "64 KiB pieces"}
    for shape in result["shapes"].values():
        assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in shape["rounds"].values())
        assert set(shape["ratios"]) == {"save by process_vm", "save by mapping", "load"}
    assert result["pages"]["engine"] in ("4 kB", "2 MB", "16 kB", "64 kB")


@pytest.mark.fake_gpus
def test_gpu_copy_compares_ways_and_links_with_one_contiguous_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    result = bench(tmp_path, "gpu-copy", "--mib", "2", "--rounds", "1")
    assert {each["path"] for each in result["gb_per_s"]} == {"h2d", "d2h", "peer"}
    ways = [([], True), ([1], False), ([1], True)]
    assert [
        (each["piece_bytes"] >> 10, each["bytes"] >> 20, each["rails"], each["staged"])
        for each in result["rings_gb_per_s"]
    ] == [(piece, mib, *way) for piece, mib in ((16, 2), (64, 2), (64, 8)) for way in ways]
    assert value(result, "h2d: 8 MiB in pieces of 64 KiB, 2 links / contiguous, 1 link") > 0
    assert value(result, "h2d: 2 MiB in pieces of 16 KiB, 1 link, staged / contiguous, 1 link") > 0
    assert [(each["piece_bytes"] >> 10, each["staged"]) for each in result["together_gb_per_s"]] == [
        (0, False),
        *((piece, staged) for piece in (16, 64) for staged in (False, True)),
    ]
    assert all(each["gpus"] == [0, 1] for each in result["together_gb_per_s"])
    assert value(result, "h2d: pieces of 64 KiB, staged / contiguous, 2 GPUs at once") > 0


@pytest.mark.fake_gpus
def test_gpu_copy_shows_what_the_daemon_measures_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLANE_GPU_DRIVER", "fake")
    result = bench(tmp_path, "gpu-copy", "--calibrate")
    ways = {(each["path"], each["method"]) for each in result["gb_per_s"]}
    assert ways == {(path, way) for path in ("h2d", "d2h") for way in ("kernel", "batch")}
    for each in result["thresholds"]:
        assert 16 << 10 <= each["batch_bytes"] <= 2 << 20
        assert value(result, f"{each['path']}: copy engines from, batch calls") == each["batch_bytes"] >> 10


def test_idle_and_memory_use_look_at_the_daemon(tmp_path: Path) -> None:
    idle = bench(tmp_path, "idle", "--seconds", "0.5", "--engines", "2", "--pool-mib", "32")
    assert idle["blocks"] == (32 << 20) // (256 << 10)
    assert 0 <= value(idle, "idle daemon, of a core") < 100
    memory = bench(tmp_path, "memory-use", "--blocks", "5000")
    assert memory["after"]["RssShmem"] >= 5000 * 4096
    assert value(memory, "the daemon's memory beside its pool") > 1


def test_identity_is_read_once_and_remembered_then(tmp_path: Path) -> None:
    flags = ["--gigabytes", "0.1", "--rounds", "3", "--folder", str(tmp_path)]
    result = bench(tmp_path / "out", "identity", *flags)
    for what in ("read cold", "remembered"):
        assert 0 < value(result, f"identity of the weights, {what}") < 1e5
    assert [each.name for each in tmp_path.iterdir()] == ["out"], "the weights are gone again"


def test_share_finds_more_in_one_pool_than_in_isolated_ones(tmp_path: Path) -> None:
    result = bench(
        tmp_path, "share", "--requests", "60", "--system-prompts", "4", "--engines", "3", "--zipf", "0.5"
    )
    shared, isolated = (
        value(result, f"Zipf 0.5: hit rate, {pools}") for pools in ("one shared pool", "3 isolated pools")
    )
    # With room for all prompts, all but the first request of each prompt finds it.
    assert 70 < shared < 100
    assert isolated < shared


def test_hooks_says_that_it_needs_vllm(tmp_path: Path) -> None:
    pytest.importorskip("kvlane.connector")
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(SystemExit, match="inside vLLM"):
            main(["hooks", "--out", str(tmp_path)])
    else:
        result = bench(tmp_path, "hooks", "--calls", "1000", "--rounds", "3")
        assert 0 < value(result, "save_kv_layer, nothing to do") < 1e6


def test_a_figure_knows_whether_it_keeps_its_bound() -> None:
    assert Figure("cpu", 0.9, "%", at_most=1.0).passed
    assert not Figure("cpu", 1.1, "%", at_most=1.0).passed
    assert Figure("ratio", 0.9, at_least=0.9).passed
    assert not Figure("ratio", math.nan, at_least=0.9).passed
    assert not Figure("cpu", math.nan, "%", at_most=1.0).passed
    assert Figure("ratio", 0.5).passed and Figure("ratio", 0.5).goal == ""
    assert Figure("ratio", 1.234, at_most=2.0).facts()["text"] == "1.23x"
    assert Figure("ratio", 1.234, at_most=2.0).goal == "at most 2x"
    assert Figure("speed", 1234.5, "MB").text == "1234 MB"


def test_figures_of_what_did_not_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "figures.json"
    machine = {"cpu": "c", "cores": 2, "memory": "m", "kernel": "k", "python": "3"}
    first = {"idle": [{"benchmark": "idle", "value": "1"}], "copy": [{"benchmark": "copy", "value": "2"}]}
    all_figures.write(path, first, machine)
    all_figures.write(path, {"idle": [{"benchmark": "idle", "value": "3"}]}, machine)
    written = json.loads(path.read_text())
    assert [figure["value"] for figure in written["figures"]] == ["2", "3"]
    assert "2 cores" in written["machine"]


def test_the_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    source = random.Random(1)
    values = [1 + source.gauss(0, 0.01) for _ in range(400)]
    few, many = overhead.interval(values[:12], random.Random(2)), overhead.interval(values, random.Random(2))
    assert few[0] < few[1] and many[0] < 1.001 and many[1] > 0.999
    assert many[1] - many[0] < few[1] - few[0]


def test_a_trace_is_as_asked_and_the_same_again() -> None:
    shape = trace.Shape(8, 4000, 1.0, (4, 6), (1, 2))
    made = trace.make(shape, 3)
    assert made == trace.make(shape, 3) and made != trace.make(shape, 4)
    counts = [sum(request.system_prompt == prompt for request in made.requests) for prompt in range(8)]
    assert 1.6 < counts[0] / counts[1] < 2.5 and 3 < counts[0] / counts[3] < 5.5
    assert {request.user_blocks for request in made.requests} == {1, 2}
    lengths = {request.system_prompt: request.system_blocks for request in made.requests}
    assert made.system_blocks == sum(lengths.values())


@pytest.mark.parametrize("in_rust", [False, True])
def test_ping_pongs_carry_all_bytes_both_ways(in_rust: bool) -> None:
    with echo_process(20_000, os.sched_getaffinity(0), in_rust=in_rust) as peer:
        assert 0 < ping_pong(peer, 20_000) < 60
        assert 0 < _bench.ping_pong(peer.fileno(), 20_000) < 60


def test_an_engines_process_has_no_bare_loops() -> None:
    """The module that every engine loads had functions that copy between any two addresses, for benchmarks alone."""
    everything = {*dir(_core), *dir(_core.GpuMemory)}
    assert {name for name in everything if "bench" in name.lower()} == set()
    # The control: they are elsewhere.
    assert {"copy", "read_process", "ping_pong", "SsdBench"} <= set(dir(_bench))


def test_the_bare_loops_move_the_bytes_they_are_told_to() -> None:
    source, target = Memory(1 << 20), Memory(1 << 20, shared=True)
    source.fill(7)
    pieces = [(source.address + 4096 * page, target.address + 4096 * (255 - page)) for page in range(256)]
    assert _bench.copy(pieces, 4096) > 0
    rows, copied = source.words.reshape(256, 512), target.words.reshape(256, 512)
    assert (copied == rows[::-1]).all()
    target.words[:] = 0
    assert _bench.read_process(os.getpid(), pieces, 4096, 100) > 0
    assert (copied == rows[::-1]).all()
    with pytest.raises(OSError):
        _bench.read_process(os.getpid(), [(8, target.address)], 4096, 1)


def test_engines_of_a_benchmark_load_what_they_saved() -> None:
    memory = Memory(32 * 8192)
    memory.fill(1)
    kept = memory.words.copy()
    hashes = block_hashes("prompt", 32)
    with daemon.running(8 << 20) as serve:
        engine = Engine(serve.address, "e", block_bytes=8192, memory=memory, pieces=2)
        assert engine.save(hashes[:20], range(20)).blocks == 20
        assert engine.save(hashes[20:], range(20, 32), parent=hashes[19]).blocks == 12
        serve.settle()
        memory.words[:] = 0
        hit = engine.lookup(hashes)
        assert hit.tokens == 32 * TOKENS_PER_BLOCK
        assert engine.load(hit, range(32)).bytes == memory.size
        assert (memory.words == kept).all()
        assert daemon.cpu_seconds(serve.pid) > 0
        engine.close()


def test_a_daemon_that_cannot_start_is_named() -> None:
    with pytest.raises(SystemExit, match="--nonsense"), daemon.running(8 << 20, "--nonsense"):
        pass


def test_all_publishes_figures_with_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        all_figures.BENCHMARKS, "idle", ["--seconds", "0.2", "--engines", "1", "--pool-mib", "16"]
    )
    path = tmp_path / "figures.json"
    arguments = argparse.Namespace(figures=path, only=["idle"], out=tmp_path)
    assert all_figures.run(arguments) == 0
    (figure,) = json.loads(path.read_text())["figures"]
    assert figure["goal"] == "at most 1 %" and figure["value"].endswith(" %")
    assert figure["command"].startswith("kvlane bench idle")
