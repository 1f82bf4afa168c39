"""One stream of requests over a pool that engines share, and over the same bytes divided among them.

    python bench/gpu/shared_pool.py --out out/shared-pool                               # two engines, two GPUs
    python bench/gpu/shared_pool.py --tensor-parallel 2 --shape mla --out out/shared-pool-mla

| mode | what |
|---|---|
| shared | `--engines` engines, each on its own GPU, on one daemon with `--pool-bytes` |
| isolated | the same engines, each on a daemon of its own with its part of `--pool-bytes` |

With `--tensor-parallel N` one engine has N ranks and a model with latent attention, whose KV cache is the same in all:

| mode | what |
|---|---|
| stored_once | on one daemon with `--pool-bytes`, which stores one copy |
| room_of_copies | on one daemon with `--pool-bytes` / N: the room that is left if each rank stored its own copy. Only \
the capacity differs: kvlane still stores and loads one copy |
| offload | another engine of N ranks on the same GPUs, with vLLM's OffloadingConnector and `--pool-bytes`. vLLM's \
version decides how many copies it stores |

Every mode gets the same draws of the same prompts. Request i goes to engine i modulo N, and each engine has
`--concurrency` requests in flight. The first `--warm-up-requests` fill the pools and are not counted. An engine's own
prefix cache holds about three prompts, so the pools decide. The engines stay up; each mode of each round starts fresh
daemons at the engines' addresses. vLLM's OffloadingConnector keeps its blocks between rounds.

With CUDA graphs ranks compute the same bytes only with `--ranks-alike` (`ranks.py` says why).

Controls: each prompt has an answer of its own; the answer with loaded blocks is the one with blocks kept in GPU memory,
and vLLM says that these blocks were not computed; engines find each other's blocks if, and only if, they share a pool.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import model
from measure import CHUNK, RANKS_ALIKE, Engine, compared_tokens, differ_at, start, summary
from pictures import NAMES, NOTHING, VERSIONS, gpus
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address

from kvlane.bench import report
from kvlane.bench.drawing import COLOURS, Bar, Panel, Picture, number, save

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
# Tokens of a prompt that shows whether an engine loads from its daemon: a few blocks of any size.
PROBE_TOKENS = 513
# Prompts whose answers are compared, and the tokens of these answers.
COMPARED, ANSWER = 4, 16
POOL_SHARE, OWN_CACHE_PROMPTS = 0.4, 3.4
USED, LOADED = "kvlane_pool_used_bytes", "kvlane_loaded_by_link_bytes_total"
SAVING = ("kvlane_claimed_blocks", "kvlane_seal_queue_blocks")
CONTROLS = ("same_tokens", "control_distinct", "control_loaded", "control_pools")
FIGURES = {
    "requests_per_s": "requests a second",
    "request_hit_rate": "requests of which at least half was not computed",
    "ttft_mean": "mean time to first token (TTFT)",
}


@dataclass(frozen=True)
class Mode:
    """The engines of a mode, and the daemons that they connect to."""

    title: str
    engines: tuple[int, ...]
    """Indexes into the list of all engines."""
    pools: tuple[int, ...]
    """Bytes of each daemon: one daemon for all engines, or one for each. Empty without daemons."""


def plan(settings: argparse.Namespace) -> dict[str, Mode]:
    """The modes by name; the first one is compared with the others."""
    size, ranks, count = settings.pool_bytes, settings.tensor_parallel, settings.engines
    if ranks == 1:
        every = tuple(range(count))
        return {
            "shared": Mode("one shared pool", every, (size,)),
            "isolated": Mode(f"{count} isolated pools", every, (size // count,) * count),
        }
    modes = {
        "stored_once": Mode("one copy for all ranks", (0,), (size,)),
        "room_of_copies": Mode(f"room of {ranks} copies", (0,), (size // ranks,)),
    }
    return modes if settings.without_offload else modes | {"offload": Mode(NAMES["offload"], (1,), ())}


def bytes_a_token(shape: str) -> int:
    """Bytes of KV cache of a token, all layers together; with latent attention those of one rank."""
    facts = model.SHAPES[shape]
    if "kv_lora_rank" not in facts:
        return model.bytes_a_token(shape)
    return int(facts["num_hidden_layers"] * (facts["kv_lora_rank"] + facts["qk_rope_head_dim"]) * 2)


def start_all(settings: argparse.Namespace, connectors: list[str], there: int) -> list[Engine]:
    """Starts an engine for each connector, all at once, on a host with so many GPUs that this process may use.

    An engine's process inherits its GPU in the environment, so the next engine waits until that process runs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(there)]
    names = [] if settings.tensor_parallel > 1 else names[: settings.gpus]
    started = []
    with ThreadPoolExecutor(len(connectors)) as pool:
        for index, connector in enumerate(connectors):
            if names:
                os.environ["CUDA_VISIBLE_DEVICES"] = names[index % len(names)]
            running = {each.pid for each in active_children()}
            started.append(
                pool.submit(start, argparse.Namespace(**vars(settings) | {"connector": connector}))
            )
            while not started[-1].done() and {each.pid for each in active_children()} <= running:
                time.sleep(0.05)
    # The daemons are to see all GPUs again.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    if any(each.exception() for each in started):
        # They would keep this process from its end.
        for each in started:
            if not each.exception():
                each.result()[0].shutdown()
    return [each.result()[0] for each in started]


