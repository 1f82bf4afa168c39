"""The demo's judgement: it must fail when something is wrong. Its engines are played by a table of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlane.demo import scenarios
from kvlane.demo.__main__ import _result
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
    return Demo(tmp_path, Daemon(tmp_path, "1mb", tmp_path), tmp_path, prompt_tokens=128, prompts=2, seed=0)


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


@pytest.mark.parametrize("window", [64, 1 << 20])
def test_a_block_is_found_and_overwritten_in_all_its_layers(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios._Pool, "_WINDOW", window)
    blocks = [bytes([number]) * 40 for number in range(1, 7)]
    tool = FakeTool(b"\0" * 50 + b"".join(blocks) + b"\0" * 9)
    victim = {"layers": [blocks[0][:8].hex(), blocks[1][:8].hex()], "layer_bytes": 40}
    other = {"layers": [blocks[4][:8].hex(), blocks[5][:8].hex()], "layer_bytes": 40}
    scenarios._Pool(tool).overwrite(victim, other)  # type: ignore[arg-type]
    assert bytes(tool.pool[50:290]) == blocks[4] + blocks[5] + blocks[2] + blocks[3] + blocks[4] + blocks[5]


def test_a_block_that_is_not_in_the_pool_is_an_error() -> None:
    absent = {"layers": [b"12345678".hex()], "layer_bytes": 40}
    with pytest.raises(ProcessFailed, match="1 of 2 layers"):
        scenarios._Pool(FakeTool(b"\0" * 100)).overwrite(absent, {"layers": ["00" * 8]})  # type: ignore[arg-type]


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
