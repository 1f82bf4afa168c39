"""An engine that was made before a fork: the child has its memory, but not its threads, and shares its sockets."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PATIENCE = 60.0

# A process with a region, which then says what is in it.
OTHER = """
import sys
from kvlane import fabric
memory = bytearray(b"o" * (1 << 20))
engine = fabric.Engine()
region = engine.register(memory)
print(engine.describe().hex(), region.number, flush=True)
for line in sys.stdin:
    print(bytes(memory[:2]).decode(), bytes(memory[-2:]).decode(), flush=True)
"""

# The parent makes an engine and all that hangs on it, and forks. The child does as `way` says, and then ends as Python
# does. The child's results go to standard output, with what the parent finds afterwards.
PARENT = """
import gc, json, os, signal, sys
from kvlane import fabric

way, transport, descriptor, remote = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]), int(sys.argv[4])
memory = bytearray(b"p" * (1 << 20))
engine = fabric.Engine(transport=transport)
region = engine.register(memory)
peer = engine.connect(descriptor)
counter = engine.counter(7)
group = engine.group([peer])
before = peer.write(region, remote, [(0, 0, 1 << 20)])
before.wait(30)

def tried(call):
    try:
        return f"answered {call()!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def in_the_child():
    memory[:] = b"c" * (1 << 20)
    small, long = [(0, 0, 2)], [(0, 0, 1 << 20)]
    calls = {
        "write": lambda: peer.write(region, remote, long).wait(5),
        "small write": lambda: peer.write(region, remote, small).wait(5),
        "read": lambda: peer.read(region, remote, long).wait(5),
        "send": lambda: peer.send(b"from the child").wait(5),
        "receive": lambda: engine.receive(0.1),
        "register": lambda: engine.register(bytearray(10)),
        "unregister": region.unregister,
        "describe": engine.describe,
        "connect": lambda: engine.connect(descriptor),
        "paths": lambda: peer.paths,
        "disconnect": peer.disconnect,
        "group": lambda: engine.group([peer]),
        "scatter": lambda: group.scatter([fabric.Part(region, remote, small)]).wait(5),
        "barrier": lambda: group.barrier([(7, 0)]),
        "count": lambda: counter.count,
        "wait for a counter": lambda: counter.wait(1, 0.1),
        "retire": counter.retire,
        "new counter": lambda: engine.counter(8),
        "id": lambda: engine.id,
        "outcome": lambda: before.done,
        "wait": lambda: before.wait(0.1),
        "cancel": before.cancel,
    }
    return {name: tried(call) for name, call in calls.items()}

read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(40)
    if way == "calls":
        os.write(write_end, json.dumps(in_the_child()).encode())
    elif way == "close":
        engine.close()
        os.write(write_end, b"{}")
    elif way == "drop":
        del peer, group, counter, region, before, engine
        gc.collect()
        os.write(write_end, b"{}")
    elif way == "another":
        with fabric.Engine(transport=transport) as own:
            mine = own.register(bytearray(b"n" * 100))
            own.connect(descriptor).write(mine, remote, [(0, 0, 2)]).wait(20)
        os.write(write_end, b"{}")
    sys.exit(0)   # what is left is dropped as at the end of every program
os.close(write_end)
with os.fdopen(read_end) as told:
    told = told.read()
_, status = os.waitpid(child, 0)
memory[:] = b"q" * (1 << 20)
peer.write(region, remote, [((1 << 20) - 2, (1 << 20) - 2, 2)]).wait(10)
after = tried(lambda: peer.write(region, remote, [(1 << 19, 1 << 19, 1 << 19)]).wait(10))
print(json.dumps({"told": json.loads(told or "null"), "status": status, "after": after, "up": peer.paths[0].trouble}))
"""


def fork(way: str, transport: str) -> tuple[dict[str, object], str]:
    """What came of it, and the first and the last two bytes at the peer then."""
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdin is not None and other.stdout is not None
        descriptor, region = other.stdout.readline().split()
        done = subprocess.run(
            [sys.executable, "-c", PARENT, way, transport, descriptor, region],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "panicked" not in done.stderr, done.stderr
        assert not done.stderr, done.stderr
        other.stdin.write("look\n")
        other.stdin.flush()
        return json.loads(done.stdout), other.stdout.readline().strip()
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_in_a_child_each_call_says_what_to_do(transport: str) -> None:
    """A child's write said done although the peer had read the parent's bytes, and the parent's next transfer hung:
    both used one connection."""
    found, there = fork("calls", transport)
    told = found["told"]
    assert isinstance(told, dict) and len(told) == 22
    for call, said in told.items():
        assert said.startswith("RuntimeError: ") and "fork" in said and "new" in said, (call, said)
    assert (found["status"], found["after"], found["up"]) == (0, "answered None", None)
    assert there == "pp qq", "nothing of the child arrived"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("way", ["close", "drop", "exit"])
def test_a_child_that_lets_go_of_it_ends_nothing(way: str, transport: str) -> None:
    """A child that only ended, as workers of `multiprocessing` do, panicked, or ended its parent's connections."""
    found, there = fork(way, transport)
    assert (found["status"], found["after"], found["up"]) == (0, "answered None", None)
    assert there == "pp qq"


def test_a_child_may_make_an_engine_of_its_own() -> None:
    found, there = fork("another", "auto")
    assert (found["told"], found["status"], found["after"]) == ({}, 0, "answered None")
    assert there == "nn qq"
