"""Daemons that lend each other blocks: what one has computed is a hit at another, whatever happens to one of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from processes import Daemon, Engine, clean_environment, run_kvlane, send_signal, until

MakeEngine = Callable[..., Engine]
MakeCluster = Callable[..., list[Daemon]]

BLOCKS = 64
# Longer than a loaded machine needs: only a lookup that somebody does not answer waits for it.
ANSWER_MS = 500
FETCH_MS = 10_000


def right(blocks: int) -> dict[str, object]:
    return {"blocks": blocks, "wrong": [], "ok": True, "detail": ""}


def cluster_of(daemon: Daemon) -> dict[str, Any]:
    return json.loads(run_kvlane("status", "--json", "--addr", daemon.address).stdout)["cluster"]


def reached(daemon: Daemon) -> list[bool]:
    return [member["is_reached"] for member in cluster_of(daemon)["members"]]


def wait_until_reached(daemons: list[Daemon], count: int | None = None) -> None:
    others = len(daemons) - 1 if count is None else count
    for daemon in daemons:
        until("the others are reached", lambda daemon=daemon: sum(reached(daemon)) >= others)


def counted(daemon: Daemon, name: str) -> int:
    _, metrics = daemon.http("/metrics")
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return int(float(lines[0].rsplit(" ", 1)[1]))


@pytest.fixture
def make_cluster(folder: Path, cleanup: ExitStack) -> MakeCluster:
    """Daemons that all name each other, and themselves, as a headless service does."""

    def make(count: int, *flags: str, each: list[list[str]] | None = None, **options: Any) -> list[Daemon]:
        ports = [free_port() for _ in range(count)]
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        daemons = []
        for number, port in enumerate(ports):
            home = folder / str(number)
            home.mkdir()
            daemon = Daemon(
                home,
                *("--peers", peers, "--cluster-listen", f"127.0.0.1:{port}"),
                *("--cluster-answer-ms", str(ANSWER_MS), "--fetch-wait-ms", str(FETCH_MS)),
                *(*flags, *(each[number] if each else [])),
                **options,
            )
            cleanup.callback(daemon.kill)
            daemon.start()
            daemons.append(daemon)
        return daemons

    return make


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_one_daemon_has_is_a_hit_at_another(
    make_cluster: MakeCluster, make_engine: MakeEngine, transport: str
) -> None:
    a, b = daemons = make_cluster(2, "--cluster-transport", transport)
    wait_until_reached(daemons)
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    at_b.wait_connected()
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    assert at_b.call("check", prompt="another", count=BLOCKS) == right(0)
    assert cluster_of(b)["fetched_blocks"] == cluster_of(a)["lent_blocks"] == BLOCKS
    until("the loans are returned", lambda: cluster_of(a)["lent_bytes_now"] == 0)
    assert cluster_of(a)["expired_loans"] == 0
    # Now B has it itself.
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    assert counted(b, "kvlane_cluster_fetched_blocks_total") == BLOCKS
    text = run_kvlane("status", "--addr", b.address).stdout
    assert f"{BLOCKS} blocks" in text and "reached, answers in" in text
    for engine in (at_a, at_b):
        engine.call("close")


def test_an_engine_that_computes_faster_than_another_daemon_answers_gets_a_miss_at_once(
    make_cluster: MakeCluster, make_engine: MakeEngine
) -> None:
    a, b = daemons = make_cluster(2)
    wait_until_reached(daemons)
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    at_b.wait_connected()
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    # It would compute all of it in a quarter of a microsecond.
    found = at_b.call("lookup", prompt="one", count=BLOCKS, tokens_per_s=2**32 - 1)
    assert found["tokens"] == 0 and found["seconds"] < FETCH_MS / 1e3
    assert cluster_of(a)["lent_blocks"] == cluster_of(b)["fetched_blocks"] == 0
    # What the pool has is a hit, however fast the engine is.
    for tokens_per_s in (1, 2**32 - 1):
        found = at_b.call("lookup", prompt="one", count=BLOCKS, tokens_per_s=tokens_per_s)
        assert at_b.call("load", prompt="one", lease=found["lease"])["blocks"] == BLOCKS
    assert cluster_of(b)["fetched_blocks"] == BLOCKS
    for engine in (at_a, at_b):
        engine.call("close")


def test_a_prompt_that_another_engine_saves_is_fetched_however_fast_its_engine_computes(
    make_cluster: MakeCluster, make_engine: MakeEngine
) -> None:
    """It waits for the rest anyhow, which would be of no use without the blocks before it."""
    a, b = daemons = make_cluster(2)
    wait_until_reached(daemons)
    at_a, prefills, decodes = make_engine(a, "a"), make_engine(b, "prefills"), make_engine(b, "decodes")
    for engine in (at_a, prefills, decodes):
        engine.wait_connected()
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    handoff = prefills.call("hand_over", count=BLOCKS, wait_ms=20_000)
    found = decodes.call("lookup", prompt="one", count=BLOCKS, handoff=handoff, tokens_per_s=2**32 - 1)
    assert found["tokens"] > 0 and found["seconds"] < 20
    assert decodes.call("load", prompt="one", lease=found["lease"])["blocks"] == BLOCKS
    for engine in (at_a, prefills, decodes):
        engine.call("close")


def test_a_killed_owner_costs_a_miss_and_is_found_again_by_itself(
    make_cluster: MakeCluster, make_engine: MakeEngine
) -> None:
    a, b = daemons = make_cluster(2)
    wait_until_reached(daemons)
    at_b = make_engine(b, "b")
    at_b.wait_connected()
    at_a = make_engine(a, "a")
    boot = at_a.wait_connected()["boot"]
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    a.restart()
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(0)
    at_a.wait_connected(boot)
    assert at_a.call("save", prompt="two", count=BLOCKS)["ok"]
    a.settle()
    until(
        "the new daemon's blocks are hits",
        lambda: at_b.call("check", prompt="two", count=BLOCKS) == right(BLOCKS),
    )
    for engine in (at_a, at_b):
        engine.call("close")


def test_a_stopped_owner_holds_up_nobody_for_long(make_cluster: MakeCluster, make_engine: MakeEngine) -> None:
    a, b = daemons = make_cluster(2, "--cluster-transport", "tcp")
    wait_until_reached(daemons)
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    at_b.wait_connected()
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    assert a.process is not None
    send_signal(a.process.pid, signal.SIGSTOP)
    try:
        # Three questions are missed, then it is left out.
        began = time.monotonic()
        for number in range(20):
            assert at_b.call("check", prompt=f"prompt-{number}", count=BLOCKS) == right(0)
        assert time.monotonic() - began < 20 * ANSWER_MS / 1000
    finally:
        send_signal(a.process.pid, signal.SIGCONT)
    until("it is asked again", lambda: at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS))
    for engine in (at_a, at_b):
        engine.call("close")


def test_a_daemon_with_another_token_is_not_reached(
    make_cluster: MakeCluster, make_engine: MakeEngine, tmp_path: Path
) -> None:
    each = []
    for name in ("one", "another"):
        (tmp_path / name).write_text(f"the token {name}\n")
        (tmp_path / name).chmod(0o600)
        each.append(["--cluster-token-file", str(tmp_path / name)])
    a, b = make_cluster(2, each=each)
    for daemon in (a, b):
        until(
            "the trouble is said",
            lambda daemon=daemon: any(member["trouble"] for member in cluster_of(daemon)["members"]),
        )
        daemon.log.wait_for("daemon not reached")
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    at_b.wait_connected()
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(0)
    assert cluster_of(a)["lent_blocks"] == 0


def test_blocks_of_an_ssd_and_of_another_daemon_make_one_hit(
    make_cluster: MakeCluster, make_engine: MakeEngine, tmp_path: Path
) -> None:
    each: list[list[str]] = [[], ["--ssd", f"{tmp_path / 'blocks'}:64mib"]]
    a, b = daemons = make_cluster(2, each=each)
    wait_until_reached(daemons)
    at_a, at_b = make_engine(a, "a"), make_engine(b, "b")
    at_a.wait_connected()
    boot = at_b.wait_connected()["boot"]
    assert at_b.call("save", prompt="one", count=BLOCKS // 2)["ok"]
    b.settle()
    b.restart()
    at_b.wait_connected(boot)
    assert at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS // 2)
    assert at_a.call("save", prompt="one", count=BLOCKS)["ok"]
    a.settle()
    until("A knows the new B", lambda: at_b.call("check", prompt="one", count=BLOCKS) == right(BLOCKS))
    assert cluster_of(b)["fetched_blocks"] == BLOCKS // 2
    fetched = cluster_of(b)["fetched_blocks"] + counted(b, "kvlane_ssd_fetched_blocks_total")
    assert fetched == BLOCKS
    # What came from another daemon is not written to this one's SSD.
    b.settle()
    assert b.status()["ssd_blocks"] == BLOCKS // 2
    for engine in (at_a, at_b):
        engine.call("close")


def test_names_and_addresses_that_lead_nowhere_are_said(make_cluster: MakeCluster) -> None:
    (daemon,) = make_cluster(1, "--peers", "no.such.host.invalid:9555,127.0.0.1:1")
    line = daemon.log.wait_for("a name of --peers is not resolved")
    assert "no.such.host.invalid:9555" in line
    assert cluster_of(daemon)["unresolved"][0].startswith("no.such.host.invalid:9555: ")
    daemon.log.wait_for("daemon not reached")
    text = until(
        "the trouble is shown",
        lambda: [t for t in [run_kvlane("status", "--addr", daemon.address).stdout] if "not reached" in t],
    )[0]
    assert "no.such.host.invalid" in text and "127.0.0.1:1" in text


def test_a_cluster_that_others_could_join_is_refused(folder: Path) -> None:
    said = run_kvlane(
        "serve", "--peers", "192.0.2.1:1", "--cluster-listen", "0.0.0.0:0", "--pool-size", "4mib"
    )
    assert said.returncode == 1
    assert "can be reached from other hosts: write --cluster-token-file" in said.stderr
    said = run_kvlane("serve", "--cluster-listen", "127.0.0.1:0", "--pool-size", "4mib")
    assert said.returncode == 1 and "--cluster-listen is of no use without --peers" in said.stderr
    said = run_kvlane("serve", "--cluster-copies", "50", "--pool-size", "4mib")
    assert said.returncode == 1 and "--cluster-copies is of no use without --peers" in said.stderr


def doctor(*flags: str) -> list[dict[str, str]]:
    """What the doctor says of the cluster."""
    told = run_kvlane("doctor", "--json", *flags, env=clean_environment(KVLANE_GPU_DRIVER="off"))
    return [each for each in json.loads(told.stdout)["findings"] if each["subject"] == "cluster"]


def test_the_doctor_says_whether_daemons_reach_each_other_both_ways(
    make_cluster: MakeCluster, folder: Path, cleanup: ExitStack
) -> None:
    a, b = make_cluster(2)
    for daemon in (a, b):
        (found,) = until(
            "both reach each other",
            lambda daemon=daemon: [
                each for each in doctor("--addr", daemon.address) if "reaches back" in each["found"]
            ],
        )
        assert found["verdict"] == "ok"
    # The third one dials A, which does not dial it.
    at_a, port = cluster_of(b)["members"][0]["address"], free_port()
    home = folder / "third"
    home.mkdir()
    third = Daemon(home, "--peers", f"{at_a},127.0.0.1:1", "--cluster-listen", f"127.0.0.1:{port}")
    cleanup.callback(third.kill)
    third.start()
    wait_until_reached([third], 1)
    until(
        "the other address is dialled", lambda: any(each["trouble"] for each in cluster_of(third)["members"])
    )
    found = {each["found"] for each in doctor("--addr", third.address)}
    assert f"{at_a} is reached, and has not reached back" in found
    assert any(each.startswith("127.0.0.1:1 is not reached: ") for each in found)


def test_the_doctor_dials_the_daemons_that_flags_name(
    make_daemon: Callable[..., Daemon], folder: Path, tmp_path: Path
) -> None:
    for name in ("token", "another"):
        (tmp_path / name).write_text(f"the {name}\n")
        (tmp_path / name).chmod(0o600)
    address = f"127.0.0.1:{free_port()}"
    make_daemon(
        *("--peers", address, "--cluster-listen", address),
        *("--cluster-token-file", str(tmp_path / "token")),
    )
    nobody = ("--addr", f"unix:{folder / 'nobody'}", "--peers", address)
    (found,) = doctor(*nobody, "--cluster-token-file", str(tmp_path / "token"))
    assert found["verdict"] == "ok" and "answers, with the same token" in found["found"]
    (found,) = doctor(*nobody, "--cluster-token-file", str(tmp_path / "another"))
    assert found["verdict"] == "note" and "it has another token" in found["found"]
    first, second = doctor("--addr", nobody[1], "--peers", "no.such.host.invalid:9555,127.0.0.1:1")
    assert first["found"].startswith("--peers no.such.host.invalid:9555: ")
    assert second["found"].startswith("127.0.0.1:1 is not reached: ")
    (found,) = doctor("--addr", nobody[1], "--peers", "192.0.2.1:9555", "--cluster-listen", "0.0.0.0:9555")
    assert found["verdict"] == "problem" and "write --cluster-token-file" in found["found"]
    (found,) = doctor("--addr", nobody[1], "--peers", "192.0.2.1:9555")
    assert found["verdict"] == "problem" and "is an address of this host alone" in found["found"]
