"""The processes that `kvlane bench remote` starts: a side of bare READs, and an engine that borrows without a pause."""

from __future__ import annotations

import sys
import time

from kvlane import _core
from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.fabric_sides import Kvlane, Side, be
from kvlane.bench.memory import Memory


class Reads(Kvlane):
    """READs of kvlane.fabric between memory like a daemon's pool."""

    def open(self, size: int, **options: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Allocates memory, and touches all of it."""
        self.memory = Memory(size, shared=True)
        self.start(**options)  # pyright: ignore[reportArgumentType]


class Borrower(Side):
    """An engine at the borrower."""

    def begin(self, address: str, block_bytes: int) -> None:
        """Registers with the daemon."""
        self._engine = Engine(address, "borrower", block_bytes=block_bytes, memory=Memory(block_bytes))
        self._tool = _core.Tool(address, 60_000)

    def borrow(self, prompt: str, blocks: int, seconds: float) -> dict[str, float]:
        """Looks the prompt up and forgets it, over and over for so long. Returns the tokens that came, and the time."""
        hashes = block_hashes(prompt, blocks)
        began, tokens = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            hit = self._engine.lookup(hashes)
            tokens += hit.tokens
            self._engine.release(hit)
            self._tool.drop_namespaces([self._engine.namespace])
        return {"tokens": tokens, "seconds": took}


SIDES: dict[str, type[Side]] = {"reads": Reads, "borrower": Borrower}

if __name__ == "__main__":
    be(SIDES[sys.argv[1]])
