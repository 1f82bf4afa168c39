"""A model on several GPUs, in any of vLLM's ways, and the same model on one GPU.

    python bench/gpu/parallel.py --shape mla --tensor-parallel 2 --out out/mla
    python bench/gpu/parallel.py --shape mla --tensor-parallel 2 --context-parallel 2 --out out/dcp
    python bench/gpu/parallel.py --pipeline-parallel 2 --out out/pp
    python bench/gpu/parallel.py --shape moe --data-parallel 2 --expert-parallel --out out/dp

| name | what |
|---|---|
| cold | TTFT of prompts that nobody has |
| in_gpu | the same again: a hit in the engine's own prefix cache |
| warm | after the prefix cache was reset: the KV cache comes from the pool |
| warm_other | data parallel: rank 1 loads what rank 0 computed; rank 0 does all that stands above |

The script counts the pool's bytes and those that each GPU's link brings. With latent attention (`--shape mla`) every
rank computes the whole cache: the pool should hold it once, and each link should bring its share. Loaded blocks are
compared with the computed ones, and those of ranks with each other. With CUDA graphs ranks compute the same bytes, and
answers from loaded blocks are those from kept ones, only with `--ranks-alike` (`ranks.py` says why). With
`--context-parallel` the ranks share the tokens of each block. `one_gpu.py` says how `--one-gpu` works.

Controls: each prompt has its own answer, the same twice, one changed block changes the answer, vLLM loads tokens of
every prompt, and answers with loaded and kept blocks are equal. `warm_other` has controls of its own. vLLM 0.26 resets
the prefix caches of all data-parallel ranks and reports only whether rank 0 did; no control rests on the reset of
another rank.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import ne
from pathlib import Path
from typing import Any

import model
import one_gpu
from measure import (
    RANKS_ALIKE,
    Engine,
    compared_tokens,
    differ_at,
    differ_at_most,
    loaded_bytes,
    start,
    summary,
)
from provenance import add_arguments, head, public
from systems import ENVIRONMENT, SYSTEMS, kvlane_address

from kvlane.bench import report

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0


class Daemon:
    """A daemon and its metrics."""

    def __init__(self, http: str) -> None:
        self._url = f"http://{http}/metrics"

    def metrics(self) -> dict[str, float]:
        """Values by name and labels."""
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def by_link(self) -> dict[str, float]:
        """Bytes that each GPU's link brought so far."""
        found = self.metrics().items()
        return {name: value for name, value in found if name.startswith("kvlane_loaded_by_link_bytes_total")}


