"""Engines that answer 500: when the router ejects one, which clients can cause that, and what operators see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import run_kvlane, until
from routed import CHAT, COMPLETIONS, LONG, Router, ask, chat, routed, wanted

LEAST = ("--policy", "least-loaded")


def conditions(router: Router) -> dict[str, dict[str, Any]]:
    """By node: the condition that /nodes shows."""
    return {node["node"]: node["condition"] for node in ask(router.admin, "/nodes")[1]["nodes"]}


def ejections(router: Router) -> list[str]:
    return [line for line in router.lines if "node ejected for" in line]


def test_one_clients_requests_that_make_engines_fail_take_no_engine_from_the_others() -> None:
    """Ten requests of one client ejected three of four engines, and tried each request on three."""
    with routed(*[[]] * 4, flags=LEAST) as (router, engines):
        for engine in engines:
            engine.faults(poison="POISON")
        for number in range(10):
            status, answer, _ = ask(router.address, COMPLETIONS, wanted(f"POISON {number}"))
            assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert sum(len(engine.log(clear=True)) for engine in engines) == 20, "each was tried on two engines"
        assert not any(condition["ejected"] for condition in conditions(router).values())
        assert ejections(router) == []
        for number in range(40):
            assert ask(router.address, COMPLETIONS, wanted(f"other {number}"))[0] == 200
        assert all(engine.log() for engine in engines), "no engine is left alone"
        assert all(condition["doubts"] == 0 for condition in conditions(router).values())


def test_one_clients_requests_take_no_prefill_engine_from_the_pairs() -> None:
    """40 of 40 later requests of others found no node of the right role."""
    pair = ["--pairs", "kvlane"]
    with routed(*[pair] * 4, roles="pppd", flags=LEAST) as (router, engines):
        for engine in engines[:3]:
            engine.faults(poison="POISON")
        for number in range(10):
            assert ask(router.address, COMPLETIONS, wanted(f"POISON {number} " + LONG))[0] == 500
        for number in range(12):
            assert ask(router.address, COMPLETIONS, wanted(f"other {number} " + LONG))[0] == 200
        assert ejections(router) == []
        chosen = ask(router.admin, "/decisions?limit=12")[1]["decisions"]
        assert {decision["why"] for decision in chosen} == {"prefill, then decode"}


def test_broken_engines_are_ejected_although_all_clients_have_one_address() -> None:
    """All clients have one address, as behind a proxy. A second attempt goes to an engine without doubts, past two
    broken ones."""
    with routed([], [], [], flags=LEAST) as (router, (one, other, good)):
        one.faults(status=500)
        other.faults(status=500)
        statuses = [ask(router.address, COMPLETIONS, wanted(f"short {number}"))[0] for number in range(30)]
        assert statuses.count(500) <= 1 and set(statuses[1:]) == {200}, statuses
        assert len(good.log()) >= 29
        until("both are ejected", lambda: len(ejections(router)) >= 2)
        line = ejections(router)[0]
        assert "node ejected for 1 s: 3 failures in a row; last: it answered 500" in line
        assert "that another node served" in line


def test_different_requests_of_different_clients_eject_an_engine(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\nkey-b\nkey-c\n")
    keys.chmod(0o600)
    socket = str(tmp_path / "route.sock")
    flags = (*LEAST, "--api-key-file", str(keys), "--socket", socket)

    def say(address: str, key: str, prompt: str) -> int:
        return ask(address, COMPLETIONS, wanted(prompt), {"Authorization": f"Bearer {key}"})[0]

    with routed([], flags=flags) as (router, (engine,)):
        engine.faults(poison="POISON")
        for number in range(5):
            assert say(router.address, "key-a", f"POISON {number}") == 500
        assert say(router.address, "key-a", "served") == 200
        for key in ("key-a", "key-b", "key-c"):
            assert say(router.address, key, "POISON, the same of all") == 500
        assert ejections(router) == [], "one client, or one request, says nothing of the engine"
        assert say(router.address, "key-a", "served") == 200
        for key, prompt in (("key-a", "POISON 1"), ("key-b", "POISON 2"), ("key-c", "POISON 3")):
            assert say(router.address, key, prompt) == 500
        until("it is ejected", lambda: ejections(router))
        condition = conditions(router)[engine.url]
        assert condition["ejected"] and condition["failures"] >= 3
        assert "several clients" in condition["last_failure"]
        told = run_kvlane("route", "list", "--socket", socket)
        assert told.returncode == 0, told.stderr
        assert " ejected " in told.stdout and "failures in a row: 3" in told.stdout
        as_json = run_kvlane("route", "list", "--json", "--socket", socket).stdout
        (listed,) = json.loads(as_json)["nodes"]
        assert set(listed["condition"]) == set(condition)
        assert listed["condition"]["last_failure"] == condition["last_failure"]
        assert say(router.address, "key-a", "served as the last one") == 200
        until("the log says so", lambda: any("node returned" in line for line in router.lines))
        assert not conditions(router)[engine.url]["ejected"]


def test_a_dead_engine_is_ejected_in_one_line_and_listed_with_the_reason() -> None:
    with routed([], [], flags=LEAST) as (router, (_, dead)):
        dead.faults(refuse=True)
        for number in range(10):
            assert ask(router.address, COMPLETIONS, wanted(f"short {number}"))[0] == 200
        (line,) = until("it is ejected", lambda: ejections(router))
        assert dead.url in line and "node ejected for 1 s: 3 failures in a row; last: it " in line
        condition = conditions(router)[dead.url]
        assert condition["ejected"] and condition["failures"] == 3
        assert condition["retry_in_ms"] is not None


@pytest.mark.parametrize(
    ("member", "param"),
    [
        ('"ec_transfer_params": {"x": 1}', "ec_transfer_params"),
        ('"vllm_xargs": {"kv_transfer_params": "x"}', "vllm_xargs.kv_transfer_params"),
        ('"vllm_xargs": {"a": [1, {"b": 2}], "ec_transfer_params": "x"}', "vllm_xargs.ec_transfer_params"),
        ('"vllm_xargs": {"\\u006bv_transfer_param\\u0073": "x"}', "vllm_xargs.kv_transfer_params"),
        ('"vllm\\u005fxargs": {"kv_transfer_params": "x"}', "vllm_xargs.kv_transfer_params"),
        (
            '"vllm_xargs" : { "a" : "x" , "a" : 1 , "kv_transfer_params" : null }',
            "vllm_xargs.kv_transfer_params",
        ),
        ('"vllm_xargs": {"a": "' + "x" * (1 << 20) + '"}', "vllm_xargs"),
    ],
)
def test_hosts_and_blocks_cannot_be_named_by_way_of_extra_arguments(member: str, param: str) -> None:
    """vLLM merges vllm_xargs with kv_transfer_params, and fails with 500 where they are no object."""
    with routed([]) as (router, (engine,)):
        for path, body in (
            (COMPLETIONS, wanted("short")),
            (CHAT, chat("short")),
            ("/v1/responses", {"input": "x"}),
        ):
            text = json.dumps(body)[:-1] + ", " + member + "}"
            status, answer, _ = ask(router.address, path, text.encode(), {"Content-Type": "application/json"})
            assert (status, answer["error"]["param"]) == (400, param)
        assert engine.log() == []
        kept = wanted("short", vllm_xargs={"session_id": "kv_transfer_params"})
        assert ask(router.address, COMPLETIONS, kept)[0] == 200, "other extra arguments pass"


def test_an_engine_whose_server_lives_is_ejected_all_the_same() -> None:
    """Monitors asked each engine for its version in between, so that it never had three failures in a row."""
    with routed([], [], flags=("--policy", "round-robin")) as (router, (broken, _)):
        broken.faults(status=500, path=COMPLETIONS)

        def is_ejected() -> bool:
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200, "the other engine serves it"
            for _ in range(2):
                assert ask(router.address, "/version")[0] == 200
            return any("node ejected" in line for line in router.lines)

        until("it is ejected", is_ejected)
