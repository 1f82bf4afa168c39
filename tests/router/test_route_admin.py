"""The admin port of `kvlane route`: what operators see."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from busy import stretched
from processes import run_kvlane, until
from routed import CHAT, COMPLETIONS, LONG, ask, chat, connect, routed, wanted

ROOT = Path(__file__).resolve().parents[2]


def metrics(admin: str) -> dict[str, float]:
    status, page, headers = ask(admin, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    rows = re.findall(r"^(\w+(?:\{[^}]*\})?) ([\d.e-]+)$", page, re.MULTILINE)
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", page, re.MULTILINE))
    assert {metric(name, kinds) for name, _ in rows} == set(kinds)
    return {name: float(value) for name, value in rows}


def metric(name: str, kinds: dict[str, str]) -> str:
    """Name of the metric to which this row belongs; a histogram has three kinds of rows."""
    name = name.partition("{")[0]
    base = re.sub("_(bucket|sum|count)$", "", name)
    return base if kinds.get(base) == "histogram" else name


def of(found: dict[str, float], name: str, **labels: str) -> float:
    """The sum of the rows of a metric that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for row, value in found.items()
        if row.partition("{")[0] == name and all(each in row for each in wanted)
    )


def test_metrics_count_and_come_to_rest() -> None:
    pair = ["--pairs", "none"]
    flags = ("--otlp-endpoint", "http://127.0.0.1:1")
    with routed(pair, [*pair, "--itl-ms", "1"], roles="pd", flags=flags) as (router, (prefill, _)):
        prefill.faults(status=500, times=1)
        ask(router.address, COMPLETIONS, wanted("fails " + LONG))
        for number in range(3):
            ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG, stream=True))
        ask(router.address, COMPLETIONS, wanted(model="unknown"))
        found = metrics(router.admin)
        reference = (
            (ROOT / "docs/reference/metrics.md")
            .read_text()
            .split("## The router")[1]
            .split("## The index")[0]
        )
        listed = set(re.findall(r"`((?:kvlane|process)_\w+)`", reference))
        # Those of `--balance` have numbers only with it.
        only_balancing = {name for name in listed if re.search("_balance_|_node_score|_scale_wanted_", name)}
        kinds = dict.fromkeys((name for name in listed if name.endswith("_seconds")), "histogram")
        assert {metric(name, kinds) for name in found} == listed - only_balancing
        assert of(found, "kvlane_route_requests_total") == 5
        assert of(found, "kvlane_route_retries_total") == 1
        assert found["kvlane_route_refused_total"] == 1
        assert found["kvlane_route_not_handed_over_total"] == 3
        nodes = {name: value for name, value in found.items() if name.startswith("kvlane_route_node_")}
        assert sum(value for name, value in nodes.items() if "_ready" in name) == 2
        assert not [
            name for name, value in nodes.items() if value and ("_requests{" in name or "_tokens{" in name)
        ]
        assert found["kvlane_route_index_bytes"] <= 24 << 20
        assert 0 < found["process_open_fds"] < found["process_max_fds"]
        assert metrics(router.admin)["process_start_time_seconds"] == found["process_start_time_seconds"]


def test_requests_are_counted_by_route_model_node_and_status() -> None:
    """Operators saw one count of all requests, which showed neither the slow model nor the failing engine."""
    flags = ["--ttft-ms", "60", "--itl-ms", "20"]
    with routed(flags, flags, flags=("--policy", "round-robin")) as (router, (good, bad)):
        for number in range(4):
            ask(router.address, CHAT, chat(f"{number} " + LONG, stream=True, max_tokens=6))
        ask(router.address, COMPLETIONS, wanted("x", max_tokens=7))
        ask(router.address, COMPLETIONS, wanted(model="strange"))
        ask(router.address, COMPLETIONS, b"{")
        ask(router.address, "/v1/" + "nonsense", wanted("x"))
        before = metrics(router.admin)
        bad.faults(status=503)
        for _ in range(2):
            assert ask(router.address, COMPLETIONS, wanted("x"))[0] == 200
        found = metrics(router.admin)
        good.faults(status=503)
        assert ask(router.address, COMPLETIONS, wanted("x"))[0] == 503
        failed = metrics(router.admin)
        leaves = connect(router.address)
        good.faults(hang_before_first_byte=True)
        bad.faults(hang_before_first_byte=True)
        leaves.request("POST", COMPLETIONS, json.dumps(wanted("x")).encode())
        until("it has it", lambda: of(metrics(router.admin), "kvlane_route_node_requests") == 1)
        leaves.close()
        total = "kvlane_route_requests_total"
        until("it has left", lambda: of(metrics(router.admin), total, status="499") == 1)

    chats = {"route": CHAT, "model": "fake"}
    assert of(before, total, **chats, status="200") == 4
    for engine in (good, bad):
        assert of(before, total, **chats, node=engine.url) == 2
    assert of(before, total, model="fake", route=COMPLETIONS, status="200") == 1
    assert of(before, total, model="other", node="", status="404") == 1, "no engine serves that model"
    assert of(before, total, model="", node="", status="400") == 1
    assert of(before, total, route="other") == 1
    first = "kvlane_route_time_to_first_token_seconds"
    assert of(before, f"{first}_count") == of(before, f"{first}_count", **chats) == 4, "of streams only"
    assert 0.06 * 4 <= of(before, f"{first}_sum") < stretched(4)
    assert of(before, f"{first}_bucket", le="0.04") == 0
    between = "kvlane_route_inter_token_latency_seconds"
    assert of(before, f"{between}_count", **chats) == 4 * 5
    assert 0.015 <= of(before, f"{between}_sum") / 20 < stretched(0.2)
    lasted = "kvlane_route_request_duration_seconds"
    assert of(before, f"{lasted}_count") == of(before, total) == 8
    assert of(before, f"{lasted}_sum", **chats) >= 4 * 0.16
    assert of(before, "kvlane_route_generated_tokens_total", **chats) == 4 * 6
    assert of(before, "kvlane_route_generated_tokens_total", route=COMPLETIONS) == 7
    assert of(before, "kvlane_route_prompt_tokens_total", **chats) >= 4 * len(LONG) // 4
    assert of(before, "kvlane_route_retries_total") == 0
    assert of(found, "kvlane_route_retries_total", node=good.url) >= 1
    assert of(failed, total, status="503") == 1


