"""Several engines at once on one GPU, asked in turns: what `measure.py` takes of one engine after the other, within the
same seconds of the host.

    python bench/gpu/turns.py --out out/turns                       # CUDA graphs
    python bench/gpu/turns.py --eager --systems none kvlane offload --out out/turns
    python bench/gpu/turns.py --systems kvlane pegaflow lmcache lmcache-mp --out out/turns-lmcache
    python bench/gpu/turns.py --systems kvlane --variant stall0 '{"kvlane.load_stall_ms": 0}'

| name | what |
|---|---|
| cold | TTFT of prompts that nobody has |
| in_gpu | the same again: a hit in the engine's own prefix cache |
| warm | after the engines' prefix caches were reset: the KV cache comes from the system |
| longer | the prompt and `--new-tokens` more, with the prompt in GPU memory, and from the system |
| busy | requests that decode: gaps of their tokens, and TTFT of prompts beside them that hit, are loaded, saved |
| decode | gaps between tokens of kvlane's engine, quiet and beside another client of its daemon |

Each prompt goes to all engines, each time beginning with the next one. Controls are those of `measure.py`. The engines
start in parallel, so what their start takes is not told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import model
import pictures
from measure import CONTROLS, Engine, differ_at, differ_at_most, gaps, loaded_bytes, start, summary
from pair import decode, second_client
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address, kvlane_with, plan, running

from kvlane.bench import report
from kvlane.bench.drawing import save

HERE = Path(__file__).resolve().parent
# Seconds after a prompt that is saved: the next engine must not find the link or the GPU taken.
SAVED_WITHIN = 0.3
# Prompts that are saved beside decodes, as many times those that are loaded: each lengthens one step by itself, at
# times by a fifth more than at others.
SAVED = 2


async def measure(engines: dict[str, Engine], settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By engine, all that the table above names."""
    source = random.Random(4)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(tokens: int) -> list[int]:
        return [source.randrange(100, vocabulary) for _ in range(tokens)]

    systems = {name: engine for name, engine in engines.items() if name != "none"}
    found: dict[str, dict[str, Any]] = {name: {} for name in engines}
    for engine in engines.values():
        await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
        await engine.ttft(draw(settings.tokens))
        await engine.ttft(draw(64))
    prompts = [draw(settings.tokens) for _ in range(settings.prompts)]

    async def ask(what: str, asked: list[list[int]], of: dict[str, Engine], pause: float = 0) -> None:
        times = await in_turns(asked, of, pause)
        for name, values in times.items():
            found[name].setdefault(what, []).append(summary(values))

    def longer() -> list[list[int]]:
        return [prompt + draw(settings.new_tokens) for prompt in prompts]

    await ask("cold", prompts, engines, SAVED_WITHIN)
    for name, engine in systems.items():
        await loaded_bytes(engine, prompts, found[name])
        report.say(f"    {name}: {found[name]['loaded_blocks_that_differ']} blocks differ")
    for _ in range(settings.rounds):
        await ask("in_gpu", 2 * prompts, engines)
    kept = {name: [(await engine.answer(p, 16))[1] for p in prompts] for name, engine in engines.items()}
    for _ in range(settings.longer_rounds):
        await ask("longer_in_gpu", longer(), engines, SAVED_WITHIN)
    for _ in range(settings.rounds):
        await forget(systems)
        await ask("warm", prompts, systems)
    await forget(systems)
    back = {name: [(await engine.answer(p, 16))[1] for p in prompts] for name, engine in systems.items()}
    for _ in range(settings.longer_rounds):
        await forget(systems)
        await ask("longer_warm", longer(), systems, SAVED_WITHIN)
    for _ in range(settings.busy_rounds):
        for name, engine in engines.items():
            await busy(engine, name in systems, settings, prompts, draw, found[name])
    if "kvlane" in engines and settings.decode_rounds:
        found["kvlane"] |= await beside_a_client(engines["kvlane"], settings, draw)

    changed = list(prompts[0])
    changed[64:96] = [(token + 1) % vocabulary for token in changed[64:96]]
    for name, engine in systems.items():
        found[name]["same_tokens"] = back[name] == kept[name]
        found[name]["answers_differ_at"] = differ_at(kept[name], back[name])
        found[name]["control_distinct"] = len(set(kept[name])) == len(kept[name])
        found[name]["control_block_matters"] = (await engine.answer(changed, 16))[1] != kept[name][0]
    return found


