"""`kvlane route record`: each request that clients send is in the file, by its text, and can be replayed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import run_kvlane, until
from recordings import Trace, expanded, recording
from routed import COMPLETIONS, Router, ask, chat, routed, wanted

from kvlane.testing.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
BLOCK_BYTES = 256


def test_each_request_is_in_the_file_with_its_lengths_and_shared_text(tmp_path: Path) -> None:
    at, file = tmp_path / "route.sock", tmp_path / "trace.jsonl"
    first, longer = "same words " * 200, "same words " * 200 + "and more " * 100
    with routed([], [], flags=("--socket", str(at))) as (router, _):
        assert ask(router.address, COMPLETIONS, wanted("nobody records yet"))[0] == 200
        with recording(at, file) as made:
            asked = [
                wanted(first, max_tokens=3),
                wanted(longer, max_tokens=5),
                wanted("other words " * 300, max_tokens=4, stream=True),
                wanted("short", max_tokens=2),
            ]
            answers = [ask(router.address, COMPLETIONS, each)[:2] for each in asked]
            assert ask(router.address, CHAT, chat(longer, max_tokens=6))[0] == 200
            # Neither a refused request nor one that an engine only tokenizes is work of an engine.
            assert ask(router.address, COMPLETIONS, {"prompt": 5, "model": "nobody-has-it"})[0] != 200
            assert [status for status, _ in answers] == [200] * 4
            # A client has its answer before the router has counted it.
            until("all are in the file", lambda: Trace(file).header["requests"] == 5)
            trace = made.end()
    assert trace.header["grade"] == "text" and trace.header["tokens_per_block"] == BLOCK_BYTES // 4
    assert [each["output_length"] for each in trace.requests] == [3, 5, 4, 2, 6]
    used = [
        answer["usage"]["prompt_tokens"]
        for (_, answer), each in zip(answers, asked, strict=True)
        if "stream" not in each
    ]
    lengths = [each["input_length"] for each in trace.requests]
    assert [lengths[0], lengths[1], lengths[3]] == used
    assert lengths[2] > 0, "an estimate, because a stream does not say it"
    blocks = [expanded(each["hash_ids"]) for each in trace.requests]
    assert len(blocks[0]) == len(first) // BLOCK_BYTES
    shared = [one for one, other in zip(blocks[0], blocks[1], strict=False) if one == other]
    assert len(shared) >= len(blocks[0]) - 1
    assert not set(blocks[1]) & set(blocks[2]) and blocks[3] == []
    assert [each.get("ttft_ms") is not None for each in trace.requests] == [False, False, True, False, False]
    assert {each["engine"] for each in trace.requests} == {0, 1}
    assert "same words" not in file.read_text() and "engine_name" not in file.read_text()


def test_one_engine_alone_and_by_name(tmp_path: Path) -> None:
    at, file = tmp_path / "route.sock", tmp_path / "trace.jsonl"
    with routed([], [], flags=("--socket", str(at), "--policy", "round-robin")) as (router, engines):
        with recording(at, file, "--node", engines[0].url, "--names") as made:
            for number in range(6):
                assert ask(router.address, COMPLETIONS, wanted(f"prompt {number}"))[0] == 200
            trace = made.end(signal.SIGTERM)
        assert len(trace.requests) == len(engines[0].log()) == 3
        assert {each["engine_name"] for each in trace.requests} == {engines[0].url}


def test_a_router_that_is_started_again_is_recorded_on(tmp_path: Path) -> None:
    at, file = tmp_path / "route.sock", tmp_path / "trace.jsonl"
    prompt: dict[str, Any] = wanted("same words " * 200)
    with (
        FakeEngine() as engine,
        Router("--worker", engine.url, "--socket", str(at), nodes=1) as router,
        recording(at, file) as made,
    ):
        assert ask(router.address, COMPLETIONS, prompt)[0] == 200
        until("it is in the file", lambda: Trace(file).header["requests"] == 1)
        router.__exit__()
        with Router("--worker", engine.url, "--socket", str(at), nodes=1) as again:
            until("it is recorded again", lambda: _recorded(again, file, prompt) > 1)
            trace = made.end()
    assert trace.header["restarts"] == 1
    one, *_, other = [set(expanded(each["hash_ids"])) for each in trace.requests]
    assert one and other and not one & other


def _recorded(router: Router, file: Path, prompt: dict[str, Any]) -> int:
    ask(router.address, COMPLETIONS, prompt)
    return int(Trace(file).header["requests"])


def test_a_recording_is_replayed_through_a_fleet(tmp_path: Path) -> None:
    at, file = tmp_path / "route.sock", tmp_path / "trace.jsonl"
    with routed([], [], flags=("--socket", str(at))) as (router, _), recording(at, file) as made:
        for number in range(30):
            prompt = f"chat {number % 5} " * 150 + "turn " * number
            assert ask(router.address, COMPLETIONS, wanted(prompt, max_tokens=4))[0] == 200
        made.end()
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        'policies = ["round-robin", "least-work"]\nloads = [0.5]\n[[class]]\nname = "a"\n[[node]]\ncount = 2\n'
    )
    ran = run_kvlane("replay", str(file), "--route", str(fleet), "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["requests"] == 30 and report["requests_without_lengths"] == 0
    found = {result["policy"]: result["found_percent"] for result in report["results"]}
    assert found["least-work"] > 20 and found["least-work"] >= found["round-robin"]


def test_a_router_that_is_not_there_is_told(tmp_path: Path) -> None:
    ran = run_kvlane("route", "record", str(tmp_path / "trace"), "--socket", str(tmp_path / "none.sock"))
    assert ran.returncode == 1 and "no router answers" in ran.stderr
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("flags", [["--for", "-1"], ["--for", "soon"]])
def test_mistakes_say_what_to_do(tmp_path: Path, flags: list[str]) -> None:
    ran = run_kvlane("route", "record", str(tmp_path / "trace"), *flags)
    assert ran.returncode != 0 and "write for example 90s" in ran.stderr
