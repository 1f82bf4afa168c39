"""Requests at rising rates: an engine that prefills and one that decodes, beside two engines that each do both.

    python bench/gpu/rates.py --out out/rates                   # two GPUs; vLLM, no peer
    python bench/gpu/rates.py --requests 1000:256 10000:256 --loads 10000 20000 --chunks 8192
    python bench/gpu/rates.py --loads 5000 --seconds 200 --burstiness 100 --chunks 8192 --store

| mode | what |
|---|---|
| pair | both engines are asked at once, and blocks land layer by layer in the one that decodes |
| store | with `--store`: the same two engines, one asked after the other; blocks go through the daemon's pool |
| two, N | two engines without a connector, asked in turns, in steps of at most N tokens |

Requests come at random (Poisson, or as `--burstiness` says), at the same times in each mode. A load is in prompt
tokens a second, so that it means as much computing for short prompts as for long ones. A request is in time if its
first token comes within `--slo-ttft` and its further tokens take `--slo-tpot` on average; the file also has each
request's two times, for other limits.
Control: the decode engine computes one token of each prompt, or the run says how many prompts it computed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import model
from handoff import HERE, PEER, on_own_gpu, start_one
from measure import Engine, summary
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, running

from kvlane.bench import report

# Tokens of a prompt's last block, and one: what is computed where blocks come through the daemon.
STORED_REST = 129
Ask = Callable[[list[int], int], Awaitable[tuple[list[float], int]]]
"""Asks for an answer of so many tokens: when each came, in ms, and the prompt's tokens computed where it decodes."""


def ask_pair(p: Engine, d: Engine) -> Ask:
    """Both at once."""

    async def ask(prompt: list[int], tokens: int) -> tuple[list[float], int]:
        name = secrets.token_hex(16)
        at_p = {"do_remote_decode": True, "kvlane": {"handoff": name}}
        beside = asyncio.create_task(p.answer(prompt, params=at_p))
        times, cached = await d.answer_counted(prompt, tokens, {"kvlane": {"handoff": name, "peer": PEER}})
        await beside
        return times, len(prompt) - cached

    return ask


def ask_store(p: Engine, d: Engine) -> Ask:
    """One after the other, through the daemon."""

    async def ask(prompt: list[int], tokens: int) -> tuple[list[float], int]:
        began = time.perf_counter()
        _, _, _, handed = await p.ask(prompt, 1, {"do_remote_decode": True})
        stored = {
            key: value for key, value in handed.get("kvlane", {}).items() if key not in ("handoff", "peer")
        }
        before = (time.perf_counter() - began) * 1e3
        times, cached = await d.answer_counted(prompt, tokens, {"kvlane": stored})
        computed = len(prompt) - cached
        # Whole blocks are stored, so the decode engine computes the rest of the last one.
        return [before + each for each in times], 1 if computed <= STORED_REST else computed

    return ask


def ask_two(engines: list[Engine]) -> Ask:
    """One after the other."""
    turns = itertools.cycle(engines)

    async def ask(prompt: list[int], tokens: int) -> tuple[list[float], int]:
        times, cached = await next(turns).answer_counted(prompt, tokens)
        return times, len(prompt) - cached

    return ask


async def at_load(
    ask: Ask, tokens: int, answer: int, load: float, settings: argparse.Namespace
) -> dict[str, Any]:
    """What requests see that come for `--seconds`, `load` prompt tokens a second."""
    rate = load / tokens
    source = random.Random(f"{load} {tokens} {answer}")
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    arrivals: list[float] = []
    # As vLLM's own client: the shape of a gamma distribution, 1 is Poisson's.
    shape = settings.burstiness
    at = source.gammavariate(shape, 1 / (rate * shape))
    while at < settings.seconds:
        arrivals.append(at)
        at += source.gammavariate(shape, 1 / (rate * shape))
    prompts = [[source.randrange(100, vocabulary) for _ in range(tokens)] for _ in arrivals]
    began = time.perf_counter()

    async def one(at: float, prompt: list[int]) -> tuple[list[float], int]:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        return await ask(prompt, answer)

    answers = await asyncio.gather(*map(one, arrivals, prompts))
    took = time.perf_counter() - began
    ttft = [times[0] for times, _ in answers]
    tpot = [(times[-1] - times[0]) / max(1, len(times) - 1) for times, _ in answers]
    gaps = [b - a for times, _ in answers for a, b in itertools.pairwise(times)]
    in_time = sum(a <= settings.slo_ttft and b <= settings.slo_tpot for a, b in zip(ttft, tpot, strict=True))
    return {
        "tokens": tokens,
        "answer": answer,
        "load": load,
        "rate": rate,
        "requests": len(answers),
        "per_second": round(len(answers) / took, 3),
        "in_time": round(in_time / len(answers), 4),
        "in_time_per_second": round(in_time / settings.seconds, 3),
        "prompts_computed_where_decoded": sum(computed > 1 for _, computed in answers),
        "ttft": summary(ttft),
        "tpot": summary(tpot),
        "itl": summary(gaps),
        "ttft_and_tpot": [[round(a, 1), round(b, 2)] for a, b in zip(ttft, tpot, strict=True)],
    }