def test_the_share_of_prompts_that_engines_have_is_counted() -> None:
    with routed([]) as (router, _):
        for _ in range(2):
            assert ask(router.address, COMPLETIONS, wanted(LONG))[0] == 200
        found = metrics(router.admin)
        prompts, cached = (of(found, f"kvlane_route_{name}_tokens_total") for name in ("prompt", "cached"))
        assert prompts == 2 * (len(LONG) // 4)
        assert 0.9 < cached / (prompts / 2) <= 1, "all of the second one"


def test_an_engine_that_goes_takes_its_rows_along(tmp_path: Path) -> None:
    socket = tmp_path / "route.sock"
    with routed([], [], flags=("--socket", str(socket), "--policy", "round-robin")) as (router, engines):
        for _ in engines:
            ask(router.address, COMPLETIONS, wanted("x"))
        before = metrics(router.admin)
        assert all(of(before, "kvlane_route_requests_total", node=engine.url) == 1 for engine in engines)
        told = run_kvlane("route", "remove", engines[0].url, "--now", "--socket", str(socket))
        assert told.returncode == 0, told.stderr
        assert not [row for row in metrics(router.admin) if engines[0].url in row]


def test_decisions_say_who_and_why() -> None:
    with routed(["--pairs", "nixl"], ["--pairs", "nixl"], roles="pd") as (router, (prefill, decode)):
        ask(router.address, COMPLETIONS, wanted("short"), {"X-Request-Id": "mine"})
        ask(router.address, COMPLETIONS, wanted(LONG))
        _, page, _ = ask(router.admin, "/decisions")
        second, first = page["decisions"]
        assert (first["client_id"], first["node"], first["prefill"]) == ("mine", decode.url, None)
        assert first["why"] == "short prompt stays on decode node"
        assert (second["node"], second["prefill"], second["why"]) == (
            decode.url,
            prefill.url,
            "prefill, then decode",
        )
        assert second["prompt_tokens"] == len(LONG) // 4
        assert prefill.log()[0]["id"] == second["id"] + "-p0"
        _, one, _ = ask(router.admin, "/decisions?limit=1")
        assert one["decisions"] == [second]


def test_nodes_and_health_follow_the_engines() -> None:
    with routed([], []) as (router, (lives, dies)):
        assert ask(router.admin, "/health")[0] == 200
        dies.kill(signal.SIGKILL)

        def states() -> dict[str, str]:
            _, page, _ = ask(router.admin, "/nodes")
            return {node["node"]: node["state"] for node in page["nodes"]}

        until("the dead one is suspect", lambda: states() == {lives.url: "ready", dies.url: "suspect"})
        _, page, _ = ask(router.admin, "/nodes")
        assert [node["models"] for node in page["nodes"]] == [["fake"], ["fake"]]
        lives.kill(signal.SIGKILL)
        until("nobody is ready", lambda: ask(router.admin, "/health")[0] == 503)


def test_only_under_its_own_names_and_read_only() -> None:
    with routed([], flags=("--admin-host", "router.example")) as (router, _):
        for host, status in [("127.0.0.1", 200), ("router.example:9092", 200), ("evil.example", 421)]:
            found, answer, _ = ask(router.admin, "/nodes", None, {"Host": host})
            assert found == status, answer
        assert (
            "--admin-host evil.example"
            in ask(router.admin, "/nodes", None, {"Host": "evil.example"})[1]["error"]
        )
        assert ask(router.admin, "/nodes", {})[0] == 405
        assert ask(router.address, "/nodes")[0] == 404, "not on the clients' port"
