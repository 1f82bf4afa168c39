"""Daemons that announce their blocks to replicas of an index, and ask one, while replicas and owners are killed."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from processes import Daemon, Engine, Index, clean_environment, run_kvlane, send_signal, until

MakeEngine = Callable[..., Engine]
MakeIndexed = Callable[..., list[Daemon]]
BLOCKS = 64
# Longer than a loaded machine needs: only a lookup that somebody does not answer waits for it.
ANSWER_MS = 500


def right(blocks: int) -> dict[str, object]:
    return {"blocks": blocks, "wrong": [], "ok": True, "detail": ""}


def cluster_of(daemon: Daemon) -> dict[str, Any]:
    return json.loads(run_kvlane("status", "--json", "--addr", daemon.address).stdout)["cluster"]


@pytest.fixture
def make_index(cleanup: ExitStack) -> Callable[..., Index]:
    def make(*flags: str) -> Index:
        index = Index(*flags)
        cleanup.callback(index.kill)
        index.start()
        return index

    return make


@pytest.fixture
def make_indexed(folder: Path, cleanup: ExitStack) -> MakeIndexed:
    """Daemons that know each other by these replicas."""

    def make(count: int, replicas: list[Index], *flags: str) -> list[Daemon]:
        daemons = []
        for number in range(count):
            home = folder / str(number)
            home.mkdir()
            daemon = Daemon(
                home,
                *("--index", ",".join(index.address for index in replicas)),
                *("--cluster-listen", f"127.0.0.1:{free_port()}", "--cluster-transport", "tcp"),
                *("--cluster-answer-ms", str(ANSWER_MS), "--fetch-wait-ms", "10000", *flags),
            )
            cleanup.callback(daemon.kill)
            daemon.start()
            daemons.append(daemon)
        for daemon in daemons:
            until(
                "the others are reached",
                lambda daemon=daemon: (
                    sum(m["is_reached"] for m in cluster_of(daemon)["members"]) >= count - 1
                ),
            )
        return daemons

    return make


def save(engine: Engine, daemon: Daemon, prompt: str, replicas: list[Index], blocks: int = BLOCKS) -> None:
    """Until each replica knows of all blocks that the daemon has."""
    assert engine.call("save", prompt=prompt, count=blocks)["ok"]
    daemon.settle()
    has = daemon.status()["blocks"]
    for index in replicas:
        until("the index knows", lambda index=index: has in index.blocks())


def test_what_one_daemon_announces_is_a_hit_at_another(
    make_index: Callable[..., Index], make_indexed: MakeIndexed, make_engine: MakeEngine
) -> None:
    replicas = [make_index(), make_index()]
    a, b = make_indexed(2, replicas)
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    at_b.wait_connected()
    save(at_a, a, "one", replicas)
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    assert at_b.call("check", prompt="another", count=BLOCKS) == right(0)
    assert sum(index.metric("kvlane_index_questions_total") for index in replicas) >= 2
    assert 'kvlane_index_owners{state="following"} 2' in replicas[0].page("/metrics")
    text = run_kvlane("status", "--addr", a.address).stdout
    assert "index       knows" in text and replicas[0].address in text
    # One replica is killed, then the other one: lookups go on, and find what there is to find.
    replicas[0].kill()
    for number in range(5):
        save(at_a, a, f"more-{number}", [replicas[1]], 8)
        until(
            "the other replica is asked",
            lambda number=number: at_b.call("check", prompt=f"more-{number}", count=8) == right(8),
        )
    replicas[1].kill()
    began = time.monotonic()
    assert at_a.call("save", prompt="two", count=BLOCKS)["ok"]
    for number in range(20):
        assert at_b.call("check", prompt=f"unknown-{number}", count=BLOCKS) == right(0)
    assert time.monotonic() - began < 20 * ANSWER_MS / 1000
    # A replica keeps nothing, and knows all again soon.
    replicas[1].start()
    until("hits come back", lambda: at_b.call("check", prompt="two", count=BLOCKS) == right(BLOCKS))
    for engine in (at_a, at_b):
        engine.call("close")


def test_an_owner_that_is_killed_or_stopped_costs_a_miss_and_comes_back_by_itself(
    make_index: Callable[..., Index], make_indexed: MakeIndexed, make_engine: MakeEngine
) -> None:
    index = make_index()
    a, b = make_indexed(2, [index])
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    boot = at_a.wait_connected()["boot"]
    at_b.wait_connected()
    save(at_a, a, "one", [index])
    a.restart()
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(0)
    at_a.wait_connected(boot)
    save(at_a, a, "two", [index])
    until("the new A is asked", lambda: at_b.call("check", prompt="two", count=BLOCKS) == right(BLOCKS))
    save(at_a, a, "three", [index], 2 * BLOCKS)
    send_signal(a.pid, signal.SIGSTOP)
    try:
        until("it is hidden", lambda: any(owner["state"] == "silent" for owner in index.owners()))
        began = time.monotonic()
        assert at_b.call("check", prompt="three", count=BLOCKS) == right(0)
        assert time.monotonic() - began < 10
        # After that the index has given it up, and dials it no more.
        until("it is silent for long", lambda: any(owner["silent_seconds"] > 7 for owner in index.owners()))
    finally:
        send_signal(a.pid, signal.SIGCONT)
    until("A is asked again", lambda: at_b.call("check", prompt="three", count=BLOCKS) == right(BLOCKS))
    for engine in (at_a, at_b):
        engine.call("close")


def test_a_daemon_with_another_token_does_not_join(
    make_index: Callable[..., Index], folder: Path, cleanup: ExitStack, tmp_path: Path
) -> None:
    for name in ("one", "another"):
        (tmp_path / name).write_text(f"the token {name}\n")
        (tmp_path / name).chmod(0o600)
    index = make_index("--token-file", str(tmp_path / "one"))
    stranger = Daemon(
        folder,
        *("--index", index.address, "--cluster-listen", f"127.0.0.1:{free_port()}"),
        *("--cluster-token-file", str(tmp_path / "another")),
    )
    cleanup.callback(stranger.kill)
    stranger.start()
    assert "another token" in stranger.log.wait_for("replica not reached")
    assert index.owners() == []


def test_an_index_that_others_could_join_is_refused() -> None:
    for flags, sentence in (
        (("--listen", "0.0.0.0:9556"), "can be reached from other hosts: write --token-file"),
        (("--listen", "nowhere"), "--listen 'nowhere' is not HOST:PORT"),
        (("--tls-key", "key.pem"), "--tls-authority go together: write all three"),
    ):
        said = run_kvlane("index", "--http", "off", *flags)
        assert said.returncode == 1 and sentence in said.stderr


def test_the_doctor_names_the_replicas(make_index: Callable[..., Index], make_indexed: MakeIndexed) -> None:
    index = make_index()
    a, _ = make_indexed(2, [index])

    def found() -> list[str]:
        environment = clean_environment(KVLANE_GPU_DRIVER="off")
        told = run_kvlane("doctor", "--json", "--addr", a.address, env=environment)
        return [each["found"] for each in json.loads(told.stdout)["findings"] if each["subject"] == "cluster"]

    until("both reach back", lambda: sum("reaches back" in each for each in found()) == 2)
    assert any(index.address in each for each in found())


def test_the_page_of_owners_says_what_each_has(
    make_index: Callable[..., Index], make_indexed: MakeIndexed, make_engine: MakeEngine
) -> None:
    index = make_index()
    (a,) = make_indexed(1, [index])
    engine = make_engine(a, "a")
    engine.wait_connected()
    save(engine, a, "one", [index])
    (owner,) = index.owners()
    assert owner["state"] == "following" and owner["blocks"] == a.status()["blocks"]
    assert owner["silent_seconds"] < 60 and owner["changes_behind"] == 0
    with urllib.request.urlopen(f"http://{index.http}/health", timeout=10) as answer:
        assert json.load(answer)["status"] == "ok"
    engine.call("close")
    assert a.stop() == 0
    until("it has left", lambda: [owner["state"] for owner in index.owners()] == ["gone"])
    assert index.stop() == 0
