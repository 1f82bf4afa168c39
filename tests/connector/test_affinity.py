"""kvlane's threads in workers that vLLM binds to a processor."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvlane.connector import affinity

SEVERAL = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(SEVERAL) < 2, reason="this process may run on one processor only")

# A worker of vLLM: bound to a processor before the connector is made.
WORKER = """
import ctypes, json, os, sys
from pathlib import Path
from types import SimpleNamespace
from kvlane import _core
from kvlane.connector.direct import Direct
from kvlane.connector.direct_order import Order
from kvlane.connector.groups import CacheGroup
from kvlane.connector.settings import Settings

memory = bytearray(4096)
base = ctypes.addressof((ctypes.c_char * 4096).from_buffer(memory))
rank = _core.HandoffRank("127.0.0.1:0", "t", [(base, 1024, 4, 1024, [0])], [(base, 4096)], b"k" * 16, "auto")
before = set(os.listdir("/proc/self/task"))
group = CacheGroup(0, 0, "full_attention", 0, 4, 0, "f32", False, ("a",))
settings = Settings.parse({"kvlane.direct": "on", "kvlane.direct.token": "t"})
direct = Direct(settings, Order([group], True), b"n" * 16, (1, 1))
direct.start([SimpleNamespace(rank=0, endpoint=rank.endpoint, key=b"k" * 16, layout=b"l")])
own = {}
# A thread names itself, as kvlane's threads do.
while not {"kvlane-fabric", "kvlane-handoff"} <= set(own):
    for task in set(os.listdir("/proc/self/task")) - before:
        name = Path("/proc/self/task", task, "comm").read_text().strip()
        if name.startswith("kvlane"):
            own[name] = sorted(os.sched_getaffinity(int(task)))
print(json.dumps({"own": own, "main": sorted(os.sched_getaffinity(0))}), flush=True)
sys.stdin.read()
"""


def worker(cpu: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GOMP_CPU_AFFINITY": str(cpu)},
        # As the OpenMP library does when it is loaded.
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
    )


@needs_two
def test_threads_of_kvlane_are_not_bound_to_the_processor_on_which_the_worker_computes() -> None:
    """The threads inherited the binding, so messages between engines waited for the worker and connections were given
    up."""
    with worker(SEVERAL[0]) as process:
        assert process.stdout is not None and process.stdin is not None
        found = json.loads(process.stdout.readline())
        process.stdin.close()
    assert found["main"] == [SEVERAL[0]], "the worker itself stays where vLLM has put it"
    assert all(allowed == SEVERAL for allowed in found["own"].values()), found["own"]


@needs_two
def test_what_a_user_forbids_stays_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in affinity.BINDING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(affinity, "_before_binding", frozenset({SEVERAL[0]}))
    monkeypatch.setattr(affinity, "PROC", Path("/nonexistent"))
    assert affinity.processors() == {SEVERAL[0]}


@needs_two
def test_two_workers_that_are_bound_to_one_processor_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {SEVERAL[0]}
    bound = affinity.bound_processors
    monkeypatch.setattr(affinity, "bound_processors", lambda pid: own if pid == os.getpid() else bound(pid))
    for cpu, warned in ((SEVERAL[0], True), (SEVERAL[1], False)):
        caplog.clear()
        with worker(cpu) as process:
            assert process.stdout is not None and process.stdin is not None
            process.stdout.readline()
            with caplog.at_level(logging.WARNING):
                affinity.warn_of_shared_processors()
            process.stdin.close()
        lines = [record.getMessage() for record in caplog.records if str(process.pid) in record.getMessage()]
        assert [
            f"process {process.pid} are bound to the same processor ({SEVERAL[0]})" in line for line in lines
        ] == [True] * warned
        assert all("VLLM_CPU_OMP_THREADS_BIND=nobind" in line for line in lines)
    with suppress(OSError):
        assert affinity.bound_processors(os.getpid()) == own


def test_a_process_whose_name_is_cut_within_a_character_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel cuts names at 15 bytes. Reading such a one failed, and with it the rank's start."""
    task = tmp_path / "4000000" / "task" / "4000000"
    task.mkdir(parents=True)
    (task / "comm").write_bytes("Обработка".encode()[:15] + b"\n")
    monkeypatch.setattr(affinity, "PROC", tmp_path)
    monkeypatch.setattr(affinity, "bound_processors", lambda _: {SEVERAL[0]})
    monkeypatch.setattr(affinity, "processors", lambda: set(SEVERAL) | {SEVERAL[0] + 1})
    affinity.warn_of_shared_processors()
