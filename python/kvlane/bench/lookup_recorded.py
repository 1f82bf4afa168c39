"""What a lookup costs while `kvlane record` records it, beside one of a daemon that nobody records."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvlane.bench import daemon, report
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.figures import Figure
from kvlane.bench.memory import Memory
from kvlane.bench.processes import beside_python

NOTE = (
    "two daemons, of which one is recorded by a `kvlane record` that reads four times a second; lookups alternate "
    "between both, and so does the order"
)
_BLOCK_BYTES = 4096
_POOL_BYTES = 64 << 20
_WARM_UP = 100
_STARTS_WITHIN_S = 30.0


def measure(blocks: int, rounds: int) -> tuple[list[Figure], dict[str, object]]:
    """The figures, and what they are made of."""
    hashes = block_hashes("recorded", blocks)
    tokens = blocks * TOKENS_PER_BLOCK
    seconds: dict[str, list[float]] = {"alone": [], "recorded": []}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        engines = {}
        for name in seconds:
            serve = stack.enter_context(daemon.running(_POOL_BYTES))
            if name == "recorded":
                stack.enter_context(_recording(serve, Path(folder) / "trace.jsonl"))
            engine = Engine(
                serve.address, "lookup", block_bytes=_BLOCK_BYTES, memory=Memory(_BLOCK_BYTES * blocks)
            )
            engine.save(hashes, range(blocks))
            serve.settle()
            engines[name] = engine
        for number in range(-_WARM_UP, rounds):
            for name in sorted(engines, reverse=number % 2 == 1):
                start = time.perf_counter()
                hit = engines[name].scheduler.lookup([hashes], tokens)
                took = time.perf_counter() - start
                assert hit.tokens == tokens, f"{hit.tokens} tokens were found and not {tokens}"
                engines[name].release(hit)
                if number >= 0:
                    seconds[name].append(took)
        assert engines["recorded"].scheduler.is_recorded and not engines["alone"].scheduler.is_recorded
        for engine in engines.values():
            engine.close()
    us = {name: report.summary(each * 1e6 for each in values) for name, values in seconds.items()}
    figures = [
        Figure(
            f"recorded: lookup of {blocks} hashes / not recorded, p50",
            us["recorded"]["p50"] / us["alone"]["p50"],
            at_most=1.03,
        ),
        Figure("recorded: the same, p99", us["recorded"]["p99"] / us["alone"]["p99"]),
    ]
    return figures, {"microseconds": us}


@contextmanager
def _recording(serve: daemon.Daemon, file: Path) -> Iterator[None]:
    process = subprocess.Popen(
        [beside_python("kvlane"), "record", str(file), "--addr", serve.address], stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + _STARTS_WITHIN_S
        # The file is made when the daemon records.
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("kvlane record did not begin")
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait()
