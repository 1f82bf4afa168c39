"""`kvlane bench memory-use`: what a million blocks cost a daemon beside its pool."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvlane.bench import daemon, report
from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.sizes import count

NAME = "memory-use"
HELP = "the daemon's own memory with a million blocks of 4 KiB in its pool"
_BLOCK_BYTES = 4096
# Blocks that one job saves: a prompt of 32,000 tokens.
_PROMPT_BLOCKS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench memory-use`."""
    parser.add_argument("--blocks", type=count, default=1_000_000, help="in the index (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Resident memory before and after."""
    memory = Memory(_BLOCK_BYTES * _PROMPT_BLOCKS)
    pool = arguments.blocks * _BLOCK_BYTES + (2 << 20)
    with daemon.running(pool) as serve:
        engine = Engine(serve.address, "memory-use", block_bytes=_BLOCK_BYTES, memory=memory)
        before = _resident(serve.pid)
        for prompt in range(-(-arguments.blocks // _PROMPT_BLOCKS)):
            count = min(_PROMPT_BLOCKS, arguments.blocks - prompt * _PROMPT_BLOCKS)
            engine.save(block_hashes(f"memory-{prompt}", count), range(count))
        serve.settle()
        blocks = serve.blocks
        after = _resident(serve.pid)
        engine.close()
    assert blocks == arguments.blocks, f"{blocks} blocks are in the index and not {arguments.blocks}"
    own = after["RssAnon"] + after["RssFile"]
    figures = [
        Figure("the daemon's memory beside its pool", own / 1e6, "MB", at_most=100.0),
        Figure(
            "growth for each block, as the kernel counts it",
            (after["RssAnon"] - before["RssAnon"]) / blocks,
            "bytes",
        ),
    ]
    note = (
        f"{blocks} blocks of {_BLOCK_BYTES} bytes. The pool is the shared memory; all else counts, also the program's "
        f"own {after['RssFile'] / 1e6:.1f} MB; page tables: {after['VmPTE'] / 1e6:.1f} MB. The bound of 96 bytes a "
        "block holds for what is allocated, which `cargo test -p kvlane-store --test memory` counts."
    )
    return Outcome(NAME, figures, {"before": before, "after": after}, note)


def _resident(pid: int) -> dict[str, int]:
    """Bytes by kind, from /proc/PID/status."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmPTE"):
            found[name] = int(value.split()[0]) * 1024
    return found
