"""`kvlane bench overhead`: CPU time of a vLLM with the connector and no hits, against one without."""

from __future__ import annotations

import argparse
import random
import statistics

from kvlane.bench import daemon, report, vllm_process
from kvlane.bench.extra import tqdm
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.sizes import count
from kvlane.bench.vllm_process import VllmProcess

NAME = "overhead"
HELP = "engine CPU time with the connector and no hits against without, in interleaved pairs; needs vLLM"
_POOL_BYTES = 256 << 20
_RESAMPLES = 5000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench overhead`."""
    parser.add_argument(
        "--engines",
        type=count,
        default=2,
        help="pairs of processes, one after the other (default %(default)s)",
    )
    parser.add_argument("--pairs", type=count, default=60, help="of batches for each (default %(default)s)")
    parser.add_argument("--prompts", type=count, default=4, help="of a batch, at once (default %(default)s)")
    parser.add_argument("--input-len", type=count, default=256, help="tokens a prompt (default %(default)s)")
    parser.add_argument("--output-len", type=count, default=16, help="tokens an answer (default %(default)s)")
    add_out(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and publish."""
    with report.CpuWatch() as watch:
        outcome = measure(arguments)
    return publish(arguments, outcome, watch)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Median over pairs of the ratio of CPU times, and its interval."""
    model = vllm_process.tiny_model(arguments.out)
    logs = arguments.out / "overhead-logs"
    pairs: list[tuple[float, float]] = []
    with (
        daemon.running(_POOL_BYTES) as serve,
        tqdm(total=arguments.engines * arguments.pairs, unit="pair", leave=False) as progress,
    ):
        for number in range(arguments.engines):
            config = vllm_process.connector(serve.address)
            with (
                vllm_process.running(model, logs / f"with-{number}.log", connector=config, threads=1) as mine,
                vllm_process.running(
                    model, logs / f"without-{number}.log", connector=None, threads=1
                ) as plain,
            ):
                for pair in range(-1, arguments.pairs):
                    prompts = _prompts(arguments, f"{number} {pair}")
                    order = (mine, plain) if pair % 2 else (plain, mine)
                    used = {engine.pid: _batch(engine, prompts, arguments.output_len) for engine in order}
                    # The first pair warms up.
                    if pair >= 0:
                        pairs.append((used[mine.pid], used[plain.pid]))
                        progress.update()
        saved = serve.blocks
    assert saved, "the engine with the connector saved nothing"
    ratios = [mine / plain for mine, plain in pairs]
    low, high = interval(ratios, random.Random(0))
    extra = statistics.median(ratios) * 100 - 100
    figures = [
        Figure("engine CPU time above plain vLLM, no hits", extra, "%", at_most=2.0),
        Figure("its 95 % interval, from", low * 100 - 100, "%"),
        Figure("its 95 % interval, to", high * 100 - 100, "%"),
        Figure("plain vLLM, a batch", statistics.median(plain for _, plain in pairs), "s"),
    ]
    note = (
        f"{len(pairs)} interleaved pairs of batches in {arguments.engines} pairs of processes, tiny model, one thread: "
        f"{arguments.prompts} prompts of {arguments.input_len} tokens, {arguments.output_len} answered. CPU time of "
        "the engine's process; the daemon, which copies, is not in it. Interval of the median: bootstrap over pairs."
    )
    return Outcome(NAME, figures, {"pairs_seconds": pairs, "interval": [low, high]}, note)


def interval(values: list[float], source: random.Random) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]


def _prompts(arguments: argparse.Namespace, name: str) -> list[list[int]]:
    source = random.Random(name)
    return [
        [source.randrange(100, 32_000) for _ in range(arguments.input_len)] for _ in range(arguments.prompts)
    ]


def _batch(engine: VllmProcess, prompts: list[list[int]], tokens: int) -> float:
    """CPU seconds of one batch, with all that it leaves to be saved."""
    before = daemon.cpu_seconds(engine.pid)
    answers = engine.ask("generate", prompts=prompts, tokens=tokens)["answers"]
    engine.ask("drain")
    used = daemon.cpu_seconds(engine.pid) - before
    assert not any(answer["cached_tokens"] for answer in answers), "a batch without hits had some"
    return used
