"""How long an engine's steps take: what a simulated engine needs to know of a real one.

    python bench/gpu/steps.py --out out/steps

| name | what |
|---|---|
| prefill | TTFT of `tokens` new ones behind `context` tokens that the engine has, nothing else running |
| decode | the time between two tokens of `batch` running requests of about `context` tokens each |
| mixed | the longest such time while `tokens` of a prompt are computed beside them |

Every prompt is new. `fit` has the coefficients of two formulas, by least squares of the relative error, and the largest
one that is left:

    prefill ms = base + token * n + known * c + pair * n * (c + n / 2)        n new tokens behind c
    decode ms  = base + request * b + token * (tokens of all b requests)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import model
import numpy
from measure import Engine, start
from provenance import add_arguments, head, public
from systems import ENVIRONMENT

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
PREFILL = [(context, tokens) for context in (0, 4096, 16384) for tokens in (16, 128, 512, 2048, 8192)]
DECODE = [(context, batch) for context in (256, 2048, 8192) for batch in (1, 4, 16, 32, 64)]
MIXED = [(1024, 16, tokens) for tokens in (256, 1024, 4096)]


class Measurement:
    """An engine, and prompts for it."""

    def __init__(self, engine: Engine, settings: argparse.Namespace) -> None:
        self._engine, self._settings = engine, settings
        self._source = random.Random(1)

    def draw(self, tokens: int) -> list[int]:
        """A prompt that was not asked before."""
        vocabulary = model.SHAPES[self._settings.shape]["vocab_size"]
        return [self._source.randrange(100, vocabulary) for _ in range(tokens)]

    async def prefill(self, context: int, tokens: int) -> dict[str, Any]:
        """TTFT of new tokens behind known ones."""
        times = []
        for _ in range(self._settings.rounds):
            known = self.draw(context)
            if known:
                await self._engine.ttft([*known, 100])
            times.append(await self._engine.ttft(known + self.draw(tokens)))
            assert self._engine.cached_tokens == context, "the engine has computed something else"
        return {"context": context, "tokens": tokens, "ms": statistics.median(times)}

    async def _running(self, context: int, batch: int, extra: int = 0) -> list[float]:
        """Times between tokens while all of them run; with a prompt of `extra` tokens amid them."""
        clock = asyncio.get_running_loop().time
        prompts = [self.draw(context) for _ in range(batch)]

        async def one(prompt: list[int]) -> list[float]:
            began = clock()
            times, _ = await self._engine.answer(prompt, self._settings.decode_tokens)
            return [began + each / 1e3 for each in times]

        async def beside() -> None:
            await asyncio.sleep(self._settings.beside_after)
            await self._engine.ttft(self.draw(extra))

        others = [asyncio.create_task(beside())] if extra else []
        came = await asyncio.gather(*(one(prompt) for prompt in prompts))
        await asyncio.gather(*others)
        first, last = max(each[0] for each in came), min(each[-1] for each in came)
        return [
            (b - a) * 1e3 for each in came for a, b in itertools.pairwise(each) if first <= a and b <= last
        ]

    async def decode(self, context: int, batch: int) -> dict[str, Any]:
        """The time between tokens."""
        gaps = await self._running(context, batch)
        tokens = context + self._settings.decode_tokens // 2
        return {"context": tokens, "batch": batch, "ms": statistics.median(gaps), "gaps": len(gaps)}

    async def mixed(self, context: int, batch: int, tokens: int) -> dict[str, Any]:
        """The longest time between tokens beside a prompt, and the usual one."""
        longest = [max(await self._running(context, batch, tokens)) for _ in range(self._settings.rounds)]
        ms = statistics.median(longest)
        return {"context": context, "batch": batch, "tokens": tokens, "ms": ms}


def fit(rows: list[list[float]], times: list[float]) -> tuple[list[float], float]:
    """Coefficients that are not negative, and the largest relative error."""
    weighed = numpy.array([[value / ms for value in row] for row, ms in zip(rows, times, strict=True)])
    used = list(range(weighed.shape[1]))
    while True:
        found, *_ = numpy.linalg.lstsq(weighed[:, used], numpy.ones(len(times)), rcond=None)
        if min(found) >= 0 or len(used) == 1:
            break
        used.pop(int(numpy.argmin(found)))
    coefficients = [0.0] * weighed.shape[1]
    for place, value in zip(used, found, strict=True):
        coefficients[place] = float(value)
    return coefficients, float(numpy.max(numpy.abs(weighed @ coefficients - 1)))


def fits(found: dict[str, Any]) -> dict[str, Any]:
    """Both formulas."""
    rows = [
        [1.0, each["tokens"], each["context"], each["tokens"] * (each["context"] + each["tokens"] / 2)]
        for each in found["prefill"]
    ]
    (base, token, known, pair), error = fit(rows, [each["ms"] for each in found["prefill"]])
    prefill = {
        "base_ms": base,
        "token_ms": token,
        "known_ms": known,
        "pair_ms": pair,
        "largest_error": error,
    }
    rows = [[1.0, each["batch"], each["batch"] * each["context"]] for each in found["decode"]]
    (base, request, token), error = fit(rows, [each["ms"] for each in found["decode"]])
    decode = {"base_ms": base, "request_ms": request, "token_ms": token, "largest_error": error}
    return {"prefill": prefill, "decode": decode}


async def measure(engine: Engine, settings: argparse.Namespace) -> dict[str, Any]:
    """All that the table above names."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    it = Measurement(engine, settings)
    most = settings.tokens
    for tokens in (64, min(most, 8192)):
        await engine.ttft(it.draw(tokens))
    found: dict[str, Any] = {"prefill": [], "decode": [], "mixed": []}
    for context, tokens in PREFILL:
        if context + tokens <= most:
            found["prefill"].append(await it.prefill(context, tokens))
    for context, batch in DECODE:
        if context <= most and context * batch <= settings.decode_memory:
            found["decode"].append(await it.decode(context, batch))
    for context, batch, tokens in MIXED:
        if tokens <= most:
            found["mixed"].append(await it.mixed(context, batch, tokens))
    found["fit"] = fits(found)
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    rows = [
        [
            name,
            str(each.get("context")),
            str(each.get("tokens", "")),
            str(each.get("batch", "")),
            f"{each['ms']:.2f}",
        ]
        for name in ("prefill", "decode", "mixed")
        for each in found[name]
    ]
    return report.table(["what", "context", "tokens", "batch", "ms"], rows) + "\n" + json.dumps(found["fit"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, default=24_576, help="of the longest prompt (default %(default)s)"
    )
    parser.add_argument("--decode-tokens", type=int, default=160)
    parser.add_argument(
        "--decode-memory", type=int, default=280_000, help="tokens that fit (default %(default)s)"
    )
    parser.add_argument("--beside-after", type=float, default=1.5, help="seconds until a prompt comes beside")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=int, default=45_000_000_000)
    parser.add_argument("--gpu-memory", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=Path("out/steps"))
    add_arguments(parser)
    settings = parser.parse_args()
    result = head("times of an engine's steps", settings)
    settings.new_tokens, settings.connector = 0, ""
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, report.CpuWatch() as watch:
        settings.scratch = scratch
        engine, _ = start(settings)
        try:
            found = asyncio.run(measure(engine, settings))
        finally:
            engine.shutdown()
    result |= {
        "settings": public(settings, ["connector"]),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "found": found,
    }
    report.write_json(settings.out / "steps.json", result)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
