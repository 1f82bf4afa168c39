"""Engines that come and go by themselves: pings, heartbeats, names, ranks; and strangers who ping."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from ports import free_port
from processes import KVLANE, PATIENCE, run_kvlane, until
from routed import COMPLETIONS, LONG, Router, ask, routed, wanted

from kvlane.testing.fake_engine import FakeEngine
from kvlane.testing.fake_engine.ping import message

PING = ("--ping", "127.0.0.1:0")
QUICK = ("--ping-seconds", "0.2")


def ping_of(router: Router) -> str:
    at = re.compile(r"beats are taken at (\S+)")
    return next(filter(None, map(at.search, router.lines)))[1]


def nodes(router: Router) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in ask(router.admin, "/nodes")[1]["nodes"]}


def refused(router: Router, reason: str) -> int:
    page = ask(router.admin, "/metrics")[1]
    found = re.search(rf'^kvlane_route_beats_refused_total{{reason="{reason}"}} (\d+)$', page, re.MULTILINE)
    assert found is not None
    return int(found[1])


def pinging(router: Router, role: str, zmq_port: int, *flags: str) -> FakeEngine:
    at = f"127.0.0.1:{zmq_port}"
    named = ("--ping-router", ping_of(router), "--role", role, "--zmq-address", at)
    return FakeEngine("--pairs", "p2p-nccl", *named, *QUICK, *flags)


@contextmanager
def beating(router: Router, url: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`kvlane route beat` beside an engine."""
    process = subprocess.Popen([KVLANE, "route", "beat", "--to", ping_of(router), "--url", url, *flags])
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def test_engines_that_ping_join_as_a_pair_and_serve() -> None:
    with Router(*PING, nodes=0) as router:
        assert ask(router.address, COMPLETIONS, wanted())[0] == 503
        with pinging(router, "P", 21001) as prefill, pinging(router, "D", 22001) as decode:
            until(
                "both are ready",
                lambda: sum(each["state"] == "ready" for each in nodes(router).values()) == 2,
            )
            for prompt in (LONG, "short"):
                status, answer, _ = ask(router.address, COMPLETIONS, wanted(prompt))
                assert status == 200, answer
            found = nodes(router)
            assert {found[prefill.url]["role"], found[decode.url]["role"]} == {"prefill", "decode"}
            assert found[prefill.url]["known_by"] == ["beat"]
            for first, second in zip(prefill.log(), decode.log(), strict=True):
                assert (first["leg"], second["leg"]) == ("prefill", "decode")
                assert first["id"] == second["id"], "both engines find each other by it"
                expected = "___prefill_addr_127.0.0.1:21001___decode_addr_127.0.0.1:22001_"
                assert re.fullmatch(f"kvlane-[0-9a-z-]+{expected}[0-9a-f]{{32}}", first["id"])
            decode.kill(signal.SIGKILL)
            until("it is suspect", lambda: nodes(router)[decode.url]["state"] == "suspect")
            assert ask(router.address, COMPLETIONS, wanted())[0] in (502, 503), "none alone can serve"
            assert all(seen["leg"] == "prefill" for seen in prefill.log()), "no id without addresses"


def test_an_engine_that_starts_anew_at_its_address_serves_at_once_and_has_no_prefix() -> None:
    with Router(*PING, "--policy", "least-loaded", nodes=0) as router, ExitStack() as stack:
        decode = stack.enter_context(pinging(router, "D", 22001))
        prefill = stack.enter_context(pinging(router, "P", 21001))
        until("both are ready", lambda: sum(each["state"] == "ready" for each in nodes(router).values()) == 2)
        before = nodes(router)[prefill.url]["id"]
        port = prefill.address.split(":")[1]
        prefill.kill(signal.SIGKILL)
        # Its KV socket has another port now: vLLM's engines take the next one that is free.
        with pinging(router, "P", 21002, "--port", port) as again:

            def state() -> dict[str, Any]:
                return nodes(router).get(again.url, {"id": before, "state": "gone"})

            until("it is another node", lambda: state()["id"] != before)
            until("it is ready", lambda: state()["state"] == "ready")
            assert len(nodes(router)) == 2
            assert ask(router.address, COMPLETIONS, wanted())[0] == 200
            assert "___prefill_addr_127.0.0.1:21002___" in again.log()[0]["id"]
            assert decode.log()[-1]["id"] == again.log()[0]["id"]