def metric(watched: list[str], name: str) -> float:
    """The sum of a metric over its labels and over the daemons of these addresses."""
    total = 0.0
    for http in watched:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        total += sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))
        )
    return total


@contextmanager
def daemons(mode: Mode, folders: list[Path], settings: argparse.Namespace) -> Iterator[list[str]]:
    """Fresh daemons at the addresses of the mode's engines; gives their addresses for metrics.

    One daemon for several engines listens at all of their addresses.
    """
    log, processes = settings.out / "daemons.log", []
    watched = [f"127.0.0.1:{settings.http_port + index}" for index in range(len(mode.pools))]
    try:
        for index, size in enumerate(mode.pools):
            command = ["kvlane", "serve", "--pool-size", str(size), "--http", watched[index]]
            # Ranks that hold the same bytes each load a part over their own link.
            command += ["--rails", "auto"] if settings.tensor_parallel > 1 else []
            for engine in mode.engines[index :: len(mode.pools)]:
                command += ["--listen", kvlane_address(folders[engine])]
            with log.open("ab") as out:
                processes.append(subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
        deadline = time.monotonic() + PATIENCE_S
        for engine, process in zip(mode.engines, processes, strict=False):
            while not SYSTEMS["kvlane"].is_up(folders[engine]):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"a daemon does not start; see {log}")
                time.sleep(0.1)
        yield watched
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def until_loaded(engine: Engine, prompt: list[int], least: int = PROBE_TOKENS // 2) -> None:
    """Asks for the prompt until so many of its tokens come from outside: the daemon is there, and has the blocks."""
    deadline = time.monotonic() + PATIENCE_S
    await engine.forget()
    while (await engine.ask(prompt, 1, None))[2] < least:
        if time.monotonic() > deadline:
            raise SystemExit(f"an engine loads nothing from outside within {PATIENCE_S:.0f} s")
        await engine.forget()
        await asyncio.sleep(0.1)


async def stream(
    engines: list[Engine], asked: list[tuple[int, list[int]]], settings: argparse.Namespace
) -> tuple[float, list[tuple[float, float]]]:
    """Asks for the prompts, each with its place in the stream.

    Returns the seconds, and of each request TTFT in ms and the share of its prompt that was not computed.
    """
    seen: list[tuple[float, float]] = []

    async def client(engine: Engine, turns: Iterator[list[int]]) -> None:
        for prompt in turns:
            times, _, cached, _ = await engine.ask(prompt, settings.answer_tokens, None)
            seen.append((times[0], cached / len(prompt)))

    clients = []
    for index, engine in enumerate(engines):
        turns = iter([prompt for place, prompt in asked if place % len(engines) == index])
        clients += [client(engine, turns) for _ in range(settings.concurrency)]
    began = time.perf_counter()
    await asyncio.gather(*clients)
    return time.perf_counter() - began, seen


async def until_saved(watched: list[str]) -> None:
    """Until these daemons have saved what engines have computed: nothing is on its way three times in a row."""
    deadline, quiet = time.monotonic() + PATIENCE_S, 0
    while quiet < 3:
        quiet = 0 if any(metric(watched, name) for name in SAVING) else quiet + 1
        if time.monotonic() > deadline:
            raise SystemExit(f"a daemon saves for more than {PATIENCE_S:.0f} s")
        await asyncio.sleep(0.05)


async def same_answers(engine: Engine, watched: list[str], prompts: list[list[int]]) -> dict[str, Any]:
    """The controls of answers, of one engine. The pool has room for the prompts, and has all of each before the engine
    forgets it: else the engine would compute a part among fewer tokens, and its last bits may differ."""
    kept, back, cached = [], [], []
    for prompt in prompts:
        await engine.ttft(prompt)
        if watched:
            # A block that is being saved is not copied for a hit.
            await until_saved(watched)
        kept.append((await engine.answer(prompt, ANSWER))[1])
        in_gpu = engine.cached_tokens
        if not watched:
            await until_loaded(engine, prompt, in_gpu - CHUNK)
        await engine.forget()
        back.append((await engine.answer(prompt, ANSWER))[1])
        cached.append((in_gpu, engine.cached_tokens))
    return {
        "same_tokens": back == kept,
        "control_distinct": len(set(kept)) == len(kept),
        "control_loaded": all(loaded >= in_gpu - CHUNK for in_gpu, loaded in cached),
        # Of each prompt, where its answers differ, and how much was in GPU memory and was loaded.
        "answers_differ_at": differ_at(kept, back),
        "cached_tokens": cached,
    }


async def measure(
    engines: list[Engine],
    mode: Mode,
    watched: list[str],
    asked: list[list[int]],
    draw: Callable[[int, int], list[list[int]]],
    settings: argparse.Namespace,
) -> dict[str, Any]:
    """One mode, one round."""
    probes = draw(len(engines) + 1, PROBE_TOKENS)
    await asyncio.gather(*map(until_loaded, engines, probes[:-1]))
    await until_loaded(engines[0], probes[-1])
    found = [(await engine.ask(probes[-1], 1, None))[2] > 0 for engine in engines[1:]]
    for engine in engines:
        await engine.forget()
    numbered = list(enumerate(asked))
    await stream(engines, numbered[: settings.warm_up_requests], settings)
    before = metric(watched, LOADED)
    seconds, seen = await stream(engines, numbered[settings.warm_up_requests :], settings)
    loaded, used = metric(watched, LOADED) - before, metric(watched, USED)
    hits, misses = ([ttft for ttft, share in seen if (share >= 0.5) == is_hit] for is_hit in (True, False))
    every_byte = len(seen) * settings.tokens * bytes_a_token(settings.shape)
    return {
        "requests": len(seen),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(seen) / seconds, 3),
        "request_hit_rate": round(len(hits) / len(seen), 4),
        "token_hit_rate": round(statistics.mean(share for _, share in seen), 4),
        # Without the hits in GPU memory. Only daemons that copy to GPUs count it.
        "token_hit_rate_of_pools": round(loaded / every_byte, 4) if loaded else None,
        "ttft_mean": round(statistics.mean(ttft for ttft, _ in seen), 3),
        "ttft": summary([ttft for ttft, _ in seen]),
        "ttft_hits": summary(hits),
        "ttft_misses": summary(misses),
        "pool_bytes": sum(mode.pools) or settings.pool_bytes,
        "pool_used_bytes": used if watched else None,
        "control_pools": found == [len(mode.pools) == 1] * len(found),
    }


