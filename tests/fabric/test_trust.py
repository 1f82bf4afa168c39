"""Whom an engine trusts that was given no token: engines of its user, and nobody else on the host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from another_user import as_user

from kvlane import fabric

PATIENCE = 30.0
STRANGER = 20_000 + os.getpid() % 20_000

# A process with a region; it says what is in it when it is asked, and writes its region to peers by their descriptors.
OTHER = """
import sys
from kvlane import fabric
memory = bytearray(b"o" * 100)
engine = fabric.Engine()
region = engine.register(memory)
print(engine.describe().hex(), region.number, flush=True)
for line in sys.stdin:
    match line.split():
        case ["look"]:
            print(memory[:1].decode(), flush=True)
        case ["write", descriptor, remote]:
            try:
                engine.connect(bytes.fromhex(descriptor)).write(region, int(remote), [(0, 0, 100)]).wait(20)
                print("done", flush=True)
            except (fabric.FabricError, ValueError) as error:
                print(type(error).__name__, error, flush=True)
"""


class Other:
    def __init__(self, runtime: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        )

    def met(self) -> Other:
        descriptor, region = self.heard().split()
        self.descriptor, self.region = bytes.fromhex(descriptor), int(region)
        return self

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.heard()

    def write_to(self, peer: Other) -> str:
        return self.ask(f"write {peer.descriptor.hex()} {peer.region}")


MakeOther = Callable[[Path], Other]


@pytest.fixture
def start() -> Iterator[MakeOther]:
    with ExitStack() as stack:

        def start(runtime: Path) -> Other:
            other = Other(runtime)
            stack.callback(other.process.wait)
            stack.callback(other.process.kill)
            return other

        yield start


@pytest.fixture
def folder() -> Iterator[Path]:
    """Which other users may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def runtime(folder: Path, name: str, owner: int | None = None) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    if owner is not None:
        os.chown(path, owner, owner)
    return path


def without_a_folder(folder: Path) -> Path:
    """A place whose `kvlane` is no folder."""
    path = runtime(folder, "without")
    (path / "kvlane").write_text("")
    return path


@pytest.mark.another_user
def test_another_user_who_has_a_descriptor_gets_nowhere(start: MakeOther, folder: Path) -> None:
    """Every user of a host could write and read what an engine had registered: it listened on loopback, and asked for
    nothing."""
    there = start(runtime(folder, "ours")).met()
    theirs = runtime(folder, "theirs", STRANGER)

    def attack() -> str:
        with fabric.Engine(patience=1) as engine:
            memory = bytearray(b"x" * 100)
            region = engine.register(memory)
            peer = engine.connect(there.descriptor)
            told = []
            for transfer in (peer.write, peer.read):
                try:
                    transfer(region, there.region, [(0, 0, 100)]).wait(20)
                    told.append("done")
                except fabric.PeerLost as error:
                    told.append(str(error))
            return f"{told} {bytes(memory[:1])}"

    told = as_user(STRANGER, attack, {"XDG_RUNTIME_DIR": str(theirs)})
    assert "done" not in told and told.count("Give both sides the same token") == 2, told
    assert told.endswith("b'x'"), "nothing was read"
    assert there.ask("look") == "o", "and nothing was written"


def test_a_refusal_tells_nothing_of_the_engine(start: MakeOther, folder: Path) -> None:
    """It told the engine's id and boot nonce, by which a peer is taken for itself."""
    there = start(runtime(folder, "ours")).met()
    boot, engine = there.descriptor[8:16], there.descriptor[16:32]
    length = there.descriptor[37]
    host, port = there.descriptor[38 : 38 + length].decode().rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        said = connection.recv(24, socket.MSG_WAITALL)
        # Longer than any greeting.
        connection.sendall(said[:5] + bytes(195))
        try:
            while more := connection.recv(4096):
                said += more
        except ConnectionResetError:
            pass
    assert said.startswith(b"KVFT")
    assert boot not in said and engine not in said


def test_engines_of_one_user_trust_each_other_without_a_word(start: MakeOther, folder: Path) -> None:
    """Also those that are started at once, before there is a secret."""
    ours = runtime(folder, "ours")
    others = [start(ours) for _ in range(3)]
    one, two, three = (other.met() for other in others)
    for here, there in ((one, two), (two, three), (three, one)):
        assert here.write_to(there) == "done"
    (made,) = (ours / "kvlane").iterdir()
    found = made.stat()
    assert (found.st_mode & 0o777, found.st_uid, found.st_size) == (0o600, os.geteuid(), 32)
    secret = made.read_bytes()
    for other in others:
        assert secret not in other.descriptor
        for place in ("cmdline", "environ"):
            shown = Path(f"/proc/{other.process.pid}/{place}").read_bytes()
            assert secret not in shown and secret.hex().encode() not in shown
    # With another runtime folder they are strangers, and are told what to do.
    stranger = start(runtime(folder, "another")).met()
    assert "Give both sides the same token" in stranger.write_to(one)


def test_without_a_runtime_folder_who_has_the_descriptor_is_trusted(start: MakeOther, folder: Path) -> None:
    ours, nowhere = runtime(folder, "ours"), without_a_folder(folder)
    usual, one, two = start(ours).met(), start(nowhere).met(), start(nowhere).met()
    assert one.write_to(two) == "done"
    assert usual.write_to(one) == "done"
    # It cannot prove to be of the other's user.
    assert "runtime folder" in one.write_to(usual)
    # A descriptor with another secret is another's.
    forged = bytearray(two.descriptor)
    forged[40] ^= 1
    two.descriptor = bytes(forged)
    assert one.write_to(two).startswith("PeerLost")


def test_a_secret_that_others_may_read_is_not_used(start: MakeOther, folder: Path) -> None:
    ours = runtime(folder, "ours")
    start(ours).met()
    secret = ours / "kvlane" / "fabric-secret"
    secret.chmod(0o644)
    one, two = start(ours).met(), start(ours).met()
    assert len({other.descriptor[5] for other in (one, two)}) == 1 and one.descriptor[5] == 2
    assert one.write_to(two) == "done", "each by the other's own"
    assert secret.stat().st_mode & 0o777 == 0o644, "it is left as it was"


def test_older_descriptors_are_refused_with_a_sentence() -> None:
    with fabric.Engine() as engine:
        older = bytearray(engine.describe())
        older[4] = 1
        with pytest.raises(ValueError, match="made by an older kvlane"):
            engine.connect(bytes(older))


def test_with_a_token_on_one_side_only_both_are_told() -> None:
    with fabric.Engine() as plain, fabric.Engine(token="secret") as token:
        for one, other in ((plain, token), (token, plain)):
            with pytest.raises(ValueError, match="give both the same token"):
                one.connect(other.describe())
