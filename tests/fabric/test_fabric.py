"""kvlane.fabric between two processes: what arrives, what counts, what fails and how."""

from __future__ import annotations

import array
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane import fabric
from kvlane.bench import certificates

SIZE = 1 << 20
PATIENCE = 30.0

# The other process: a region, a counter; then it says what it is asked for.
OTHER = """
import hashlib, sys
from kvlane import fabric
memory = bytearray(b"o" * (1 << 20))
engine = fabric.Engine(token=sys.argv[1], tls=sys.argv[3:] or None)
region = engine.register(memory)
counter = engine.counter(7)
print(engine.describe().hex(), region.number, counter.generation, flush=True)
for line in sys.stdin:
    match line.split():
        case ["wait", count]:
            print(counter.wait(int(count), 30), flush=True)
        case ["count"]:
            print(counter.count, flush=True)
        case ["echo"]:
            message = engine.receive(30)
            back = engine.connect(bytes.fromhex(sys.argv[2]))
            assert message is not None and back.id == message.sender
            back.send(message.data[::-1]).wait(30)
            print(engine.id.engine, engine.id.boot, flush=True)
        case ["digest"]:
            print(hashlib.sha256(memory).hexdigest(), flush=True)
        case ["unregister"]:
            region.unregister()
            print("done", flush=True)
"""


class Other:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        descriptor, region, generation = self.heard().split()
        self.descriptor = bytes.fromhex(descriptor)
        self.region = int(region)
        self.notify = (7, int(generation))

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.heard()


