"""SIGHUP, SIGTERM and SIGINT: a router reads its configuration again, or stops and loses no request on the way."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from busy import stretched
from processes import PATIENCE, until
from routed import COMPLETIONS, Router, ask, connect, routed, wanted

from kvlane.testing.fake_engine import FakeEngine

READ = "configuration read again"
REFUSED = "configuration not read again, the former one stays"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def hang_up(router: Router, line: str) -> str:
    """Sends SIGHUP, and returns the line of the log with the result."""
    seen = len(router.lines)
    router.process.send_signal(signal.SIGHUP)

    def said() -> str | None:
        assert router.process.poll() is None, "SIGHUP ended the router"
        return next((each for each in router.lines[seen:] if line in each), None)

    return until(line, said)


def json_of(body: object) -> bytes:
    return json.dumps(body).encode()


def names(router: Router) -> set[str]:
    return {node["node"] for node in ask(router.admin, "/nodes")[1]["nodes"]}


def node(engine: FakeEngine, role: str = "worker") -> str:
    return f'[[node]]\nurl = "{engine.url}"\nrole = "{role}"\n'


@contextmanager
def by_file(file: Path, text: str, *, nodes: int) -> Iterator[Router]:
    file.write_text(text)
    with Router("--config", str(file), nodes=nodes) as router:
        yield router


def test_a_hangup_reads_keys_again_and_ends_nothing(tmp_path: Path) -> None:
    """SIGHUP used to kill the router, with every stream that it carried."""
    file = tmp_path / "keys"
    file.write_text("first\n")
    file.chmod(0o600)
    with routed(["--itl-ms", "50"], flags=("--api-key-file", str(file))) as (router, _):
        stream = connect(router.address)
        body = wanted("x", stream=True, max_tokens=20)
        stream.request("POST", COMPLETIONS, json_of(body), bearer("first"))
        answer = stream.getresponse()
        assert answer.read1().startswith(b"data: ")
        file.write_text("second\nthird\n")
        assert "2 keys of clients" in hang_up(router, READ)
        for key, status in [("second", 200), ("third", 200), ("first", 401)]:
            assert ask(router.address, COMPLETIONS, wanted("x"), bearer(key))[0] == status
        assert answer.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("text", ["\n", None])
def test_a_key_file_that_cannot_be_used_is_refused_and_the_former_keys_stay(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n")
    file.chmod(0o600)
    with routed([], flags=("--api-key-file", str(file))) as (router, _):
        file.unlink() if text is None else file.write_text(text)
        line = hang_up(router, REFUSED)
        assert "--api-key-file" in line
        assert ask(router.address, COMPLETIONS, wanted("x"), bearer("first"))[0] == 200
        assert ask(router.address, COMPLETIONS, wanted("x"))[0] == 401


def test_a_hangup_reads_the_engines_of_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    with ExitStack() as stack:
        first, second, slow = (stack.enter_context(FakeEngine("--itl-ms", ms)) for ms in ("0", "0", "50"))
        router = stack.enter_context(by_file(file, node(first) + node(slow), nodes=2))
        slow_stream = connect(router.address)
        first.faults(refuse=True)
        slow_stream.request("POST", COMPLETIONS, json_of(wanted("x", stream=True, max_tokens=100)))
        answer = slow_stream.getresponse()
        assert answer.read1().startswith(b"data: ")
        first.faults()
        file.write_text(node(second) + '[[dns]]\nname = "localhost:1"\nrole = "worker"\n')
        assert "1 nodes are new or changed, 2 drain; 1 names are new, 0 gone" in hang_up(router, READ)
        until("the idle one has gone", lambda: first.url not in names(router))
        until("the new one is ready", lambda: ask(router.admin, "/health")[1]["nodes_ready"] == 1)
        assert ask(router.address, COMPLETIONS, wanted("x"))[0] == 200
        assert len(second.log()) == 1
        assert slow.url in names(router), "it drains until its request is over"
        assert answer.read().endswith(b"data: [DONE]\n\n")
        until("it has gone", lambda: slow.url not in names(router))
        file.write_text(node(second))
        assert "0 nodes are new or changed, 0 drain; 0 names are new, 1 gone" in hang_up(router, READ)
        until("the name's nodes have gone", lambda: names(router) == {second.url})


def test_an_engine_whose_role_changes_in_the_file_joins_anew(tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeEngine("--pairs", "nixl")) for _ in range(2))
        router = stack.enter_context(by_file(file, node(one) + node(other), nodes=2))
        file.write_text(node(one, "prefill") + node(other, "decode"))
        hang_up(router, READ)
        roles = {each["node"]: each["role"] for each in ask(router.admin, "/nodes")[1]["nodes"]}
        assert roles == {one.url: "prefill", other.url: "decode"}
        until("both are ready", lambda: ask(router.admin, "/health")[1].get("nodes_ready") == 2)
        assert ask(router.address, COMPLETIONS, wanted())[0] == 200
        assert len(one.log()) == len(other.log()) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[[node]]\nurl = 5\n", "url"),
        ("nonsense = 3\n", "there is no such key"),
        ("", "no engine is named"),
        ('max-connections = "many"\n', "max-connections"),
        ("[[node", "line 1"),
    ],
)
def test_a_bad_file_is_refused_with_one_sentence_and_the_former_one_stays(
    tmp_path: Path, wrong: str, said: str
) -> None:
    file = tmp_path / "route.toml"
    with FakeEngine() as engine, by_file(file, node(engine), nodes=1) as router:
        file.write_text(wrong)
        line = hang_up(router, REFUSED)
        assert said in line, line
        assert ask(router.address, COMPLETIONS, wanted("x"))[0] == 200
        # The control: the file as it was is taken.
        file.write_text(node(engine))
        hang_up(router, READ)


def test_a_hangup_names_what_takes_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "route.toml"
    with FakeEngine() as engine, by_file(file, "drain = 7\n" + node(engine), nodes=1) as router:
        file.write_text('policy = "random"\ndrain = 3\nmax-body = "1mb"\n' + node(engine))
        for _ in range(2):
            assert hang_up(router, READ).endswith("these count after a restart only: max-body, policy")
        file.write_text("drain = 2\n" + node(engine))
        assert "restart" not in hang_up(router, READ)
        router.process.send_signal(signal.SIGINT)
        assert router.process.wait(PATIENCE) == 0
        until("it has said all", lambda: any("requests have 2 s" in line for line in router.lines))


def test_at_sigterm_health_says_so_at_once_and_clients_are_served_until_the_delay_is_over() -> None:
    """A new pod's clients come for some seconds after SIGTERM; they found a closed port."""
    delay = int(stretched(2))
    closed_by = delay + stretched(3)
    with routed(["--itl-ms", "20"], flags=("--drain-delay", str(delay), "--drain", "60")) as (router, _):
        stream = connect(router.address)
        # The stream lasts longer than the port may stay open.
        tokens = round((closed_by + 1) / 0.02)
        stream.request("POST", COMPLETIONS, json_of(wanted("x", stream=True, max_tokens=tokens)))
        answer = stream.getresponse()
        router.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        until("admin says so", lambda: ask(router.admin, "/health")[0] == 503)
        assert ask(router.admin, "/health")[1]["status"] == "the router stops"
        assert ask(router.address, "/health")[0] == 503
        status, _, headers = ask(router.address, COMPLETIONS, wanted("x"))
        assert (status, headers["connection"]) == (200, "close")
        assert time.monotonic() - began < delay
        until("the port is closed", lambda: _is_closed(router))
        assert delay - 0.1 < time.monotonic() - began < closed_by
        assert ask(router.admin, "/health")[0] == 503
        assert answer.read().endswith(b"data: [DONE]\n\n"), "it had --drain seconds"
        assert router.process.wait(PATIENCE) == 0
    assert router.lines[-1].endswith("stopped: nothing cut")