async def controls(
    engines: list[Engine],
    watched: list[str],
    draw: Callable[[int, int], list[list[int]]],
    settings: argparse.Namespace,
) -> dict[str, Any]:
    """The controls of answers, with an empty pool and prompts of their own; `answers` has those of each engine."""
    await asyncio.gather(*map(until_loaded, engines, draw(len(engines), PROBE_TOKENS)))
    held = []
    for engine in engines:
        await engine.forget()
        held.append(await same_answers(engine, watched, draw(COMPARED, compared_tokens(settings.tokens))))
    return {name: all(each[name] for each in held) for name in CONTROLS[:-1]} | {"answers": held}


async def all_rounds(
    engines: list[Engine],
    modes: dict[str, Mode],
    folders: list[Path],
    settings: argparse.Namespace,
    keep: Callable[[dict[str, list[dict[str, Any]]]], None],
) -> dict[str, list[dict[str, Any]]]:
    """Each mode in each round; every second round goes backwards. `keep` gets what was found after each mode."""
    source = random.Random(settings.seed)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]

    def draw(count: int, tokens: int) -> list[list[int]]:
        return [[source.randrange(100, vocabulary) for _ in range(tokens)] for _ in range(count)]

    weights = [1 / (rank + 1) ** settings.zipf for rank in range(settings.prompts)]
    asked = source.choices(draw(settings.prompts, settings.tokens), weights, k=settings.requests)
    for engine in engines:
        await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
        # kvlane looks at the weights again.
        await engine.forget()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
    for turn in range(settings.rounds):
        for name in list(modes)[:: -1 if turn % 2 else 1]:
            mode = modes[name]
            of_mode = [engines[each] for each in mode.engines]
            with daemons(mode, folders, settings) as watched:
                found[name].append(await measure(of_mode, mode, watched, asked, draw, settings))
            if turn == 0:
                with daemons(mode, folders, settings) as watched:
                    found[name][0] |= await controls(of_mode, watched, draw, settings)
            report.say(f"    round {turn + 1}, {name}: {found[name][-1]}")
            keep(found)
    return found


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Of the rounds of a mode; TTFT is in ms."""
    return {figure: statistics.median(each[figure] for each in rounds) for figure in FIGURES}


def controls_hold(rounds: list[dict[str, Any]]) -> bool:
    """Those of answers are of the first round only."""
    return all(rounds[0][name] for name in CONTROLS) and all(each[CONTROLS[-1]] for each in rounds)


def compare(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """The first mode's medians by those of each other mode."""
    (first, one), *others = ((name, medians(rounds)) for name, rounds in found.items())
    return {
        f"{first} / {name}": {
            key: round(one[key] / value, 4) if value else None for key, value in other.items()
        }
        for name, other in others
    }


