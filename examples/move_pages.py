"""The KV pages of a request go from one process to another, which hears when all of them are there.

python examples/move_pages.py
python examples/move_pages.py --memory cuda:0 cuda:1    # from one GPU's memory to the other's; needs torch
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from kvlane import fabric

PAGE_BYTES, PAGES = 64 << 10, 256
WANTED = [3, 14, 15, 92, 65, 35, 89, 79]  # where the sender has them
FREE = [7, 0, 200, 4, 5, 6, 100, 101]  # where the receiver wants them
DONE = 1  # a counter


def allocate(where: str, content: bytearray) -> Any:
    """Memory with this content, of the host or of a GPU."""
    if where == "host":
        return content
    try:
        import torch

        return torch.frombuffer(content, dtype=torch.uint8).to(where)
    except (ImportError, AssertionError, RuntimeError) as error:
        sys.exit(f"torch has no memory on {where}: {error}")


def receive(where: str, transport: str) -> None:
    """Offers its memory, and waits for the pages."""
    memory = allocate(where, bytearray(PAGE_BYTES * PAGES))
    with fabric.Engine(transport=transport) as engine:
        region = engine.register(memory)
        done = engine.counter(DONE)
        print(engine.describe().hex(), region.number, done.generation, flush=True)
        if not done.wait(1, timeout=10):
            sys.exit("nothing came within 10 s")
        arrived = [int(memory[page * PAGE_BYTES]) for page in FREE]
        print(f"received pages that begin with {arrived}")
        # The sender closes stdin when its transfer is over. If this engine closed before, the transfer could fail.
        sys.stdin.read()


def send(memory: Any, transport: str, descriptor: str, region: str, generation: str) -> None:
    """Writes the pages, then counts the receiver's counter."""
    with fabric.Engine(transport=transport) as engine:
        own = fabric.Pages(engine.register(memory), WANTED, stride=PAGE_BYTES)
        peers = fabric.Pages(int(region), FREE, stride=PAGE_BYTES)
        peer = engine.connect(bytes.fromhex(descriptor))
        sent = peer.write_pages(PAGE_BYTES, own, peers, notify=(DONE, int(generation)), timeout=30)
        sent.wait()
    print(f"sent {len(WANTED)} pages of {PAGE_BYTES} bytes by {', '.join(sent.carried)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Moves KV pages from one process to another.")
    parser.add_argument(
        "--memory",
        nargs="+",
        default=["host"],
        metavar="HOST_OR_GPU",
        help="host, or a GPU such as cuda:0: the sender's and the receiver's, or one for both (default: host)",
    )
    parser.add_argument("--receive", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        return receive(*arguments.receive)
    if len(arguments.memory) > 2:
        parser.error("--memory takes the sender's and the receiver's, not more")
    # "auto" would do, but it does not wait for "cuda" while sockets are there.
    transport = "auto" if "host" in arguments.memory else "cuda"
    content = b"".join(bytes([page]) * PAGE_BYTES for page in range(PAGES))
    memory = allocate(arguments.memory[0], bytearray(content))
    command = [sys.executable, __file__, "--receive", arguments.memory[-1], transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        if offer := receiver.stdout.readline().split():
            send(memory, transport, *offer)
        print(receiver.communicate()[0], end="")
    sys.exit(receiver.returncode)


if __name__ == "__main__":
    main()
