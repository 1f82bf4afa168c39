"""`kvlane bench idle`: what a daemon with a full pool and idle engines costs the CPU."""

from __future__ import annotations

import argparse
import time

from kvlane.bench import daemon, report
from kvlane.bench.engine import Engine, block_hashes
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.sizes import count

NAME = "idle"
HELP = "CPU of a daemon with a full pool and idle engines, the scrub at its default rate"
_BLOCK_BYTES = 256 << 10
_BLOCKS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench idle`."""
    parser.add_argument("--seconds", type=float, default=30.0, help="to watch (default %(default)s)")
    parser.add_argument("--engines", type=count, default=8, help="connected (default %(default)s)")
    parser.add_argument("--pool-mib", type=count, default=1024, help="filled pool (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Share of a core over the time watched."""
    pool = arguments.pool_mib << 20
    memory = Memory(_BLOCK_BYTES * _BLOCKS)
    with daemon.running(pool) as serve:
        engines = [
            Engine(serve.address, f"idle-{number}", block_bytes=_BLOCK_BYTES, memory=memory)
            for number in range(arguments.engines)
        ]
        for job in range(pool // memory.size + 1):
            engines[0].save(block_hashes(f"idle-{job}", _BLOCKS), range(_BLOCKS))
        serve.settle()
        status = serve.tool.status()
        before = daemon.cpu_seconds(serve.pid)
        start = time.monotonic()
        time.sleep(arguments.seconds)
        used = daemon.cpu_seconds(serve.pid) - before
        percent = used / (time.monotonic() - start) * 100
        for engine in engines:
            engine.close()
    details = {"blocks": status["blocks"], "used_bytes": status["used_bytes"], "cpu_seconds": used}
    note = (
        f"{arguments.engines} engines connected, {status['used_bytes']} bytes of {pool} used, scrub at its default "
        f"rate, {arguments.seconds:.0f} s."
    )
    figures = [Figure("idle daemon, of a core", percent, "%", at_most=1.0)]
    return Outcome(NAME, figures, details, note)
