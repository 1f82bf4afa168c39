"""Another engine's place in the comparison: moves bytes between its GPU memory and the daemon at a rate (between host
memory and the daemon where there is no GPU, for trying the comparison out).

Blocks of 2 MiB in 32 pieces, as those of a model with 32 layers are. Saves of new prompts and loads take turns. Says
"ready", then listens: `begin` starts, `end` stops and answers GB/s.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import uuid

import torch

from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.memory import Memory

PIECE_BYTES, PIECES = 64 << 10, 32
BLOCK_BYTES = PIECE_BYTES * PIECES
BLOCKS = 128


class GpuMemory:
    """Memory of the first GPU that torch sees."""

    def __init__(self, size: int) -> None:
        self._tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.address: int = self._tensor.data_ptr()
        self.size = size
        self.gpu = uuid.UUID(str(torch.cuda.get_device_properties(0).uuid)).bytes


def move(engine: Engine, rate: float, stop: threading.Event) -> float:
    """Saves and loads until it is told to stop; GB/s."""
    ids = range(BLOCKS)
    start = time.monotonic()
    moved = 0
    saved: list[bytes] = []
    while not stop.is_set():
        hashes = block_hashes(f"{start} {moved}", BLOCKS)
        moved += engine.save(hashes, ids).bytes
        # Load the prompt of the save before, because the last save may not be visible yet.
        hit = engine.lookup(saved) if saved else None
        if hit is not None and hit.tokens:
            moved += engine.load(hit, ids[: len(hit.pages(0, 0)) // 4]).bytes
        saved = hashes
        # Sleep until the time that the rate gives for the bytes so far.
        stop.wait(max(0.0, start + moved / 1e9 / rate - time.monotonic()))
    return moved / 1e9 / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", required=True, help="of the daemon")
    parser.add_argument("--gb-per-s", type=float, required=True)
    arguments = parser.parse_args()
    size = BLOCKS * BLOCK_BYTES
    memory = GpuMemory(size) if torch.cuda.is_available() else Memory(size)
    engine = Engine(
        arguments.address,
        "second client",
        block_bytes=BLOCK_BYTES,
        memory=memory,
        pieces=PIECES,
        gpu=getattr(memory, "gpu", None),
    )
    print("ready", flush=True)
    stop = threading.Event()
    rates: list[float] = []
    mover: threading.Thread | None = None
    for line in sys.stdin:
        if line.strip() == "begin":
            stop.clear()
            mover = threading.Thread(target=lambda: rates.append(move(engine, arguments.gb_per_s, stop)))
            mover.start()
        elif mover is not None:
            stop.set()
            mover.join()
            print(rates[-1] if rates else 0.0, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
