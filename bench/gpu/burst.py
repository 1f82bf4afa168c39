"""A burst of prompts to a decode engine with room for few: they overflow, wait at the prefill engine, or are computed.

    python bench/gpu/burst.py --out out/burst                   # two GPUs: the engine that prefills has its own
    python bench/gpu/burst.py --gpus 1 --computed-before        # one GPU; the prompts are computed before

| mode | what |
|---|---|
| overflow | the prefill engine computes all prompts; they wait for room in the pool of the decode engine's daemon |
| waits | the same with a decode engine that uses no daemon: prompts wait at the prefill engine, and some are computed |
| computed | the decode engine computes all prompts |

Each request goes to the prefill engine first, and to the decode engine with its answer, as behind proxies for P2P NCCL.
The first token's time counts from the burst's begin. The modes have their turns on the same engines, with new prompts.
Controls: how many prompts the decode engine computed, and how many overflowed; answers of that engine begin alike when
it is asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import model
from handoff import HERE, PEER, on_own_gpu
from measure import Engine, summary
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, running

from kvlane.bench import report

OVERFLOWS = "vllm:kvlane_direct_overflows_total"
# By then an engine has sent what it counted in its last steps.
COUNT_AFTER_S = 0.5
MODES = ("overflow", "waits", "computed")
PREFILL, OVERFLOW, WAITS = "prefill", "overflow", "waits"


class Engines:
    """The engine that prefills, and two that decode: with a daemon and without."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.all: dict[str, Engine] = {}
        self._settings = settings
        self._source = random.Random(11)

    def draw(self, tokens: int) -> list[int]:
        vocabulary = model.SHAPES[self._settings.shape]["vocab_size"]
        return [self._source.randrange(100, vocabulary) for _ in range(tokens)]

    async def one(
        self, mode: str, prompt: list[int], began: float
    ) -> tuple[list[float], tuple[int, ...], int]:
        """When each token came, in ms from the burst's begin, the answer, and the tokens that were computed where it
        decodes."""
        engine, params = self.all[OVERFLOW if mode == "overflow" else WAITS], None
        if mode != "computed":
            _, _, _, params = await self.all[PREFILL].ask(prompt, 1, {"do_remote_decode": True})
        asked = (time.perf_counter() - began) * 1e3
        times, answer, cached, _ = await engine.ask(prompt, self._settings.new_tokens, params)
        return [asked + each for each in times], answer, len(prompt) - cached

    async def burst(
        self, mode: str, prompts: list[list[int]]
    ) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
        """What the requests of one burst see, and their answers."""
        before, began = counted(OVERFLOWS), time.perf_counter()
        answers = await asyncio.gather(*(self.one(mode, prompt, began) for prompt in prompts))
        took = time.perf_counter() - began
        await asyncio.sleep(COUNT_AFTER_S)
        first, last = [times[0] for times, _, _ in answers], [times[-1] for times, _, _ in answers]
        gaps = [b - a for times, _, _ in answers for a, b in itertools.pairwise(times)]
        computed = [tokens for _, _, tokens in answers]
        seen = {
            "seconds": round(took, 3),
            "ttft": summary(first),
            "last_token": summary(last),
            "itl": summary(gaps),
            "prompts_computed_where_decoded": sum(2 * each > self._settings.tokens for each in computed),
            "tokens_computed_where_decoded": sum(computed),
            "overflows": counted(OVERFLOWS) - before,
        }
        return seen, [answer for _, answer, _ in answers]


def counted(name: str) -> float:
    """A counter of the engine that was started last: the others count nothing that this process sees."""
    from prometheus_client import REGISTRY

    samples = (each for metric in REGISTRY.collect() for each in metric.samples)
    return sum(each.value for each in samples if each.name == name)


async def measure(engines: Engines, settings: argparse.Namespace) -> dict[str, Any]:
    """Every mode in turns."""
    for engine in engines.all.values():
        await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
        # kvlane looks at the weights again.
        await engine.forget()
        await engine.answer(engines.draw(settings.tokens), 8)
        await engine.answer(engines.draw(200), 8)
    for mode in MODES:
        await engines.burst(mode, [engines.draw(settings.tokens) for _ in range(2)])
    found: dict[str, Any] = {"bursts": {mode: [] for mode in MODES}}
    alike: list[int] = []
    for index in range(settings.rounds):
        for turn in range(len(MODES)):
            mode = MODES[(index + turn) % len(MODES)]
            prompts = [engines.draw(settings.tokens) for _ in range(settings.burst)]
            if settings.computed_before and mode != "computed":
                await asyncio.gather(*(engines.all[PREFILL].answer(prompt) for prompt in prompts))
            burst, answers = await engines.burst(mode, prompts)
            report.say(row(mode, burst))
            if mode == "overflow":
                # Alone in its steps. Late tokens may differ: other numbers of requests in a step, other kernels.
                for prompt, answer in zip(prompts[:2], answers, strict=False):
                    again = (await engines.all[OVERFLOW].answer(prompt, settings.new_tokens))[1]
                    alike.append(sum(1 for _ in itertools.takewhile(bool, map(int.__eq__, again, answer))))
            found["bursts"][mode].append(burst)
    found["tokens_alike_when_asked_again"] = alike
    return found


