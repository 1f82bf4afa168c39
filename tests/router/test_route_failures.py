"""Engines that fail, die, or come back; clients that leave. No request is lost that a live engine could serve."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading

import pytest
from processes import until
from routed import COMPLETIONS, LONG, Router, ask, connect, routed, text_of, wanted, words_of

from kvlane.testing.fake_engine import FakeEngine

LEAST = ("--policy", "least-loaded")


@pytest.mark.parametrize(
    "fault",
    [
        {"refuse": True},
        {"status": 500},
        {"status": 503},
        {"status": 429},
        {"die_at_chunk": 0},
        {"garbage": True},
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_before_the_first_byte_another_engine_serves(fault: dict[str, object], is_stream: bool) -> None:
    with routed([], [], flags=LEAST) as (router, (bad, good)):
        bad.faults(**fault)
        for _ in range(10):
            status, answer, _ = ask(router.address, COMPLETIONS, wanted("short", stream=is_stream))
            assert status == 200, answer
            assert (words_of(answer) if is_stream else text_of(answer)).split()
        assert len(good.log()) == 10
        bad.faults()


@pytest.mark.parametrize("has_kept", [False, True])
def test_a_request_that_kills_engines_does_not_kill_them_all(has_kept: bool) -> None:
    """Over kept connections it used to: an engine's end looked like one of an idle connection."""
    with routed(*[[]] * 5, flags=LEAST) as (router, engines):
        for _ in range(5 if has_kept else 0):
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
        assert all(bool(engine.log()) == has_kept for engine in engines)
        for engine in engines:
            engine.faults(exit_at_chunk=0)
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 502
        until("three are dead", lambda: sum(engine.process.poll() is not None for engine in engines) == 3)
        assert sum(engine.process.poll() is None for engine in engines) == 2


def test_a_request_that_two_engines_answer_with_500_is_tried_on_no_third() -> None:
    """vLLM answers 500 when a request makes it fail, and when its engine dies of the request."""
    with routed(*[[]] * 5, flags=LEAST) as (router, engines):
        for engine in engines:
            engine.faults(status=500)
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 500
        assert sum(len(engine.log()) for engine in engines) == 2


@pytest.mark.parametrize("fault", [{"status": 500}, {"retry_after": 7}])
def test_where_nobody_else_is_the_engines_error_comes_through(fault: dict[str, object]) -> None:
    with routed([]) as (router, (engine,)):
        engine.faults(**fault)
        assert (
            ask(router.address, COMPLETIONS, wanted())[:2] == ask(engine.address, COMPLETIONS, wanted())[:2]
        )


def test_nonsense_of_an_engine_is_a_502() -> None:
    with routed([]) as (router, (engine,)):
        engine.faults(garbage=True)
        status, answer, _ = ask(router.address, COMPLETIONS, wanted())
        assert (status, answer["error"]["code"]) == (502, 502)


def test_after_the_first_byte_the_client_sees_the_cut() -> None:
    with routed(["--itl-ms", "5"], ["--itl-ms", "5"], flags=LEAST) as (router, engines):
        for engine in engines:
            engine.faults(die_at_chunk=3)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(router.address, COMPLETIONS, wanted(stream=True))
        assert sum(len(engine.log()) for engine in engines) == 1, "it is not begun anew"


def test_a_kept_connection_that_the_engine_closes_just_now_costs_nobody_a_request() -> None:
    """Complaint 45 (smg 2162): the request that met it failed."""
    with routed([]) as (router, (engine,)):
        engine.faults(close_idle_connections=True)
        connection = connect(router.address)
        for _ in range(100):
            connection.request("POST", COMPLETIONS, json.dumps(wanted("short")))
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)


def test_a_dead_engine_is_left_alone_and_found_again() -> None:
    with FakeEngine() as first, FakeEngine() as second:
        port = second.address.split(":")[1]
        flags = ("--worker", first.url, "--worker", second.url, *LEAST)
        with Router(*flags, nodes=2) as router:
            second.kill(signal.SIGKILL)
            for _ in range(30):
                assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
            until("it is suspect", lambda: any("does not answer" in line for line in router.lines))
            with FakeEngine("--port", port) as again:
                until(
                    "it serves again",
                    lambda: ask(router.address, COMPLETIONS, wanted("short"))[0] and again.log(),
                )


def test_without_an_engine_503_and_when_to_ask_again() -> None:
    with routed([]) as (router, (engine,)):
        engine.kill(signal.SIGKILL)
        status, _, _ = ask(router.address, COMPLETIONS, wanted())
        assert status == 502, "it was there a moment ago"
        until("it is suspect", lambda: ask(router.address, "/health")[0] == 503)


def test_a_client_that_leaves_ends_its_request_in_the_engine() -> None:
    """Complaint 35 (production-stack 634)."""
    with routed(["--itl-ms", "50"]) as (router, (engine,)):
        for is_stream in (True, False):
            connection = connect(router.address)
            connection.request("POST", COMPLETIONS, json.dumps(wanted(max_tokens=1000, stream=is_stream)))
            until("it runs", lambda: [seen["state"] for seen in engine.log()][-1:] == ["running"])
            assert connection.sock is not None
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
            until("it is aborted", lambda: [seen["state"] for seen in engine.log()][-1:] == ["aborted"])


def test_a_client_that_does_not_read_holds_up_nobody_else() -> None:
    with routed([]) as (router, (engine,)):
        slow = connect(router.address)
        slow.connect()
        assert slow.sock is not None
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.request("POST", COMPLETIONS, json.dumps(wanted(max_tokens=30_000, stream=True)))
        until("it is under way", lambda: engine.log())
        for _ in range(10):
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
        slow.close()


def test_a_hanging_engine_is_given_up_once_when_that_is_asked_for() -> None:
    with routed([], [], flags=(*LEAST, "--first-byte-timeout", "0.3")) as (router, engines):
        engines[0].faults(hang_before_first_byte=True)
        for _ in range(4):
            assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200
        hanging = [seen for seen in engines[0].log() if seen["state"] != "done"]
        assert hanging, "the control: the hanging one was asked"
        until(
            "the first try is aborted", lambda: all(seen["state"] == "aborted" for seen in engines[0].log())
        )
        engines[1].faults(hang_before_first_byte=True)
        status, answer, _ = ask(router.address, COMPLETIONS, wanted("short"))
        assert (status, "0.3 s" in answer["error"]["message"]) == (504, True)


def test_engines_that_flap_lose_no_request() -> None:
    """One engine is stopped and continued, another killed and started, under load; a third lives."""
    with routed(*[["--itl-ms", "1"]] * 3) as (router, (_, stops, dies)):
        statuses: list[int] = []
        over = threading.Event()

        def client(number: int) -> None:
            while not over.is_set():
                prompt = f"client {number} " + LONG
                statuses.append(ask(router.address, COMPLETIONS, wanted(prompt, max_tokens=3))[0])

        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        [each.start() for each in clients]
        try:
            for _ in range(3):
                before = len(statuses)
                stops.kill(signal.SIGSTOP)
                until("others are served meanwhile", lambda before=before: len(statuses) > before + 5)
                stops.kill(signal.SIGCONT)
                until("requests go on", lambda before=before: len(statuses) > before + 20)
            before = len(statuses)
            dies.kill(signal.SIGKILL)
            until("requests go on without it", lambda: len(statuses) > before + 50)
        finally:
            over.set()
            [each.join() for each in clients]
        assert set(statuses) == {200}
