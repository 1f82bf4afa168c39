"""Each sentence of docs/troubleshoot.md is what the program prints when somebody makes that mistake.

A mistake is a heading of the page; the sentences below it stand in a block of text, an empty line between them. Here
the mistake is made with real processes, and each sentence is looked for in what they print: a sentence that is changed
in the program or on the page alone, and a mistake that nobody makes here, fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from processes import KVLANE, PATIENCE, Daemon, clean_environment, run_kvlane
from wire import (
    DONE,
    ENGINE_OPENED,
    HELLO,
    OPEN_ENGINE,
    POOL_MAPPED,
    REGISTER_WORKER,
    SCHEDULER,
    WELCOME,
    WORKER,
    WORKER_REGISTERED,
    Wire,
    group,
    hello,
    region,
    register,
    worker_group,
)

from kvlane._core import WIRE_VERSION

MakeDaemon = Callable[..., Daemon]
Scene = Callable[[Path, MakeDaemon], str]

PAGE = Path(__file__).parents[2] / "docs" / "troubleshoot.md"
# A user that a host hardly has.
SOMEBODY = 20_000 + os.getpid() % 20_000
# Those that the page has to have.
MISTAKES = (
    "No daemon", "Wrong user", "Wrong address", "Port in use", "Pool too large", "SSD folder missing",
    "SSD folder unwritable", "SSD file foreign", "SSD file of another size", "SSD file of another version",
    "Wrong model", "Wrong wire version", "Typo in a key", "Key without prefix",
)  # fmt: skip
NEEDS_ANOTHER_USER = ("Wrong user", "SSD folder unwritable")


def _sentences() -> list[tuple[str, str]]:
    """Each mistake of the page with each of its sentences."""
    found, mistake, block = [], "", None
    for line in PAGE.read_text().splitlines():
        if line.startswith("### "):
            mistake = line[4:]
        elif line == "```text":
            block = []
        elif line == "```" and block is not None:
            found += [(mistake, " ".join(part.split())) for part in "\n".join(block).split("\n\n")]
            block = None
        elif block is not None:
            block.append(line)
    return found


def _pattern(sentence: str) -> re.Pattern[str]:
    """`<SIZE>`, in capitals, is clap's own. A line of the log has its time before the sentence, and fields after it."""
    parts = re.split(r"<[a-z]+>", sentence)
    return re.compile(r"(?:^|\s)" + ".+".join(map(re.escape, parts)) + r"(?:$| \w+=)")


SCENES: dict[str, Scene] = {}


def scene(mistake: str) -> Callable[[Scene], Scene]:
    def keep(make: Scene) -> Scene:
        SCENES[mistake] = make
        return make

    return keep


def _serve(folder: Path, *flags: str, **options: Any) -> str:
    """What a daemon prints that does not start."""
    needed = {
        "--pool-size": "2mib",
        "--listen": f"unix:{folder}/k.sock",
        "--http": "off",
        "--hugepages": "off",
    }
    rest = [word for pair in needed.items() if pair[0] not in flags for word in pair]
    ended = run_kvlane("serve", *rest, *flags, **options)
    assert ended.returncode != 0 and ended.stdout == "", ended
    # The log says other things before it. The error itself is one line, and no word of it comes twice.
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith(("kvlane: ", "error: "))]
    assert "\x1b" not in ended.stderr and "os error" not in line
    assert not re.search(r"(\b\w+\b[^\n]{20,})\1", line), f"something is said twice: {line}"
    return line


def _status(address: str, **options: Any) -> str:
    ended = run_kvlane("status", "--addr", address, **options)
    assert ended.returncode == 1 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr


def _doctor(folder: Path, **extra: Any) -> str:
    """What the doctor says of an engine with these keys, in the words of the connector."""
    config = {"kv_connector": "KVLaneConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    flags = (
        "--addr",
        f"unix:{folder}/kvlane.sock",
        "--pool-size",
        "1mib",
        "--engine-config",
        json.dumps(config),
    )
    # The interpreter of these tests: that beside the program, or the first on the path.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = run_kvlane("doctor", *flags, env=clean_environment(KVLANE_GPU_DRIVER="off", PATH=path))
    assert ended.returncode == 1, ended.stdout
    return ended.stdout


