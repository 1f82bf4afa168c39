"""The demo's judgement: it must fail when something is wrong. Its engines are played by a table of answers."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from kvlane.demo import device, scenarios
from kvlane.demo.__main__ import _publish, _result
from kvlane.demo.processes import Daemon, ProcessFailed
from kvlane.demo.scenarios import Demo, Reference, Scenario

ANSWER = {"tokens": [5, 6, 7], "logprobs": [-1.0, -2.0, -0.5], "cached_tokens": 96, "ttft_ms": 1.0}


class FakeTool:
    """A pool in a bytearray."""

    def __init__(self, pool: bytes) -> None:
        self.pool = bytearray(pool)

    def status(self) -> dict[str, object]:
        return {"pool_bytes": len(self.pool)}

    def read_pool(self, offset: int, length: int) -> bytes:
        assert offset >= 0 and offset + length <= len(self.pool)
        return bytes(self.pool[offset : offset + length])

    def write_pool(self, offset: int, data: bytes) -> None:
        self.pool[offset : offset + len(data)] = data


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return make_demo(tmp_path, "cpu")


def make_demo(folder: Path, kind: str) -> Demo:
    daemon = Daemon(folder, "1mb", folder)
    return Demo(folder, daemon, folder, device.SETUPS[kind], prompt_tokens=128, prompts=2, seed=0)


def compared(demo: Demo, answer: dict[str, Any]) -> Scenario:
    scenario = Scenario("x")
    demo._compare(scenario, "A", answer, Reference([], ANSWER, [], ANSWER), scenarios.SAME_BATCH)
    return scenario


def test_equal_answers_pass(demo: Demo) -> None:
    assert compared(demo, dict(ANSWER)).passed
    assert demo.tokens_equal


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": [5, 6, 8]}, "tokens differ"),
        ({"logprobs": [-1.0, -2.0, -0.4]}, "a logprob is 0.1 away"),
        ({"cached_tokens": 64}, "64 tokens hit instead of 96"),
    ],
)
def test_a_deviating_answer_fails(demo: Demo, change: dict[str, Any], sentence: str) -> None:
    scenario = compared(demo, {**ANSWER, **change})
    assert not scenario.passed
    assert sentence in scenario.problems[0]
    assert demo.tokens_equal == ("tokens" not in change)


class FakeEngine:
    """Holds these blocks, by their digests."""

    name = "A"

    def __init__(self, *digests: str) -> None:
        self._digests = digests

    def ask(self, op: str, **_: Any) -> dict[str, Any]:
        assert op == "blocks"
        return {"blocks": [{"digest": digest} for digest in self._digests]}


def test_the_block_of_the_last_token_is_computed_again_and_not_compared(demo: Demo) -> None:
    """The prompt fills four blocks; three can hit."""
    assert (demo.hit_blocks, demo.hit_tokens) == (3, 96)
    reference = Reference([], ANSWER, ["a", "b", "c", "d"], ANSWER)
    for digests, passes in (("abcx", True), ("abc", True), ("abxd", False), ("ab", False)):
        scenario = Scenario("x")
        demo._compare_bytes(scenario, FakeEngine(*digests), reference)  # type: ignore[arg-type]
        assert scenario.passed == passes, digests


def test_in_bfloat16_answers_of_another_batch_are_looked_at_and_not_judged(tmp_path: Path) -> None:
    assert make_demo(tmp_path, "cpu")._other_batch == scenarios.OTHER_BATCH
    coarse = make_demo(tmp_path, "cuda")
    assert coarse._other_batch is None
    scenario = Scenario("x")
    reference = Reference([], ANSWER, [], ANSWER)
    for tokens in ([5, 6, 7], [5, 8, 7]):
        answer = {**ANSWER, "tokens": tokens}
        coarse._compare(scenario, "A", answer, reference, coarse._other_batch)
    assert scenario.passed and coarse.tokens_equal
    assert scenario.figures == {"agreeing_tokens": 1}
    # Where they come from counts all the same.
    coarse._compare(scenario, "A", {**ANSWER, "cached_tokens": 0}, reference, coarse._other_batch)
    assert not scenario.passed


def findings(driver: str, **gpus: str) -> list[dict[str, str]]:
    """As `kvlane doctor --json` has them."""
    found = [{"subject": "gpu driver", "verdict": driver, "found": "cuda, 2 GPUs"}]
    name = "NVIDIA H200, 150.1 GB, compute capability 9.0, 0000:03:00.0"
    found += [
        {"subject": f"gpu {gpu[1:]}", "verdict": verdict, "found": name} for gpu, verdict in gpus.items()
    ]
    return [*found, {"subject": "gpu memory", "verdict": "ok", "found": "?"}]


def test_gpus_are_those_that_the_doctor_finds_usable() -> None:
    assert device.usable_gpus(findings("ok", _0="ok", _1="note")) == ["NVIDIA H200"] * 2
    assert device.usable_gpus(findings("ok", _0="problem", _1="ok")) == ["NVIDIA H200"]
    assert device.usable_gpus(findings("ok")) == []
    # A driver that is played, or does not answer.
    assert device.usable_gpus(findings("note", _0="ok")) == device.usable_gpus(findings("problem")) == []
    assert device.usable_gpus([]) == []


@pytest.mark.parametrize(
    ("wanted", "gpus", "vllm", "expected"),
    [
        ("auto", [], "cpu", "cpu"),
        ("auto", ["H200"], "cpu", "cpu"),
        ("auto", ["H200"], "cuda", "cuda"),
        ("cpu", ["H200"], "cpu", "cpu"),
        ("cuda", ["H200"], "cuda", "cuda"),
        # Without the package's metadata what was asked for counts.
        ("auto", [], None, "cpu"),
        ("cuda", ["H200"], None, "cuda"),
    ],
)
def test_the_device_is_the_one_that_the_vllm_is_for(
    wanted: str, gpus: list[str], vllm: str | None, expected: str
) -> None:
    assert device.choose(wanted, gpus, vllm) == device.SETUPS[expected]


@pytest.mark.parametrize(
    ("wanted", "gpus", "vllm", "words"),
    [
        ("cuda", [], "cuda", "no GPU that kvlane can use"),
        ("auto", [], "cuda", "no GPU that kvlane can use"),
        ("cuda", ["H200"], "cpu", "computes on cpu, not on cuda"),
        ("cpu", ["H200"], "cuda", "computes on cuda, not on cpu"),
    ],
)
def test_a_device_that_cannot_be_had_is_refused_with_the_reason(
    wanted: str, gpus: list[str], vllm: str, words: str
) -> None:
    with pytest.raises(device.NoSuchDevice, match=words):
        device.choose(wanted, gpus, vllm)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.32.0+cpu", "cpu"), ("0.26.0", "cuda"), ("0.26.0+cu130", "cuda"), ("0.32.0+rocm700", None)],
)
def test_what_a_vllm_is_for(version: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "version", lambda name: version)
    assert device.vllm_here() == expected


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/demo.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("demo")


def test_make_demo_takes_the_gpu_and_the_python_that_is_there(script: Any) -> None:
    def environment(wanted: str, gpus: list[str], vllm: str | None, *missing: str) -> str | None:
        name, why = script.environment_for(wanted, gpus, vllm, list(missing))
        assert why.startswith("engines on ")
        return name

    assert environment("auto", [], None, "vllm") == "vllm-0.32"
    assert environment("auto", [], "cuda") == "vllm-0.32"
    assert environment("cpu", [], "cuda") == "vllm-0.32"
    assert environment("auto", ["H200"], None, "vllm", "torch") == "vllm-0.32-cuda"
    assert environment("cuda", ["H200"], "cpu") == "vllm-0.32-cuda"
    assert environment("auto", ["H200"], "cuda", "matplotlib") == "vllm-0.32-cuda"
    assert environment("auto", ["H200"], "cuda") is None
    with pytest.raises(SystemExit, match="no GPU that kvlane can use"):
        environment("cuda", [], "cuda")


@pytest.mark.parametrize("window", [64, 1 << 20])
def test_a_block_is_found_and_overwritten_in_all_its_layers(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios.PoolBytes, "_WINDOW", window)
    blocks = [bytes([number]) * 40 for number in range(1, 7)]
    tool = FakeTool(b"\0" * 50 + b"".join(blocks) + b"\0" * 9)
    victim = {"layers": [blocks[0][:8].hex(), blocks[1][:8].hex()], "layer_bytes": 40}
    other = {"layers": [blocks[4][:8].hex(), blocks[5][:8].hex()], "layer_bytes": 40}
    scenarios.PoolBytes(tool).overwrite(victim, other)  # type: ignore[arg-type]
    assert bytes(tool.pool[50:290]) == blocks[4] + blocks[5] + blocks[2] + blocks[3] + blocks[4] + blocks[5]


def test_a_block_that_is_not_in_the_pool_is_an_error() -> None:
    absent = {"layers": [b"12345678".hex()], "layer_bytes": 40}
    with pytest.raises(ProcessFailed, match="1 of 2 layers"):
        scenarios.PoolBytes(FakeTool(b"\0" * 100)).overwrite(absent, {"layers": ["00" * 8]})  # type: ignore[arg-type]


def test_what_it_prints_fits_a_terminal(
    demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = {"ttft_ms": {"mean": 2.0, "p50": 2.0, "p99": 3.0}}
    done = [
        Scenario(f"{name}: {'a scenario with a long name ' * 5}", timed) for name in ("cold", "warm", "ssd")
    ]
    done[1].must(False, "what went wrong was long to tell " * 6)
    result = _result(demo, done, 1.0)
    result["device"] = {"kind": "cpu", "name": "A Processor With A Very Long Name " * 3, "dtype": "float32"}
    result["machine"] = {"vllm": "0.32.0+cpu"}
    _publish(argparse.Namespace(out=tmp_path, prompt_tokens=128), result, done)
    *lines, written = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert written.startswith("written: ")


def test_the_result_names_what_was_asked_for(demo: Demo) -> None:
    timed = {"ttft_ms": {"mean": 2.0, "p50": 2.0, "p99": 3.0}}
    done = [
        Scenario("cold: engine A computes", timed),
        Scenario("warm: after reset_prefix_cache", {**timed, "hit_tokens": 192}),
        Scenario("control: one corrupted block"),
        *(Scenario(str(number)) for number in range(len(demo.all()) - 3)),
    ]
    result = _result(demo, done, 1.0)
    assert result["passed"] and result["tokens_equal"] and result["control_failed_as_it_must"]
    assert result["hit_tokens"] == 192
    assert result["cold_ttft_ms"] == result["warm_ttft_ms"] == {"mean": 2.0, "p99": 3.0}

    done[2].must(False, "a corrupted block did not change the answer")
    result = _result(demo, done, 1.0)
    assert not result["passed"] and not result["control_failed_as_it_must"]
    assert not _result(demo, done[:1], 1.0)["tokens_equal"]
