"""A daemon with an SSD tier: what the pool loses comes back, also after its end, and never with a wrong byte."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patterns import NAMESPACE
from processes import Daemon, Engine, run_kvlane, until
from ssd_fixture import BLOCKS as KEPT
from ssd_fixture import FIXTURES, PIECE_BYTES, PROMPT, unpack

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

BLOCKS = 64


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def ssd_daemon(make_daemon: MakeDaemon, ssd: Path) -> Daemon:
    return make_daemon("--ssd", f"{ssd}:64mib")


def right(blocks: int) -> dict[str, object]:
    return {"blocks": blocks, "wrong": [], "ok": True, "detail": ""}


def counted(daemon: Daemon, what: str) -> int:
    """A counter of the tier's metrics."""
    _, metrics = daemon.http("/metrics")
    lines = [line for line in metrics.splitlines() if line.startswith(f"kvlane_ssd_{what}_total ")]
    return int(lines[0].rsplit(" ", 1)[1])


def _path(daemon: Daemon) -> dict[str, Any]:
    """Which way the SSD's transfers take, as `kvlane status --json` has it."""
    done = run_kvlane("status", "--addr", daemon.address, "--json")
    assert done.returncode == 0, done.stderr
    (ssd,) = json.loads(done.stdout)["ssds"]
    return ssd