def table(result: Mapping[str, Any]) -> str:
    """Medians of the rounds for people; bytes and the share loaded from pools are the last round's."""
    rows = []
    for name, rounds in result["found"].items():
        per_s, hits, ttft = medians(rounds).values()
        shares = (rounds[-1]["token_hit_rate"], rounds[-1]["token_hit_rate_of_pools"])
        used = rounds[-1]["pool_used_bytes"]
        cells = [f"{per_s:.2f}", f"{hits:.1%}", *("-" if each is None else f"{each:.1%}" for each in shares)]
        cells += [f"{ttft:.1f}", "-" if used is None else f"{used / 1e9:.3g}"]
        rows.append([result["modes"][name], *cells, controls_hold(rounds)])
    heads = ["requests/s", "hits", "hit tokens", "from pools", "TTFT ms", "used GB", "controls"]
    ratios = [f"{name}: {parts}" for name, parts in result["ratios"].items()]
    return "\n".join([report.table(["mode", *heads], rows), *ratios])


def picture(result: Mapping[str, Any]) -> Picture:
    """Requests a second, hits and mean TTFT of each mode. Bars are relative to the first mode's."""
    found, settings = result["found"], result["settings"]
    first, panels = next(iter(found)), []
    for figure, heading in FIGURES.items():
        unit, bars = medians(found[first])[figure] or 1.0, []
        for index, (name, rounds) in enumerate(found.items()):
            value = medians(rounds)[figure]
            texts = {"request_hit_rate": f"{value:.1%}", "ttft_mean": f"{number(value)} ms"}
            dots = tuple(each[figure] / unit for each in rounds)
            text, colour = texts.get(figure, f"{number(value)}/s"), (COLOURS[0], NOTHING, COLOURS[1])[index]
            bars.append(Bar(result["modes"][name], value / unit, text, colour, samples=dots))
        panels.append(Panel(heading, tuple(bars)))
    versions, ranks = result["versions"], settings["tensor_parallel"]
    known = [f"{name} {versions[key]}" for key, name in VERSIONS.items() if key in versions]
    engines = f"One engine of {ranks} ranks" if ranks > 1 else f"{settings['engines']} engines"
    return Picture(
        f"{engines}, {settings['prompts']} prompts of {settings['tokens']:,} tokens, "
        f"{settings['pool_bytes'] / 1e9:.3g} GB of pool",
        f"{gpus(result['host'])}; {', '.join([*known, result['date']])}. Draws by Zipf {settings['zipf']}, "
        f"{settings['concurrency']} requests in flight per engine. Bars: medians of rounds; dots: rounds.",
        tuple(panels),
    )


