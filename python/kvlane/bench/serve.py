"""`kvlane bench serve`: what a client of an OpenAI endpoint feels, with a cold and with a warm cache."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvlane.bench import load, pictures, report
from kvlane.bench.drawing import save
from kvlane.bench.endpoint import Endpoint
from kvlane.bench.extra import tqdm
from kvlane.bench.processes import connector_config, own_daemon, own_engine

NAME = "serve"
HELP = "TTFT, TPOT, ITL and hits of an OpenAI endpoint, or of an engine of its own, cold and warm"
# Counters of vLLM that a round's difference is taken of.
_HITS, _OWN_HITS = "vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvlane bench serve`."""
    target = parser.add_argument_group("what is measured: --base-url, or --model alone for an own engine")
    target.add_argument("--base-url", help="endpoint that runs already, without /v1")
    target.add_argument("--model", help="name at the endpoint; or what the own `vllm serve` is to load")
    target.add_argument("--api-key", default="", help="bearer token of the endpoint")
    target.add_argument(
        "--connector",
        choices=("kvlane", "none", "both"),
        default="kvlane",
        help="own engine: with kvlane, plain, or one after the other (default %(default)s)",
    )
    target.add_argument("--address", help="own engine: daemon to use; default starts one")
    target.add_argument(
        "--pool-size", default="4gb", help="pool of the daemon that is started (default %(default)s)"
    )
    target.add_argument(
        "--engine-args",
        default="",
        help="further flags of `vllm serve`, in one string; on a CPU at least --kv-cache-memory-bytes",
    )
    work = parser.add_argument_group("the load")
    work.add_argument(
        "--num-prompts", type=_positive, default=50, help="requests a round (default %(default)s)"
    )
    work.add_argument(
        "--input-len", type=_positive, default=1024, help="tokens a prompt (default %(default)s)"
    )
    work.add_argument(
        "--output-len", type=_positive, default=32, help="tokens an answer (default %(default)s)"
    )
    work.add_argument(
        "--shared-prefix", type=int, default=0, help="of --input-len, the tokens all prompts share"
    )
    work.add_argument(
        "--request-rate", type=_rate, default=2.0, help="a second, or inf (default %(default)s)"
    )
    work.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson")
    work.add_argument(
        "--vocab", type=int, default=10_000, help="token ids are below this (default %(default)s)"
    )
    work.add_argument(
        "--warm-rounds", type=int, default=1, help="rounds after the cold one (default %(default)s)"
    )
    work.add_argument(
        "--shuffle-warm", action="store_true", help="warm rounds send the prompts in another order"
    )
    work.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default %(default)s)")
    work.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and write serve.json and serve.png; 1 when a request failed."""
    if arguments.base_url is None and arguments.model is None:
        sys.exit("kvlane bench serve needs --base-url of an endpoint, or --model for an engine of its own")
    if not 0 <= arguments.shared_prefix <= arguments.input_len:
        sys.exit(
            f"--shared-prefix {arguments.shared_prefix} is not between 0 and --input-len {arguments.input_len}"
        )
    if arguments.vocab <= 100:
        sys.exit(f"--vocab {arguments.vocab} is too small: ids below 100 are left out as special")

    with report.CpuWatch() as watch:
        if arguments.base_url:
            runs = [_measure(arguments, "endpoint", arguments.base_url, arguments.model)]
        else:
            kinds = ("none", "kvlane") if arguments.connector == "both" else (arguments.connector,)
            runs = [_measure_own(arguments, kind) for kind in kinds]
    settings = {key: value for key, value in vars(arguments).items() if key not in ("run", "api_key")}
    result = {
        "benchmark": "serve",
        "settings": {
            key: str(value) if isinstance(value, Path) else value for key, value in settings.items()
        },
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "commit": report.commit(),
        "runs": runs,
    }
    _publish(arguments.out, result)
    return 1 if any(each["failed"] for measured in runs for each in measured["rounds"]) else 0


def _measure_own(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    with ExitStack() as started:
        logs = arguments.out / "serve-logs"
        report.say(f"starting vllm serve {arguments.model} ({kind}); logs in {logs}")
        connector = None
        if kind == "kvlane":
            address = arguments.address or started.enter_context(own_daemon(arguments.pool_size, logs))
            connector = connector_config(address)
        base_url = started.enter_context(
            own_engine(arguments.model, connector, arguments.engine_args.split(), logs)
        )
        return _measure(
            arguments, "vLLM with kvlane" if connector else "vLLM alone", base_url, arguments.model
        )


def _measure(arguments: argparse.Namespace, name: str, base_url: str, model: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "rounds": asyncio.run(_rounds(arguments, Endpoint(base_url, arguments.api_key), model)),
    }


async def _rounds(
    arguments: argparse.Namespace, endpoint: Endpoint, model: str | None
) -> list[dict[str, Any]]:
    model = model or await endpoint.first_model()
    prompts = load.make_prompts(
        arguments.num_prompts, arguments.input_len, arguments.shared_prefix, arguments.seed, arguments.vocab
    )
    # Whatever an engine does only once, it does now.
    warmup = load.make_prompts(1, arguments.input_len, 0, arguments.seed + 1, arguments.vocab)
    await load.run_round(endpoint.base_url, model, warmup, [0.0], 2, api_key=arguments.api_key)

    rounds = []
    for index in range(1 + arguments.warm_rounds):
        name = "cold" if index == 0 else "warm" if arguments.warm_rounds == 1 else f"warm {index}"
        reset = await endpoint.reset_prefix_cache()
        order = list(prompts)
        if index and arguments.shuffle_warm:
            random.Random(arguments.seed + index).shuffle(order)
        arrivals = load.arrival_times(
            len(order), arguments.request_rate, arguments.arrivals, arguments.seed + index
        )
        before = await endpoint.counters()
        with tqdm(total=len(order), desc=name, unit="request") as progress:
            timings = await load.run_round(
                endpoint.base_url,
                model,
                order,
                arrivals,
                arguments.output_len,
                api_key=arguments.api_key,
                timeout_s=arguments.timeout,
                on_done=progress.update,
            )
        after = await endpoint.counters()
        figures = round_figures(timings)
        figures |= {"round": name, "own_prefix_cache_reset": reset, "prompt_tokens": sum(map(len, order))}
        figures["hit_tokens"] = _increase(before, after, _HITS)
        figures["own_hit_tokens"] = _increase(before, after, _OWN_HITS)
        rounds.append(figures)
    return rounds


def round_figures(timings: list[load.Timing]) -> dict[str, Any]:
    """What one round's timings say; failed requests count as failed and for nothing else. Milliseconds."""
    good = [timing for timing in timings if not timing.error]
    duration = max((timing.started + timing.total for timing in good), default=0.0)
    rate = len(good) / duration if duration else 0.0
    tokens = sum(timing.tokens for timing in good)
    return {
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "errors": sorted({timing.error for timing in timings if timing.error})[:5],
        "duration_s": duration,
        "requests_per_s": rate,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / duration if duration else 0.0,
        "ttft_ms": report.summary(timing.ttft * 1e3 for timing in good),
        "ttft_each_ms": [timing.ttft * 1e3 for timing in good],
        "tpot_ms": report.summary(timing.tpot * 1e3 for timing in good if timing.tpot is not None),
        "itl_ms": report.summary(gap * 1e3 for timing in good for gap in timing.gaps),
        "client_late_ms": max((timing.late for timing in timings), default=0.0) * 1e3,
    }


