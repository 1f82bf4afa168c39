"""An engine without vLLM: the two sides of the connector towards the daemon, over memory of its own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol

from kvlane import _core

TOKENS_PER_BLOCK = 16
_TIMEOUT_MS = 120_000.0


def block_hashes(prompt: str, count: int) -> list[bytes]:
    """Hashes of a prompt's blocks, 32 bytes each as vLLM's default gives them."""
    return [hashlib.sha256(f"{prompt}/{block}".encode()).digest() for block in range(count)]


class Blocks(Protocol):
    """The positions of an engine's blocks in memory."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...


class Engine:
    """A scheduler and one worker. Blocks are of `pieces` equal pieces; piece p of all blocks lie together, as the
    layers of a model do. With one piece, blocks are contiguous. `gpu` is the UUID of the GPU that they lie on, if any;
    what comes before a save or load there is in its default stream."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        block_bytes: int,
        memory: Blocks,
        pieces: int = 1,
        save_method: str = "auto",
        gpu: bytes | None = None,
        follow_journal: bool = False,
    ) -> None:
        blocks = memory.size // block_bytes
        piece_bytes = block_bytes // pieces
        offsets = [piece * blocks * piece_bytes for piece in range(pieces)]
        region = (memory.address, piece_bytes, blocks, piece_bytes, offsets)
        # Engines that cut blocks the same way share them.
        namespace = hashlib.sha256(f"bench {block_bytes} {pieces}".encode()).digest()[:16]
        groups = [(namespace, f"bench {block_bytes} B", TOKENS_PER_BLOCK, 0)]
        self.namespace = namespace
        self.memory = memory
        self.worker = _core.Worker(
            address,
            name,
            "kvlane bench",
            0,
            1,
            [(namespace, namespace, [region])],
            save_method=save_method,
            save_timeout_ms=_TIMEOUT_MS,
            gpu=gpu,
        )
        self.scheduler = _core.Scheduler(
            address,
            name,
            "kvlane bench",
            groups,
            1,
            lookup_timeout_ms=_TIMEOUT_MS,
            follow_journal=follow_journal,
            crosses_hosts=True,
        )
        if not self.worker.wait_registered(_TIMEOUT_MS):
            raise RuntimeError(f"engine {name} could not register: {self.worker.reason}")
        self._jobs = itertools.count(1)

    def save(self, hashes: list[bytes], ids: Sequence[int], parent: bytes = b"") -> _core.Finished:
        """Saves blocks of one prompt. They continue `parent`, or begin the prompt."""
        self.worker.save(next(self._jobs), [(0, parent, hashes, list(ids))])
        return self._finished()

    def load(self, hit: _core.Hit, ids: Sequence[int]) -> _core.Finished:
        """Loads a hit into the blocks `ids`, and releases its lease."""
        self.worker.load(next(self._jobs), hit.boot, [(0, list(ids), hit.pages(0, 0))])
        finished = self._finished()
        self.release(hit)
        return finished

    def lookup(self, hashes: list[bytes]) -> _core.Hit:
        """Looks a prompt up. A hit is leased until `release`."""
        return self.scheduler.lookup([hashes], len(hashes) * TOKENS_PER_BLOCK, timeout_ms=_TIMEOUT_MS)

    def release(self, hit: _core.Hit) -> None:
        """Releases the hit's lease, if it has one."""
        if hit.tokens:
            self.scheduler.release(hit.boot, hit.lease)

    def close(self) -> None:
        """Closes the connection to the daemon."""
        self.scheduler.close()
        self.worker.close()

    def _finished(self) -> _core.Finished:
        assert self.worker.wait(_TIMEOUT_MS), "a job did not end"
        (finished,) = self.worker.poll()
        assert finished.ok, finished.detail
        return finished
