"""`kvlane bench hooks`: what vLLM's per-layer calls of the connector cost when there is nothing to do."""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import count

NAME = "hooks"
HELP = "save_kv_layer and wait_for_layer_load with nothing to do, beside an empty method; needs vLLM"
_CALLS = {
    "save_kv_layer": "hook(name, None, None)",
    "wait_for_layer_load": "hook(name)",
    "empty method": "hook(name)",
}


class _Empty:
    def method(self, layer_name: str) -> None:
        return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench hooks`."""
    parser.add_argument("--calls", type=count, default=100_000, help="a round (default %(default)s)")
    parser.add_argument("--rounds", type=count, default=15, help="of all hooks, interleaved")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Medians of nanoseconds a call."""
    try:
        from kvlane.connector import KVLaneConnector
        from kvlane.connector.guard import Failures
        from kvlane.connector.worker import WorkerSide
    except ImportError as error:
        sys.exit(
            f"kvlane bench hooks calls the connector inside vLLM, and there is none beside this Python: {error}"
        )
    # The hooks read no other state of the connector.
    connector = object.__new__(KVLaneConnector)
    connector._worker = WorkerSide(0, Failures())
    hooks = {
        "save_kv_layer": connector.save_kv_layer,
        "wait_for_layer_load": connector.wait_for_layer_load,
        "empty method": _Empty().method,
    }
    ns: dict[str, list[float]] = {name: [] for name in hooks}
    for _ in range(arguments.rounds):
        for name, hook in hooks.items():
            timer = timeit.Timer(
                _CALLS[name], globals={"hook": hook, "name": "model.layers.0.self_attn.attn"}
            )
            ns[name].append(timer.timeit(arguments.calls) / arguments.calls * 1e9)
    medians = {name: statistics.median(values) for name, values in ns.items()}
    figures = [
        Figure(f"{name}, nothing to do", medians[name], "ns", at_most=1000.0)
        for name in ("save_kv_layer", "wait_for_layer_load")
    ]
    figures.append(Figure("an empty Python method", medians["empty method"], "ns"))
    return Outcome(NAME, figures, {"nanoseconds": medians}, "Medians over interleaved rounds.")
