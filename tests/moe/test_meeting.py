"""Ranks that meet at the path of a Unix socket."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvlane import moe


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's thread returned, or the text of its error."""

    def one(rank: int) -> Any:
        try:
            return work(rank)
        except moe.NotJoined as error:
            return str(error)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def connected(path: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
        try:
            found.connect(path)
            return found
        except (FileNotFoundError, ConnectionRefusedError):
            threading.Event().wait(0.01)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ranks.sock")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_rank_gets_the_bytes_of_all_in_order_also_none(path: str, size: int) -> None:
    def gather_twice(rank: int) -> list[list[bytes]]:
        group = moe.Group.at(path, rank, size, timeout=20)
        return [group.all_gather(bytes([rank]) * (rank * 9000)), group.all_gather(b"")]

    wanted = [[bytes([rank]) * (rank * 9000) for rank in range(size)], [b""] * size]
    assert together(size, gather_twice) == [wanted] * size
    assert not Path(path).exists()


def test_a_socket_that_a_killed_rank_left_behind_is_replaced_and_one_in_use_is_not(path: str) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(path)
    left.close()
    assert together(2, lambda rank: moe.Group.at(path, rank, 2, 20).all_gather(b"x")) == [[b"x"] * 2] * 2
    Path(path).write_text("a file of the user's")
    with pytest.raises(moe.NotJoined, match=r"rank 0 cannot listen at .*: Address already in use"):
        moe.Group.at(path, 0, 2)
    assert Path(path).read_text() == "a file of the user's"


def test_who_does_not_come_is_named(path: str) -> None:
    def come(rank: int) -> Any:
        return None if rank == 2 else moe.Group.at(path, rank, 4, timeout=0.5)

    found = together(4, come)
    assert found[0] == f"ranks 2 did not come to {path} within 0.5 s"
    with pytest.raises(moe.NotJoined, match=r"rank 0 does not listen at .* after 0.1 s"):
        moe.Group.at(path, 1, 2, timeout=0.1)


def test_strangers_are_sent_away_and_the_ranks_meet(path: str) -> None:
    source = random.Random(7)
    hellos = [b"", b"\0" * 8, b"\1\0\0\0\3\0\0\0", b"\0\0\0\0\2\0\0\0", b"\2\0\0\0\2\0\0\0"]
    hellos += [source.randbytes(source.randrange(1, 40)) for _ in range(60)]

    def come(rank: int) -> Any:
        if rank == 2:
            silent = [connected(path) for _ in range(200)]
            # The oldest ones are sent away, so that they cost no more than so many descriptors.
            silent[0].settimeout(20)
            assert silent[0].recv(1) == b""
            for hello in hellos:
                with connected(path) as stranger:
                    stranger.send(hello)
                    stranger.settimeout(20)
                    if hello:
                        assert stranger.recv(1) == b""
            met.set()
            return silent
        if rank == 1:
            met.wait()
        return moe.Group.at(path, rank, 2, timeout=20).all_gather(bytes([rank]))

    met = threading.Event()
    assert together(3, come)[:2] == [[b"\0", b"\1"]] * 2


def test_a_rank_that_leaves_or_is_there_twice_is_an_error_for_the_others(path: str) -> None:
    def come(rank: int) -> Any:
        # The last two are both rank 2.
        group = moe.Group.at(path, min(rank, 2), 3, timeout=3)
        if rank == 1:
            return None
        return group.all_gather(b"x")

    found = together(4, come)
    assert "rank 1 at" in found[0] and "has ended its connection to rank 0" in found[0]
    # One of them may come when the others have met.
    ends = ("or another process is rank 2", "rank 0 does not listen")
    assert all(any(end in each for end in ends) for each in found[2:])


def test_what_cannot_be_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        moe.Group.at(path, 2, 2)
    with pytest.raises(ValueError, match="rank -1 is not one of 2"):
        moe.Group(-1, 2, lambda told: [told])
    for timeout in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout has to be above 0 and at most"):
            moe.Group.at(path, 0, 1, timeout)
    assert moe.Group.at(Path(path), 0, 1).all_gather(b"told") == [b"told"]

    def gather(rank: int) -> Any:
        group = moe.Group.at(path, rank, 2, timeout=20)
        with pytest.raises(ValueError, match="at most 65536 bytes"):
            group.all_gather(bytes((1 << 16) + 1))
        return group.all_gather(bytes(1 << 16))

    assert together(2, gather) == [[bytes(1 << 16)] * 2] * 2


def test_all_learn_of_a_rank_that_dies_between_two_all_gathers(path: str) -> None:
    left = threading.Barrier(3)

    def gather(rank: int) -> Any:
        group = moe.Group.at(path, rank, 3, timeout=20)
        group.all_gather(b"once")
        left.wait()
        if rank == 1:
            return None
        began = time.monotonic()
        try:
            # Its sockets live as long as the group.
            return group.all_gather(b"twice"), group
        except moe.NotJoined as error:
            assert time.monotonic() - began < 10
            return str(error), group

    found = together(3, gather)
    assert "rank 1 at" in found[0][0] and "has ended its connection" in found[0][0]
    assert "rank 0 at" in found[2][0] and "has ended its connection" in found[2][0]


def test_a_rank_that_starts_again_before_all_have_come_is_let_in(path: str) -> None:
    def come(rank: int) -> Any:
        if rank == 1:
            with connected(path) as died:
                died.send(b"\1\0\0\0\3\0\0\0")
        if rank == 2:
            came.wait()
        if rank == 1:
            again = moe.Group.at(path, 1, 3, timeout=20)
            came.set()
            return again.all_gather(b"1")
        return moe.Group.at(path, rank, 3, timeout=20).all_gather(bytes([48 + rank]))

    came = threading.Event()
    assert together(3, come) == [[b"0", b"1", b"2"]] * 3


def test_a_door_at_which_too_many_wait_is_an_error_in_time(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as full:
        full.bind(path)
        full.listen(0)
        waiting = [connected(path)]
        with suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        for rank, why in ((0, "rank 0 cannot listen"), (1, "rank 0 does not listen at .* after 0.3 s")):
            began = time.monotonic()
            with pytest.raises(moe.NotJoined, match=why):
                moe.Group.at(path, rank, 2, timeout=0.3)
            assert time.monotonic() - began < 10
        for each in waiting:
            each.close()


@pytest.mark.parametrize("place", ["no/such/folder", "stream", "x" * 200])
def test_a_path_that_no_socket_can_have_is_an_error(place: str, tmp_path: Path) -> None:
    path = str(tmp_path / place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        if place == "stream":
            stream.bind(path)
            stream.listen()
        for rank in (0, 1):
            with pytest.raises(moe.NotJoined):
                moe.Group.at(path, rank, 2, timeout=0.3)