@contextmanager
def other(token: str = "", descriptor: bytes = b"", tls: fabric.Tls | None = None) -> Iterator[Other]:
    command = [sys.executable, "-c", OTHER, token, descriptor.hex(), *map(str, tls or ())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Other(process)
    finally:
        process.kill()
        process.wait()


def digest(data: bytes | bytearray) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_runs_arrive_and_are_counted_after_them() -> None:
    source = numpy.random.default_rng(1).integers(0, 256, SIZE, dtype=numpy.uint8)
    with other() as there, fabric.Engine() as engine:
        region = engine.register(source)
        peer = engine.connect(there.descriptor)
        expected = bytearray(b"o" * SIZE)
        runs = [(0, 100, 8193), (50_000, 20_000, 1), (60_000, 30_000, 300_000)]
        for here, far, length in runs:
            expected[far : far + length] = source[here : here + length].tobytes()
        peer.write(region, there.region, runs, notify=there.notify).wait(PATIENCE)
        assert there.ask("wait 1") == "True"
        assert there.ask("digest") == digest(expected)
        peer.read(region, there.region, [(0, 0, SIZE)]).wait(PATIENCE)
        assert source.tobytes() == bytes(expected)


def test_pages_arrive_at_the_pages_they_are_for() -> None:
    pages, page = 64, 4096
    source = bytearray(random.Random(2).randbytes(SIZE))
    with other() as there, fabric.Engine(connections=2) as engine:
        region = engine.register(source)
        peer = engine.connect(there.descriptor)
        order = random.Random(3).sample(range(SIZE // page), pages)
        local = fabric.Pages(region, order, stride=page)
        remote = fabric.Pages(there.region, array.array("I", reversed(order)).tobytes(), stride=page)
        peer.write_pages(page, local, remote, bulk=True).wait(PATIENCE)
        expected = bytearray(b"o" * SIZE)
        for here, far in zip(order, reversed(order), strict=True):
            expected[far * page : (far + 1) * page] = source[here * page : (here + 1) * page]
        assert there.ask("digest") == digest(expected)
        source[:] = bytes(SIZE)
        peer.read_pages(page, local, remote).wait(PATIENCE)
        for here, far in zip(order, reversed(order), strict=True):
            assert source[here * page : (here + 1) * page] == expected[far * page : (far + 1) * page]


def test_failures_have_types_that_say_what_to_do() -> None:
    memory = bytearray(100)
    with other("secret") as there:
        with fabric.Engine(token="other", patience=0.2) as stranger:
            transfer = stranger.connect(there.descriptor).read(
                stranger.register(memory), there.region, [(0, 0, 100)]
            )
            with pytest.raises(fabric.PeerLost, match="another token"):
                transfer.wait(PATIENCE)
            assert transfer.done and memory == bytes(100)
        with fabric.Engine(token="secret", patience=0.5) as engine:
            region = engine.register(memory)
            peer = engine.connect(there.descriptor)
            peer.read(region, there.region, [(0, 0, 100)]).wait(PATIENCE)
            assert memory == b"o" * 100
            assert all(path.trouble is None for path in peer.paths)
            assert any((path.bytes_per_second or 0) > 0 for path in peer.paths)
            with pytest.raises(ValueError, match="101 bytes"):
                peer.read(region, there.region, [(0, 0, 101)])
            assert there.ask("unregister") == "done"
            # ValueError once the peer has told that it is not registered any more.
            with pytest.raises((fabric.Refused, ValueError)):
                peer.read(region, there.region, [(0, 0, 100)]).wait(PATIENCE)
            there.process.kill()
            there.process.wait()
            late = peer.write(region, there.region, [], notify=(1, 0), timeout=0.1)
            with pytest.raises((fabric.DeadlineExceeded, fabric.PeerLost)):
                late.wait(PATIENCE)
            waits = peer.write(region, there.region, [], notify=(1, 0))
            waits.cancel()
            with pytest.raises((fabric.Cancelled, fabric.PeerLost)):
                waits.wait(PATIENCE)
            region.unregister()
            with pytest.raises(KeyError):
                region.unregister()


def test_what_cannot_be_registered_is_told_before_anything_moves() -> None:
    with fabric.Engine() as engine:
        with pytest.raises(ValueError, match="writable"):
            engine.register(b"constant")
        with pytest.raises(ValueError, match="length"):
            engine.register(4096)
        with pytest.raises(ValueError, match="101 bytes"):
            engine.register(bytearray(100), length=101)
        with pytest.raises(ValueError, match="not a memory descriptor"):
            engine.connect(b"x" * 40)
        memory = bytearray(100)
        region = engine.register(memory, writable=False)
        with pytest.raises(BufferError):
            memory.extend(b"more")
        region.unregister()
        memory.extend(b"more")
    with pytest.raises(ValueError, match="token"):
        fabric.Engine(listen=["0.0.0.0:0"])
    with pytest.raises(ValueError, match="closed"):
        engine.describe()


def test_closing_an_engine_ends_what_waits_for_it_in_other_threads() -> None:
    engine = fabric.Engine()
    counter = engine.counter(1)
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def wait() -> bool:
            begun.set()
            return counter.wait(1)

        waiting = pool.submit(wait)
        assert begun.wait(PATIENCE)
        engine.close()
        try:
            assert waiting.result(PATIENCE) is False
        except ValueError as error:  # it had not begun to wait yet
            assert "closed" in str(error)


def test_a_region_is_given_back_once_also_when_its_number_has_new_memory() -> None:
    with other() as there, fabric.Engine() as engine:
        former = engine.register(bytearray(100))
        former.unregister()
        memory = bytearray(100)
        again = engine.register(memory)
        peer = engine.connect(there.descriptor)
        with pytest.raises(KeyError):
            former.unregister()
        with pytest.raises(KeyError):
            peer.read(former, there.region, [(0, 0, 100)])
        peer.read(again, there.region, [(0, 0, 100)]).wait(PATIENCE)
        assert memory == b"o" * 100


def test_a_transfer_of_a_closed_engine_has_failed() -> None:
    memory = bytearray(100)
    with other() as there:
        engine = fabric.Engine()
        there.process.kill()
        there.process.wait()
        transfer = engine.connect(there.descriptor).write(
            engine.register(memory), there.region, [(0, 0, 100)]
        )
        engine.close()
        with pytest.raises(fabric.PeerLost, match="cannot be reached"):
            transfer.wait(PATIENCE)


def test_each_member_of_a_group_gets_its_own_part() -> None:
    source = numpy.random.default_rng(2).integers(0, 256, SIZE, dtype=numpy.uint8)
    with other() as one, other() as two, fabric.Engine() as engine:
        region = engine.register(source)
        group = engine.group([engine.connect(one.descriptor), engine.connect(two.descriptor)])
        assert len(group) == 2
        lists = [[(0, 0, 8191), (20_000, 30_000, 8193)], [(50_000, 7, 16_385), (0, 100_000, 0)]]
        parts = [
            fabric.Part(region, there.region, runs, there.notify)
            for there, runs in zip((one, two), lists, strict=True)
        ]
        transfer = group.scatter(parts, timeout=PATIENCE)
        transfer.wait(PATIENCE)
        assert transfer.done and [part.done for part in transfer.parts] == [True, True]
        expected = [bytearray(b"o" * SIZE) for _ in lists]
        for there, runs, memory in zip((one, two), lists, expected, strict=True):
            for here, far, length in runs:
                memory[far : far + length] = source[here : here + length].tobytes()
            assert there.ask("wait 1") == "True" and there.ask("digest") == digest(memory)
        pages = [
            fabric.Part.pages(
                4096,
                fabric.Pages(region, [3, 9], 4096),
                fabric.Pages(there.region, [100, 50], 4096),
                there.notify,
            )
            for there in (one, two)
        ]
        group.scatter(pages, bulk=True).wait(PATIENCE)
        for there, memory in zip((one, two), expected, strict=True):
            for here, far in [(3, 100), (9, 50)]:
                memory[far * 4096 : far * 4096 + 4096] = source[here * 4096 : here * 4096 + 4096].tobytes()
            assert there.ask("wait 2") == "True" and there.ask("digest") == digest(memory)
        # One part that cannot be begun: none is.
        parts[1] = fabric.Part(region, two.region, [(0, 0, SIZE + 1)], two.notify)
        with pytest.raises(ValueError, match=r"member 1 .*1048577 bytes"):
            group.scatter(parts)
        with pytest.raises(ValueError, match="1 parts for a group of 2"):
            group.scatter(parts[:1])
        group.barrier([one.notify, two.notify], timeout=PATIENCE).wait(PATIENCE)
        assert [there.ask("wait 3") for there in (one, two)] == ["True", "True"]
        assert [there.ask("count") for there in (one, two)] == ["3", "3"]


def test_a_member_that_is_gone_fails_alone() -> None:
    with other() as stays, other() as goes, fabric.Engine(patience=0.5) as engine:
        region = engine.register(bytearray(b"x" * 100))
        peers = [engine.connect(there.descriptor) for there in (goes, stays)]
        group = engine.group(peers)
        goes.process.kill()
        goes.process.wait()
        counters = [goes.notify, stays.notify]
        told = group.barrier(counters)
        with pytest.raises(
            fabric.GroupFailed, match=r"1 of 2 members failed: member 0: .*cannot be reached"
        ) as failed:
            told.wait(PATIENCE)
        assert [type(failure) for failure in failed.value.failures.values()] == [fabric.PeerLost]
        told.parts[1].wait(0)
        assert stays.ask("count") == "1"
        parts = [fabric.Part(region, there.region, [(0, 0, 100)], there.notify) for there in (goes, stays)]
        scattered = group.scatter(parts, timeout=PATIENCE)
        scattered.parts[1].wait(PATIENCE)
        with pytest.raises(fabric.GroupFailed):
            scattered.wait(PATIENCE)
        assert stays.ask("count") == "2"
        with pytest.raises(ValueError, match="members 0 and 2"):
            engine.group([*peers, peers[0]])
        peers[0].disconnect()
        with pytest.raises(KeyError, match="no such peer"):
            engine.group(peers)
        with pytest.raises(KeyError, match="member 0"):
            group.barrier(counters)


def test_waiting_for_a_group_ends_with_its_time_and_cancelling_it_ends_it() -> None:
    with other() as there, fabric.Engine() as engine:
        there.process.kill()
        there.process.wait()
        told = engine.group([engine.connect(there.descriptor)]).barrier([there.notify])
        with pytest.raises(fabric.StillMoving):
            told.wait(0)
        assert not told.done
        told.cancel()
        with pytest.raises(fabric.GroupFailed) as failed:
            told.wait(PATIENCE)
        assert isinstance(failed.value.failures[0], fabric.Cancelled)


def test_engines_wait_for_each_other() -> None:
    with fabric.Engine() as one, fabric.Engine() as two, fabric.Engine() as three:
        engines = [one, two, three]
        counters = [engine.counter(5) for engine in engines]
        came: list[int] = []

        def member(me: int) -> None:
            others = [at for at in range(3) if at != me]
            group = engines[me].group([engines[me].connect(engines[at].describe()) for at in others])
            for round in range(1, 11):
                came.append(round)
                told = group.barrier([(5, counters[at].generation) for at in others], timeout=PATIENCE)
                assert counters[me].wait(len(group) * round, timeout=PATIENCE)
                assert sum(other >= round for other in list(came)) >= 3
                told.wait(PATIENCE)

        with ThreadPoolExecutor(3) as pool:
            for waiting in [pool.submit(member, me) for me in range(3)]:
                waiting.result(3 * PATIENCE)


def test_messages_arrive_once_and_say_whose_they_are() -> None:
    with fabric.Engine(patience=0.5) as engine, other(descriptor=engine.describe()) as there:
        peer = engine.connect(there.descriptor)
        for data in (b"", b"x", bytes(range(256)) * 256):
            assert len(data) <= 65_536
            sent = peer.send(data)
            said = there.ask("echo")
            sent.wait(PATIENCE)
            assert sent.done
            answer = engine.receive(PATIENCE)
            assert answer == fabric.Message(peer.id, data[::-1])
            assert said == f"{peer.id.engine} {peer.id.boot}"
        assert engine.receive(0) is None
        with pytest.raises(ValueError, match="65537 bytes"):
            peer.send(bytes(65_537))
        there.process.kill()
        there.process.wait()
        with pytest.raises((fabric.PeerLost, fabric.DeadlineExceeded)):
            peer.send(b"x").wait(PATIENCE)
        peer.disconnect()
        with pytest.raises(KeyError, match="no such peer"):
            peer.send(b"x")


def test_messages_that_nobody_takes_fail_as_no_room() -> None:
    with fabric.Engine() as engine, fabric.Engine(inbox_messages=2) as there:
        peer = engine.connect(there.describe())
        for data in (b"one", b"two"):
            peer.send(data).wait(PATIENCE)
        with pytest.raises(fabric.NoRoom):
            peer.send(b"three", timeout=0.2, bulk=True).wait(PATIENCE)
        waits = peer.send(b"four", timeout=PATIENCE)
        received = [there.receive(PATIENCE) for _ in range(3)]
        waits.wait(PATIENCE)
        assert [message and message.data for message in received] == [b"one", b"two", b"four"]
        assert received[0] is not None and received[0].sender == engine.id
        assert there.receive(0.05) is None
    with pytest.raises(ValueError, match="inbox"):
        fabric.Engine(inbox_bytes=1000)


def test_closing_an_engine_ends_what_waits_for_a_message() -> None:
    engine = fabric.Engine()
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def wait() -> fabric.Message | None:
            begun.set()
            return engine.receive()

        waiting = pool.submit(wait)
        assert begun.wait(PATIENCE)
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            waiting.result(PATIENCE)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
def test_with_tls_bytes_go_both_ways_and_peers_without_are_told(tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    source = bytearray(random.Random(4).randbytes(SIZE))
    with other("secret", tls=files) as there:
        with fabric.Engine(token="secret", tls=files) as engine:
            region = engine.register(source)
            peer = engine.connect(there.descriptor)
            peer.write(region, there.region, [(0, 0, SIZE)], notify=there.notify).wait(PATIENCE)
            assert there.ask("wait 1") == "True"
            assert there.ask("digest") == digest(source)
            expected, source[:] = bytes(source), bytes(SIZE)
            peer.read(region, there.region, [(0, 0, SIZE)]).wait(PATIENCE)
            assert source == expected
        with fabric.Engine(token="secret", patience=4.0) as stranger:
            memory = bytearray(100)
            read = stranger.connect(there.descriptor).read(
                stranger.register(memory), there.region, [(0, 0, 100)]
            )
            with pytest.raises(fabric.PeerLost, match="wants TLS"):
                read.wait(PATIENCE)
            assert memory == bytes(100)
    with pytest.raises(ValueError, match=r"missing\.pem"):
        fabric.Engine(tls=files._replace(key=tmp_path / "missing.pem"))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[fabric.Engine, fabric.Engine]]:
    with fabric.Engine() as one, fabric.Engine() as two:
        two.register(bytearray(64))
        yield one, two


@settings(deadline=None)
@given(noise=st.binary(max_size=200))
def test_bytes_of_any_origin_are_no_descriptor_and_that_is_said(
    pair: tuple[fabric.Engine, fabric.Engine], noise: bytes
) -> None:
    engine, other = pair
    peer = engine.connect(other.describe())
    for descriptor in (noise, b"KVFD\x01\0\0\0" + noise):
        with pytest.raises(ValueError, match="descriptor"):
            engine.connect(descriptor)
        # A whole one, but of another process, is a KeyError.
        with pytest.raises((ValueError, KeyError), match="descriptor"):
            peer.update(descriptor)
    peer.disconnect()


@settings(deadline=None)
@given(
    cut=st.integers(0, 200),
    more=st.binary(min_size=1, max_size=50),
    at=st.integers(0, 35),
    by=st.integers(1, 255),
)
def test_a_descriptor_that_was_changed_is_none_or_another_one(
    pair: tuple[fabric.Engine, fabric.Engine], cut: int, more: bytes, at: int, by: int
) -> None:
    engine, other = pair
    right = other.describe()
    for wrong in (right[: cut % len(right)], right + more):
        with pytest.raises(ValueError, match="not a memory descriptor"):
            engine.connect(wrong)
    # Nothing of its addresses: an engine tries them.
    changed = bytearray(right)
    changed[at] ^= by
    peer = engine.connect(right)
    if 6 <= at < 8:
        peer.update(bytes(changed))  # means nothing yet
    else:
        with pytest.raises((ValueError, KeyError), match="descriptor"):
            peer.update(bytes(changed))
    peer.disconnect()
