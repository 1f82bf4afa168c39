"""vLLM with two data-parallel ranks and its experts on both: kvlane's all-to-all, DeepEP's, and vLLM's own all-gather.

    python bench/gpu/moe_serve.py --out out/moe-serve

| engine | `--all2all-backend` | module `deep_ep` |
|---|---|---|
| kvlane | deepep_low_latency | kvlane.moe.deep_ep, by KVLANE_DEEP_EP=1 |
| deepep | deepep_low_latency | DeepEP's, from the folder --deepep |
| allgather | allgather_reducescatter | - |

Each engine answers the same prompts, one at a time, and then `--running` at a time. A figure is the time per output
token (TPOT) of a request; `kernels_ms` says which kernels of one rank took longest in a round of 16 tokens. Controls:
each prompt has its own answer; with two experts swapped the answers change; vLLM has built DeepEP's classes, and ranks
of kvlane have dispatched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model
from measure import Engine, start, summary
from provenance import add_arguments, head, public
from systems import ENVIRONMENT

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
BACKENDS = {
    "kvlane": "deepep_low_latency",
    "deepep": "deepep_low_latency",
    "allgather": "allgather_reducescatter",
}
# NVSHMEM, over which DeepEP runs, finds no network card.
OF_ONE_HOST = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}


async def measure(
    engine: Engine, settings: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """What one engine answers, and how fast. `keep` gets each part as soon as it is known."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    await engine.on_workers(model.redraw_experts, model.DEVIATION[settings.shape])
    source = random.Random(3)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    prompts = [draw(300) for _ in range(4)]
    begun = time.perf_counter()

    def done(what: str) -> None:
        report.say(f"{time.perf_counter() - begun:5.1f} s: {what}")

    async def answers() -> list[tuple[int, ...]]:
        found = []
        for number, prompt in enumerate(prompts):
            engine.rank = number % 2
            found.append((await engine.answer(prompt, 16))[1])
            done(f"answer {number + 1} of {len(prompts)}")
        engine.rank = None
        return found

    first = await answers()
    keep({"answers": first, "control_distinct": len(set(first)) == len(first)})
    tpot: list[float] = []
    for number in range(settings.rounds + 1):
        came = await asyncio.gather(
            *(engine.answer(draw(settings.tokens), settings.new_tokens) for _ in range(settings.running))
        )
        done(f"round {number} of {settings.rounds}")
        # The first round is warm-up.
        if number > 0:
            tpot += [(times[-1] - times[0]) / (len(times) - 1) for times, _ in came]
            keep({"tpot": summary(tpot)})
    await engine.on_workers(model.begin_profile)
    await asyncio.gather(*(engine.answer(draw(settings.tokens), 16) for _ in range(settings.running)))
    kernels = (await engine.on_workers(model.end_profile))[0]
    done("kernels")
    classes, dispatches = zip(*await engine.on_workers(model.all_to_all_facts), strict=True)
    keep(
        {
            "kernels_ms": longest(kernels),
            "classes": sorted(set().union(*classes)),
            "dispatches_of_kvlane": list(dispatches),
        }
    )
    keep({"same_again": first == await answers()})
    await engine.on_workers(model.swap_experts)
    keep({"control_experts_matter": await answers() != first})


def longest(kernels: dict[str, tuple[float, int]], count: int = 12) -> dict[str, list[float]]:
    """Milliseconds and launches of those that took longest, and of all."""
    ordered = sorted(kernels.items(), key=lambda each: -each[1][0])
    found = {name[:100]: [round(us / 1e3, 2), launches] for name, (us, launches) in ordered[:count]}
    found["all"] = [
        round(sum(us for us, _ in kernels.values()) / 1e3, 2),
        sum(n for _, n in kernels.values()),
    ]
    return found


