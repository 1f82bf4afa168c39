"""`kvlane bench all`: every figure with a goal, in one run, into docs/figures.json for docs/performance.md."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from kvlane.bench import figures, report

NAME = "all"
HELP = "all benchmarks with a goal, one after the other; writes the figures of docs/performance.md"
# Modules and the flags that they run with.
BENCHMARKS: dict[str, list[str]] = {
    "lookup": ["--sessions", "64", "--busy"],
    "journal": [],
    "copy": [],
    "hooks": [],
    "idle": [],
    "memory_use": [],
    "overhead": [],
    "share": ["--vllm"],
    "fabric": ["--loopback", "--rounds", "7"],
}
NEEDS_VLLM = ("hooks", "overhead", "share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench all`."""
    parser.add_argument(
        "--figures",
        type=Path,
        default=Path("docs/figures.json"),
        help="where those figures go (default %(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, help="these alone; what the file has of the others stays"
    )
    figures.add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs what this machine can run, and writes the file. Other figures stay as they are."""
    wanted = arguments.only or list(BENCHMARKS)
    has_vllm = importlib.util.find_spec("vllm") is not None
    measured: dict[str, list[dict[str, Any]]] = {}
    for name in wanted:
        if name in NEEDS_VLLM and not has_vllm:
            report.say(f"{name}: left out, it needs vLLM beside this Python")
            continue
        report.say(f"== {name}")
        measured[name] = _run_one(name, arguments.out)
    write(arguments.figures, measured, report.machine_facts())
    print(f"written: {arguments.figures}")
    return 0


def _run_one(name: str, out: Path) -> list[dict[str, Any]]:
    module = importlib.import_module(f"kvlane.bench.{name}")
    parser = argparse.ArgumentParser(prog=module.NAME)
    module.add_arguments(parser)
    flags = BENCHMARKS[name]
    own = parser.parse_args([*flags, "--out", str(out)])
    with report.CpuWatch() as watch:
        outcome = module.measure(own)
    figures.publish(own, outcome, watch)
    command = " ".join(["kvlane bench", module.NAME, *flags])
    return [
        {
            "what": figure.what,
            "value": figure.text,
            "goal": figure.goal,
            "passed": figure.passed,
            "command": command,
            "benchmark": name,
            "number": figure.value,
            "date": time.strftime("%Y-%m-%d"),
            "note": outcome.note,
            "other_cores": round(watch.facts["other_cores"], 2),
        }
        for figure in outcome.figures
        if figure.goal
    ]


def write(path: Path, measured: dict[str, list[dict[str, Any]]], machine: dict[str, Any]) -> None:
    """Replaces the figures of the benchmarks that ran, and keeps the others in the file."""
    kept = json.loads(path.read_text())["figures"] if path.exists() else []
    by_name: dict[str, list[dict[str, Any]]] = {}
    for figure in kept:
        by_name.setdefault(figure["benchmark"], []).append(figure)
    by_name |= measured
    ordered = [figure for name in BENCHMARKS for figure in by_name.get(name, [])]
    sentence = (
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory']}, Linux {machine['kernel']}, "
        f"Python {machine['python']}, measured {time.strftime('%Y-%m-%d')}."
    )
    report.write_json(path, {"machine": sentence, "facts": machine, "figures": ordered})
