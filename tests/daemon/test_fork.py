"""A process that forks while it is connected to the daemon, as engines do that start helpers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from processes import PATIENCE, Daemon, clean_environment

# Connects, forks, and lets the child do as it is told. Then saves a block and looks it up, as before.
ENGINE = """
import gc, json, os, signal, sys
sys.path.insert(0, sys.argv[3])
from engine_process import DEFAULTS, EngineProcess
from kvlane import _core

address, way = sys.argv[1:3]
engine = EngineProcess(address, "forks", DEFAULTS)
tool = _core.Tool(address)
while not (engine.state()["worker"] and engine.state()["scheduler"]):
    pass
sessions = len(tool.status()["sessions"])

def tried(call):
    try:
        return f"answered {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(40)
    told = {}
    if way == "calls":
        told = {
            "scheduler": tried(engine.scheduler.tick),
            "lookup": tried(lambda: engine.lookup("p", 3)),
            "worker": tried(engine.worker.poll),
            "save": tried(lambda: engine.save("p", 3)),
            "tool": tried(tool.status),
        }
    elif way == "close":
        engine.close()
        tool.close()
    elif way == "drop":
        del engine, tool
        gc.collect()
    os.write(write_end, json.dumps(told).encode())
    sys.exit(0)
os.close(write_end)
with os.fdopen(read_end) as answer:
    told = json.loads(answer.read() or "null")
_, status = os.waitpid(child, 0)
saved = engine.save("p", 3)["blocks"]
tool.settle()
found = engine.check("p", 3)
stats = (engine.worker.take_stats()["losses"], engine.scheduler.take_stats()["losses"])
same = len(tool.status()["sessions"]) == sessions
print(json.dumps([told, status, saved, found["blocks"], found["wrong"], list(stats), same]))
engine.close()
"""


@pytest.mark.parametrize("way", ["calls", "close", "drop", "exit"])
def test_a_child_does_not_touch_its_parents_session(daemon: Daemon, way: str) -> None:
    """A child that closed, or only dropped, what it had inherited said goodbye over its parent's connection, and
    waited for a thread that it does not have."""
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, daemon.address, way, folder],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    told, *rest = json.loads(done.stdout)
    assert rest == [0, 3, 3, [], [0.0, 0.0], True]
    if way == "calls":
        assert len(told) == 5
    for call, said in told.items():
        assert said.startswith("RuntimeError: ") and "fork" in said, (call, said)