def arguments() -> argparse.Namespace:
    """The command line; sizes that it leaves out follow from the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=2, help="without --tensor-parallel")
    parser.add_argument("--gpus", type=int, help="for the engines, which share them in turn (default: all)")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of one engine; --shape mla")
    parser.add_argument(
        "--ranks-alike", action="store_true", help="PyTorch's compiler writes the same code for all ranks"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=48, help="distinct ones (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt (default %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=4)
    parser.add_argument("--requests", type=int, default=240, help="with those of the warm-up")
    parser.add_argument("--warm-up-requests", type=int, default=60)
    parser.add_argument("--zipf", type=float, default=0.6, help="exponent of the draws (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--concurrency", type=int, default=2, help="requests in flight per engine")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool-bytes", type=int, help="of a mode (default: 40 %% of all prompts' bytes)")
    parser.add_argument("--kv-cache-bytes", type=int, help="of each GPU (default: 3.4 prompts' bytes)")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument("--without-offload", action="store_true", help="no engine with vLLM's own offload")
    parser.add_argument("--http-port", type=int, default=9093, help="of the first daemon; others follow")
    parser.add_argument("--out", type=Path, default=Path("out/shared-pool"))
    add_arguments(parser)
    settings = parser.parse_args()
    if (settings.tensor_parallel > 1) != (settings.shape == "mla"):
        parser.error("--tensor-parallel and --shape mla belong together: only such ranks hold the same bytes")
    if settings.warm_up_requests >= settings.requests:
        parser.error("--warm-up-requests leaves no request to count")
    a_prompt = settings.tokens * bytes_a_token(settings.shape)
    settings.pool_bytes = settings.pool_bytes or int(POOL_SHARE * settings.prompts * a_prompt)
    settings.kv_cache_bytes = settings.kv_cache_bytes or int(OWN_CACHE_PROMPTS * a_prompt)
    settings.new_tokens = max(settings.answer_tokens, ANSWER)
    settings.compilation = RANKS_ALIKE if settings.ranks_alike else None
    return settings


def main() -> int:
    settings = arguments()
    result = head("gpu shared pool", settings)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    # Threads start them.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    modes = plan(settings)
    with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
        settings.scratch = scratch
        model.write_config(settings.shape, Path(scratch))
        systems = {
            each: "kvlane" if mode.pools else "offload" for mode in modes.values() for each in mode.engines
        }
        folders = [Path(scratch) / str(index) for index in systems]
        for folder in folders:
            folder.mkdir()
        pairs = zip(systems.values(), folders, strict=True)
        connectors = [SYSTEMS[system].connector(settings.pool_bytes, folder) for system, folder in pairs]
        result |= {
            "settings": public(settings, ["compilation"]),
            "modes": {name: mode.title for name, mode in modes.items()},
        }

        def keep(found: dict[str, list[dict[str, Any]]]) -> None:
            """A run that is cut off leaves what was measured."""
            report.write_json(settings.out / "shared-pool.json", result | {"found": found})

        engines = start_all(settings, connectors, len(result["host"]["gpus"]))
        report.say(f"    {len(engines)} engines are up")
        try:
            found = asyncio.run(all_rounds(engines, modes, folders, settings, keep))
        finally:
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(lambda each: each.shutdown(), engines))
    result |= {
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
        "ratios": compare(found),
    }
    report.write_json(settings.out / "shared-pool.json", result)
    print(table(result))
    try:
        save(picture(result), settings.out / "shared-pool.png")
    except ImportError:
        report.say("no picture: matplotlib is missing")
    return 0 if all(map(controls_hold, found.values())) else 1


if __name__ == "__main__":
    # A script that is terminated ends its engines and daemons, whose ports the next one needs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