def row(mode: str, burst: dict[str, Any]) -> str:
    """A burst in one line."""
    itl = burst["itl"]
    return (
        f"{mode:9} mean TTFT {burst['ttft']['mean']:.0f}, last token {burst['last_token']['mean']:.0f} ms, ITL p50 "
        f"{itl['p50']:.2f}, p99 {itl['p99']:.2f}, longest {itl['max']:.0f} ms, all in {burst['seconds']:.1f} s, "
        f"computed where decoded {burst['prompts_computed_where_decoded']}, overflows {burst['overflows']:.0f}"
    )


def compare(found: dict[str, Any]) -> dict[str, Any]:
    """Means of TTFT over all rounds, and the overflow's by the better of the others."""

    def mean(mode: str, what: str, part: str) -> float:
        values = [burst[what][part] for burst in found["bursts"][mode]]
        return sum(values) / len(values)

    ttft = {mode: round(mean(mode, "ttft", "mean"), 1) for mode in MODES}
    last = {mode: round(mean(mode, "last_token", "mean"), 1) for mode in MODES}
    itl = {mode: round(mean(mode, "itl", "p99"), 3) for mode in MODES}
    best = min(ttft["waits"], ttft["computed"])
    return {
        "ttft_mean": ttft,
        "last_token_mean": last,
        "itl_p99": itl,
        "ttft_overflow_by_the_better": round(ttft["overflow"] / best, 3),
        "last_token_overflow_by_the_better": round(
            last["overflow"] / min(last["waits"], last["computed"]), 3
        ),
        "itl_overflow_by_waits": round(itl["overflow"] / itl["waits"], 3),
    }


def start_all(engines: Engines, settings: argparse.Namespace, folder: Path) -> None:
    """Starts the three engines, one after the other."""
    bytes_a_token = model.bytes_a_token(settings.shape)
    room = int((settings.room + 0.3) * (settings.tokens + settings.new_tokens) * bytes_a_token)
    with_daemon = json.loads(SYSTEMS["kvlane"].connector(settings.cache_bytes, folder))
    direct = {"kvlane.direct": "on"}
    plans = {
        PREFILL: (0, settings.kv_cache_bytes, {"kvlane.direct.listen": PEER, "kvlane.daemon": "off"}),
        WAITS: (1, room, {"kvlane.daemon": "off"}),
        OVERFLOW: (1, room, with_daemon["kv_connector_extra_config"]),
    }
    for name, (gpu, kv_cache_bytes, extra) in plans.items():
        config = {**with_daemon, "kv_connector_extra_config": {**direct, **extra}}
        most = None if name == PREFILL else settings.room
        each = argparse.Namespace(**vars(settings) | {"kv_cache_bytes": kv_cache_bytes, "most_running": most})
        engines.all[name] = on_own_gpu(each, gpu, json.dumps(config))
        report.say(f"{name}: up")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="one for all, or one to prefill")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument(
        "--burst", type=int, default=40, help="prompts that come at once (default %(default)s)"
    )
    parser.add_argument(
        "--computed-before",
        action="store_true",
        help="the prefill engine has the prompts in its cache, so it takes nothing of a GPU that both share",
    )
    parser.add_argument("--room", type=int, default=4, help="prompts that the decode engine has room for")
    parser.add_argument("--block-size", type=int, help="tokens of a block (vLLM's own choice without it)")
    parser.add_argument("--tokens", type=int, default=5000, help="of a prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=200, help="of an answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="bursts of each mode (default %(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=140_000_000_000, help="of the daemon's pool")
    parser.add_argument("--kv-cache-bytes", type=int, default=40_000_000_000, help="of the prefill engine")
    parser.add_argument("--gpu-memory", type=float, default=0.12, help="share that is free at each start")
    parser.add_argument("--out", type=Path, default=Path("out/burst"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("a burst to a decode engine with room for few", settings)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    engines = Engines(settings)
    with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
        folder = Path(scratch)
        settings.scratch = scratch
        with running(SYSTEMS["kvlane"], settings.cache_bytes, folder, settings.out / "kvlane.log"):
            try:
                start_all(engines, settings, folder)
                found = asyncio.run(measure(engines, settings))
            finally:
                for each in engines.all.values():
                    each.shutdown()
    ratios = compare(found)
    result |= {
        "settings": public(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
        "ratios": ratios,
    }
    report.write_json(settings.out / "burst.json", result)
    for name, value in ratios.items():
        print(f"{name}: {value}")
    return 0 if min(found["tokens_alike_when_asked_again"]) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
