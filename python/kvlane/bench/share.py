"""`kvlane bench share`: engines on a shared pool against the same engines on isolated pools of the same total size."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack

from kvlane.bench import daemon, report, share_vllm, trace
from kvlane.bench.engine import TOKENS_PER_BLOCK, Engine, block_hashes
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import Memory
from kvlane.bench.sizes import count

NAME = "share"
HELP = "hit rate of eight engines on one shared pool against eight isolated ones; --vllm also for TTFT"
_BLOCK_BYTES = 4096
# 512 to 4096 and 32 to 512 tokens.
_SYSTEM_BLOCKS, _USER_BLOCKS = (32, 256), (2, 32)
# A steeper popularity than the measured one. With it an isolated pool already holds the most popular prompts.
_STEEP_ZIPF = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench share`."""
    parser.add_argument("--engines", type=count, default=8, help="served round-robin (default %(default)s)")
    parser.add_argument("--requests", type=count, default=2000, help="of the trace (default %(default)s)")
    parser.add_argument("--system-prompts", type=count, default=128, help="(default %(default)s)")
    parser.add_argument(
        "--zipf", type=float, default=0.6, help="exponent of their popularity (default %(default)s)"
    )
    parser.add_argument(
        "--pool-share",
        type=float,
        default=1.2,
        help="all pools together, in sizes of all system prompts together (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vllm", action="store_true", help="also by a real vLLM, a shorter trace: mean TTFT; needs vLLM"
    )
    parser.add_argument("--vllm-requests", type=count, default=200, help="with --vllm (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Hit rates, at a flat and at a steep popularity; TTFT with --vllm."""
    figures: list[Figure] = []
    details: dict[str, object] = {}
    for zipf in (arguments.zipf, _STEEP_ZIPF):
        shape = trace.Shape(arguments.system_prompts, arguments.requests, zipf, _SYSTEM_BLOCKS, _USER_BLOCKS)
        made = trace.make(shape, arguments.seed)
        budget = int(made.system_blocks * arguments.pool_share)
        shared = hit_rate(made, arguments.engines, budget, isolated=False)
        isolated = hit_rate(made, arguments.engines, budget, isolated=True)
        goal = 3.0 if zipf == arguments.zipf else None
        figures += [
            Figure(f"Zipf {zipf}: hit rate, one shared pool", shared * 100, "%"),
            Figure(f"Zipf {zipf}: hit rate, {arguments.engines} isolated pools", isolated * 100, "%"),
            Figure(f"Zipf {zipf}: shared / isolated hit rate", shared / isolated, at_least=goal),
        ]
        details[f"zipf {zipf}"] = {"shared": shared, "isolated": isolated, "pool_blocks": budget}
    note = (
        f"{arguments.requests} requests to {arguments.engines} engines in turn; {arguments.system_prompts} system "
        "prompts of 512 to 4096 tokens, users' parts of 32 to 512; all pools together hold "
        f"{arguments.pool_share} times all system prompts; hit tokens / prompt tokens, engines without a prefix cache."
    )
    if arguments.vllm:
        found, more = share_vllm.measure(arguments)
        figures += found
        details["vllm"] = more
        note += f" {share_vllm.NOTE}"
    return Outcome(NAME, figures, details, note)


def hit_rate(made: trace.Trace, engines: int, pool_blocks: int, *, isolated: bool) -> float:
    """The share of hit blocks, if each engine has a pool of its own, or all have one."""
    memory = Memory(_BLOCK_BYTES * (_SYSTEM_BLOCKS[1] + _USER_BLOCKS[1]))
    daemons = engines if isolated else 1
    hits = 0
    with ExitStack() as stack:
        serves = [
            stack.enter_context(daemon.running(pool_blocks // daemons * _BLOCK_BYTES, "--scrub-rate", "0"))
            for _ in range(daemons)
        ]
        row = []
        for number in range(engines):
            engine = Engine(
                serves[number % daemons].address,
                f"share-{number}",
                block_bytes=_BLOCK_BYTES,
                memory=memory,
            )
            stack.callback(engine.close)
            row.append(engine)
        for request in _with_bar(made.requests, "isolated" if isolated else "shared"):
            number = request.number % engines
            hits += _serve(row[number], request)
            serves[number % daemons].settle()
    return hits / sum(request.blocks for request in made.requests)


def _with_bar(requests: Iterable[trace.Request], name: str) -> Iterable[trace.Request]:
    return tqdm(requests, desc=name, unit="request", leave=False)


def _serve(engine: Engine, request: trace.Request) -> int:
    """Looks up a request's blocks and saves those that are missing. Returns how many were hits."""
    hashes = block_hashes(f"system-{request.system_prompt}", request.system_blocks)
    hashes += block_hashes(f"user-{request.number}", request.user_blocks)
    hit = engine.lookup(hashes)
    found = hit.tokens // TOKENS_PER_BLOCK
    missing = hashes[found:]
    if missing:
        engine.save(missing, range(found, len(hashes)), parent=hashes[found - 1] if found else b"")
    engine.release(hit)
    return found