@contextmanager
def daemon(settings: argparse.Namespace, folder: Path) -> Iterator[Daemon]:
    """A daemon whose loads may use the links of all GPUs."""
    command = ["kvlane", "serve", "--pool-size", str(settings.cache_bytes), "--rails", "auto"]
    command += ["--listen", kvlane_address(folder), "--http", settings.http]
    with (settings.out / "daemon.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE_S
        while not SYSTEMS["kvlane"].is_up(folder):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the daemon does not start; see {settings.out / 'daemon.log'}")
            time.sleep(0.1)
        yield Daemon(settings.http)
    finally:
        process.terminate()
        process.wait()


async def measure(engine: Engine, watched: Daemon, settings: argparse.Namespace) -> dict[str, Any]:
    """All that the table above names; the pool's bytes, and those of each link."""
    await engine.on_workers(model.redraw_weights, model.DEVIATION[settings.shape])
    source = random.Random(7)
    vocabulary = model.SHAPES[settings.shape]["vocab_size"]
    first, *prompts = [
        [source.randrange(100, vocabulary) for _ in range(compared_tokens(settings.tokens))]
        for _ in range(settings.prompts + 1)
    ]
    # None: without data parallelism there is no rank to choose.
    ranks = range(settings.data_parallel) if settings.data_parallel else [None]
    await warm_up(engine, first, ranks)

    engine.rank = ranks[0]
    cold = [await engine.ttft(prompt) for prompt in prompts]
    kept = await answers(engine, prompts)
    again = await answers(engine, prompts)
    in_gpu = [await engine.ttft(prompt) for prompt in prompts]
    found: dict[str, Any] = {"cold": summary(cold), "in_gpu": summary(in_gpu)}
    by_rank = await loaded_bytes(engine, prompts, found)
    found |= {
        # With latent attention: blocks that ranks computed with other bytes than rank 0.
        "blocks_unlike_rank_0": [sum(map(ne, each, by_rank[0])) for each in by_rank[1:]],
        "control_bytes": found["loaded_blocks_that_differ"] <= differ_at_most(len(prompts), found),
        "control_same_again": again == kept,
        # The blocks are all there before these requests begin.
        "same_tokens_when_all_is_loaded": await answers(engine, prompts) == kept,
    }
    await engine.forget()
    metrics = watched.metrics()
    found |= await load(engine, watched, prompts, "")
    if len(ranks) > 1:
        engine.rank = ranks[1]
        found |= await load(engine, watched, prompts, "_other")
    await engine.forget()
    engine.rank = ranks[0]
    back = await answers(engine, prompts)
    changed = list(prompts[0])
    changed[64:96] = [(token + 1) % vocabulary for token in changed[64:96]]
    found |= {
        "pool_used_bytes": metrics["kvlane_pool_used_bytes"],
        "blocks": metrics["kvlane_blocks"],
        "same_tokens": back == kept,
        "answers_differ_at": differ_at(kept, back),
        "control_distinct": len(set(kept)) == len(kept),
        "control_block_matters": (await engine.answer(changed, 16))[1] != kept[0],
    }
    if len(ranks) > 1:
        engine.rank = ranks[1]
        found["same_tokens_other"] = await answers(engine, prompts) == kept
    return found


async def warm_up(engine: Engine, prompt: list[int], ranks: Sequence[int | None]) -> None:
    """Rank 0 computes the prompt and all ranks load it, so that no figure includes what vLLM does only once."""
    engine.rank = ranks[0]
    await engine.ttft(prompt)
    await engine.forget()
    for engine.rank in ranks:
        await engine.ttft(prompt)
    await engine.forget()


async def answers(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The first 16 tokens after each prompt."""
    return [(await engine.answer(prompt, 16))[1] for prompt in prompts]


async def load(engine: Engine, watched: Daemon, prompts: list[list[int]], suffix: str) -> dict[str, Any]:
    """TTFT of prompts that come from the pool, the tokens of each that vLLM did not compute, and the bytes by link."""
    before = watched.by_link()
    times, tokens = [], []
    for prompt in prompts:
        times.append(await engine.ttft(prompt))
        tokens.append(engine.cached_tokens)
    return {
        f"warm{suffix}": summary(times),
        f"loaded_tokens{suffix}": tokens,
        f"control_loaded{suffix}": min(tokens) > 0,
        f"loaded_by_link_bytes{suffix}": {
            name: value - before.get(name, 0) for name, value in watched.by_link().items()
        },
    }


def engines(settings: argparse.Namespace) -> dict[int, argparse.Namespace]:
    """The settings of each engine, by its number of GPUs. `Engine` passes on to vLLM what is not None."""
    ways = {
        "tensor_parallel": settings.tensor_parallel,
        "context_parallel": settings.context_parallel if settings.context_parallel > 1 else None,
        "pipeline_parallel": settings.pipeline_parallel if settings.pipeline_parallel > 1 else None,
        "data_parallel": settings.data_parallel if settings.data_parallel > 1 else None,
        "expert_parallel": settings.expert_parallel or None,
    }
    one = dict.fromkeys(ways) | {"tensor_parallel": 1}
    gpus = settings.tensor_parallel * settings.pipeline_parallel * settings.data_parallel
    by_gpus = ({} if settings.only_several else {1: one}) | {gpus: ways}
    return {number: argparse.Namespace(**vars(settings) | parts) for number, parts in by_gpus.items()}


def hosts(settings: argparse.Namespace, ranks: int) -> AbstractContextManager[argparse.Namespace]:
    """All ranks but the first, where they share one GPU; the settings that start the engine."""
    return one_gpu.other_ranks(settings, ranks) if settings.one_gpu and ranks > 1 else nullcontext(settings)


def sharing(settings: argparse.Namespace, folder: Path) -> AbstractContextManager[None]:
    """What lets several ranks share one GPU."""
    return one_gpu.side_by_side(folder) if settings.one_gpu else nullcontext()


def compared(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The engine on several GPUs to the one on one GPU, if that ran."""
    several = found[max(found)]
    links = several["loaded_by_link_bytes"]
    loaded = sum(links.values())
    parts: dict[str, Any] = {
        "share_by_link": {name: round(value / loaded, 3) if loaded else 0.0 for name, value in links.items()}
    }
    if 1 in found:
        one = found[1]
        parts["pool_bytes_to_one_gpu"] = round(several["pool_used_bytes"] / one["pool_used_bytes"], 4)
        parts["ttft_to_one_gpu"] = {
            name: round(several[name]["p50"] / one[name.removesuffix("_other")]["p50"], 3)
            for name in TIMES
            if name in several
        }
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), default="llama-8b")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--context-parallel", type=int, default=1, help="of decodes, among tensor-parallel ranks"
    )
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument(
        "--one-gpu",
        action="store_true",
        help="all ranks on one GPU: bytes and answers are as on several, times count for nothing",
    )
    parser.add_argument(
        "--ranks-alike", action="store_true", help="PyTorch's compiler writes the same code for all ranks"
    )
    parser.add_argument("--only-several", action="store_true", help="leave out the engine on one GPU")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=10_000, help="of a prompt, about (default %(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=16_000_000_000)
    parser.add_argument("--kv-cache-bytes", type=int, default=10_000_000_000, help="of each GPU")
    parser.add_argument("--gpu-memory", type=float, default=0.3)
    parser.add_argument("--http", default="127.0.0.1:9093", help="of the daemon")
    parser.add_argument("--out", type=Path, default=Path("out/parallel"))
    add_arguments(parser)
    settings = parser.parse_args()
    if settings.tensor_parallel * settings.pipeline_parallel * settings.data_parallel == 1:
        parser.error("say how several GPUs share the work: --tensor-parallel 2, for example")
    result = head("gpu parallel", settings)
    settings.new_tokens = 0
    settings.compilation = RANKS_ALIKE if settings.ranks_alike else None
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    settings.out.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch, sharing(settings, Path(scratch)):
        folder, settings.scratch = Path(scratch), scratch
        settings.connector = SYSTEMS["kvlane"].connector(settings.cache_bytes, folder)
        for gpus, its in engines(settings).items():
            with daemon(settings, folder) as watched, hosts(its, gpus) as those:
                engine, seconds = start(those)
                report.say(f"    the engine is up after {seconds:.0f} s")
                try:
                    found[gpus] = asyncio.run(measure(engine, watched, those))
                finally:
                    engine.shutdown()
            report.say(f"    {gpus} GPUs: {found[gpus]}")
    result |= {
        "settings": public(settings, ["connector", "compilation"]),
        "machine": report.machine_facts(),
        "found": {str(gpus): parts for gpus, parts in found.items()},
    }
    result |= compared(found)
    report.write_json(settings.out / "parallel.json", result)
    print(table(found, result))
    return 0 if controls_hold(found) else 1


