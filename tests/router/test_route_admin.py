"""The admin port of `kvlane route`: what operators see."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from processes import until
from routed import COMPLETIONS, LONG, ask, routed, wanted

ROOT = Path(__file__).resolve().parents[2]


def metrics(admin: str) -> dict[str, float]:
    status, page, headers = ask(admin, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    rows = re.findall(r"^(\w+(?:\{[^}]*\})?) (\d+)$", page, re.MULTILINE)
    names = set(re.findall(r"^# TYPE (\w+)", page, re.MULTILINE))
    assert {name.partition("{")[0] for name, _ in rows} == names
    return {name: float(value) for name, value in rows}


def test_metrics_count_and_come_to_rest() -> None:
    pair = ["--pairs", "none"]
    with routed(pair, [*pair, "--itl-ms", "1"], roles="pd") as (router, (prefill, _)):
        prefill.faults(status=500, times=1)
        ask(router.address, COMPLETIONS, wanted("fails " + LONG))
        for number in range(3):
            ask(router.address, COMPLETIONS, wanted(f"{number} " + LONG, stream=True))
        ask(router.address, COMPLETIONS, wanted(model="unknown"))
        found = metrics(router.admin)
        reference = (ROOT / "docs/reference/metrics.md").read_text().split("## The router")[1]
        listed = set(re.findall(r"`(kvlane_\w+)`", reference))
        # Those of `--balance` have numbers only with it.
        only_balancing = {name for name in listed if re.search("_balance_|_node_score|_scale_wanted_", name)}
        assert {name.partition("{")[0] for name in found} == listed - only_balancing
        assert found["kvlane_route_requests_total"] == 5
        assert found["kvlane_route_retries_total"] == 1
        assert found["kvlane_route_refused_total"] == 1
        assert found["kvlane_route_not_handed_over_total"] == 3
        nodes = {name: value for name, value in found.items() if "node=" in name}
        assert sum(value for name, value in nodes.items() if "_ready" in name) == 2
        assert not [
            name for name, value in nodes.items() if value and ("_requests" in name or "_tokens" in name)
        ]
        assert found["kvlane_route_index_bytes"] <= 24 << 20


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
