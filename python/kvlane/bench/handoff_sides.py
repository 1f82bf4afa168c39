"""The two engines that `kvlane bench handoff` starts, each without a model: a rank and a scheduler of direct hand-offs,
and beside them an engine of the fabric for bare READs of the same bytes."""

from __future__ import annotations

import os
import random
import secrets
import struct
import sys
import time
from typing import Any

from kvlane import _core, fabric
from kvlane.bench.children import serve_commands
from kvlane.bench.extra import numpy
from kvlane.bench.memory import GpuMemory, allocate

_RUN = struct.Struct("<QQQ")
_SHAPE, _CONTENT, _HASH = bytes(16), bytes(16), bytes(16)
_SOON_MS = 120_000.0


class EngineSide:
    """One of the two engines. Its cache has `layers` layers, one behind the other, each with `blocks` blocks."""

    def open(
        self,
        layers: int,
        blocks: int,
        block_layer_bytes: int,
        transport: str,
        scattered: bool,
        memory: str = "host",
    ) -> None:
        """Allocates memory of the host, all of it touched, or of a GPU, and starts the engine that reads and shows it.
        Blocks of a prompt lie in a random order if `scattered`."""
        self.layers, self.blocks, self.piece = layers, blocks, block_layer_bytes
        layer_bytes = blocks * block_layer_bytes
        self.memory = allocate(layers * layer_bytes, memory)
        regions = [
            (self.memory.address + layer * layer_bytes, block_layer_bytes, blocks, block_layer_bytes, [0])
            for layer in range(layers)
        ]
        self.transport, self.key = transport, secrets.token_bytes(16)
        areas = [(self.memory.address, self.memory.size)]
        uuid = self.memory.core.uuid if isinstance(self.memory, GpuMemory) else None
        self.rank = _core.HandoffRank("127.0.0.1:0", "", regions, areas, self.key, transport, uuid)
        self.hook = self.rank.layer_hook([(str(layer), layer) for layer in range(layers)])
        ranks = [(self.rank.endpoint, self.key)]
        self.scheduler = _core.HandoffScheduler("127.0.0.1:0", "", ranks, _SHAPE, [])
        self.order = list(range(blocks))
        if scattered:
            # The two engines have different orders.
            random.Random(os.getpid()).shuffle(self.order)
        self.bare = fabric.Engine(("127.0.0.1:0",), transport=transport)
        device = "cpu" if memory == "host" else memory
        self.region = self.bare.register(self.memory.address, self.memory.size, device=device)
        self.offered: list[int] = []

    def address(self) -> list[Any]:
        """The address of this engine, and the order in which its blocks lie."""
        return [self.scheduler.address, self.bare.describe().hex(), self.region.number, self.order]

    def meet(self, address: list[Any]) -> None:
        """Connects to the other side. `address`: its answer to `address`."""
        self.peer_address, described, self.remote, far = address
        self.peer = self.bare.connect(bytes.fromhex(described))
        size, piece = self.blocks * self.piece, self.piece
        runs = [
            (layer * size + near * piece, layer * size + there * piece, piece)
            for layer in range(self.layers)
            for near, there in zip(self.order, far, strict=True)
        ]
        self.runs = b"".join(_RUN.pack(*run) for run in runs)
        # The first READ makes the connections.
        self.read()

    def read(self, layers: int | None = None) -> float:
        """Seconds of one bare READ of all that a hand-off brings, or of the first so many layers."""
        count = self.blocks * (self.layers if layers is None else layers)
        runs = self.runs[: count * _RUN.size]
        began = time.perf_counter()
        self.peer.read(self.region, self.remote, runs).wait()
        return time.perf_counter() - began

    def put(self, salt: int) -> None:
        """Fills the memory with bytes that differ by place."""
        self.memory.fill(salt)

    def digest(self, order: list[int] | None = None) -> int:
        """A digest of all bytes in the order of the prompt's blocks."""
        layers = self.memory.words.reshape(self.layers, self.blocks, -1)
        sums = layers.sum(axis=2, dtype=numpy.uint64)[:, self.order if order is None else order]
        weights = numpy.arange(1, sums.size + 1, dtype=numpy.uint64).reshape(sums.shape)
        return int((sums * weights).sum(dtype=numpy.uint64))

    # The engine that computes.

    def begin(self, id: str) -> None:
        """Begins to lend the blocks of a request."""
        assert self.scheduler.begin_lending(bytes.fromhex(id), _CONTENT)

    def compute(self, id: str, layer_ms: float, at_once: bool) -> dict[str, float]:
        """Computes a step of `layer_ms` for each layer. Offers each layer when it is done, or all at the end. Returns
        the time of the last layer's end, and the median seconds of a call of the layers' hook and of a call of an empty
        function at the same places."""
        filled = [(bytes.fromhex(id), 0, self.order, _HASH)]
        hook = None
        if not at_once:
            self.rank.step_begins(filled)
            hook = self.hook
            hook.begin(0)
        spent: list[float] = []
        nothing = str
        bare: list[float] = []
        done = time.monotonic()
        for layer in range(self.layers):
            done += layer_ms / 1e3
            if layer_ms:
                time.sleep(max(0.0, done - time.monotonic()))
            if hook is None:
                continue
            # The two take turns as first, because the first call after the wait finds cold caches.
            if layer % 2:
                began = time.perf_counter()
                nothing(str(layer))
                bare.append(time.perf_counter() - began)
                hook(str(layer))
            else:
                began = time.perf_counter()
                hook(str(layer))
                spent.append(time.perf_counter() - began)
        last = time.monotonic()
        if at_once:
            self.rank.step_begins(filled)
        self.rank.step_ends()
        return {
            "last": last,
            "hook_s": sorted(spent)[len(spent) // 2] if spent else 0.0,
            "bare_hook_s": sorted(bare)[len(bare) // 2] if bare else 0.0,
        }

    def free(self) -> int:
        """The number of hand-offs whose blocks came free since the last call."""
        return len(self.scheduler.take_free_lendings())

    # The engine that goes on.

    def land(self, id: str) -> dict[str, float]:
        """Asks for a prompt and waits until it has landed: the seconds that took, and the time of its end."""
        name = bytes.fromhex(id)
        began = time.perf_counter()
        self.want(id)
        assert self.scheduler.wait_over(name, _SOON_MS), "it does not land"
        seconds, over = time.perf_counter() - began, time.monotonic()
        return self._over(name, over) | {"seconds": seconds}

    def want(self, id: str) -> None:
        """Asks for a prompt."""
        name = bytes.fromhex(id)
        asked = self.scheduler.begin_landing(
            name, self.peer_address, _CONTENT, 0, self.blocks, _SOON_MS, _SOON_MS
        )
        assert asked, "too many hand-offs"
        self.scheduler.give_room(name, self.order)

    def landed(self, id: str) -> dict[str, float]:
        """Waits until what `want` asked for has landed."""
        name = bytes.fromhex(id)
        assert self.scheduler.wait_over(name, _SOON_MS), "it does not land"
        return self._over(name, time.monotonic())

    def _over(self, name: bytes, over: float) -> dict[str, float]:
        standing = self.scheduler.standing(name)
        assert standing is not None
        word, sentence, end_block, _ = standing
        assert word == "landed" and end_block == self.blocks, sentence
        self.scheduler.forget_landing(name)
        return {"over": over}

    def counts(self) -> dict[str, int]:
        """Counts of reads since the last call."""
        reads, failed, runs, cuda, cma, tcp = self.rank.take_counts()
        by_carrier = {"cuda_bytes": cuda, "cma_bytes": cma, "tcp_bytes": tcp}
        return {"reads": reads, "failed": failed, "runs": runs, **by_carrier}


if __name__ == "__main__":
    sys.exit(serve_commands(EngineSide()))