def one(settings: argparse.Namespace) -> None:
    """One engine, in a process of its own."""
    settings.data_parallel, settings.expert_parallel, settings.tensor_parallel = 2, True, 1
    settings.connector = ""
    # Most tokens of a step, for which a low-latency backend has room: DeepEP's refuses many more.
    settings.chunk = 256
    settings.all2all_backend = BACKENDS[settings.engine]
    engine, ready = start(settings)
    found: dict[str, Any] = {"ready_s": round(ready, 1)}

    def keep(parts: dict[str, Any]) -> None:
        found.update(parts)
        written = settings.result.with_suffix(".part")
        report.write_json(written, found)
        written.replace(settings.result)

    try:
        asyncio.run(measure(engine, settings, keep))
    finally:
        engine.shutdown()


def run(settings: argparse.Namespace, engine: str, folder: Path) -> dict[str, Any] | None:
    """What is known of an engine. None: it failed before it answered. Its log says why."""
    environment = os.environ | ENVIRONMENT | OF_ONE_HOST | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    paths = [str(HERE)]
    if engine == "kvlane":
        environment["KVLANE_DEEP_EP"] = "1"
    elif engine == "deepep":
        paths.append(str(settings.deepep))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    result = folder / f"{engine}.json"
    command = [
        sys.executable,
        __file__,
        "--engine",
        engine,
        "--result",
        str(result),
        "--scratch",
        str(folder),
    ]
    for name in ("shape", "rounds", "running", "tokens", "new_tokens", "kv_cache_bytes", "gpu_memory"):
        command += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
    command += ["--eager"] * settings.eager
    with (settings.out / f"{engine}.log").open("wb") as log:
        try:
            subprocess.run(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=settings.patience,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            report.say(f"{engine}: {error}"[:200])
    return json.loads(result.read_text()) if result.exists() else None


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """kvlane's engine to the others, as far as both are known."""
    ours, parts = found.get("kvlane", {}), {}
    for name, theirs in found.items():
        if not ours or theirs is ours:
            continue
        pairs = list(zip(ours["answers"], theirs["answers"], strict=True))
        parts[name] = {"equal_answers": sum(mine == other for mine, other in pairs), "of": len(pairs)}
        if "tpot" in ours and "tpot" in theirs:
            parts[name]["tpot_p50"] = round(ours["tpot"]["p50"] / theirs["tpot"]["p50"], 4)
    return parts


def controls_hold(found: dict[str, dict[str, Any]]) -> bool:
    """Without these the figures count for nothing."""
    for name, parts in found.items():
        if not all(
            parts.get(control) for control in ("control_distinct", "control_experts_matter", "same_again")
        ):
            return False
        if BACKENDS[name].startswith("deepep") and not any("DeepEP" in each for each in parts["classes"]):
            return False
    return "kvlane" in found and min(found["kvlane"]["dispatches_of_kvlane"]) > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", nargs="+", choices=sorted(BACKENDS), default=list(BACKENDS))
    parser.add_argument(
        "--deepep", type=Path, default=Path("/tmp/deepep"), help="folder with the module deep_ep of DeepEP"
    )
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="moe")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one (default %(default)s)")
    parser.add_argument("--running", type=int, default=32, help="requests at a time (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--kv-cache-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--gpu-memory", type=float, default=0.5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of an engine")
    parser.add_argument("--out", type=Path, default=Path("out/moe-serve"))
    parser.add_argument("--engine", choices=sorted(BACKENDS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    add_arguments(parser)
    settings = parser.parse_args()
    if settings.engine:
        one(settings)
        return 0
    hidden = ["engine", "result"]
    result = head("gpu moe serve", settings)
    result |= {"settings": public(settings, hidden), "found": {}, "kvlane_to": {}}
    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in settings.engines:
            if parts := run(settings, engine, Path(folder)):
                found[engine] = parts
                said = {name: value for name, value in parts.items() if name != "answers"}
                report.say(f"{engine}: {said}")
                # A run that is cut off leaves the engines that were measured.
                result |= {"found": found, "kvlane_to": compared(found)}
                report.write_json(settings.out / "moe-serve.json", result)
    print(json.dumps(result["kvlane_to"], indent=2))
    return 0 if controls_hold(found) else 1


if __name__ == "__main__":
    sys.exit(main())
