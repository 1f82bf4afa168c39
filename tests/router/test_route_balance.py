"""Workers of `kvlane route --balance` prefill or decode, as the work needs it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import KVLANE, PATIENCE, until
from routed import COMPLETIONS, LONG, Router, ask, routed, text_of, wanted

from kvlane.testing.fake_engine import FakeEngine

ENGINE = ["--pairs", "kvlane", "--prefill-tokens-per-second", "4000", "--itl-ms", "5"]
# Shortens minutes to seconds.
QUICK = """
[balance]
every-ms = 50
window = 4
level-dwell-ms = 100
flip-after-ms = 100
flip-every-ms = 100
role-dwell-ms = 500
ttft-ms = 200
prefill-rate = 4000
step-tokens = 500
requests-max = 8
relief = 0
"""


def roles(router: Router) -> list[str]:
    _, page, _ = ask(router.admin, "/nodes")
    return [node["role"] for node in page["nodes"]]


def balance_records(router: Router) -> list[dict[str, Any]]:
    _, page, _ = ask(router.admin, "/decisions?limit=500")
    return page["balance"]


@contextmanager
def asking(
    router: Router, clients: int, body: Callable[[int], dict[str, Any]]
) -> Iterator[list[tuple[Any, ...]]]:
    """So many clients ask one request after the other, until the context ends."""
    over, answers = threading.Event(), list[tuple[Any, ...]]()

    def client(number: int) -> None:
        turn = 0
        while not over.is_set():
            asked = body(number * 100_000 + turn)
            status, answer, _ = ask(router.address, COMPLETIONS, asked)
            answers.append((status, asked["prompt"], asked["max_tokens"], answer))
            turn += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)


@pytest.mark.parametrize("drains", ["false", "true"])
def test_roles_follow_the_work_and_no_request_is_lost(tmp_path: Path, drains: str) -> None:
    config = tmp_path / "route.toml"
    config.write_text(QUICK + f"drains = {drains}\n")
    with (
        FakeEngine(*ENGINE) as alone,
        routed(*[ENGINE] * 4, flags=("--config", str(config))) as (router, engines),
    ):
        until("roles", lambda: sorted(roles(router)) == ["decode", "decode", "prefill", "prefill"])

        def prefills(number: int) -> dict[str, Any]:
            return wanted(f"{number} " + LONG, max_tokens=1)

        with asking(router, 12, prefills) as first:
            until("another node prefills", lambda: roles(router).count("prefill") == 3)

        def decodes(number: int) -> dict[str, Any]:
            return wanted(f"short {number} " * 20, max_tokens=60)

        with asking(router, 24, decodes) as second:
            until("all but one decode", lambda: roles(router).count("decode") == 3)
        answers = [*first, *second]
        assert len(answers) > 30
        assert {status for status, *_ in answers} == {200}
        for _, prompt, tokens, answer in (answers[0], answers[-1]):
            _, expected, _ = ask(alone.address, COMPLETIONS, wanted(prompt, max_tokens=tokens))
            assert text_of(answer) == text_of(expected)
        legs = {seen["leg"] for engine in engines for seen in engine.log()}
        assert {"prefill", "decode"} <= legs
        told = balance_records(router)
        assert {each["state"] for each in told} >= {
            "imbalanced: too few prefill nodes",
            "imbalanced: too few decode nodes",
        }
        changes = [each for each in told if each["what"] == "changes to"]
        assert len(changes) >= 4 + 1 + 2 and all(each["node"] and each["role"] for each in changes)
        _, page, _ = ask(router.admin, "/metrics")
        count = re.search(r"^kvlane_route_role_changes_total (\d+)$", page, re.MULTILINE)
        assert count is not None and int(count[1]) == len(changes)
        assert 'kvlane_route_balance_state{group="",connector="store",model="fake",state=' in page
        assert 'kvlane_route_balance_score{group="",connector="store",model="fake",role="prefill"}' in page
        assert "kvlane_route_node_score{" in page
        _, page, _ = ask(router.admin, "/nodes")
        assert all(
            node["role_may_change"] and "running" in node["load"]["indicators"] for node in page["nodes"]
        )
        at_rest = until(
            "rest",
            lambda: all(node["requests"] == 0 for node in ask(router.admin, "/nodes")[1]["nodes"]),
        )
        assert at_rest


def test_named_roles_stay_and_one_worker_helps_where_it_is_needed(tmp_path: Path) -> None:
    config = tmp_path / "route.toml"
    config.write_text(QUICK)
    with routed(*[ENGINE] * 3, roles="pdw", flags=("--config", str(config))) as (router, _):
        until("the worker decodes", lambda: sorted(roles(router)) == ["decode", "decode", "prefill"])
        with asking(router, 12, lambda number: wanted(f"{number} " + LONG, max_tokens=1)) as answers:
            until("it prefills", lambda: sorted(roles(router)) == ["decode", "prefill", "prefill"])
        assert {status for status, *_ in answers} == {200}
        _, page, _ = ask(router.admin, "/nodes")
        assert sorted(node["role_may_change"] for node in page["nodes"]) == [False, False, True]


def test_workers_get_roles_by_a_flag() -> None:
    with routed(ENGINE, ENGINE, ENGINE, flags=("--balance",)) as (router, _):
        until("roles", lambda: sorted(roles(router)) == ["decode", "decode", "prefill"])


# Whatever the load is, it is high.
OVERLOADED = """
[balance.prefill]
high-enter = 0
high-exit = 0
low-exit = 0
low-enter = 0
[balance.decode]
high-enter = 0
high-exit = 0
low-exit = 0
low-enter = 0
"""


def test_in_an_overload_classes_that_the_operator_names_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "route.toml"
    config.write_text(QUICK + "scale-up-after-ms = 300\nrefuse-s = { batch = 30 }\n" + OVERLOADED)
    with routed(ENGINE, ENGINE, flags=("--config", str(config))) as (router, _):
        until("an overload", lambda: any(each["state"] == "overload" for each in balance_records(router)))
        body = wanted(max_tokens=1)
        status, answer, headers = ask(router.address, COMPLETIONS, body, {"X-Request-Class": "batch"})
        assert (status, headers["retry-after"]) == (429, "30")
        assert answer["error"]["type"] == "RateLimitError" and "the class batch" in answer["error"]["message"]
        for others in ({}, {"X-Request-Class": "interactive"}, {"X-Request-Class": "b\xe4tch"}):
            assert ask(router.address, COMPLETIONS, body, others)[0] == 200
        wanted_more = until(
            "one more is asked for",
            lambda: [each for each in balance_records(router) if each["what"] == "one more wanted"],
        )
        assert wanted_more[0]["role"] in ("prefill", "decode")
        _, page, _ = ask(router.admin, "/metrics")
        assert "kvlane_route_shed_total 1\n" in page
        assert re.search(r'^kvlane_route_scale_wanted_total\{direction="up"\} [1-9]', page, re.MULTILINE)


def test_a_webhook_is_told_and_a_dead_one_holds_nothing_up(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/records/v1/?from=kvlane", self.path
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    config = tmp_path / "route.toml"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config.write_text(
            QUICK + f'webhook = "http://127.0.0.1:{server.server_port}/records/v1/?from=kvlane"\n'
        )
        with routed(ENGINE, ENGINE, flags=("--config", str(config))) as (router, _):
            until("two are told", lambda: len([each for each in told if each["what"] == "changes to"]) == 2)
            seen = list(told)
            assert seen[::-1] == balance_records(router)[-len(seen) :]
        server.shutdown()
        dead = server.server_port
    config.write_text(QUICK + f'webhook = "http://127.0.0.1:{dead}/records"\n')
    with routed(ENGINE, ENGINE, flags=("--config", str(config))) as (router, _):
        until("it is logged", lambda: any("webhook failed to take a record" in line for line in router.lines))
        assert sorted(roles(router)) == ["decode", "prefill"]
        assert ask(router.address, COMPLETIONS, wanted(max_tokens=1))[0] == 200


def test_a_webhook_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    config = tmp_path / "route.toml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config.write_text(QUICK + f'webhook = "http://127.0.0.1:{silent.getsockname()[1]}/"\n')
        with routed(*[ENGINE] * 6, flags=("--config", str(config))) as (router, _):
            until("roles", lambda: "worker" not in roles(router))
            router.process.terminate()
            # Eight records wait, at two seconds each.
            assert router.process.wait(12) == 0


def test_without_it_workers_serve_whole_requests() -> None:
    with routed(ENGINE, ENGINE) as (router, _):
        ask(router.address, COMPLETIONS, wanted(max_tokens=1))
        assert roles(router) == ["worker", "worker"]
        assert balance_records(router) == []
        _, page, _ = ask(router.admin, "/metrics")
        assert "kvlane_route_balance_state" not in page


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("flips = 3", "[balance]: invalid type"),
        ("speed = 3", "[balance]: unknown field `speed`"),
        ("ttft-ms = -1", "balance.ttft-ms = -1: from 1 to 86400000"),
        ("ttft-ms = nan", "balance.ttft-ms = NaN: from 1 to"),
        ('webhook = "ftp://a"', "balance.webhook: ftp://a is no address"),
        ("refuse-s = { batch = 0 }", "balance.refuse-s.batch = 0: from 1 to 86400"),
        ("window = 0", "balance.window = 0: from 1 to 10000 looks"),
        ("[balance.prefill]\nhigh-enter = 0.01", "[balance.prefill]: low-enter = 0.1"),
        (
            "[balance.decode]\nweights = { speed = 1 }",
            "weights.speed: there is no such indicator; there are running",
        ),
        ("[balance.decode]\nweights = { gpu = -1 }", "weights.gpu = -1: from 0 to 1000000"),
    ],
)
def test_mistakes_in_the_table_are_told_with_their_key(tmp_path: Path, table: str, sentence: str) -> None:
    config = tmp_path / "route.toml"
    config.write_text(f"[balance]\n{table}\n")
    command = [str(KVLANE), "route", "--worker", "http://127.0.0.1:1", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode != 0 and sentence in done.stderr, done.stderr