async def in_turns(
    prompts: list[list[int]], engines: dict[str, Engine], pause: float
) -> dict[str, list[float]]:
    """TTFT of each prompt in each engine."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for index, prompt in enumerate(prompts):
        names = list(engines)
        first = index % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(await engines[name].ttft(prompt))
            await asyncio.sleep(pause)
    return times


async def busy(
    engine: Engine,
    has_system: bool,
    settings: argparse.Namespace,
    prompts: list[list[int]],
    draw: Any,
    found: dict[str, Any],
) -> None:
    """Gaps of requests that decode, and TTFT of the prompts that come beside them, by what these are."""
    new = [draw(settings.new_tokens) for _ in range(SAVED * len(prompts))]
    beside = {"quiet": [], "in_gpu": prompts, "warm": prompts, "saved": new}
    for what, asked in beside.items():
        if what == "warm":
            if not has_system:
                continue
            await engine.forget()
        elif what == "in_gpu":
            for prompt in prompts:
                await engine.ttft(prompt)
        between, came = await gaps(engine, settings, asked, draw, found)
        found.setdefault(f"busy_{what}", []).append(summary(between))
        if came:
            found.setdefault(f"busy_{what}_ttft", []).append(summary(came))


async def forget(engines: dict[str, Engine]) -> None:
    """Empties the prefix caches."""
    for engine in engines.values():
        await engine.forget()


async def beside_a_client(engine: Engine, settings: argparse.Namespace, draw: Any) -> dict[str, Any]:
    """As in `pair.py`."""
    gaps: dict[str, list[float]] = {"quiet": [], "beside": []}
    by_round: dict[str, list[float]] = {"quiet": [], "beside": []}
    rates: list[float] = []
    with second_client(settings) as client:
        for _ in range(settings.decode_rounds):
            for what in gaps:
                if what == "beside":
                    client.begin()
                between = await decode(engine, settings, draw)
                if what == "beside":
                    rates.append(client.end())
                gaps[what] += between
                by_round[what].append(summary(between)["p99"])
    return {
        "decode": {what: summary(values) for what, values in gaps.items()},
        "decode_p99_by_round": by_round,
        "client_gb_per_s": [round(rate, 2) for rate in rates],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=sorted(SYSTEMS),
        default=["none", "kvlane", "pegaflow", "offload"],
        help="default: %(default)s; four engines of the 8B shape are what one GPU has room for",
    )
    parser.add_argument(
        "--variant",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="one more engine on kvlane's daemon, with these keys of kv_connector_extra_config",
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--new-tokens", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longer-rounds", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--decode-tokens", type=int, default=750)
    parser.add_argument("--decode-rounds", type=int, default=0)
    parser.add_argument("--busy-rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4.0, help="prompts a second beside decodes")
    parser.add_argument("--client-rate", type=float, default=10.0)
    parser.add_argument("--cache-bytes", type=int, default=24_000_000_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=13_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument(
        "--gdn-prefill-backend", help="vLLM's, for linear attention (triton: without FlashInfer)"
    )
    parser.add_argument("--one-after-the-other", action="store_true", help="start the engines so")
    add_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be started")
    parser.add_argument("--out", type=Path, default=Path("out/turns"))
    settings = parser.parse_args()
    for name, keys in settings.variant:
        SYSTEMS[name] = kvlane_with(name, json.loads(keys))
        settings.systems = [*settings.systems, name]
    if settings.dry_run:
        print(plan(settings.systems, settings.cache_bytes, settings.out))
        return 0
    result = head("gpu turns", settings)
    settings.tensor_parallel = 1
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    # Threads start them.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as servers:
        folder = Path(scratch)
        settings.scratch, settings.address = scratch, kvlane_address(folder)
        with ThreadPoolExecutor(len(settings.systems)) as pool:

            def serve(name: str) -> contextlib.AbstractContextManager[None]:
                server = running(SYSTEMS[name], settings.cache_bytes, folder, settings.out / f"{name}.log")
                server.__enter__()
                return server

            for server in pool.map(serve, settings.systems):
                servers.push(server)
        model.write_config(settings.shape, folder)

        def engine(name: str) -> Engine:
            connector = SYSTEMS[name].connector(settings.cache_bytes, folder)
            return start(argparse.Namespace(**vars(settings) | {"connector": connector}))[0]

        at_once = 1 if settings.one_after_the_other else len(settings.systems)
        with ThreadPoolExecutor(at_once) as pool:
            engines = dict(zip(settings.systems, pool.map(engine, settings.systems), strict=True))
        report.say(f"    {len(engines)} engines are up")
        try:
            with report.CpuWatch() as watch:
                found = asyncio.run(measure(engines, settings))
            result |= {
                "settings": public(settings, ["address"]),
                "machine": report.machine_facts() | {"cpu_use": watch.facts},
                "found": found,
            }
            # Engines can take long to end.
            report.write_json(settings.out / "turns.json", result)
            print(table(found), flush=True)
        finally:
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(Engine.shutdown, engines.values()))
    picture = pictures.beside_decodes(result)
    if picture.panels:
        try:
            save(picture, settings.out / "turns.png")
        except ImportError:
            report.say("no picture: matplotlib is missing")
    return 0 if controls_hold(found) else 1


def table(found: dict[str, dict[str, Any]]) -> str:
    """TTFT of each system, medians of the rounds."""
    lines = [
        "| system | " + " | ".join(PARTS) + " | same tokens, controls |",
        "|---" * (len(PARTS) + 2) + "|",
    ]
    for name, parts in found.items():
        cells = [" ".join(f"{each['p50']:.1f}" for each in parts.get(part, [])) for part in PARTS]
        held = [str(parts.get(key)) for key in CONTROLS]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(held)} |")
    lines += busy_table(found)
    for name, parts in found.items():
        if "decode" in parts:
            quiet, beside = parts["decode"]["quiet"], parts["decode"]["beside"]
            ratios = [f"{beside[part] / quiet[part]:.3f}" for part in ("p50", "p99")]
            lines.append(
                f"{name}: ITL beside a client at {parts['client_gb_per_s']} GB/s / quiet: "
                f"p50 {ratios[0]}, p99 {ratios[1]} ({beside['p99']} / {quiet['p99']} ms)"
            )
    return "\n".join(lines)


def busy_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Beside requests that decode: medians of the rounds, of p99 gaps and of median TTFT."""
    if not any("busy_quiet" in parts for parts in found.values()):
        return []
    lines = ["", "| beside decodes | " + " | ".join(BUSY) + " |", "|---" * (len(BUSY) + 1) + "|"]
    for name, parts in found.items():
        cells = []
        for part in BUSY:
            gap = [each["p99"] for each in parts.get(f"busy_{part}", []) if each]
            came = [each["p50"] for each in parts.get(f"busy_{part}_ttft", [])]
            texts = [f"gaps p99 {statistics.median(gap):.2f}"] if gap else []
            cells.append(", ".join(texts + ([f"TTFT {statistics.median(came):.1f}"] if came else [])))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


BUSY = ("quiet", "in_gpu", "warm", "saved")
PARTS = ("cold", "in_gpu", "longer_in_gpu", "warm", "longer_warm")


def controls_hold(found: dict[str, dict[str, Any]]) -> bool:
    """As in compare.py."""
    return all(parts.get(name, True) for parts in found.values() for name in CONTROLS) and all(
        parts.get("loaded_blocks_that_differ", 0) <= differ_at_most(parts["cold"][0]["count"], parts)
        for parts in found.values()
    )


if __name__ == "__main__":
    sys.exit(main())
