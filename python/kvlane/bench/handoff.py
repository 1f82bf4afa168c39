"""`kvlane bench handoff`: direct hand-offs of a prompt's blocks between two processes without a model, beside the bare
READ of the same bytes."""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvlane.bench import report
from kvlane.bench.children import Child
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.memory import both_memories, parse_memory
from kvlane.bench.sizes import count, parse_size

NAME = "handoff"
HELP = "direct hand-offs between two processes, beside a bare READ of the same bytes; needs no vLLM"
TRANSPORTS = ("cma", "tcp", "cuda")
# Those that reach the memory.
HOST_TRANSPORTS, GPU_TRANSPORTS = ("cma", "tcp"), ("cuda", "tcp")
READ_GOAL, OVERLAP_GOAL, HOOK_GOAL_US = 0.95, 0.10, 5.0
# A READ of a layer takes this share of the time to compute the layer.
LINK_SHARE = 0.8
# The cases by `send_type`, and whether a prompt is offered as a whole once it is computed.
SEND_TYPES = {"PUT_ASYNC": ("layers_s", False), "PUT": ("put_s", False), "GET": ("get_s", True)}
GET_GOAL = 1.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench handoff`."""
    parser.add_argument("--layers", type=count, default=32, help="of the model (default %(default)s)")
    parser.add_argument("--blocks", type=count, default=64, help="of the prompt (default %(default)s)")
    parser.add_argument(
        "--block-layer-bytes",
        type=parse_size,
        default=128 << 10,
        metavar="SIZE",
        help="of one block in one layer (default 128k)",
    )
    parser.add_argument(
        "--transports",
        type=_transports,
        help="how bytes travel: cma,tcp, or cuda,tcp between GPUs (default: both)",
    )
    parser.add_argument(
        "--memory",
        type=parse_memory,
        default="host",
        metavar="host|cuda:N|cuda:N,cuda:M",
        help="of both engines, or of the one that computes and the one that goes on (default %(default)s)",
    )
    parser.add_argument(
        "--contiguous",
        action="store_true",
        help="the prompt's blocks lie one after the other; without it each side has them in a random order",
    )
    parser.add_argument(
        "--layer-ms",
        type=float,
        help="to compute a layer (default: so long that a bare READ of a layer takes 80%% of it)",
    )
    parser.add_argument("--rounds", type=count, default=7, help="of all cases in turns (default %(default)s)")
    add_out(parser)


def _transports(text: str) -> list[str]:
    named = text.split(",")
    if not set(named) <= set(TRANSPORTS):
        raise argparse.ArgumentTypeError(f"some of {','.join(TRANSPORTS)}, not {text}")
    return named


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    reaching = HOST_TRANSPORTS if arguments.memory == "host" else GPU_TRANSPORTS
    arguments.transports = arguments.transports or list(reaching)
    for transport in arguments.transports:
        if transport not in reaching:
            sys.exit(
                f"--transports {transport} does not reach --memory {arguments.memory}: {','.join(reaching)} do"
            )
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


class _Pair:
    """Two engines."""

    def __init__(self, transport: str, arguments: argparse.Namespace) -> None:
        self.transport, self.layers = transport, arguments.layers
        self._layer_ms: float | None = arguments.layer_ms
        self.prefill, self.decode = (
            Child(["-m", "kvlane.bench.handoff_sides", f"{transport}-{role}"], {})
            for role in ("prefill", "decode")
        )
        self.results: dict[str, list[float]] = {}
        self.hook_us: list[float] = []
        self.bare_hook_us: list[float] = []

    def meet(self, arguments: argparse.Namespace) -> None:
        """Does a first hand-off, so that its extra cost is not measured."""
        memories = both_memories(arguments.memory)
        for side, memory in zip((self.prefill, self.decode), memories, strict=True):
            side.ask(
                "open",
                layers=arguments.layers,
                blocks=arguments.blocks,
                block_layer_bytes=arguments.block_layer_bytes,
                transport=self.transport,
                scattered=not arguments.contiguous,
                memory=memory,
            )
        self.decode.ask("meet", address=self.prefill.ask("address"))
        self.whole(1)
        self.check()

    def end(self) -> None:
        """Ends both engines."""
        for side in (self.prefill, self.decode):
            side.end()

    def check(self) -> None:
        """Checks that the landed bytes equal the other engine's, and that the check notices other bytes."""
        theirs, ours = self.prefill.ask("digest"), self.decode.ask("digest")
        if theirs != ours:
            raise SystemExit(f"{self.transport}: what has landed is something else")
        self.decode.ask("put", salt=99)
        if self.decode.ask("digest") == theirs:
            raise SystemExit("the check of bytes finds nothing")

    def whole(self, salt: int) -> float:
        """Seconds of a hand-off of a prompt that has been computed."""
        self.prefill.ask("put", salt=salt)
        name = secrets.token_hex(16)
        self.prefill.ask("begin", id=name)
        self.prefill.ask("compute", id=name, layer_ms=0, at_once=True)
        return self.decode.ask("land", id=name)["seconds"]

    def overlapped(self, layer_ms: float, at_once: bool) -> float:
        """Seconds from the last layer to the end of the landing."""
        name = secrets.token_hex(16)
        self.prefill.ask("begin", id=name)
        self.decode.ask("want", id=name)
        self.decode.tell("landed", id=name)
        computed = self.prefill.ask("compute", id=name, layer_ms=layer_ms, at_once=at_once)
        if not at_once:
            self.hook_us.append(computed["hook_s"] * 1e6)
            self.bare_hook_us.append(computed["bare_hook_s"] * 1e6)
        return self.decode.answer("landed")["over"] - computed["last"]

    def round(self, salt: int) -> None:
        """Each case once."""
        bare = self.decode.ask("read")
        self._add("bare_s", bare)
        self._add("whole_s", self.whole(salt))
        layer_ms = self.layer_ms
        for case, at_once in SEND_TYPES.values():
            self._add(case, self.overlapped(layer_ms, at_once))

    @property
    def layer_ms(self) -> float:
        """Milliseconds to compute a layer: as asked for, or so that a READ of it takes the share LINK_SHARE."""
        if self._layer_ms is not None:
            return self._layer_ms
        return statistics.median(self.results["bare_s"]) / self.layers * 1e3 / LINK_SHARE

    def _add(self, case: str, seconds: float) -> None:
        self.results.setdefault(case, []).append(seconds)


@contextmanager
def _pairs(arguments: argparse.Namespace) -> Iterator[list[_Pair]]:
    with ExitStack() as stack:
        pairs = [_Pair(transport, arguments) for transport in arguments.transports]
        for pair in pairs:
            stack.callback(pair.end)
            pair.meet(arguments)
        yield pairs


def measure(arguments: argparse.Namespace) -> Outcome:
    """Medians of all rounds."""
    with _pairs(arguments) as pairs:
        for salt in tqdm(range(arguments.rounds), unit="round"):
            for pair in pairs if salt % 2 == 0 else pairs[::-1]:
                pair.round(salt + 2)
        counts = {pair.transport: pair.decode.ask("counts") for pair in pairs}
    figures: list[Figure] = []
    results: dict[str, Any] = {}
    size = arguments.layers * arguments.blocks * arguments.block_layer_bytes
    is_host = arguments.memory == "host"
    for pair in pairs:
        name = pair.transport
        median = {case: statistics.median(seconds) for case, seconds in pair.results.items()}
        hook_us = statistics.median(pair.hook_us)
        figures += [
            Figure(
                f"{name}: bare READ's time / a hand-off's, all computed before",
                median["bare_s"] / median["whole_s"],
                at_least=READ_GOAL if is_host else None,
            ),
            Figure(
                f"{name}: from the last layer to landed, layer by layer / all at the end (GET)",
                median["layers_s"] / median["get_s"],
                at_most=OVERLAP_GOAL if is_host else None,
            ),
            Figure(
                f"{name}: from the last layer to landed, GET / PUT_ASYNC",
                median["get_s"] / median["layers_s"],
                at_least=GET_GOAL,
            ),
            *(
                Figure(f"{name}: from the last layer to landed, {send_type}", median[case] * 1e6, "us")
                for send_type, (case, _) in SEND_TYPES.items()
            ),
            Figure(f"{name}: a layer's hook while it is offered", hook_us, "us", at_most=HOOK_GOAL_US),
            Figure(f"{name}: an empty call at the same place", statistics.median(pair.bare_hook_us), "us"),
            Figure(f"{name}: bare READ", size / median["bare_s"] / 1e9, "GB/s"),
            Figure(f"{name}: a layer is computed in", pair.layer_ms, "ms"),
        ]
        results[name] = {"seconds": pair.results, "hook_us": pair.hook_us, "counts": counts[name]}
    lie = "one after the other" if arguments.contiguous else "in a random order on each side"
    beside = "" if arguments.layer_ms else f"; a bare READ of the layer takes {LINK_SHARE:.0%} of it"
    note = (
        f"{arguments.blocks} blocks of {arguments.layers} layers, {arguments.block_layer_bytes} bytes each, {lie}. "
        f"Medians of {arguments.rounds} rounds in turns. Computing a layer is a sleep{beside}. PUT is offered as "
        f"PUT_ASYNC is. Memory of {' and '.join(dict.fromkeys(both_memories(arguments.memory)))}; bytes by "
        f"carrier: {'; '.join(_carriers(name, counts[name]) for name in counts)}."
    )
    return Outcome(NAME, figures, {"bytes": size, "results": results}, note)


def _carriers(transport: str, counts: dict[str, int]) -> str:
    """The carriers of a pair's hand-offs."""
    moved = {name: counts[f"{name}_bytes"] for name in ("cuda", "cma", "tcp")}
    return f"{transport}: " + ", ".join(f"{bytes} by {name}" for name, bytes in moved.items() if bytes)
