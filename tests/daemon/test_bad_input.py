"""Bad input: one clear sentence with the offending value, and nothing that was cached is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from busy import stretched
from patterns import NAMESPACE, hashes
from processes import Daemon, Engine, run_kvlane, until
from wire import (
    BYE,
    CLAIM,
    COMMIT,
    CONFLICT,
    DONE,
    DROP_NAMESPACES,
    ENGINE_OPENED,
    GET_STATUS,
    HELLO,
    INCOMPATIBLE,
    INVALID,
    LOOKUP,
    LOOKUP_RESULT,
    MAP_POOL,
    NOT_ALLOWED,
    OPEN_ENGINE,
    POOL_MAPPED,
    REFUSED,
    REGISTER_WORKER,
    RELEASE,
    SAVE,
    SCHEDULER,
    UNKNOWN,
    WELCOME,
    WORKER,
    WORKER_REGISTERED,
    Closed,
    Wire,
    field,
    fields,
    frame,
    group,
    hello,
    refusal,
    region,
    register,
    worker_group,
)

from kvlane import _core
from kvlane._core import WIRE_VERSION

MakeDaemon = Callable[..., Daemon]
MakeEngine = Callable[..., Engine]


# Typed by a person


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--pool-size", "4xb"], ["4xb", "--pool-size"]),
        (["--pool-size=-5"], ["-5", "--pool-size"]),
        (["--pool-size", "lots"], ["lots", "--pool-size"]),
        (["--pool-size", ""], ["--pool-size"]),
        (["--pool-size", "0"], ["'0'", "--pool-size"]),
        (["--pool-size", "64kb"], ["'64kb'", "--pool-size"]),
        (["--pool-size", "900tb"], ["'900tb'", "memory"]),
        (["--pool-size", "99999999999999999999gb"], ["'99999999999999999999gb'", "2^64"]),
        (["--http", "nowhere"], ["'nowhere'", "--http"]),
        (["--http", "127.0.0.1:99999"], ["'127.0.0.1:99999'", "--http"]),
        (["--listen", "nowhere"], ["'nowhere'", "--listen"]),
        (["--listen", "unix:"], ["'unix:'", "--listen"]),
        (["--listen", "unix:/" + "x" * 150], ["151", "107"]),
        (["--hugepages", "perhaps"], ["perhaps", "--hugepages"]),
        (["--scrub-rate", "5furlongs"], ["5furlongs", "--scrub-rate"]),
        (["--max-sessions", "many"], ["many", "--max-sessions"]),
        (["--drain-seconds=-1"], ["-1", "--drain-seconds"]),
        (["--config", "/nonexistent/kvlane.toml"], ["/nonexistent/kvlane.toml", "--config"]),
        (["--log", "=,=;"], ["=,=;", "--log"]),
        (
            ["--log", "verbose"],
            ["'verbose'", "--log", "error, warn, info, debug, trace, off", "kvlane_server"],
        ),
        (["--log-format", "yaml"], ["'yaml'", "--log-format", "text, json"]),
        (["--rails", "some"], ["'some'", "--rails"]),
        (["--ssd", "/nonexistent/blocks:4xb"], ["'4xb'", "--ssd", "'xb'"]),
        (["--ssd-path", "sideways"], ["'sideways'", "--ssd-path", "direct"]),
        (["--ssd-path", "staged"], ["--ssd-path is of no use without --ssd"]),
        (["--ssd", "/nonexistent/blocks", "--ssd-staging", "0"], ["--ssd-staging 0 B", "--ssd-path direct"]),
        (
            ["--ssd", "/nonexistent/blocks", "--ssd-staging", "100tb"],
            ["--ssd-staging 100", "available", "smaller"],
        ),
        (["--colour"], ["--colour"]),
    ],
)
def test_wrong_flags_are_named(folder: Path, flags: list[str], parts: list[str]) -> None:
    needed = {"--pool-size": "8mib", "--listen": f"unix:{folder}/s", "--http": "off", "--hugepages": "off"}
    given = {flag.split("=")[0] for flag in flags}
    rest = [word for pair in needed.items() if pair[0] not in given for word in pair]
    failed = run_kvlane("serve", *rest, *flags)
    assert failed.returncode != 0
    for part in parts:
        assert part in failed.stderr, failed.stderr
    assert "panicked" not in failed.stderr
    assert "\x1b" not in failed.stderr, "no colours but on a terminal"
    assert "os error" not in failed.stderr
    assert not (folder / "s").exists(), "a daemon that does not start leaves no socket"


def _second(daemon: Daemon, listen: str, http: str = "off") -> str:
    failed = run_kvlane("serve", "--pool-size", "8mib", "--listen", listen, "--http", http)
    assert failed.returncode == 1
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("kvlane: ")]
    return line


def test_occupied_places_are_named_and_the_first_daemon_goes_on(
    make_daemon: MakeDaemon, make_engine: MakeEngine, folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = make_daemon()
        engine = make_engine(daemon, "a")
        engine.call("save", prompt="p", count=4)
        daemon.settle()
        assert daemon.address in _second(daemon, daemon.address)
        assert f"127.0.0.1:{port}" in _second(daemon, f"127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in _second(daemon, f"unix:{folder}/other.sock", f"127.0.0.1:{port}")
        assert f"127.0.0.1:{daemon.port}" in _second(
            daemon, f"unix:{folder}/other.sock", f"127.0.0.1:{daemon.port}"
        )
        assert not (folder / "other.sock").exists()
    file = folder / "precious.txt"
    file.write_text("precious")
    assert f"{file} exists and is no socket" in _second(daemon, f"unix:{file}")
    assert file.read_text() == "precious"
    (folder / "subfolder").mkdir()
    assert f"{folder}/subfolder" in _second(daemon, f"unix:{folder}/subfolder")
    assert str(file) in _second(daemon, f"unix:{file}/kvlane.sock")
    assert engine.call("check", prompt="p", count=4) == {"blocks": 4, "wrong": [], "ok": True, "detail": ""}


def test_a_stale_socket_file_is_replaced(make_daemon: MakeDaemon, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "kvlane.sock"))
    daemon = make_daemon()
    assert daemon.status()["blocks"] == 0


# Connections


def _as_user(uid: int, path: Path) -> tuple[int, str]:
    """Greets as another user, and answers the refusal."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            with Wire(path) as wire:
                reason, sentence = wire.refused(HELLO, hello())
                os.write(writing, f"{reason} {sentence}".encode())
        except BaseException as error:  # noqa: BLE001 - the parent reads it and fails
            os.write(writing, f"-1 {error!r}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        reason, sentence = answer.read().split(" ", 1)
    os.waitpid(child, 0)
    return int(reason), sentence


@pytest.mark.another_user
def test_a_foreign_user_is_refused_by_credentials(daemon: Daemon, folder: Path) -> None:
    folder.chmod(0o755)
    assert "Permission" in _as_user(65534, daemon.path)[1], "by default not even the socket opens"
    daemon.path.chmod(0o777)
    reason, sentence = _as_user(65534, daemon.path)
    assert reason == NOT_ALLOWED, sentence
    assert "65534" in sentence
    assert daemon.status()["sessions"], "and the others go on"


def test_engines_are_refused_over_tcp(make_daemon: MakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    make_daemon("--listen", f"127.0.0.1:{port}")
    for role in (SCHEDULER, WORKER):
        with Wire(("127.0.0.1", port)) as wire:
            reason, sentence = wire.refused(HELLO, hello(role, "a"))
            assert reason == NOT_ALLOWED
            assert "Unix socket" in sentence
            wire.wait_closed()


@pytest.mark.parametrize(
    ("speaks", "upgrade"),
    [((WIRE_VERSION + 1, 99), "daemon"), ((0, 0), "client"), ((WIRE_VERSION + 1, 1), "")],
    ids=["newer", "older", "empty"],
)
def test_a_wrong_wire_version_is_refused_with_what_to_upgrade(
    daemon: Daemon, speaks: tuple[int, int], upgrade: str
) -> None:
    with Wire(daemon.path) as wire:
        reason, sentence = wire.refused(HELLO, hello(wire=speaks))
        assert reason == INCOMPATIBLE
        assert f"{speaks[0]} to {speaks[1]}" in sentence
        assert f"upgrade the {upgrade}" in sentence
        wire.wait_closed()


@pytest.mark.parametrize(
    ("greeting", "part"),
    [
        (hello(nonce=b"short"), "this one 5"),
        (hello(nonce=b""), "this one 0"),
        (hello(role=7), "role 7"),
        (hello(SCHEDULER, ""), "engine id is empty"),
        (hello(WORKER, "x" * 100_000), "100000 bytes"),
        (hello(client="x" * 70_000), "70000 bytes"),
    ],
)
def test_wrong_greetings_are_refused(daemon: Daemon, greeting: bytes, part: str) -> None:
    """A client's name had no bound: two of 40 MB made an answer longer than a frame, at which the daemon's thread
    panicked and left its session behind."""
    with Wire(daemon.path) as wire:
        reason, sentence = wire.refused(HELLO, greeting)
        assert reason == INVALID
        assert part in sentence
        wire.wait_closed()


def test_hello_comes_first_and_once(daemon: Daemon) -> None:
    with Wire(daemon.path) as wire:
        assert "must be Hello" in wire.refused(GET_STATUS)[1]
        assert wire.ask(HELLO, hello())[0] == WELCOME
        reason, sentence = wire.refused(HELLO, hello())
        assert reason == INVALID
        assert "already" in sentence
        wire.wait_closed()


# Bytes on the wire


@pytest.fixture
def cached(daemon: Daemon, make_engine: MakeEngine) -> Engine:
    """An engine whose six blocks are in the pool."""
    engine = make_engine(daemon, "cached")
    assert engine.call("save", prompt="p", count=6)["blocks"] == 6
    daemon.settle()
    return engine


def _still_there(engine: Engine) -> None:
    assert engine.call("check", prompt="p", count=6) == {"blocks": 6, "wrong": [], "ok": True, "detail": ""}
    engine.call("state")


def test_garbage_is_answered_with_a_sentence_and_a_closed_connection(daemon: Daemon, cached: Engine) -> None:
    dice = random.Random(1)
    for noise in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x00\x00\x00\x80",
        frame(b"\xff" * 50),
        *(frame(dice.randbytes(dice.randrange(1, 300))) for _ in range(50)),
        *(dice.randbytes(dice.randrange(4, 5000)) for _ in range(50)),
    ):
        with Wire(daemon.path) as wire:
            wire.socket.sendall(noise)
            wire.socket.shutdown(socket.SHUT_WR)
            try:
                kind, answer = wire.reply()
                assert kind == REFUSED
                assert refusal(answer)[1]
            except Closed:
                pass  # what looks like the beginning of a frame is waited for
            wire.wait_closed()
    with Wire(daemon.path) as wire:
        wire.socket.sendall(b"GET / HTTP/1.1\r\n")
        assert "542393671 bytes" in refusal(wire.reply()[1])[1]
    _still_there(cached)
    assert [session["engine"] for session in daemon.engines()] == ["cached", "cached"]


def test_a_truncated_frame_changes_nothing(daemon: Daemon, cached: Engine) -> None:
    greeting = frame(fields((1, 1), (HELLO, hello())))
    for length in range(1, len(greeting)):
        with Wire(daemon.path) as wire:
            wire.socket.sendall(greeting[:length])
    with Wire(daemon.path) as slow:
        for byte in greeting:
            slow.socket.sendall(bytes([byte]))
        assert slow.reply()[0] == WELCOME
        slow.socket.sendall(frame(field(1, 1)))
        assert "no body" in refusal(slow.reply()[1])[1]
    _still_there(cached)


def _open(wire: Wire, engine: str = "by hand", nonce: bytes = b"s" * 16) -> None:
    assert wire.ask(HELLO, hello(SCHEDULER, engine, nonce))[0] == WELCOME
    assert wire.ask(OPEN_ENGINE, group() + field(2, 1))[0] == ENGINE_OPENED


def _join(wire: Wire, engine: str = "by hand", nonce: bytes = b"w" * 16) -> None:
    assert wire.ask(HELLO, hello(WORKER, engine, nonce))[0] == WELCOME
    assert wire.ask(REGISTER_WORKER, register(worker_group(region())))[0] == WORKER_REGISTERED
    assert wire.ask(POOL_MAPPED)[0] == DONE


def test_requests_that_make_no_sense_are_refused(daemon: Daemon, cached: Engine) -> None:
    def lookup(*groups: tuple[int, bytes]) -> bytes:
        return b"".join(field(1, fields((1, number), (2, names))) for number, names in groups) + field(
            2, 1000
        )

    def save(number: int = 0, names: bytes = bytes(16), ids: bytes = b"\0", parent: bytes = b"") -> bytes:
        return field(1, fields((1, number), (2, parent), (3, names), (4, ids)))

    with Wire(daemon.path) as scheduler, Wire(daemon.path) as worker:
        _open(scheduler)
        _join(worker)
        for body, content, reason, part in (
            (LOOKUP, lookup((0, bytes(15))), INVALID, "15"),
            (LOOKUP, lookup((0, bytes(33))), INVALID, "33"),
            (LOOKUP, lookup(), INVALID, "0 groups"),
            (LOOKUP, lookup((0, b""), (1, b"")), INVALID, "2 groups"),
            (LOOKUP, lookup((5, bytes(16))), INVALID, "group 5"),
            (OPEN_ENGINE, group(bytes(15)) + field(2, 1), INVALID, "15"),
            (OPEN_ENGINE, field(2, 1), CONFLICT, "0 groups"),
            (OPEN_ENGINE, group() * 65 + field(2, 1), CONFLICT, "65 groups"),
            (OPEN_ENGINE, group(tokens=0) + field(2, 1), CONFLICT, "0 tokens"),
            (OPEN_ENGINE, group(), CONFLICT, "0 workers"),
            (OPEN_ENGINE, group() + field(2, 5000), CONFLICT, "5000 workers"),
            (OPEN_ENGINE, group() + field(2, 2), CONFLICT, "2 workers"),
            (OPEN_ENGINE, group(b"x" * 16) + field(2, 1), CONFLICT, "group 0"),
            (REGISTER_WORKER, register(worker_group(region())), NOT_ALLOWED, "only workers"),
            (MAP_POOL, field(1, 1), NOT_ALLOWED, "only workers"),
            (DROP_NAMESPACES, field(1, b"y" * 16), NOT_ALLOWED, "use a tool"),
            (SAVE, save(), NOT_ALLOWED, "register"),
        ):
            assert (found := scheduler.refused(body, content))[0] == reason, found
            assert part in found[1], found
        # A failed opening closes the engine until the next one.
        assert scheduler.ask(OPEN_ENGINE, group() + field(2, 1))[0] == ENGINE_OPENED
        for body, content, reason, part in (
            (CLAIM, save(names=bytes(15)), INVALID, "15"),
            (CLAIM, save(number=3), INVALID, "group 3"),
            (CLAIM, save(ids=b""), INVALID, "0 block ids"),
            (CLAIM, save(ids=b"\x08"), INVALID, "block id 8"),
            (CLAIM, save(parent=b"short"), INVALID, "5"),
            (COMMIT, field(1, 77), UNKNOWN, "claim 77"),
            (SAVE, save(), NOT_ALLOWED, "mapping"),
            (LOOKUP, lookup((0, b"")), NOT_ALLOWED, "open"),
            (RELEASE, field(1, 1), NOT_ALLOWED, "open"),
            (OPEN_ENGINE, group() + field(2, 1), NOT_ALLOWED, "only the scheduler"),
            (REGISTER_WORKER, register(worker_group(region(blocks=0))), INVALID, "blocks is 0"),
            (REGISTER_WORKER, register(worker_group(region(piece=0))), INVALID, "piece size is 0"),
            (REGISTER_WORKER, register(worker_group(region(stride=0))), INVALID, "stride is 0"),
            (REGISTER_WORKER, register(worker_group(region(offsets=()))), INVALID, "0 pieces"),
            (REGISTER_WORKER, register(worker_group(region(offsets=(0, 4095)))), INVALID, "4095"),
            (REGISTER_WORKER, register(worker_group(region(stride=4095))), INVALID, "overlap"),
            (REGISTER_WORKER, register(worker_group(region(base=2**64 - 8))), INVALID, "address space"),
            (
                REGISTER_WORKER,
                register(worker_group(region(piece=1 << 40, stride=1 << 40))),
                INVALID,
                str(1 << 40),
            ),
            (REGISTER_WORKER, register(worker_group()), INVALID, "without regions"),
            (REGISTER_WORKER, register(worker_group(region(), layout=b"?")), INVALID, "this one 1"),
            (REGISTER_WORKER, register(worker_group(region(), namespace=b"?")), INVALID, "1"),
            (REGISTER_WORKER, register(worker_group(region(), namespace=b"n" * 16)), CONFLICT, "group 0"),
            (REGISTER_WORKER, register(), CONFLICT, "0 groups"),
            (REGISTER_WORKER, register(worker_group(region()), rank=1), CONFLICT, "rank 1"),
            (REGISTER_WORKER, register(worker_group(region()), method=1), NOT_ALLOWED, "process_vm"),
        ):
            assert (found := worker.refused(body, content))[0] == reason, found
            assert part in found[1], found
        # After all that both still work.
        assert worker.ask(REGISTER_WORKER, register(worker_group(region())))[0] == WORKER_REGISTERED
        assert worker.ask(POOL_MAPPED)[0] == DONE
        kind, answer = scheduler.ask(LOOKUP, lookup((0, bytes(16))))
        assert kind == LOOKUP_RESULT
        assert answer == {4: [1]}, "ready, and a miss"
        for wire in (scheduler, worker):
            wire.ask(BYE)
    with Wire(daemon.path) as tool:
        assert tool.ask(HELLO, hello())[0] == WELCOME
        for name, reason, part in ((b"y" * 16, UNKNOWN, "7979"), (b"y" * 15, INVALID, "15")):
            assert (found := tool.refused(DROP_NAMESPACES, field(1, name)))[0] == reason, found
            assert part in found[1], found
        tool.ask(BYE)
    _still_there(cached)


def test_a_worker_that_failed_to_register_again_cannot_write_with_its_old_shape(
    daemon: Daemon, cached: Engine
) -> None:
    """Its former registration stayed in force although the engine had ended. When another engine then came under the
    same name with other sizes, its saves went beyond the extents, over other blocks."""
    with Wire(daemon.path) as worker, Wire(daemon.path) as scheduler, Wire(daemon.path) as other:
        _open(scheduler, "e")
        _join(worker, "e")
        assert (
            worker.refused(REGISTER_WORKER, register(worker_group(region(), namespace=b"n" * 16)))[0]
            == CONFLICT
        )
        scheduler.ask(BYE)
        scheduler.wait_closed()
        assert other.ask(HELLO, hello(WORKER, "e", b"o" * 16))[0] == WELCOME
        small = register(worker_group(region(piece=64, stride=64), layout=b"other layout ..."))
        assert other.ask(REGISTER_WORKER, small)[0] == WORKER_REGISTERED
        assert other.ask(POOL_MAPPED)[0] == DONE
        with Wire(daemon.path) as second:
            _open(second, "e", b"S" * 16)
            claim = field(1, fields((1, 0), (3, b"h" * 16), (4, b"\0")))
            reason, sentence = worker.refused(CLAIM, claim)
            assert (reason, "register" in sentence) == (NOT_ALLOWED, True), sentence
    _still_there(cached)


def test_a_process_that_serves_another_engine_now_leaves_nothing_of_the_former(daemon: Daemon) -> None:
    """Its place in the former engine was never given back: its id could not be used until the daemon's end."""
    with Wire(daemon.path) as first, Wire(daemon.path) as second, Wire(daemon.path) as third:
        _open(first, "former", b"n" * 16)
        assert second.ask(HELLO, hello(SCHEDULER, "latter", b"n" * 16))[0] == WELCOME
        first.wait_closed()
        _open(third, "former", b"m" * 16)


def test_many_connections_of_one_process_at_once_end_with_one_of_them(daemon: Daemon) -> None:
    """Two new connections used to wait for each other's end, for ever."""
    greeting = frame(fields((1, 1), (HELLO, hello(SCHEDULER, "same"))))
    for _ in range(20):
        wires = [Wire(daemon.path) for _ in range(6)]
        for wire in wires:
            wire.socket.sendall(greeting)
        until("one session", lambda: len(daemon.engines()) == 1)
        for wire in wires:
            wire.socket.close()

    # The daemon may read a greeting of the last round after this one and believe it the newer: a client connects again.
    def served() -> bool:
        with Wire(daemon.path) as last:
            try:
                _open(last, "same", b"0123456789abcdef")
            except (Closed, ConnectionError):
                return False
        return True

    until("the process to be served again", served)


def test_an_answer_too_long_for_a_frame_is_cut_and_not_a_panic(
    make_daemon: MakeDaemon, make_engine: MakeEngine
) -> None:
    """The same block asked for four million times, by an engine of many workers, made an answer of 268 MB."""
    daemon = make_daemon()
    workers = 16
    engines = [
        make_engine(daemon, "wide", rank=rank, workers=workers, scheduler=rank == 0)
        for rank in range(workers)
    ]
    for engine in engines:
        engine.call("save", prompt="p", count=1)
    daemon.settle()
    assert engines[0].call("lookup", prompt="p", count=1)["tokens"] == 16
    nonce = b"z" * 16
    engines[0].call("close")
    until("its sessions to go", lambda: len(daemon.engines()) == workers - 1)
    with Wire(daemon.path) as scheduler, Wire(daemon.path) as worker:
        assert scheduler.ask(HELLO, hello(SCHEDULER, "wide", nonce))[0] == WELCOME
        assert scheduler.ask(OPEN_ENGINE, group() + field(2, workers))[0] == ENGINE_OPENED
        again = register(worker_group(region(piece=16384, stride=16384)), workers=workers)
        assert worker.ask(HELLO, hello(WORKER, "wide", nonce))[0] == WELCOME
        assert worker.ask(REGISTER_WORKER, again)[0] == WORKER_REGISTERED
        assert worker.ask(POOL_MAPPED)[0] == DONE
        (name,) = hashes("p", 0, 1)
        kind, answer = scheduler.ask(LOOKUP, field(1, field(2, name * 4_000_000)) + field(2, 1 << 40))
        assert kind == LOOKUP_RESULT
        (tokens,) = answer[1]
        assert isinstance(tokens, int)
        assert 16 * 100_000 < tokens < 16 * 4_000_000
        for wire in (scheduler, worker):
            wire.ask(BYE)
    assert daemon.status()["blocks"] == 1


def test_a_silent_connection_is_cut_off(daemon: Daemon) -> None:
    """Connections that never greet used to keep a thread each, without bound."""
    with Wire(daemon.path) as silent:
        started = time.monotonic()
        silent.wait_closed()
        assert 5 < time.monotonic() - started < stretched(25)


def test_connections_are_bounded(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("--max-sessions", "4")
    wires = [Wire(daemon.path) for _ in range(4 + 64)]
    with Wire(daemon.path) as beyond:
        beyond.wait_closed()
    for wire in wires:
        wire.socket.close()
    for turn in range(8):
        # A closed connection counts until the daemon's thread has read its end.
        until("a closed connection to make room", lambda nonce=bytes([turn]) * 16: _is_served(daemon, nonce))


def _is_served(daemon: Daemon, nonce: bytes) -> bool:
    with Wire(daemon.path) as wire:
        try:
            assert wire.ask(HELLO, hello(nonce=nonce))[0] == WELCOME
        except Closed:
            return False
        assert wire.ask(BYE)[0] == DONE
        wire.wait_closed()
        return True


# Requests of engines


def test_two_engines_with_one_id(daemon: Daemon, cached: Engine, make_engine: MakeEngine) -> None:
    other = make_engine(daemon, "cached", layout="05" * 16)
    state = other.call("state")
    assert not state["worker"]
    assert not state["scheduler"]
    for sentence in (state["reason"], state["refusal"]):
        assert "'cached'" in sentence, state
        assert "engine_id" in sentence
    assert other.call("check", prompt="p", count=6)["blocks"] == 0
    end = other.call("save", prompt="q", count=3)
    assert not end["ok"]
    _still_there(cached)
    # The place is free as soon as the first has gone.
    cached.kill()
    other.wait_connected()
    assert other.call("check", prompt="p", count=6)["blocks"] == 0, "another layout shares nothing"


@pytest.mark.parametrize(
    ("region", "part"),
    [
        ((4096, 4096, 4, 0, [0]), "piece size is 0"),
        ((4096, 4096, 4, 4096, []), "0 pieces"),
        ((4096, 4096, 4, 4096, [0, 100]), "overlap"),
        ((4096, 0, 4, 4096, [0]), "stride is 0"),
        ((2**64 - 4096, 4096, 4, 4096, [0]), "address space"),
    ],
)
def test_a_worker_with_a_wrong_shape_is_told_so_at_once(
    daemon: Daemon, region: tuple[int, int, int, int, list[int]], part: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        _core.Worker(daemon.address, "wrong", "test", 0, 1, [(NAMESPACE, bytes(16), [region])])


def test_wrong_arguments_from_python(daemon: Daemon) -> None:
    scheduler = _core.Scheduler(daemon.address, "py", "test", [(NAMESPACE, "n", 16, 0)], 1)
    with pytest.raises(ValueError, match="15"):
        scheduler.lookup_start("r", [[bytes(15)]], 100)
    with pytest.raises(ValueError, match="this one 3"):
        _core.Scheduler(daemon.address, "py", "test", [(b"abc", "n", 16, 0)], 1)
    with pytest.raises(ValueError, match="'nowhere'"):
        _core.Scheduler("nowhere", "py", "test", [(NAMESPACE, "n", 16, 0)], 1)
    with pytest.raises(ValueError, match="-1"):
        _core.Scheduler(daemon.address, "py", "test", [(NAMESPACE, "n", 16, 0)], 1, -1.0)
    with pytest.raises(ValueError, match="'teleport'"):
        _core.Worker(daemon.address, "py", "test", 0, 1, [], "teleport")
    latent = [(NAMESPACE, bytes(16), [(4096, 4096, 4, 1024, [0])])]
    with pytest.raises(ValueError, match="2 groups came with 1 groups"):
        _core.Worker(daemon.address, "py", "test", 0, 2, latent, replicas=[2, 2])
    with pytest.raises(ValueError, match="3 workers cannot share the blocks of a group by 2"):
        _core.Worker(daemon.address, "py", "test", 0, 3, latent, replicas=[2])
    with pytest.raises(ValueError, match="1024 bytes cannot be cut into 4 slices"):
        _core.Worker(daemon.address, "py", "test", 0, 4, latent, replicas=[4])
    with pytest.raises(ConnectionError, match="kvlane serve"):
        _core.Tool("unix:/nonexistent/kvlane.sock")
    tool = _core.Tool(daemon.address)
    with pytest.raises(ValueError, match="0707"):
        tool.drop_namespaces([bytes([7]) * 16])
    with pytest.raises(ValueError, match="not inside the pool"):
        tool.read_pool((64 << 20) - 1, 2)
    with pytest.raises(ValueError, match="not inside the pool"):
        tool.write_pool(2**64 - 1, b"xx")
    tool.close()
    scheduler.close()


def test_a_million_hashes_are_looked_up(daemon: Daemon, cached: Engine) -> None:
    """From this process, beside the engine: the hashes alone are 16 MB."""
    del cached
    scheduler = _core.Scheduler(daemon.address, "million", "test", [(NAMESPACE, "pattern", 16, 0)], 1)
    memory = mmap.mmap(-1, 2 * 256 * 8192)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # The engine's layout and sizes: its blocks are found.
    region = (base, 8192, 256, 8192, [0, 256 * 8192])
    worker = _core.Worker(daemon.address, "million", "test", 0, 1, [(NAMESPACE, b"\x04" * 16, [region])])
    prompt = hashes("p", 0, 6) + [number.to_bytes(16, "little") for number in range(1, 999_995)]
    assert len(prompt) == 1_000_000
    # A lookup that is out of time is a miss.
    hit = scheduler.lookup([prompt], 1 << 40, 1e3 * stretched(20))
    assert hit.tokens == 6 * 16
    assert len(hit.pages(0, 0)) == 6 * 4
    scheduler.release(hit.boot, hit.lease)
    # None of them in the pool, and none at all.
    assert scheduler.lookup([prompt[6:]], 1 << 40, 20_000.0).tokens == 0
    assert scheduler.lookup([[]], 1 << 40, 20_000.0).tokens == 0
    assert scheduler.lookup([prompt], 0, 20_000.0).tokens == 0
    worker.close()
    scheduler.close()


def test_zero_blocks_are_saved_and_loaded(daemon: Daemon, cached: Engine) -> None:
    end = cached.call("save", prompt="none", count=0)
    assert (end["ok"], end["blocks"]) == (True, 0)
    assert cached.call("check", prompt="none", count=0)["blocks"] == 0
    _still_there(cached)
    assert daemon.status()["claimed_blocks"] == 0
