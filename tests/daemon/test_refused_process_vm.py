"""Where the kernel does not let the daemon read an engine, saves travel through the mapping; where that was ruled out,
the engine is told why it cannot save."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import KVLANE, Daemon, Engine, run_kvlane

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]

NOBODY = 65534

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}


def forbid_process_vm() -> None:
    """Installs a seccomp filter that answers EPERM to process_vm_readv; for the child before it becomes the daemon."""
    number = PROCESS_VM_READV[platform.machine()]
    load_word, jump_if_equal, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (load_word, 0, 0, 0),  # the call's number
            (jump_if_equal, 0, 1, number),
            (answer, 0, 0, refuse),
            (answer, 0, 0, allow),
        )
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("HxxxxxxP", 4, ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_program
    ):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


@pytest.fixture
def unprivileged(folder: Path) -> dict[str, Any]:
    """Options of a daemon that runs as nobody, from a copy of the binary that nobody may run."""
    if os.geteuid() != 0:
        return {}  # the test runs in a user namespace, with a fixture of its own
    os.chown(folder, NOBODY, NOBODY)
    binary = folder / "kvlane"
    shutil.copy(KVLANE, binary)
    binary.chmod(0o755)
    return {"binary": binary, "user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


def _saves_work(daemon: Daemon, engine: Engine, method: str, reason: str) -> None:
    state = engine.wait_connected()
    assert state["method"] == method
    assert reason in state["reason"], state
    assert engine.call("save", prompt="p", count=20)["blocks"] == 20
    daemon.settle()
    assert engine.call("check", prompt="p", count=20) == {"blocks": 20, "wrong": [], "ok": True, "detail": ""}
    (worker,) = [session for session in daemon.engines() if session["role"] == "worker"]
    assert worker["method"] == method
    assert reason in worker["reason"]
    whose = ("--daemon-user", daemon.user) if daemon.user else ()
    shown = run_kvlane("status", "--json", "--addr", daemon.address, *whose).stdout
    assert f'"save_method": "{method}"' in shown
    assert f'kvlane_workers_registered_total{{method="{method}"}} 1' in daemon.http("/metrics")[1]


def _demand_is_refused(daemon: Daemon, engine: Engine) -> None:
    """An engine that insists on process_vm: no saves, one sentence, and no harm to it or to others."""
    state = engine.call("state")
    assert not state["worker"]
    assert "process_vm was asked for" in state["reason"]
    assert "process_vm refused" in state["reason"]
    assert not engine.call("save", prompt="q", count=3)["ok"]
    assert engine.call("check", prompt="p", count=20)["blocks"] == 0
    assert daemon.status()["blocks"] == 20


@pytest.mark.another_user
def test_an_engine_that_is_not_dumpable(
    make_daemon: MakeDaemon, make_engine: MakeEngine, unprivileged: dict[str, Any]
) -> None:
    daemon = make_daemon(**unprivileged)
    engine = make_engine(daemon, "a", uid=NOBODY, dumpable=0)
    _saves_work(daemon, engine, "mapped", "process_vm refused")
    assert "dumpable" in engine.call("state")["reason"]
    _demand_is_refused(daemon, make_engine(daemon, "b", uid=NOBODY, dumpable=0, save_method="process_vm"))


@pytest.mark.another_user
def test_an_unprivileged_pair_may_where_nothing_forbids_it(
    make_daemon: MakeDaemon, make_engine: MakeEngine, unprivileged: dict[str, Any]
) -> None:
    """The control of the test above: only the one flag differs."""
    daemon = make_daemon(**unprivileged)
    _saves_work(daemon, make_engine(daemon, "a", uid=NOBODY, dumpable=1), "process_vm", "process_vm works")


@pytest.mark.another_user
def test_an_engine_of_another_user(
    make_daemon: MakeDaemon, make_engine: MakeEngine, unprivileged: dict[str, Any]
) -> None:
    """Root may use the daemon of a user that it names, which may not read root's memory."""
    daemon = make_daemon(**unprivileged)
    engine = make_engine(daemon, "a", daemon_user=str(NOBODY))
    _saves_work(daemon, engine, "mapped", "process_vm refused")


@pytest.mark.skipif(platform.machine() not in PROCESS_VM_READV, reason="the call's number here is not known")
def test_a_daemon_under_a_seccomp_filter(make_daemon: MakeDaemon, make_engine: MakeEngine) -> None:
    daemon = make_daemon(preexec_fn=forbid_process_vm)
    _saves_work(daemon, make_engine(daemon, "a"), "mapped", "seccomp filter")
    _demand_is_refused(daemon, make_engine(daemon, "b", save_method="process_vm"))


def test_mapping_on_demand(daemon: Daemon, make_engine: MakeEngine) -> None:
    _saves_work(daemon, make_engine(daemon, "a", save_method="mapped"), "mapped", "asked for")