def _increase(before: dict[str, float], after: dict[str, float], name: str) -> int | None:
    """None where the endpoint does not have the counter."""
    return int(after[name] - before.get(name, 0.0)) if name in after else None


def _publish(out: Path, result: dict[str, Any]) -> None:
    report.write_json(out / "serve.json", result)
    headers = ["engine", "round", "ok", "req/s", "hit tokens", "of"]
    headers += [f"{name} {part}" for name in ("TTFT", "TPOT", "ITL") for part in ("mean", "p50", "p99")]
    rows = []
    for measured in result["runs"]:
        for each in measured["rounds"]:
            row: list[Any] = [
                measured["name"],
                each["round"],
                f"{each['requests'] - each['failed']}/{each['requests']}",
            ]
            hits = each["hit_tokens"]
            row += [each["requests_per_s"], "-" if hits is None else hits, each["prompt_tokens"]]
            for name in ("ttft_ms", "tpot_ms", "itl_ms"):
                row += [each[name][part] for part in ("mean", "p50", "p99")]
            rows.append(row)
            for error in each["errors"]:
                report.say(f"{measured['name']}, {each['round']}: {error}")
            if not each["own_prefix_cache_reset"]:
                report.say(
                    f"{measured['name']}, {each['round']}: the engine's own prefix cache was not emptied before"
                )
    print(report.table(headers, rows))
    print("times in milliseconds")
    cpu = result["machine"]["cpu_use"]
    print(f"others used {cpu['other_cores']:.2f} cores meanwhile")
    save(pictures.serve(result), out / "serve.png")
    print(f"written: {out / 'serve.json'}, {out / 'serve.png'}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value