def table(found: dict[int, dict[str, Any]], result: dict[str, Any]) -> str:
    """Medians of TTFT in ms, the controls, and the comparison."""
    lines = [f"| GPUs | {' | '.join(TIMES)} | controls that fail |", "|---" * (len(TIMES) + 2) + "|"]
    for gpus, parts in found.items():
        cells = [f"{parts[name]['p50']:.1f}" if name in parts else "" for name in TIMES]
        failed = ", ".join(name for name in CONTROLS if not parts.get(name, True)) or "none"
        lines.append(f"| {gpus} | {' | '.join(cells)} | {failed} |")
    names = ("pool_bytes_to_one_gpu", "ttft_to_one_gpu", "share_by_link")
    return "\n".join(lines + [f"{name}: {result[name]}" for name in names if name in result])


def controls_hold(found: dict[int, dict[str, Any]]) -> bool:
    """Without all of them the figures count for nothing. Those of `warm_other` are there with data parallelism."""
    return all(parts.get(name, True) for parts in found.values() for name in CONTROLS)


TIMES = ("cold", "in_gpu", "warm", "warm_other")
CONTROLS = (
    "control_same_again",
    "same_tokens",
    "same_tokens_when_all_is_loaded",
    "control_bytes",
    "control_distinct",
    "control_block_matters",
    "control_loaded",
    "same_tokens_other",
    "control_loaded_other",
)


if __name__ == "__main__":
    # A script that is terminated ends its engines and daemons, whose ports the next one needs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
