"""The KV pages of a request go from one process to another, which hears when all of them are there.

python examples/move_pages.py
"""

from __future__ import annotations

import subprocess
import sys

from kvlane import fabric

PAGE_BYTES, PAGES = 64 << 10, 256
WANTED = [3, 14, 15, 92, 65, 35, 89, 79]  # where the sender has them
FREE = [7, 0, 200, 4, 5, 6, 100, 101]  # where the receiver wants them
DONE = 1  # a counter


def receive() -> None:
    """Offers its memory, and waits for the pages."""
    memory = bytearray(PAGE_BYTES * PAGES)
    with fabric.Engine() as engine:
        region = engine.register(memory)
        done = engine.counter(DONE)
        print(engine.describe().hex(), region.number, done.generation, flush=True)
        if not done.wait(1, timeout=30):
            sys.exit("nothing came within 30 s")
    arrived = [memory[page * PAGE_BYTES] for page in FREE]
    print(f"received pages that begin with {arrived}")


def send(descriptor: str, region: str, generation: str) -> None:
    """Writes the pages, then counts the receiver's counter."""
    memory = bytearray(b"".join(bytes([page]) * PAGE_BYTES for page in range(PAGES)))
    with fabric.Engine() as engine:
        own = fabric.Pages(engine.register(memory), WANTED, stride=PAGE_BYTES)
        peers = fabric.Pages(int(region), FREE, stride=PAGE_BYTES)
        peer = engine.connect(bytes.fromhex(descriptor))
        peer.write_pages(PAGE_BYTES, own, peers, notify=(DONE, int(generation)), timeout=30).wait()
    print(f"sent {len(WANTED)} pages of {PAGE_BYTES} bytes")


def main() -> None:
    if sys.argv[1:] == ["receive"]:
        return receive()
    command = [sys.executable, __file__, "receive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        send(*receiver.stdout.readline().split())
        print(receiver.stdout.read(), end="")
    sys.exit(receiver.returncode)


if __name__ == "__main__":
    main()