def test_status_and_metrics_say_which_way_transfers_take(
    make_daemon: MakeDaemon, make_engine: MakeEngine, ssd: Path
) -> None:
    daemon = make_daemon("--ssd", f"{ssd}:64mib", "--ssd-path", "staged", "--ssd-staging", "8mib")
    engine = make_engine(daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    daemon.settle()
    shown = _path(daemon)
    assert (shown["transfer_path"], shown["path_reason"]) == ("staged", "--ssd-path staged")
    assert shown["staging_bytes"] == 8 << 20
    assert "staged (--ssd-path staged)" in run_kvlane("status", "--addr", daemon.address).stdout
    page = daemon.http("/metrics")[1]
    assert f'kvlane_ssd_staged{{device="{ssd}"}} 1' in page
    assert f'kvlane_ssd_staging_bytes{{device="{ssd}"}} {8 << 20}' in page
    # The pool is empty after a restart, so the blocks come from the SSD, and the other way.
    daemon.stop()
    daemon.flags = ("--ssd", f"{ssd}:64mib", "--ssd-path", "direct")
    daemon.start()
    engine.wait_connected(boot)
    assert engine.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    assert _path(daemon)["transfer_path"] == "direct"
    assert f'kvlane_ssd_staged{{device="{ssd}"}} 0' in daemon.http("/metrics")[1]


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_prompts_come_back_after_the_daemons_end(
    ssd_daemon: Daemon, make_engine: MakeEngine, how: str
) -> None:
    engine = make_engine(ssd_daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    assert engine.call("save", prompt="two", count=BLOCKS // 2)["ok"]
    if how == "stopped":
        # A daemon that stops in order writes what it has first.
        assert ssd_daemon.stop() == 0
        ssd_daemon.start()
    else:
        ssd_daemon.settle()
        ssd_daemon.restart()
    engine.wait_connected(boot)
    assert ssd_daemon.status()["blocks"] == 0
    assert engine.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    assert engine.call("check", prompt="two", count=BLOCKS) == right(BLOCKS // 2)
    assert engine.call("check", prompt="three", count=BLOCKS) == right(0)
    # The blocks that came back are in the pool now, and are not written again.
    status = ssd_daemon.status()
    assert status["blocks"] == BLOCKS + BLOCKS // 2
    assert status["ssd_blocks"] == status["blocks"]
    engine.call("close")


def test_blocks_that_the_release_before_wrote_are_hits(
    make_daemon: MakeDaemon, make_engine: MakeEngine, ssd: Path
) -> None:
    """Who installs this version over 0.1.0 keeps what is on the SSD."""
    ssd.write_bytes(unpack((FIXTURES / "0.1.0.pages").read_bytes()))
    daemon = make_daemon("--ssd", str(ssd))
    engine = make_engine(daemon, "engine", piece_bytes=PIECE_BYTES)
    engine.wait_connected()
    assert daemon.status()["ssd_blocks"] == KEPT
    assert engine.call("check", prompt=PROMPT, count=KEPT) == right(KEPT)
    assert engine.call("check", prompt="another", count=KEPT) == right(0)
    engine.call("close")


def test_what_the_pool_cannot_hold_is_on_the_ssd(
    make_daemon: MakeDaemon, make_engine: MakeEngine, ssd: Path
) -> None:
    # Room for 128 blocks of 16 KiB.
    daemon = make_daemon("--ssd", f"{ssd}:64mib", pool="2mib")
    engine = make_engine(daemon, "engine")
    engine.wait_connected()
    prompts = [f"prompt-{number}" for number in range(6)]
    for prompt in prompts:
        assert engine.call("save", prompt=prompt, count=BLOCKS)["ok"]
        daemon.settle()
    for prompt in [*prompts, *reversed(prompts)]:
        assert engine.call("check", prompt=prompt, count=BLOCKS) == right(BLOCKS)
    assert counted(daemon, "written_blocks") == len(prompts) * BLOCKS
    assert counted(daemon, "fetched_blocks") >= 4 * BLOCKS
    assert counted(daemon, "failed_fetches") == 0
    engine.call("close")


def test_two_files_share_the_blocks(make_daemon: MakeDaemon, make_engine: MakeEngine, tmp_path: Path) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    daemon = make_daemon(*(flag for path in paths for flag in ("--ssd", f"{path}:32mib")))
    engine = make_engine(daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    daemon.settle()
    status = daemon.status()
    assert status["ssd_blocks"] == BLOCKS
    assert [device["path"] for device in status["ssds"]] == [str(path) for path in paths]
    assert all(device["used_bytes"] > 0 and device["trouble"] == "" for device in status["ssds"])
    daemon.restart()
    engine.wait_connected(boot)
    assert engine.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    text = run_kvlane("status", "--addr", daemon.address).stdout
    assert "ssd" in text and str(paths[0]) in text
    engine.call("close")


def test_engines_that_ask_for_the_same_at_once_share_the_reads(
    ssd_daemon: Daemon, make_engine: MakeEngine
) -> None:
    engines = [make_engine(ssd_daemon, name) for name in ("a", "b")]
    boot = engines[0].wait_connected()["boot"]
    engines[1].wait_connected()
    assert engines[0].call("save", prompt="one", count=BLOCKS)["ok"]
    ssd_daemon.settle()
    ssd_daemon.restart()
    for engine in engines:
        engine.wait_connected(boot)
    for engine in engines:
        engine.send("check", prompt="one", count=BLOCKS)
    assert [engine.answer() for engine in engines] == [right(BLOCKS), right(BLOCKS)]
    assert ssd_daemon.status()["blocks"] == BLOCKS
    for engine in engines:
        engine.call("close")


def test_a_dropped_namespace_stays_away(ssd_daemon: Daemon, make_engine: MakeEngine) -> None:
    engine = make_engine(ssd_daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    ssd_daemon.settle()
    dropped = run_kvlane("drop", NAMESPACE.hex(), "--addr", ssd_daemon.address)
    assert dropped.returncode == 0, dropped.stderr
    assert engine.call("check", prompt="one", count=BLOCKS) == right(0)
    assert ssd_daemon.stop() == 0
    ssd_daemon.start()
    engine.wait_connected(boot)
    assert engine.call("check", prompt="one", count=BLOCKS) == right(0)
    engine.call("close")


def test_a_namespace_that_only_the_ssd_knows_can_be_dropped(
    ssd_daemon: Daemon, make_engine: MakeEngine
) -> None:
    """Before its engine has come back, a daemon that was started again has nothing of it in its pool. It used to answer
    that there is no such namespace, and the blocks came back with the engine. Then it took any name, listed none, and
    wanted all digits."""
    engine = make_engine(ssd_daemon, "engine")
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    ssd_daemon.settle()
    engine.close()
    assert ssd_daemon.stop() == 0
    ssd_daemon.start()
    (held,) = ssd_daemon.status()["namespaces"]
    assert (held["namespace"], held["name"]) == (NAMESPACE, "")
    assert (held["blocks"], held["ssd_blocks"]) == (0, BLOCKS)
    assert held["ssd_bytes"] >= BLOCKS * 16384
    told = run_kvlane("status", "--addr", ssd_daemon.address).stdout
    assert NAMESPACE.hex() in told and "(only on the SSD)" in told
    unknown = run_kvlane("drop", "09" * 16, "--addr", ssd_daemon.address)
    assert unknown.returncode == 1
    assert "does not exist" in unknown.stderr
    dropped = run_kvlane("drop", NAMESPACE.hex()[:4], "--addr", ssd_daemon.address)
    assert dropped.returncode == 0, dropped.stderr
    assert f"{BLOCKS} on the SSD" in dropped.stdout
    assert ssd_daemon.status()["namespaces"] == []
    ssd_daemon.restart()
    engine = make_engine(ssd_daemon, "engine")
    engine.wait_connected()
    assert engine.call("check", prompt="one", count=BLOCKS) == right(0)
    engine.call("close")


@pytest.fixture
def failing_daemon(make_daemon: MakeDaemon, ssd: Path) -> Daemon:
    """One whose writes at the start of its file can be made to fail, by a limit on the length of files."""
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN)}
    return make_daemon("--ssd", f"{ssd}:64mib", **ignore)


def _limit_files(daemon: Daemon, length: int) -> None:
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (length, hard))


def test_a_drop_that_the_ssd_cannot_note_is_no_success(
    failing_daemon: Daemon, make_engine: MakeEngine, ssd: Path
) -> None:
    """`kvlane drop` reported success although the file had not noted it: after a kill the dropped blocks were hits
    again, with new weights."""
    daemon = failing_daemon
    engine = make_engine(daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    daemon.settle()
    _limit_files(daemon, 4096)
    dropped = run_kvlane("drop", NAMESPACE.hex(), "--addr", daemon.address)
    assert dropped.returncode == 1, dropped.stdout
    for part in (str(ssd), NAMESPACE.hex(), "dropped from RAM", "restart"):
        assert part in dropped.stderr, dropped.stderr
    assert engine.call("check", prompt="one", count=BLOCKS) == right(0)
    (device,) = daemon.status()["ssds"]
    assert "could not be noted" in device["trouble"]
    # As was said.
    daemon.restart()
    boot = engine.wait_connected(boot)["boot"]
    assert engine.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)

    # The daemon tries again by itself; once it has noted it, a kill brings nothing back.
    _limit_files(daemon, 4096)
    assert run_kvlane("drop", NAMESPACE.hex(), "--addr", daemon.address).returncode == 1
    _limit_files(daemon, resource.RLIM_INFINITY)
    daemon.log.wait_for("SSD has noted the dropped namespaces")
    assert daemon.status()["ssds"][0]["trouble"] == ""
    daemon.restart()
    engine.wait_connected(boot)
    assert engine.call("check", prompt="one", count=BLOCKS) == right(0)
    engine.call("close")


def test_damaged_bytes_are_a_miss(ssd_daemon: Daemon, make_engine: MakeEngine, ssd: Path) -> None:
    engine = make_engine(ssd_daemon, "engine")
    boot = engine.wait_connected()["boot"]
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    assert ssd_daemon.stop() == 0
    dice = random.Random(7)
    with ssd.open("r+b") as file:
        # Beyond the superblock; every second place hits a page that holds something.
        for at in range(1 << 20, 3 << 20, 64 << 10):
            file.seek(at + dice.randrange(4096))
            file.write(b"\x55")
    ssd_daemon.start()
    engine.wait_connected(boot)
    found = engine.call("check", prompt="one", count=BLOCKS)
    assert found["ok"] and found["wrong"] == [] and found["blocks"] < BLOCKS

    # On a slow disk some are still on their way when the lookup is answered; those are not saved again.
    def are_read() -> bool:
        return counted(ssd_daemon, "fetched_blocks") + counted(ssd_daemon, "failed_fetches") == BLOCKS

    until("all blocks have come or failed", are_read)
    # The failed blocks can be saved again.
    assert engine.call("save", prompt="one", count=BLOCKS)["ok"]
    # A block is found once its checksum is taken, which nobody waits for.
    ssd_daemon.settle()
    assert engine.call("check", prompt="one", count=BLOCKS) == right(BLOCKS)
    engine.call("close")


def test_a_file_in_use_or_of_something_else_is_left_alone(
    ssd_daemon: Daemon, ssd: Path, tmp_path: Path
) -> None:
    def serve(path: Path) -> str:
        flags = ("--pool-size", "2mib", "--listen", f"unix:{tmp_path}/other.sock", "--http", "off")
        ended = run_kvlane("serve", *flags, "--hugepages", "off", "--ssd", f"{path}:64mib")
        assert ended.returncode != 0
        return ended.stderr

    assert ssd_daemon.process is not None
    assert "in use by another daemon" in serve(ssd)
    letters = tmp_path / "letters"
    letters.write_bytes(b"precious" * 1_000_000)
    assert "is left alone" in serve(letters)
    assert letters.read_bytes() == b"precious" * 1_000_000


def _rounds(daemon: Daemon, make_engine: MakeEngine, rounds: int) -> int:
    """Kills the daemon at random moments of work. Answers how many loads there were."""
    seed = int(os.environ.get("KVLANE_TEST_SEED", time.time_ns() // 1000))
    print(f"{rounds} rounds of KVLANE_TEST_SEED={seed}")
    dice = random.Random(seed)
    engine = make_engine(daemon, "engine", blocks=64)
    loads = 0
    for _ in range(rounds):
        boot = engine.wait_connected()["boot"]
        engine.send("work", seed=dice.randrange(1 << 32), seconds=0.2, prompts=12, count=32)
        # The moment is what is varied: some time within the work, or after it.
        if dice.random() < 0.8:
            time.sleep(dice.random() * 0.2)
        daemon.signal(signal.SIGKILL)
        daemon.restart()
        done = engine.answer()
        assert done["wrong"] == [] and done["broken"] == []
        loads += done["loads"]
        engine.wait_connected(boot)
    engine.call("close")
    return loads


def test_a_daemon_that_is_killed_at_work_never_gives_wrong_bytes(
    make_daemon: MakeDaemon, make_engine: MakeEngine, ssd: Path
) -> None:
    # A pool and a file that are both too small for the work: much is evicted, fetched and cleaned.
    daemon = make_daemon("--ssd", f"{ssd}:8mib", pool="1mib")
    assert _rounds(daemon, make_engine, 20) > 0


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", ["direct", "staged"])
def test_many_kills(make_daemon: MakeDaemon, make_engine: MakeEngine, ssd: Path, path: str) -> None:
    daemon = make_daemon("--ssd", f"{ssd}:8mib", "--ssd-path", path, pool="1mib")
    assert _rounds(daemon, make_engine, 300) > 0