@scene("No daemon")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    address = f"unix:{folder}/kvlane.sock"
    nobody = _status(address)
    engine = """if True:
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
        from kvlane import _core
        from kvlane.connector import core_log
        core_log.start(_core)
        scheduler = _core.Scheduler(sys.argv[1], "engine", "test", [(bytes(16), "n", 16, 0)], 1)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", engine, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    engine_says = process.stdout.readline()
    process.communicate(timeout=PATIENCE)
    daemon = make_daemon()
    daemon.kill()
    return nobody + engine_says + _status(address)


@scene("Wrong address")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    told = [
        _status("nowhere"),
        _serve(folder, "--listen", "nowhere"),
        _serve(folder, "--listen", "unix:/" + "x" * 150),
        run_kvlane("serve", "--http", "off", env=clean_environment(KVLANE_ADDR="nowhere")).stderr,
        _doctor(folder, **{"kvlane.address": "127.0.0.1:9000"}),
    ]
    daemon = Daemon(folder)
    try:
        flags = ("--pool-size", "2mib", "--hugepages", "off", "--http", "off")
        daemon.start_with(*flags, "--listen", f"127.0.0.1:{free_port()}")
        told.append(daemon.log.wait_for("no Unix socket"))
    finally:
        daemon.kill()
    return "\n".join(told)


def _for_others(folder: Path) -> Path:
    """The program, where everybody may run it."""
    folder.chmod(0o755)
    return Path(shutil.copy(KVLANE, folder / "kvlane"))


@scene("Wrong user")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    binary = _for_others(folder)

    def status_as_somebody(address: str) -> str:
        ended = subprocess.run(
            [binary, "status", "--addr", address], capture_output=True, text=True, timeout=PATIENCE, check=False,
            env=clean_environment(), cwd="/", user=SOMEBODY, group=SOMEBODY, extra_groups=[],
        )  # fmt: skip
        assert ended.returncode == 1
        return ended.stderr

    mine = make_daemon()
    told = [status_as_somebody(mine.address)]
    mine.path.chmod(0o777)
    told.append(status_as_somebody(mine.address))
    mine.kill()
    theirs = folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, SOMEBODY, SOMEBODY)
    daemon = Daemon(theirs, binary=binary, cwd="/", user=SOMEBODY, group=SOMEBODY, extra_groups=[])
    try:
        daemon.start()
        told.append(_status(daemon.address))
    finally:
        daemon.kill()
    return "\n".join(told)


@scene("Port in use")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    file = folder / "precious.txt"
    file.write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        told = [_serve(folder, "--http", place), _serve(folder, "--listen", place)]
    told += [_serve(folder, "--listen", make_daemon().address), _serve(folder, "--listen", f"unix:{file}")]
    return "\n".join(told)


@scene("Pool too large")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    return "\n".join(
        [
            _serve(folder, "--pool-size", "900Ti"),
            # More pages than any machine has reserved.
            _serve(folder, "--pool-size", "900Ti", "--hugepages", "on"),
        ]
    )


@scene("Wrong flag")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    (folder / "kvlane.toml").write_text('http = "off"\npool = "4gb"\n')
    return "\n".join(
        [
            _serve(folder, "--log", "verbose"),
            _serve(folder, "--pool-size", "4xb"),
            _serve(folder, "--config", str(folder / "kvlane.toml")),
        ]
    )


@scene("A flag without effect")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    daemon = make_daemon("--rails", "9", "--seal-threads", "500", environment={"KVLANE_GPU_DRIVER": "off"})
    daemon.ready_line()
    return daemon.log.text()


@scene("SSD folder missing")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    told = [
        _serve(folder, "--ssd", f"{folder}/none/blocks:64mib"),
        _serve(folder, "--ssd", f"{folder}/none/"),
    ]
    assert not (folder / "none").exists()
    assert told[1].count("does not exist") == 1
    return told[0]


@scene("SSD folder unwritable")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    binary, disk, run = _for_others(folder), folder / "disk", folder / "run"
    disk.mkdir(mode=0o755)
    run.mkdir()
    os.chown(run, SOMEBODY, SOMEBODY)
    flags = ("--pool-size", "2mib", "--hugepages", "off", "--http", "off", "--listen", f"unix:{run}/k.sock")
    ended = subprocess.run(
        [binary, "serve", *flags, "--ssd", f"{disk}/blocks:64mib"], capture_output=True, text=True, timeout=PATIENCE,
        check=False, env=clean_environment(), cwd="/", user=SOMEBODY, group=SOMEBODY, extra_groups=[],
    )  # fmt: skip
    assert ended.returncode == 1 and list(disk.iterdir()) == []
    return ended.stderr


@scene("SSD file foreign")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    file = folder / "letters"
    file.write_bytes(b"precious" * 1000)
    told = _serve(folder, "--ssd", f"{file}:64mib")
    assert file.read_bytes() == b"precious" * 1000
    return told


def _made(folder: Path, make_daemon: MakeDaemon) -> Path:
    """A file that a daemon made."""
    file = folder / "blocks"
    assert make_daemon("--ssd", f"{file}:64mib").stop() == 0
    return file


@scene("SSD file of another size")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    file = _made(folder, make_daemon)
    told = _serve(folder, "--ssd", f"{file}:32Mi")
    assert "not 32mib" in told and "'" + str(file) + ":32Mi'" in told
    # The flag may name the size that the file was made with, by the message.
    asked = re.search(r"was made with (\S+) of capacity", told)
    assert asked is not None
    assert make_daemon("--ssd", f"{file}:{asked[1]}").stop() == 0
    return told


@scene("SSD file of another version")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    file = _made(folder, make_daemon)
    with file.open("r+b") as opened:
        # crates/ssd/src/layout/mod.rs: kind, checksum and length, then the version as the first field.
        for copy in (0, 4096):
            opened.seek(copy)
            page = bytearray(opened.read(4096))
            opened.seek(copy)
            opened.write(_of_version(page, 2))
    return _serve(folder, "--ssd", f"{file}:64mib")


def _of_version(page: bytearray, version: int) -> bytes:
    """A superblock as another version would write it."""
    length = int.from_bytes(page[12:16], "little")
    page[16:20] = version.to_bytes(4, "little")
    page[8:12] = _crc32c(bytes(page[12:length])).to_bytes(4, "little")
    return bytes(page)


def _crc32c(content: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@scene("SSD file in use")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    file = folder / "blocks"
    make_daemon("--ssd", f"{file}:64mib")
    return _serve(folder, "--ssd", f"{file}:64mib")


@scene("Wrong model")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    daemon = make_daemon()
    alone = run_kvlane("status", "--addr", daemon.address).stdout
    assert "share blocks" not in alone
    with (
        Wire(daemon.path) as one,
        Wire(daemon.path) as two,
        Wire(daemon.path) as three,
        Wire(daemon.path) as four,
    ):
        _engine(one, two, "one", b"1" * 16)
        only_one = run_kvlane("status", "--addr", daemon.address).stdout
        assert "share blocks" not in only_one
        _engine(three, four, "two", b"2" * 16)
        return run_kvlane("status", "--addr", daemon.address).stdout


def _engine(scheduler: Wire, worker: Wire, name: str, namespace: bytes) -> None:
    nonces = (name.encode().rjust(16, b"s"), name.encode().rjust(16, b"w"))
    assert scheduler.ask(HELLO, hello(SCHEDULER, name, nonces[0]))[0] == WELCOME
    opened = group(namespace) + b"\x10\x01"
    assert scheduler.ask(OPEN_ENGINE, opened)[0] == ENGINE_OPENED
    assert worker.ask(HELLO, hello(WORKER, name, nonces[1]))[0] == WELCOME
    joined = register(worker_group(region(), namespace=namespace))
    assert worker.ask(REGISTER_WORKER, joined)[0] == WORKER_REGISTERED
    assert worker.ask(POOL_MAPPED)[0] == DONE


@scene("Wrong wire version")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    daemon = make_daemon()
    with Wire(daemon.path) as newer:
        newer.refused(HELLO, hello(wire=(WIRE_VERSION + 1, 99)))
    assert daemon.stop() == 0
    told = daemon.log.rest()
    # It says a thing once to a peer.
    daemon.start()
    with Wire(daemon.path) as older:
        older.refused(HELLO, hello(wire=(0, 0)))
    assert daemon.stop() == 0
    return told + daemon.log.rest()


@scene("Typo in a key")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    return "\n".join(
        [
            _doctor(folder, **{"kvlane.adress": "unix:/run/kvlane.sock"}),
            _doctor(folder, **{"kvlane.color": "blue"}),
            _doctor(folder, **{"kvlane.layout": "blocks"}),
        ]
    )


@scene("Key without prefix")
def _(folder: Path, make_daemon: MakeDaemon) -> str:
    return _doctor(folder, address="unix:/run/kvlane.sock")


def test_every_mistake_of_the_page_is_made_here_and_none_is_missing() -> None:
    headings = {line[4:] for line in PAGE.read_text().splitlines() if line.startswith("### ")}
    assert headings == {mistake for mistake, _ in _sentences()} == set(SCENES)
    assert headings >= set(MISTAKES)
    assert PAGE.read_text().splitlines()[2].startswith("This page is for ")


def _cases() -> list[Any]:
    cases = []
    for number, (mistake, sentence) in enumerate(_sentences()):
        marks = [pytest.mark.another_user] if mistake in NEEDS_ANOTHER_USER else []
        cases.append(pytest.param(mistake, sentence, marks=marks, id=f"{number}-{mistake.replace(' ', '-')}"))
    return cases


@pytest.mark.parametrize(("mistake", "sentence"), _cases())
def test_the_program_prints_this_sentence(
    mistake: str, sentence: str, folder: Path, make_daemon: MakeDaemon
) -> None:
    """Errors came two or three times in one line, with raw bytes instead of what was typed, and in some of these cases
    not at all: a typo in `--log` ended the log, and a key without its prefix was ignored."""
    printed = SCENES[mistake](folder, make_daemon)
    assert any(_pattern(sentence).search(line) for line in printed.splitlines()), (
        f"{sentence}\nis not in\n{printed}"
    )