def _is_closed(router: Router) -> bool:
    try:
        ask(router.address, "/health")
    except (ConnectionError, http.client.HTTPException):
        return True
    return False


def test_the_last_line_says_how_many_requests_were_cut() -> None:
    with routed(["--itl-ms", "20"], flags=("--drain", "1")) as (router, _):
        streams = _long_streams(router, 3)
        idle = connect(router.address)
        idle.request("GET", "/v1/models")
        idle.getresponse().read()
        router.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                stream.read()
        assert router.process.wait(PATIENCE) == 0
    assert router.lines[-1].endswith("stopped: 3 requests cut after 1 s")


def _long_streams(router: Router, count: int) -> list[http.client.HTTPResponse]:
    answers = []
    for _ in range(count):
        stream = connect(router.address)
        stream.request("POST", COMPLETIONS, json_of(wanted("x", stream=True, max_tokens=5000)))
        answers.append(stream.getresponse())
    return answers


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(again: signal.Signals) -> None:
    for delay in ("0", "60"):
        with routed(["--itl-ms", "20"], flags=("--drain-delay", delay, "--drain", "60")) as (router, _):
            (answer,) = _long_streams(router, 1)
            router.process.send_signal(signal.SIGTERM)
            until("it stops", lambda router=router: any("stopping" in line for line in router.lines))
            router.process.send_signal(again)
            assert router.process.wait(PATIENCE) == 0
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                answer.read()
        assert "stopped: 1 request cut after" in router.lines[-1]


def test_ctrl_c_does_not_wait_for_new_clients() -> None:
    with routed([], flags=("--drain-delay", "60")) as (router, _):
        router.process.send_signal(signal.SIGINT)
        assert router.process.wait(5) == 0
    assert router.lines[-1].endswith("stopped: nothing cut")