def test_an_engine_named_by_a_flag_and_by_pings_is_one_node() -> None:
    with FakeEngine() as engine:
        url = f"http://localhost:{engine.address.split(':')[1]}"
        with Router("--worker", url, *PING, nodes=1) as router:
            with beating(router, url, "--role", "worker") as process:
                until("both know it", lambda: nodes(router)[url]["known_by"] == ["flag", "beat"])
                assert len(nodes(router)) == 1
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
            until("its good-bye has come", lambda: nodes(router)[url]["known_by"] == ["flag"])
            assert nodes(router)[url]["state"] == "ready"


def test_heartbeats_of_ours_tell_of_any_engine_and_end_with_a_goodbye() -> None:
    with Router(*PING, nodes=0) as router, FakeEngine() as engine:
        with beating(router, engine.url, "--role", "worker", "--group", "a") as process:
            until("it is ready", lambda: nodes(router).get(engine.url, {}).get("state") == "ready")
            found = nodes(router)[engine.url]
            assert (found["role"], found["group"], found["connector"]) == ("worker", "a", "store")
            assert ask(router.address, COMPLETIONS, wanted())[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        until("it has gone", lambda: not nodes(router))
        assert ask(router.address, COMPLETIONS, wanted())[0] == 503


def test_engines_that_flap_each_second_cost_nobody_a_request() -> None:
    """Their beats come and go, and so do they; one engine stays."""
    with FakeEngine() as stays, Router("--worker", stays.url, *PING, nodes=1) as router:
        statuses: list[int] = []
        port = free_port()
        for _ in range(3):
            with FakeEngine("--port", str(port)) as flaps, beating(router, flaps.url, "--role", "worker"):
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    statuses.append(ask(router.address, COMPLETIONS, wanted(LONG))[0])
            statuses += [ask(router.address, COMPLETIONS, wanted(LONG))[0] for _ in range(5)]
        assert set(statuses) == {200}


def test_a_name_s_addresses_are_engines() -> None:
    with FakeEngine() as engine:
        name = f"localhost:{engine.address.split(':')[1]}"
        with Router("--worker-dns", name, "--worker-dns", "no-such-name.invalid:80", nodes=1) as router:
            assert nodes(router)[engine.url]["known_by"] == ["dns"]
            assert ask(router.address, COMPLETIONS, wanted())[0] == 200
            failed = re.compile(r"^kvlane_route_names_failed_total [1-9]", re.MULTILINE)
            until("the other name has failed", lambda: failed.search(ask(router.admin, "/metrics")[1]))
            assert sum("cannot be looked up" in line for line in router.lines) == 1


def test_ranks_of_one_server_are_engines_of_their_own(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        config = tmp_path / "route.toml"
        config.write_text(
            f'policy = "round-robin"\n[[node]]\nurl = "{engine.url}"\nrole = "worker"\nranks = 3\n'
        )
        with Router("--config", str(config), nodes=3) as router:
            assert sorted(nodes(router)) == [f"{engine.url}#{rank}" for rank in range(3)]
            for _ in range(6):
                # A client chooses no rank.
                assert ask(router.address, COMPLETIONS, wanted(), {"X-data-parallel-rank": "7"})[0] == 200
            ranks = [seen["headers"]["x-data-parallel-rank"] for seen in engine.log()]
            assert sorted(ranks) == ["0", "0", "1", "1", "2", "2"]


@contextmanager
def dealer(router: Router) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{ping_of(router)}")
        yield socket


@pytest.mark.parametrize(
    ("reason", "sent"),
    [
        ("malformed", b"no msgpack"),
        ("malformed", message("X", "127.0.0.1:1", "127.0.0.1:2")),
        ("protocol", b"x" * (1 << 20)),
        ("address", message("P", "10.0.0.1:8100", "127.0.0.1:2")),
        ("address", message("P", "127.0.0.1:8100", "10.0.0.1:2")),
        ("address", message("P", "example.com:8100", "127.0.0.1:2")),
    ],
)
def test_what_a_stranger_pings_is_dropped_counted_and_told_once(reason: str, sent: bytes) -> None:
    with Router(*PING, nodes=0) as router:
        for number in (1, 2):
            with dealer(router) as socket:
                socket.send(sent)
                until("it is counted", lambda number=number: refused(router, reason) >= number)
        assert nodes(router) == {}
        assert sum("beat refused" in line for line in router.lines) == 1
        with dealer(router) as socket:
            socket.send(message("P", "127.0.0.1:1", "127.0.0.1:2"))
            until("the control: a right one counts", lambda: len(nodes(router)) == 1)


def test_peers_outside_the_list_are_not_read() -> None:
    with Router(*PING, "--ping-allow", "10.0.0.0/8", nodes=0) as router:
        with dealer(router) as socket:
            socket.send(message("P", "10.0.0.1:1", "10.0.0.1:2"))
            until("it is counted", lambda: refused(router, "stranger"))
        assert nodes(router) == {}


def test_clients_of_the_former_proxy_find_the_router_at_a_second_port() -> None:
    with routed([], flags=("--listen", "127.0.0.1:0")) as (router, _):
        also = re.compile(r"served at http://(\S+) too")
        found = until("it is told", lambda: next(filter(None, map(also.search, list(router.lines))), None))
        assert ask(found[1], COMPLETIONS, wanted())[0] == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('polcy = "random"', 'polcy = "random": there is no such key; there are node, dns, listen'),
        ('policy = "fair"', 'policy = "fair": .*choose one of random, round-robin'),
        ("threads = 0", "threads = 0: .*1..=256"),
        ("threads = [1]", "threads = .*a text or a number is allowed"),
        ('worker = "http://127.0.0.1:1"', r"worker: .*\[\[node\]\] tables"),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "prefil"',
            'number 1: role = "prefil": .*prefill, decode or worker',
        ),
        ('[[node]]\nurl = 3\nrole = "worker"', "url = 3: it has to be a text"),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "worker"\nrank = 2',
            "rank = 2: .*there are url, role, group, class, host, pool, ranks",
        ),
        ('[[node]]\nrole = "worker"', "url is missing"),
        ('[[node]]\nurl = "http://h:1"\nrole = "worker"\nranks = 0', "ranks = 0: .*from 1 to 1024"),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "prefill"\nzmq = "h:2"',
            'zmq is of nodes with connector = "p2p-nccl"',
        ),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "prefill"\nconnector = "store"\nhandoff = "h:2"',
            'handoff is of nodes with connector = "direct"',
        ),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "prefill"\nconnector = "direct"\nhandoff = "h"',
            "handoff = .*HOST:PORT",
        ),
        (
            '[[node]]\nurl = "http://h:1"\nrole = "prefill"\nconnector = "tcp"',
            "choose store, nixl, p2p-nccl or direct",
        ),
        ("[node]", r"write \[\[node\]\]"),
        ("a =", "line 1: "),
        ('[[node]]\nurl = "http://h:1"\nrole = "prefill"', "without --decode"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    config = tmp_path / "route.toml"
    config.write_text(text)
    ended = run_kvlane(
        "route", "--config", str(config), "--socket", "off", "--listen", "127.0.0.1:0", "--admin", "off"
    )
    assert ended.returncode == 1
    assert re.search(expected, ended.stderr), ended.stderr
    assert str(config) in ended.stderr or "without" in expected
    assert len(ended.stderr.splitlines()) == 1


def test_flags_count_more_than_the_file_and_engines_add_up(tmp_path: Path) -> None:
    with FakeEngine() as one, FakeEngine() as other:
        config = tmp_path / "route.toml"
        config.write_text(f'policy = "random"\ndrain = 3\n[[node]]\nurl = "{one.url}"\nrole = "worker"\n')
        flags = ("--config", str(config), "--worker", other.url, "--policy", "round-robin")
        with Router(*flags, nodes=2) as router:
            assert any("by round-robin" in line and "2 workers" in line for line in router.lines)
            for _ in range(4):
                assert ask(router.address, COMPLETIONS, wanted())[0] == 200
            assert (len(one.log()), len(other.log())) == (2, 2)
            router.process.send_signal(signal.SIGTERM)
            router.process.wait(PATIENCE)
        assert any("stopping" in line and "requests have 3 s" in line for line in router.lines)


def test_a_router_learns_which_class_of_engines_answers_sooner(tmp_path: Path) -> None:
    """Engines of one class answer after 160 ms, of the other after 40."""
    with FakeEngine("--ttft-ms", "40") as fast, FakeEngine("--ttft-ms", "160") as slow:
        config = tmp_path / "route.toml"
        tables = [
            f'[[node]]\nurl = "{engine.url}"\nrole = "worker"\nclass = "{name}"\n'
            for name, engine in (("fast", fast), ("slow", slow))
        ]
        config.write_text('policy = "least-delay"\n' + "".join(tables))
        with Router("--config", str(config), nodes=2) as router:

            def predictions() -> dict[str, dict[str, object] | None]:
                _, page, _ = ask(router.admin, "/nodes")
                return {node["class"]: node["prediction"] for node in page["nodes"]}

            assert predictions() == {"fast": None, "slow": None}
            # Answers in one piece say nothing of their first token.
            assert ask(router.address, COMPLETIONS, wanted("whole"))[0] == 200
            # Nor do refusals.
            too_long = wanted("refused", stream=True, max_tokens=10_000_000)
            assert ask(router.address, COMPLETIONS, too_long)[0] == 400
            assert predictions() == {"fast": None, "slow": None}
            numbers = itertools.count()

            def both_are_known() -> bool:
                body = wanted(f"{next(numbers)} of many", stream=True, max_tokens=1)
                assert ask(router.address, COMPLETIONS, body)[0] == 200
                return all(each is not None and each["is_used"] for each in predictions().values())

            until("both classes are known", both_are_known)
            before = len(slow.log())
            for number in range(20):
                body = wanted(f"{number} of others", stream=True, max_tokens=1)
                assert ask(router.address, COMPLETIONS, body)[0] == 200
            assert len(slow.log()) - before <= 2


def test_a_router_learns_which_decode_engine_a_prompt_reaches_sooner(tmp_path: Path) -> None:
    """One beside the prefill engine, whose first token comes at once; on another host one that waits 160 ms."""
    with (
        FakeEngine("--pairs", "kvlane") as prefill,
        FakeEngine("--pairs", "kvlane", "--ttft-ms", "5") as near,
        FakeEngine("--pairs", "kvlane", "--ttft-ms", "160") as far,
    ):
        config = tmp_path / "route.toml"
        tables = [
            f'[[node]]\nurl = "{engine.url}"\nrole = "{role}"\nhost = "{host}"\n'
            for engine, role, host in (
                (prefill, "prefill", "a"),
                (near, "decode", "a"),
                (far, "decode", "b"),
            )
        ]
        config.write_text('policy = "least-delay"\nshort-prompt = 0\n' + "".join(tables))
        with Router("--config", str(config), nodes=3) as router:
            _, page, _ = ask(router.admin, "/nodes")
            assert {node["role"] + node["host"] for node in page["nodes"]} == {
                "prefilla",
                "decodea",
                "decodeb",
            }
            numbers = itertools.count()

            def sent() -> None:
                body = wanted(f"{next(numbers)} of many" + LONG, stream=True, max_tokens=1)
                assert ask(router.address, COMPLETIONS, body)[0] == 200

            def only_the_near_one() -> bool:
                before = len(far.log())
                for _ in range(20):
                    sent()
                return len(far.log()) == before

            sent()
            sent()
            assert len(near.log()) and len(far.log()), "by turns, while nothing is known"
            until("prompts go to the near one", only_the_near_one)
            assert len(far.log()) >= 40, "both were learned of"
