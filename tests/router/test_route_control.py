"""`kvlane route list`, `drain`, `add` and `remove`: changes while the router runs, and who may make them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from another_user import as_user
from processes import KVLANE, PATIENCE, run_kvlane, until
from routed import COMPLETIONS, Router, ask, connect, routed, wanted

from kvlane.testing.fake_engine import FakeEngine


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "route.sock"


def output(at: Path, *words: str) -> str:
    done = run_kvlane("route", *words, "--socket", str(at))
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(at: Path, *words: str) -> str:
    done = run_kvlane("route", *words, "--socket", str(at))
    assert done.returncode == 1, done.stdout
    return done.stderr


def listed(at: Path) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in json.loads(output(at, "list", "--json"))["nodes"]}


def test_a_drained_engine_finishes_its_streams_and_gets_nothing_new(at: Path) -> None:
    slow = ["--itl-ms", "20"]
    with routed(slow, slow, flags=("--socket", str(at), "--policy", "round-robin")) as (router, engines):
        one, other = engines
        streams = [connect(router.address) for _ in range(4)]
        for stream in streams:
            stream.request("POST", COMPLETIONS, json.dumps(wanted("short", max_tokens=60, stream=True)))
        until("all run", lambda: len(one.log()) + len(other.log()) == 4)
        assert listed(at)[one.url]["requests"] == 2
        waits = subprocess.Popen([KVLANE, "route", "drain", one.url, "--wait", "--socket", str(at)])
        until("it drains", lambda: listed(at)[one.url]["state"] == "draining")
        for _ in range(4):
            assert ask(router.address, COMPLETIONS, wanted("short", max_tokens=1))[0] == 200
        assert waits.poll() is None, "its streams are not over"
        for stream in streams:
            assert stream.getresponse().read().endswith(b"data: [DONE]\n\n")
        assert waits.wait(PATIENCE) == 0
        assert (len(one.log()), len(other.log())) == (2, 6)
        assert ask(router.admin, "/nodes")[1]["nodes"][0]["state"] in ("draining", "ready")
        output(at, "add", one.url, "--role", "worker")
        until(
            "it serves again",
            lambda: ask(router.address, COMPLETIONS, wanted("short")) and len(one.log()) > 2,
        )


def test_engines_are_added_and_removed_while_it_runs(at: Path) -> None:
    with (
        FakeEngine() as one,
        FakeEngine("--itl-ms", "20") as other,
        Router("--worker", one.url, "--socket", str(at), nodes=1) as router,
    ):
        table = output(at, "add", other.url, "--role", "worker", "--group", "a")
        assert other.url in table and table.startswith("NODE")
        until("it is ready", lambda: listed(at)[other.url]["state"] == "ready")
        assert listed(at)[other.url]["known_by"] == ["operator"]
        output(at, "remove", one.url, "--wait")
        assert list(listed(at)) == [other.url]
        stream = connect(router.address)
        stream.request("POST", COMPLETIONS, json.dumps(wanted("short", max_tokens=60, stream=True)))
        until("it runs", lambda: len(other.log()) == 1)
        assert "goes when the 1 requests" in output(at, "remove", other.url)
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 503
        assert stream.getresponse().read().endswith(b"data: [DONE]\n\n")
        until("it has gone", lambda: not listed(at))
        assert sum("node removed" in line for line in router.lines) == 2


def test_it_does_what_the_page_tells_it(at: Path) -> None:
    """With the page's addresses, where nobody answers; the page's file names engines of all kinds."""
    page = (Path(__file__).parents[2] / "docs/router-reference.md").read_text()
    (commands,) = re.findall(r"```sh\n(kvlane route list\n[^`]*)```", page)
    (file,) = re.findall(r"```text\n(policy = [^`]*)```", page)
    config = at.with_name("route.toml")
    config.write_text(re.sub("^listen.*", "", file, flags=re.MULTILINE))
    flags = ("--worker", "http://127.0.0.1:8100", "--config", str(config), "--socket", str(at))
    with Router(*flags, nodes=0):
        found = {name.removeprefix("http://127.0.0.1:"): node for name, node in listed(at).items()}
        assert {"8100", *(f"8100#{rank}" for rank in range(4)), "8200"} <= set(found)
        assert (found["8200"]["group"], found["8200"]["connector"]) == ("a", "p2p-nccl")
        for command in commands.splitlines():
            output(at, *command.split()[2:])
        assert "http://127.0.0.1:8102" in listed(at)
        until("it has gone", lambda: "http://127.0.0.1:8100" not in listed(at))


def test_removed_at_once_what_is_under_way_goes_on(at: Path) -> None:
    with routed(["--itl-ms", "20"], flags=("--socket", str(at))) as (router, (engine,)):
        stream = connect(router.address)
        stream.request("POST", COMPLETIONS, json.dumps(wanted("short", max_tokens=60, stream=True)))
        until("it runs", lambda: len(engine.log()) == 1)
        assert "has gone" in output(at, "remove", engine.url, "--now")
        assert listed(at) == {}
        assert stream.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_what_cannot_be_done_is_said(at: Path) -> None:
    with routed([], flags=("--socket", str(at))) as (_, (engine,)):
        assert "is no node of this router" in refusal(at, "drain", "http://127.0.0.1:1")
        assert "is there already, as worker" in refusal(at, "add", engine.url, "--role", "decode")
        zmq = ("--connector", "p2p-nccl", "--zmq", "a b:1")
        assert "HOST:PORT" in refusal(at, "add", "http://127.0.0.1:1", "--role", "decode", *zmq)
        handoff = ("--connector", "direct", "--handoff", 'a"b:1')
        assert "HOST:PORT" in refusal(at, "add", "http://127.0.0.1:1", "--role", "prefill", *handoff)
        again = run_kvlane(
            "route", "--worker", engine.url, "--socket", str(at), "--listen", "127.0.0.1:0", "--admin", "off"
        )
        assert again.returncode == 1 and "somebody else listens there" in again.stderr
    assert "no router answers" in refusal(at, "list")
    assert not at.exists()


def test_the_socket_is_for_its_user_alone_and_takes_nonsense(at: Path) -> None:
    with routed([], flags=("--socket", str(at))) as (router, (engine,)):
        mode = at.stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600

        def say(line: bytes) -> dict[str, Any]:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE)
                client.connect(str(at))
                client.sendall(line)
                return json.loads(client.makefile().readline())

        for line in (
            b"\n",
            b"nonsense\n",
            b'{"call": "fly"}\n',
            b'{"call": "drain"}\n',
            b"\xff\n",
            b"x" * 5000 + b"\n",
        ):
            assert "does not understand" in say(line)["error"], line
        unknown = b'{"call": "drain", "node": "http://127.0.0.1:1", "more": 1}\n'
        assert "unknown field" in say(unknown)["error"]
        assert say(b'{"call": "list"}\n')["nodes"][0]["node"] == engine.url
        # Callers who say nothing keep nobody out.
        silent = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for each in silent:
            each.setblocking(False)
            each.connect_ex(str(at))
        until("they were sent away", lambda: engine.url in listed(at))
        for each in silent:
            each.close()
        assert ask(router.address, COMPLETIONS, wanted("short"))[0] == 200


@pytest.mark.another_user
def test_another_user_is_turned_away() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        at = folder / "route.sock"
        with routed([], flags=("--socket", str(at))) as (router, _):
            # Somebody has opened it: the router still looks at who calls.
            at.chmod(0o666)

            def ask_it() -> str:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(PATIENCE)
                    client.connect(str(at))
                    client.sendall(b'{"call": "list"}\n')
                    return client.recv(100).decode()

            assert "nodes" in as_user(os.geteuid(), ask_it), "the control: its own user is served"
            assert "nodes" not in as_user(54321, ask_it)
            until("it is told", lambda: any("the peer is another user" in line for line in router.lines))
    finally:
        shutil.rmtree(folder)
