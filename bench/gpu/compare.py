"""All systems one after the other on this host, and what came out as ratios: JSON, a table and a picture.

    python bench/gpu/compare.py --out out/gpu            # everything: about a quarter of an hour on an H200
    python bench/gpu/compare.py --systems none kvlane --modes eager
    python bench/gpu/compare.py --draw gpu.json --out .  # where the GPU host has no matplotlib

Every engine is a process of its own (`measure.py` says what it measures), so that nothing of one is left for the next.
An engine without a connector runs beside one with kvlane instead (`pair.py`): what a connector costs is less than the
speed of a host changes within minutes. With `--repeat` the whole series runs several times, and medians are taken over
it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model
import pictures
from measure import CONTROLS, differ_at_most
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address, plan, running

from kvlane.bench import report
from kvlane.bench.drawing import save
from kvlane.bench.figures import Figure

MODES = ("eager", "graphs")
HERE = Path(__file__).resolve().parent
PEERS = ("pegaflow", "offload", "lmcache", "lmcache-mp")
# kvlane and none at the same time.
PAIR = "pair"


@dataclass(frozen=True)
class Run:
    """One engine of the series."""

    system: str
    mode: str
    repeat: int
    found: dict[str, Any]


def main() -> int:
    arguments = _arguments()
    if arguments.dry_run:
        print(plan(arguments.systems, arguments.cache_bytes, arguments.out))
        return 0
    if arguments.draw:
        arguments.out.mkdir(parents=True, exist_ok=True)
        return publish(json.loads(arguments.draw.read_text()), arguments.out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    failures: list[str] = []
    series = [
        (repeat, mode, system)
        for repeat in range(arguments.repeat)
        for mode in arguments.modes
        for system in _order(arguments.systems)
    ]
    result = head("gpu", arguments) | {"settings": public(arguments)}
    for number, (repeat, mode, system) in enumerate(series, 1):
        what = SYSTEMS[system].what if system != PAIR else "with kvlane and without a connector, in turns"
        report.say(f"[{number}/{len(series)}] {system}, {mode}: {what}")
        with report.CpuWatch() as watch:
            try:
                found = _run(arguments, system, mode, repeat)
            except RuntimeError as error:
                failures.append(f"{system}, {mode}: {error}")
                report.say(f"    FAILED: {error}")
                continue
        runs.append(Run(system, mode, repeat, found | {"cpu_use": watch.facts}))
        report.say(_pair_line(found) if system == PAIR else _line(found))
        # After each engine: what was measured stays, even if the rest is cut off.
        result |= {
            "machine": report.machine_facts(),
            "runs": [vars(run) for run in runs],
            "failures": failures,
        }
        report.write_json(arguments.out / "gpu.json", result)
    return publish(result, arguments.out) or bool(failures) if runs else 1


def publish(result: dict[str, Any], folder: Path) -> int:
    """Writes gpu.json, gpu.md and a picture for each mode; 1 if a control failed."""
    runs = [Run(**run) for run in result["runs"]]
    modes = [mode for mode in MODES if any(run.mode == mode for run in runs)]
    figures = [figure for mode in modes for figure in _figures(runs, mode)]
    report.write_json(folder / "gpu.json", result | {"figures": [figure.facts() for figure in figures]})
    table = _table(figures)
    (folder / "gpu.md").write_text(table + "\n")
    print(f"\n{table}\n\nin {folder}: gpu.json, gpu.md, gpu-MODE.png")
    try:
        for mode in modes:
            save(pictures.compared(result, mode), folder / f"gpu-{mode}.png")
    except ImportError:
        report.say("no picture: matplotlib is missing; draw it elsewhere with --draw gpu.json")
    return 0 if _controls_hold(runs) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="eager, CUDA graphs")
    parser.add_argument("--repeat", type=int, default=1, help="times the series runs (default %(default)s)")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=8, help="default %(default)s")
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=2_000, help="added to it (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds (default %(default)s)")
    parser.add_argument("--decodes", type=int, default=8, help="running requests (default %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=750, help="of each (default %(default)s)")
    parser.add_argument("--decode-rounds", type=int, default=2, help="default %(default)s")
    parser.add_argument("--rate", type=float, default=4.0, help="prompts a second (default %(default)s)")
    parser.add_argument(
        "--starts", type=int, default=2, help="of each engine of the pair (default %(default)s)"
    )
    parser.add_argument(
        "--client-rate",
        type=float,
        default=10.0,
        help="GB/s of the pair's second client (default %(default)s)",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--cache-bytes", type=int, default=32_000_000_000, help="of each system")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="share that vLLM may use")
    parser.add_argument("--kv-cache-bytes", type=int, default=0, help="vLLM's KV cache, instead of a share")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that one engine may take")
    add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be started")
    parser.add_argument(
        "--draw", type=Path, metavar="GPU.JSON", help="measure nothing: table and pictures of this result"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    return parser.parse_args()


def _order(systems: list[str]) -> list[str]:
    """The systems that run. If both are asked for, an engine without a connector runs in the pair only."""
    if not {"kvlane", "none"} <= set(systems):
        return systems
    return [PAIR if system == "none" else system for system in systems]


def _run(arguments: argparse.Namespace, system: str, mode: str, repeat: int) -> dict[str, Any]:
    log = arguments.out / f"{system}-{mode}-{repeat}.log"
    passed_on = [
        *("shape", "prompts", "tokens", "new_tokens", "rounds", "decodes", "decode_tokens", "decode_rounds"),
        *("tensor_parallel", "gpu_memory", "kv_cache_bytes"),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        result = folder / "result.json"
        if system == PAIR:
            system = "kvlane"
            command = [sys.executable, str(HERE / "pair.py"), "--address", kvlane_address(folder)]
            passed_on += ["starts", "client_rate"]
        else:
            command = [sys.executable, str(HERE / "measure.py"), "--system", system]
            passed_on += ["rate"]
        command += ["--result", str(result), "--scratch", scratch]
        command += ["--connector", SYSTEMS[system].connector(arguments.cache_bytes, folder)]
        command += ["--eager"] if mode == "eager" else []
        for name in passed_on:
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        server_log = log.with_suffix(".server.log")
        with running(SYSTEMS[system], arguments.cache_bytes, folder, server_log), log.open("wb") as written:
            engine = subprocess.Popen(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
            try:
                code = engine.wait(arguments.patience)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # vLLM's own processes are in its group, and may outlive it.
                with suppress(ProcessLookupError):
                    os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()
        if code != 0 or not result.exists():
            ended = f"did not end within {arguments.patience} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"the engine {ended}; see {log}")
        return json.loads(result.read_text())


def _line(found: dict[str, Any]) -> str:
    warm = [part["p50"] for part in found.get("warm", [])]
    return (
        f"    ready {found['ready_s']} s, TTFT ms: cold {found['cold']['p50']}, in GPU {found['in_gpu']['p50']}"
        + (f", warm {', '.join(map(str, warm))}" if warm else "")
    )


def _pair_line(found: dict[str, Any]) -> str:
    parts = [
        f"{what} {found[name]['kvlane']['p50']} and {found[name]['none']['p50']} ms"
        for name, what in (("cold", "cold"), ("in_gpu", "in GPU"))
    ]
    return (
        f"    ready {found['ready']['kvlane']} and {found['ready']['none']} s, {', '.join(parts)}, ITL p99 "
        f"{found['decode']['quiet']['p99']} ms, beside a client at {found['client_gb_per_s']} GB/s "
        f"{found['decode']['beside']['p99']} ms"
    )


def _median(runs: list[Run], system: str, mode: str, name: str, part: str = "p50") -> float | None:
    """Over rounds and repeats."""
    values: list[float] = []
    for run in runs:
        if run.system == system and run.mode == mode and name in run.found:
            found = run.found[name]
            parts = found if isinstance(found, list) else [found]
            values += [each[part] for each in parts if part in each]
    return statistics.median(values) if values else None


def _figures(runs: list[Run], mode: str) -> list[Figure]:
    """kvlane against what the goals name; without the needed system, no figure."""

    def of(system: str, name: str, part: str = "p50") -> float | None:
        return _median(runs, system, mode, name, part)

    def better_peer(name: str, part: str = "p50") -> float | None:
        return min((value for peer in PEERS if (value := of(peer, name, part)) is not None), default=None)

    figures: list[Figure] = []

    def ratio(what: str, mine: float | None, other: float | None, at_most: float) -> None:
        if mine is not None and other:
            text = f"{mode}: {what}, {mine:.1f} / {other:.1f} ms"
            figures.append(Figure(text, mine / other, at_most=at_most))

    ratio(
        "warm TTFT / better peer",
        of("kvlane", "warm"),
        better_peer("warm"),
        0.72 if mode == "eager" else 0.78,
    )
    mine, plain = _of_pair(runs, mode, "in_gpu", "kvlane"), _of_pair(runs, mode, "in_gpu", "none")
    if mine is not None and plain is not None:
        what = f"{mode}: hit in GPU memory, above no connector ({mine:.1f} and {plain:.1f} ms)"
        figures.append(Figure(what, mine - plain, "ms", at_most=1.0))
    ratio(
        "cold TTFT / no connector",
        _of_pair(runs, mode, "cold", "kvlane"),
        _of_pair(runs, mode, "cold", "none"),
        1.01,
    )
    ratio(
        "cached and new tokens, from kvlane / in GPU",
        of("kvlane", "longer_warm"),
        of("kvlane", "longer_in_gpu"),
        1.15,
    )
    ratio(
        "ITL p99 while prompts are loaded / hit in GPU memory",
        of("kvlane", "decode_warm", "p99"),
        of("kvlane", "decode_in_gpu", "p99"),
        1.03,
    )
    for part in ("mean", "p99"):
        ratio(
            f"open loop, warm TTFT {part} / PegaFlow",
            of("kvlane", "open_loop", part),
            of("pegaflow", "open_loop", part),
            0.85,
        )
    ratio(
        "ITL p99 beside another client of the daemon / quiet",
        _of_pair(runs, mode, "decode", "beside", "p99"),
        _of_pair(runs, mode, "decode", "quiet", "p99"),
        1.03,
    )
    ready, plain_ready = _ready(runs, "kvlane", mode), _ready(runs, "none", mode)
    if ready is not None and plain_ready is not None:
        what = f"{mode}: engine start above no connector ({ready:.1f} and {plain_ready:.1f} s)"
        figures.append(Figure(what, ready - plain_ready, "s", at_most=1.0))
    return figures


def _pairs(runs: list[Run], mode: str) -> list[Run]:
    return [run for run in runs if run.system == PAIR and run.mode == mode]


def _of_pair(runs: list[Run], mode: str, name: str, of: str, part: str = "p50") -> float | None:
    values = [run.found[name][of][part] for run in _pairs(runs, mode)]
    return statistics.median(values) if values else None


def _ready(runs: list[Run], system: str, mode: str) -> float | None:
    values = [seconds for run in _pairs(runs, mode) for seconds in run.found["ready"][system]]
    return statistics.median(values) if values else None


def _controls_hold(runs: list[Run]) -> bool:
    """Every system's answers and bytes; said if not."""
    wrong = []
    for run in runs:
        wrong += [
            f"{run.system}, {run.mode}: {name} is false" for name in CONTROLS if run.found.get(name) is False
        ]
        differ = run.found.get("loaded_blocks_that_differ", 0)
        if differ and differ > differ_at_most(run.found["cold"]["count"], run.found):
            wrong.append(f"{run.system}, {run.mode}: {differ} blocks differ")
    for sentence in wrong:
        report.say(f"WRONG: {sentence}")
    return not wrong


def _table(figures: list[Figure]) -> str:
    lines = ["| what | measured | goal |", "|---|---|---|"]
    lines += [
        f"| {figure.what} | {figure.text}{'' if figure.passed else ' (missed)'} | {figure.goal} |"
        for figure in figures
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
