"""Engines that hand over directly and use no daemon."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import BLOCK, Engine, Request

from kvlane.connector.no_daemon import NoScheduler, uses_daemon
from kvlane.connector.settings import Settings
from kvlane.connector.settings_check import check
from kvlane.testing import FakeCore

DIRECT = {"kvlane.direct": "on"}


@pytest.fixture
def default_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVLANE_ADDR", raising=False)
    monkeypatch.setenv("KVLANE_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "kvlane.sock"
    monkeypatch.setattr("kvlane._core.default_address", lambda: f"unix:{path}")
    return path


def test_an_engine_that_hands_over_directly_uses_a_daemon_where_it_is_named_or_there(
    default_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uses(**keys: object) -> bool:
        return uses_daemon(Settings.parse({f"kvlane.{name}": value for name, value in keys.items()}))

    assert uses(), "without direct hand-offs"
    assert not uses(direct="on")
    assert uses(direct="on", daemon="on") and uses(direct="on", address="unix:/somewhere")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(default_socket))
        assert uses(direct="on"), "as before, where a daemon was started first"
        assert not uses(direct="on", daemon="off")
    default_socket.unlink()
    default_socket.write_text("no socket")
    assert not uses(direct="on")
    monkeypatch.setenv("KVLANE_ADDR", "unix:/somewhere")
    assert uses(direct="on")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kvlane.daemon": "never"}, "kvlane.daemon must be one of auto, on, off"),
        ({"kvlane.daemon": "off"}, "the connector would do nothing"),
        ({**DIRECT, "kvlane.daemon": "off", "kvlane.address": "unix:/x"}, "leave one of them out"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.parse(keys)


def test_an_engine_without_a_daemon_misses_nothing_and_counts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine counted `unavailable` for each prompt, so an alert fired for ever, and logged that no daemon
    answers."""
    caplog.set_level(logging.INFO)
    engine = Engine(FakeCore(), settings=DIRECT, has_daemon=False)
    for number in range(3):
        request = Request(f"r{number}", list(range(number * 100, number * 100 + 4 * BLOCK)))
        assert engine.run(request) == 0
        engine.finish(request)
    assert not engine.scheduler.take_stats()
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "uses no daemon" in line]) == 1
    assert not [line for line in said if "no kvlane daemon answers" in line]
    assert isinstance(engine.scheduler._core, NoScheduler)


@pytest.mark.parametrize(
    ("keys", "needed"),
    [
        (DIRECT, False),
        ({}, True),
        ({**DIRECT, "kvlane.daemon": "on"}, True),
        ({**DIRECT, "kvlane.daemon": "off"}, None),
    ],
)
def test_doctor_is_told_whether_the_engine_needs_a_daemon(
    keys: dict[str, object], needed: bool | None, default_socket: Path
) -> None:
    config = {"kv_connector": "KVLaneConnector", "kv_role": "kv_both", "kv_connector_extra_config": keys}
    assert check(config)[0][0]["verdict"] == "ok"
    done = subprocess.run(
        [sys.executable, "-m", "kvlane.connector.settings_check"],
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=True,
    )
    daemon = json.loads(done.stdout)["daemon"]
    assert (daemon and daemon["is_needed"]) == needed


# As vLLM's engine ends on SIGTERM: a process of `multiprocessing`, by SystemExit; without the connector's shutdown.
ENGINE = """
import multiprocessing, signal, sys
from types import SimpleNamespace
from kvlane import _core
from kvlane.connector.direct import Direct
from kvlane.connector.direct_order import Order
from kvlane.connector.groups import CacheGroup
from kvlane.connector.settings import Settings

def serve(memory=bytearray(4096)):
    # A handler would not end a process that is signalled just before it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import ctypes
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    rank = _core.HandoffRank("127.0.0.1:0", "", [(base, 1024, 4, 1024, [0])], [(base, 4096)], b"k" * 16, "auto")
    group = CacheGroup(0, 0, "full_attention", 0, 4, 0, "f32", False, ("a",))
    direct = Direct(Settings.parse({"kvlane.direct": "on"}), Order([group], True), b"n" * 16, (1, 1))
    direct.start([SimpleNamespace(rank=0, endpoint=rank.endpoint, key=b"k" * 16, layout=b"l")])
    print(multiprocessing.current_process().pid, flush=True)
    signal.sigwait({signal.SIGTERM})
    sys.exit(0)

multiprocessing.get_context("fork").Process(target=serve).start()
"""


def test_an_engine_that_is_terminated_takes_its_address_out_of_the_runtime_folder(
    tmp_path: Path,
) -> None:
    """The engine's file stayed until the next engine started."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        (left,) = tmp_path.rglob("*.direct")
        assert left.name.startswith(f"{pid}-")
        os.kill(pid, signal.SIGTERM)
        parent.wait(30)
    assert not list(tmp_path.rglob("*.direct"))
