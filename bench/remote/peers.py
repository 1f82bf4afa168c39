"""Fetches in turns with a peer: `kvlane bench remote`, with Mooncake Store beside it.

    python bench/remote/peers.py --parts tcp --rounds 7

Its flags are those of `kvlane bench remote`. With `--side store` it is a process of the peer, started by the benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvlane.bench import extra, remote
from kvlane.bench.children import Child, Failed, end_with_parent, serve_commands
from kvlane.bench.memory import Memory
from kvlane.bench.remote_hosts import Peer, Settings

INSTALL = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1; apt-get install libibverbs1 libnuma1"
_MASTER_PORT, _METRICS_PORT = 50061, 9103
_MASTER_SECONDS = 30
# Its log goes to stderr, and is long.
_QUIET = {"GLOG_minloglevel": "2"}


class Store:
    """A process of Mooncake Store: the one whose memory holds the objects, or the one that gets them. Parts of `piece`
    bytes are objects of their own."""

    def start(self, host: str, master: str, segment_bytes: int, buffer_bytes: int, piece: int) -> None:
        """Connects to the master."""
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        address = f"{master}:{_MASTER_PORT}"
        deadline = time.monotonic() + _MASTER_SECONDS
        while self._store.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", address) != 0:
            if time.monotonic() > deadline:
                raise OSError("its setup failed")
            time.sleep(0.2)
        self._memory, self._piece = Memory(buffer_bytes, shared=True), piece
        if self._store.register_buffer(self._memory.address, self._memory.size) != 0:
            raise OSError("it did not register memory")

    def put(self, first: int, count: int) -> None:
        """Stores objects, each with bytes of its own."""
        self._memory.fill(first)
        stored = self._store.batch_put_from(*self._batch(first, count))
        if any(stored):
            raise OSError(f"batch_put_from returned {min(stored)}")

    def get(self, first: int, count: int) -> float:
        """Gets objects into memory. Returns the seconds."""
        batch = self._batch(first, count)
        start = time.perf_counter()
        got = self._store.batch_get_into(*batch)
        took = time.perf_counter() - start
        if wrong := [each for each in got if each != self._piece]:
            raise OSError(f"batch_get_into returned {wrong[0]} for an object of {self._piece} bytes")
        return took

    def compare(self, count: int) -> None:
        """Whether memory begins with as many objects of the first `put`. OSError if it does not."""
        words = count * self._piece // 8
        got = self._memory.words[:words].copy()
        self._memory.fill(0)
        if not (got == self._memory.words[:words]).all():
            raise OSError("batch_get_into brought wrong bytes")

    def _batch(self, first: int, count: int) -> tuple[list[str], list[int], list[int]]:
        keys = [f"remote-{number}" for number in range(first, first + count)]
        places = [self._memory.address + number * self._piece for number in range(count)]
        return keys, places, [self._piece] * count


def missing() -> str | None:
    """Why Mooncake cannot be measured here."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return str(error)
    return None


@contextmanager
def mooncake(settings: Settings) -> Iterator[Callable[[], float]]:
    """The master and the holder of all objects on the owner's host, and a client here that gets them."""
    owner, here, piece = settings.owners[0], settings.here, settings.block_bytes
    size = settings.blocks * piece
    package = importlib.util.find_spec("mooncake")
    assert package is not None and package.origin is not None
    command = [str(Path(package.origin).with_name("mooncake_master")), f"-rpc_port={_MASTER_PORT}"]
    command.append(f"-metrics_port={_METRICS_PORT}")
    with ExitStack() as stack:
        master = subprocess.Popen(
            [*owner.inside, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        stack.callback(master.wait)
        stack.callback(master.kill)
        sides = []
        part = min(max((64 << 20) // piece, 1), settings.blocks)
        try:
            for host, segment, buffer in ((owner, size * 5 // 4, part * piece), (here, 0, size)):
                side = Child([__file__, "--side", "store"], _QUIET, inside=host.inside)
                stack.callback(side.end)
                options = {"segment_bytes": segment, "buffer_bytes": buffer, "piece": piece}
                side.ask("start", host=host.address, master=owner.address, **options)
                sides.append(side)
            holder, client = sides
            for first in range(0, settings.blocks, part):
                holder.ask("put", first=first, count=min(part, settings.blocks - first))
            client.ask("get", first=0, count=settings.blocks)
            client.ask("compare", count=part)
        except Failed as failure:
            raise OSError(str(failure)) from None
        yield lambda: client.ask("get", first=0, count=settings.blocks)


PEERS = {"mooncake": Peer(mooncake, missing, INSTALL, goal=1.1)}


def main() -> int:
    if sys.argv[1:2] == ["--side"]:
        serve_commands(Store())
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    remote.add_arguments(parser, PEERS)
    arguments = parser.parse_args()
    if lacks := extra.lacks():
        sys.exit(lacks)
    return remote.run(arguments, PEERS)


if __name__ == "__main__":
    sys.exit(main())
