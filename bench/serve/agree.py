"""Whether `kvlane bench serve` and vLLM's own `vllm bench serve` tell the same of one engine.

    python bench/serve/agree.py --out out/agree           # six minutes on two cores, with vLLM for the CPU

One engine with kvlane, on a small model that is built here. Both tools ask it in turns, at the same rate, for
prompts that begin alike (vLLM's dataset `prefix_repetition` with one prefix): first prompts that nobody has, then,
after the engine's own prefix cache was emptied, the same again, which come from kvlane. Each repetition has new
prompts. The engine's counters say for both tools where the tokens came from.

Of each figure, the two tools agree when their medians over the repetitions differ by no more than the larger of their
own spreads (largest minus smallest). Writes agree.json; status 1 when a mean or a median does not agree. The
percentiles are told as well: vLLM interpolates them, kvlane takes the nearest rank.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.endpoint import Endpoint
from kvlane.bench.processes import beside_python, connector_config, own_daemon, own_engine
from kvlane.bench.sources import Sources
from kvlane.demo.model import SHAPES, build_model

TOOLS = ("kvlane bench serve", "vllm bench serve")
PHASES = ("cold", "warm")
TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
JUDGED = ("mean", "p50")
PARTS = ("mean", "p50", "p90", "p95", "p99")
_TIMEOUT_S = 600

# By tool, phase and figure ("ttft mean"), one value a repetition, in ms.
Values = dict[str, dict[str, dict[str, list[float]]]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="of the model")
    parser.add_argument("--repetitions", type=int, default=5, help="default %(default)s")
    parser.add_argument("--prompts", type=int, default=40, help="a round (default %(default)s)")
    parser.add_argument("--prefix", type=int, default=512, help="tokens all share (default %(default)s)")
    parser.add_argument("--suffix", type=int, default=512, help="tokens of each (default %(default)s)")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="prompts a second (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/agree"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    model = build_model(settings.out / f"model-{settings.shape}", SHAPES[settings.shape])
    values: Values = {tool: {phase: {} for phase in PHASES} for tool in TOOLS}
    hits: dict[str, dict[str, list[int | None]]] = {tool: {phase: [] for phase in PHASES} for tool in TOOLS}
    with report.CpuWatch() as watch, own_daemon("1gb", settings.out) as address:
        flags = f"--dtype {SHAPES[settings.shape].dtype} --enforce-eager --kv-cache-memory-bytes {1 << 29}"
        with own_engine(str(model), connector_config(address), flags.split(), settings.out) as url:
            endpoint = Endpoint(url)
            # The engine does its one-time work here.
            _kvlane(settings, url, model, 1)
            for number in range(settings.repetitions):
                for tool in TOOLS if number % 2 else reversed(TOOLS):
                    report.say(f"[{number + 1}/{settings.repetitions}] {tool}")
                    found = (
                        _kvlane(settings, url, model, 100 + number)
                        if tool == TOOLS[0]
                        else _vllm(settings, endpoint, model, 100 + number)
                    )
                    for phase, (figures, from_kvlane) in found.items():
                        hits[tool][phase].append(from_kvlane)
                        for what, value in figures.items():
                            values[tool][phase].setdefault(what, []).append(value)
    rows = compare(values)
    result = {
        "benchmark": "serve agreement",
        "date": time.strftime("%Y-%m-%d"),
        "settings": {key: value for key, value in vars(settings).items() if key != "out"},
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "commit": report.commit(),
        "tokens_from_kvlane": hits,
        "ms": values,
        "compared": rows,
    }
    report.write_json(settings.out / "agree.json", result)
    print(table(rows))
    print(f"tokens from kvlane: {json.dumps(hits)}")
    print(f"others used {watch.facts['other_cores']:.2f} cores meanwhile; written: {settings.out}/agree.json")
    return 0 if all(row["agrees"] for row in rows if row["part"] in JUDGED) else 1


def compare(values: Values) -> list[dict[str, Any]]:
    """A row for each phase and figure: both medians, both spreads, and whether they agree."""
    rows = []
    for phase in PHASES:
        for time_name in TIMES:
            for part in PARTS:
                mine, theirs = (values[tool][phase][f"{time_name} {part}"] for tool in TOOLS)
                medians = statistics.median(mine), statistics.median(theirs)
                spreads = max(mine) - min(mine), max(theirs) - min(theirs)
                rows.append(
                    {
                        "phase": phase,
                        "time": time_name,
                        "part": part,
                        "kvlane_ms": medians[0],
                        "vllm_ms": medians[1],
                        "kvlane_spread_ms": spreads[0],
                        "vllm_spread_ms": spreads[1],
                        "agrees": abs(medians[0] - medians[1]) <= max(spreads),
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The comparison as a table, in ms."""
    return report.table(
        ["ms, medians", "kvlane bench", "spread", "vllm bench", "spread", "agree"],
        [
            [
                f"{row['phase']} {TIMES[row['time']]} {row['part']}",
                row["kvlane_ms"],
                row["kvlane_spread_ms"],
                row["vllm_ms"],
                row["vllm_spread_ms"],
                row["agrees"],
            ]
            for row in rows
        ],
    )


