"""Each fault of a fake engine as a client meets it, and what the log then says."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvlane.testing.fake_engine import FakeEngine

PATIENCE = 30.0
COMPLETIONS = "/v1/completions"
WHOLE = {"model": "fake", "prompt": "Tell me.", "max_tokens": 8}
STREAMED = {**WHOLE, "stream": True}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as started:
        yield started


def connect(engine: FakeEngine) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(engine.address, timeout=PATIENCE)


def post(connection: http.client.HTTPConnection, body: object = None) -> http.client.HTTPResponse:
    connection.request("POST", COMPLETIONS, json.dumps(WHOLE if body is None else body))
    return connection.getresponse()


def status(engine: FakeEngine, path: str = COMPLETIONS) -> int:
    connection = connect(engine)
    try:
        if path == COMPLETIONS:
            return post(connection).status
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def received(engine: FakeEngine, body: object) -> tuple[bytes, bool]:
    """All bytes of an answer up to its end, and whether that was a reset."""
    host, port = engine.address.split(":")
    data = json.dumps(body).encode()
    read = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as peer:
        peer.sendall(
            b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(data)) + data
        )
        while True:
            try:
                more = peer.recv(65536)
            except ConnectionResetError:
                return read, True
            if not more:
                return read, False
            read += more


def last(engine: FakeEngine) -> tuple[Any, Any]:
    """State and number of chunks of the newest request."""
    newest = engine.log()[-1]
    return newest["state"], newest["chunks"]


def test_a_status_comes_as_often_as_was_said(engine: FakeEngine):
    assert engine.faults(status=500, times=2)["status"] == {"value": 500, "left": 2, "path": None}
    assert [status(engine) for _ in range(3)] == [500, 500, 200]


def test_faults_stay_until_they_are_cleared(engine: FakeEngine):
    engine.faults(status=418)
    assert [status(engine) for _ in range(3)] == [418] * 3
    assert status(engine, "/health") == 200
    assert engine.faults() == {}
    assert status(engine) == 200


def test_a_fault_can_be_of_another_path(engine: FakeEngine):
    engine.faults(status=503, path="/health")
    assert (status(engine), status(engine, "/health")) == (200, 503)


def test_faults_that_do_not_exist_change_nothing(engine: FakeEngine):
    engine.faults(status=500)
    for wrong in ({"typo": True}, {"status": True}, {"die_at_chunk": -1}, {"times": 0}, {"refuse": 1}):
        with pytest.raises(ValueError):
            engine.faults(**wrong)
    assert status(engine) == 500


def test_retry_after(engine: FakeEngine):
    engine.faults(retry_after=2, times=1)
    connection = connect(engine)
    answer = post(connection)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    answer.read()
    # The connection lives on.
    assert post(connection).status == 200
    connection.close()


def test_refused_connections_close_and_open_ones_stay(engine: FakeEngine):
    before = connect(engine)
    assert post(before).read()
    engine.faults(refuse=True)
    with pytest.raises(OSError):
        status(engine)
    assert post(before).status == 200
    before.close()
    engine.faults()
    assert status(engine) == 200


@pytest.mark.parametrize("body", [WHOLE, STREAMED])
def test_a_hanging_engine_sends_nothing_until_its_client_goes(engine: FakeEngine, body: object):
    engine.faults(hang_before_first_byte=True, times=1)
    connection = connect(engine)
    connection.request("POST", COMPLETIONS, json.dumps(body))
    deadline = time.monotonic() + PATIENCE
    while not engine.log():
        assert time.monotonic() < deadline
    # The engine reads what comes in order of arrival: were there an answer, it would have been sent by now.
    assert status(engine) == 200
    assert connection.sock is not None
    connection.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.sock.recv(1)
    assert engine.log()[0]["state"] == "running"
    connection.close()
    while engine.log()[0]["state"] != "aborted":
        assert time.monotonic() < deadline


@pytest.mark.parametrize("at", [0, 3])
def test_a_stream_is_reset_after_that_many_tokens(engine: FakeEngine, at: int):
    engine.faults(die_at_chunk=at, times=1)
    read, reset = received(engine, STREAMED)
    assert reset
    assert read.startswith(b"HTTP/1.1 200 ")
    assert read.count(b'"text":') == at
    assert last(engine) == ("aborted", at)
    assert status(engine) == 200


def test_an_answer_in_one_piece_is_reset_amid_it(engine: FakeEngine):
    engine.faults(die_at_chunk=1)
    read, reset = received(engine, WHOLE)
    assert reset
    assert read.startswith(b"HTTP/1.1 200 ")
    engine.faults(die_at_chunk=0)
    assert received(engine, WHOLE) == (b"", True)


def test_the_process_exits_amid_a_stream(engine: FakeEngine):
    engine.faults(exit_at_chunk=2)
    read, _ = received(engine, STREAMED)
    assert read.count(b'"text":') == 2
    assert engine.process.wait(PATIENCE) == 3


def test_health_can_be_slow(engine: FakeEngine):
    engine.faults(slow_health=0.3, times=1)
    begin = time.monotonic()
    assert status(engine, "/health") == 200
    # A lower bound holds on any machine, however busy.
    assert time.monotonic() - begin >= 0.29


def test_garbage_is_no_http(engine: FakeEngine):
    engine.faults(garbage=True)
    connection = connect(engine)
    with pytest.raises(http.client.BadStatusLine):
        post(connection)
    connection.close()
    assert last(engine) == ("aborted", 0)


@pytest.mark.parametrize("body", [WHOLE, STREAMED])
def test_a_length_that_is_too_long(engine: FakeEngine, body: object):
    engine.faults(bad_length=True, times=1)
    connection = connect(engine)
    answer = post(connection, body)
    assert answer.status == 200
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    connection.close()
    assert last(engine)[0] == "aborted"


@pytest.mark.parametrize("body", [WHOLE, STREAMED])
def test_a_kept_connection_closes_after_an_answer_that_does_not_say_so(engine: FakeEngine, body: object):
    engine.faults(close_idle_connections=True)
    connection = connect(engine)
    answer = post(connection, body)
    assert "connection" not in answer.headers
    sock = connection.sock
    assert sock is not None
    assert answer.read()
    assert sock.recv(1) == b""
    connection.close()
    assert last(engine)[0] == "done"


def test_a_client_that_goes_aborts_its_request_and_frees_its_seat():
    with FakeEngine("--max-num-seqs", "1", "--itl-ms", "60000") as engine:
        first, second = connect(engine), connect(engine)
        assert post(first, STREAMED).status == 200
        second.request("POST", COMPLETIONS, json.dumps({**WHOLE, "max_tokens": 1}))
        assert first.sock is not None
        first.sock.shutdown(socket.SHUT_RDWR)
        first.close()
        assert second.getresponse().status == 200
        assert [(each["state"], each["chunks"]) for each in engine.log()] == [("aborted", 1), ("done", 1)]
        second.close()


def test_many_who_wait_for_one_seat_all_end():
    with FakeEngine("--max-num-seqs", "1", "--ttft-ms", "50") as engine:
        first = connect(engine)
        first.request("POST", COMPLETIONS, json.dumps(WHOLE))
        others = [connect(engine) for _ in range(20)]
        engine.faults()
        for each in others:
            each.request("POST", COMPLETIONS, json.dumps(WHOLE))
        said = {json.loads(each.getresponse().read())["choices"][0]["text"] for each in (first, *others)}
        assert len(said) == 1
        for each in (first, *others):
            each.close()