async def measure(ask: Ask, what: str, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """One mode at every load."""
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    source = random.Random(7)
    points = []
    for tokens, answer in settings.requests:
        for _ in range(4):
            await ask([source.randrange(100, vocabulary) for _ in range(tokens)], answer)
        for load in settings.loads:
            points.append(await at_load(ask, tokens, answer, load, settings))
            report.say(row(what, points[-1]))
    return points


def row(what: str, point: dict[str, Any]) -> str:
    """A point in one line."""
    ttft, tpot, itl = point["ttft"]["mean"], point["tpot"]["p99"], point["itl"]["p99"]
    return (
        f"{what:12} {point['tokens']:5} in, {point['answer']} out, {point['rate']:6.2f}/s: "
        f"TTFT mean {ttft:.0f}, TPOT p99 {tpot:.2f}, ITL p99 {itl:.2f} ms, "
        f"in time {point['in_time']:.0%} of {point['requests']}"
    )


def compare(modes: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each point, the pair's figures by the best of the two-engine modes (by TPOT p99)."""
    found = []
    for index, pair in enumerate(modes["pair"]):
        others = {name: points[index] for name, points in modes.items() if name.startswith("two")}
        if not others:
            continue
        name = min(others, key=lambda name: (others[name]["tpot"]["p99"], name))
        best = others[name]

        def of(what: str, part: str, pair: dict[str, Any] = pair, best: dict[str, Any] = best) -> float:
            return round(pair[what][part] / best[what][part], 3)

        found.append(
            {
                **{key: pair[key] for key in ("tokens", "answer", "rate")},
                "best": name,
                "tpot_p99": of("tpot", "p99"),
                "itl_p99": of("itl", "p99"),
                "ttft_mean": of("ttft", "mean"),
                "in_time": [pair["in_time"], max(other["in_time"] for other in others.values())],
            }
        )
    return found


def lengths(text: str) -> tuple[int, int]:
    """`5000:200`, a prompt's tokens and an answer's."""
    tokens, _, answer = text.partition(":")
    return int(tokens), int(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="one for both, or each its own")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument(
        "--requests",
        type=lengths,
        nargs="+",
        default=[(5000, 200)],
        metavar="IN:OUT",
        help="tokens of a prompt and of its answer (default 5000:200)",
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[5000, 10_000, 15_000, 20_000, 25_000, 30_000],
        help="prompt tokens a second",
    )
    parser.add_argument("--seconds", type=float, default=15, help="at each load (default %(default)s)")
    parser.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="of arrivals: above 1 more regular (default %(default)s)",
    )
    parser.add_argument("--store", action="store_true", help="the pair through the daemon, too")
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=[2048, 8192, 16384], help="of the two engines"
    )
    parser.add_argument("--slo-ttft", type=float, default=1000, help="ms (default %(default)s)")
    parser.add_argument("--slo-tpot", type=float, default=15, help="ms (default %(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=24_000_000_000, help="of the daemon's pool")
    parser.add_argument("--kv-cache-bytes", type=int, default=40_000_000_000, help="of each engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument(
        "--extra", default="{}", help="further keys of the pair's kv_connector_extra_config, JSON"
    )
    parser.add_argument("--out", type=Path, default=Path("out/rates"))
    add_arguments(parser)
    settings = parser.parse_args()
    settings.tokens = max(tokens for tokens, _ in settings.requests)
    settings.new_tokens = max(answer for _, answer in settings.requests)
    result = head("a prefill and a decode engine beside two engines that do both", settings)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    modes: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
        folder = Path(scratch)
        settings.scratch = scratch
        with running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "kvlane.log"):
            asking = {"pair": lambda engines: ask_pair(engines[0], engines[1])}
            if settings.store:
                asking["store"] = lambda engines: ask_store(engines[0], engines[1])
            modes |= run(settings, lambda number: start_one(settings, number, folder), asking)
        for chunk in settings.chunks:
            chunked = argparse.Namespace(**vars(settings) | {"chunk": chunk})
            modes |= run(
                settings,
                lambda number, each=chunked: on_own_gpu(each, number, ""),
                {f"two, {chunk}": ask_two},
            )
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "modes": modes,
        "ratios": compare(modes),
    }
    report.write_json(settings.out / "rates.json", result)
    for each in result["ratios"]:
        print(each)
    return 0 if not any(point["prompts_computed_where_decoded"] for point in modes["pair"]) else 1


def run(
    settings: argparse.Namespace,
    engine: Callable[[int], Engine],
    asking: dict[str, Callable[[list[Engine]], Ask]],
) -> dict[str, list[dict[str, Any]]]:
    """Starts two engines, measures these modes, ends them."""
    engines: list[Engine] = []

    async def all_modes() -> dict[str, list[dict[str, Any]]]:
        return {what: await measure(ask(engines), what, settings) for what, ask in asking.items()}

    try:
        engines.extend(engine(number) for number in range(2))
        return asyncio.run(all_modes())
    finally:
        for each in engines:
            each.shutdown()


if __name__ == "__main__":
    sys.exit(main())