Found = dict[str, tuple[dict[str, float], int | None]]


def _kvlane(settings: argparse.Namespace, url: str, model: Path, seed: int) -> Found:
    """Both phases by one `kvlane bench serve`."""
    out = settings.out / "kvlane"
    command = [sys.executable, "-m", "kvlane.bench", "serve", "--base-url", url, "--model", str(model)]
    command += ["--num-prompts", str(settings.prompts), "--input-len", str(settings.prefix + settings.suffix)]
    command += ["--shared-prefix", str(settings.prefix), "--output-len", str(settings.output)]
    command += ["--request-rate", str(settings.rate), "--seed", str(seed), "--out", str(out)]
    _run(command, settings.out / "kvlane.log")
    rounds = json.loads((out / "serve.json").read_text())["runs"][0]["rounds"]
    assert tuple(each["round"] for each in rounds) == PHASES, [each["round"] for each in rounds]
    return {
        each["round"]: (
            {f"{name} {part}": each[f"{name}_ms"][part] for name in TIMES for part in PARTS},
            each["kvlane_hit_tokens"],
        )
        for each in rounds
    }


def _vllm(settings: argparse.Namespace, endpoint: Endpoint, model: Path, seed: int) -> Found:
    """One `vllm bench serve` for each phase: the same seed has the same prompts."""
    found: Found = {}
    for phase in PHASES:
        assert asyncio.run(endpoint.reset_prefix_cache()), "the engine's prefix cache could not be emptied"
        command = [beside_python("vllm"), "bench", "serve", "--backend", "openai", "--base-url"]
        command += [endpoint.base_url, "--model", str(model), "--dataset-name", "prefix_repetition"]
        command += ["--prefix-repetition-prefix-len", str(settings.prefix)]
        command += ["--prefix-repetition-suffix-len", str(settings.suffix)]
        command += ["--prefix-repetition-num-prefixes", "1"]
        command += ["--prefix-repetition-output-len", str(settings.output)]
        command += ["--num-prompts", str(settings.prompts), "--request-rate", str(settings.rate)]
        command += ["--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        command += ["--percentile-metrics", ",".join(TIMES), "--metric-percentiles", "90,95,99"]
        command += ["--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(settings.out)]
        command += ["--result-filename", "vllm.json"]
        before = asyncio.run(endpoint.counters())
        _run(command, settings.out / "vllm-bench.log")
        sources = Sources.between(before, asyncio.run(endpoint.counters()), reset=True)
        told = json.loads((settings.out / "vllm.json").read_text())
        assert told["completed"] == settings.prompts, f"{told['completed']} of {settings.prompts} completed"
        names = {"p50": "median"}
        figures = {
            f"{name} {part}": told[f"{names.get(part, part)}_{name}_ms"] for name in TIMES for part in PARTS
        }
        found[phase] = figures, sources.kvlane
    return found


def _run(command: list[str], log: Path) -> None:
    with log.open("ab") as written:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            command, stdout=written, stderr=written, env=environment, timeout=_TIMEOUT_S, check=False
        )
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ended with {done.returncode}; see {log}")


if __name__ == "__main__":
    sys.exit(main())
