"""`kvlane bench serve`: the times that a client of an OpenAI endpoint sees, with a cold and with a warm cache."""

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
from kvlane.bench.endpoint import Endpoint, NoEndpointError
from kvlane.bench.extra import tqdm
from kvlane.bench.processes import connector_config, own_daemon, own_engine
from kvlane.bench.sources import Sources

NAME = "serve"
HELP = "TTFT, TPOT, ITL, end-to-end latency and hits of an OpenAI endpoint, or of an engine of its own, cold and warm"
STATUSES = (
    "A round after the first is called warm when the endpoint's /metrics say that it came from kvlane, and repeat "
    "otherwise. Exit status: 0; 1 when a request failed; 3 when the first round was not cold, or a later one is a "
    "repeat, but for --connector none, of which nobody expects more."
)
NOT_AS_MEANT = 3
"""The exit status of rounds that were not cold or warm as intended."""
# The times in a report, with their names in vLLM's benchmark.
TIMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
PARTS = ("mean", "p50", "p90", "p95", "p99")


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
        help="own engine: with kvlane, plain, or one after the other; of --base-url: what it is said to have "
        "(default %(default)s)",
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
        "--warm-rounds",
        type=int,
        default=1,
        help="rounds after the cold one, with the same prompts (default %(default)s)",
    )
    work.add_argument("--shuffle-warm", action="store_true", help="these send the prompts in another order")
    work.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default %(default)s)")
    work.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    parser.epilog = STATUSES


def run(arguments: argparse.Namespace) -> int:
    """Measure and write serve.json and serve.png; the status is one of STATUSES."""
    if arguments.base_url is None and arguments.model is None:
        sys.exit("kvlane bench serve needs --base-url of an endpoint, or --model for an engine of its own")
    if arguments.base_url is not None and not arguments.base_url.startswith(("http://", "https://")):
        sys.exit(f"--base-url {arguments.base_url!r} is no URL: write for example http://127.0.0.1:8000")
    if arguments.base_url is not None and arguments.connector == "both":
        sys.exit("--connector both starts two engines of its own; leave out --base-url")
    if not 0 <= arguments.shared_prefix <= arguments.input_len:
        sys.exit(
            f"--shared-prefix {arguments.shared_prefix} is not between 0 and --input-len {arguments.input_len}"
        )
    if arguments.vocab <= 100:
        sys.exit(f"--vocab {arguments.vocab} is too small: ids below 100 are left out as special")

    with report.CpuWatch() as watch:
        try:
            if arguments.base_url:
                with_kvlane = arguments.connector != "none"
                runs = [_measure(arguments, "endpoint", arguments.base_url, arguments.model, with_kvlane)]
            else:
                kinds = ("none", "kvlane") if arguments.connector == "both" else (arguments.connector,)
                runs = [_measure_own(arguments, kind) for kind in kinds]
        except NoEndpointError as error:
            sys.exit(str(error))
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
    return status(runs)


def status(runs: list[dict[str, Any]]) -> int:
    """The exit status, as STATUSES says."""
    if any(each["failed"] for measured in runs for each in measured["rounds"]):
        return 1
    meant = [measured for measured in runs if measured["meant_to_be_warm"]]
    missed = any(each["not_warm"] for measured in meant for each in measured["rounds"])
    missed |= any(each["not_cold"] for measured in runs for each in measured["rounds"])
    return NOT_AS_MEANT if missed else 0


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
        name = "vLLM with kvlane" if connector else "vLLM alone"
        return _measure(arguments, name, base_url, arguments.model, connector is not None)


def _measure(
    arguments: argparse.Namespace, name: str, base_url: str, model: str | None, with_kvlane: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "meant_to_be_warm": with_kvlane,
        "rounds": asyncio.run(_rounds(arguments, Endpoint(base_url, arguments.api_key), model)),
    }


async def _rounds(
    arguments: argparse.Namespace, endpoint: Endpoint, model: str | None
) -> list[dict[str, Any]]:
    model = model or await endpoint.first_model()
    prompts = load.make_prompts(
        arguments.num_prompts, arguments.input_len, arguments.shared_prefix, arguments.seed, arguments.vocab
    )
    # The engine now does its one-time work.
    warmup = load.make_prompts(1, arguments.input_len, 0, f"warm-up {arguments.seed}", arguments.vocab)
    [first] = await load.run_round(endpoint.base_url, model, warmup, [0.0], 2, api_key=arguments.api_key)
    if first.error:
        raise NoEndpointError(
            f"{endpoint.base_url} did not serve one prompt of {arguments.input_len} tokens with the model {model!r}, "
            f"so nothing was measured ({first.error}); see --model, --input-len, --vocab and --api-key"
        )

    rounds = []
    for index in range(1 + arguments.warm_rounds):
        reset = await endpoint.reset_prefix_cache()
        order = list(prompts)
        if index and arguments.shuffle_warm:
            random.Random(arguments.seed + index).shuffle(order)
        arrivals = load.arrival_times(
            len(order), arguments.request_rate, arguments.arrivals, arguments.seed + index
        )
        before = await endpoint.counters()
        with tqdm(total=len(order), desc=f"round {index + 1}", unit="request") as progress:
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
        sources = Sources.between(before, await endpoint.counters(), reset)
        not_warm = sources.not_warm() if index else None
        not_cold = None if index else sources.not_cold(arguments.shared_prefix * (len(order) - 1))
        name = ("repeat" if not_warm else "warm") if index else "not cold" if not_cold else "cold"
        if index and arguments.warm_rounds > 1:
            name += f" {index}"
        rounds.append(
            {
                **round_figures(timings),
                "round": name,
                "prompt_tokens": sum(map(len, order)),
                "own_prefix_cache_reset": reset,
                "kvlane_hit_tokens": sources.kvlane,
                "external_hit_tokens": sources.external,
                "own_hit_tokens": sources.own,
                "not_cold": not_cold,
                "not_warm": not_warm,
            }
        )
    return rounds


def round_figures(timings: list[load.Timing]) -> dict[str, Any]:
    """A round's figures in milliseconds. A failed request counts as failed, and in no other figure."""
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
        "e2el_ms": report.summary(timing.chunks[-1] * 1e3 for timing in good),
        "client_late_ms": max((timing.late for timing in timings), default=0.0) * 1e3,
    }


def _publish(out: Path, result: dict[str, Any]) -> None:
    report.write_json(out / "serve.json", result)
    runs = result["runs"]
    print(table(runs))
    for measured in runs:
        for each in measured["rounds"]:
            if why := each["not_cold"] or each["not_warm"]:
                print(report.paragraph(f"{measured['name']}, {each['round']}: {why}"))
    if any(
        each["not_warm"] for measured in runs if measured["meant_to_be_warm"] for each in measured["rounds"]
    ):
        print("to have it from kvlane: a daemon that runs (kvlane status), and an engine with its connector")
    print("times in milliseconds; E2EL: until the last token came")
    cpu = result["machine"]["cpu_use"]
    print(f"others used {cpu['other_cores']:.2f} cores meanwhile")
    for measured in runs:
        for each in measured["rounds"]:
            for error in each["errors"]:
                report.say(f"{measured['name']}, {each['round']}: {error}")
    save(pictures.serve(result), out / "serve.png")
    print(f"written: {out / 'serve.json'}, {out / 'serve.png'}")


def table(runs: list[dict[str, Any]]) -> str:
    """The sources of each round's prompt tokens, and below them the round's times."""
    rounds = [
        (f"{measured['name']}, {each['round']}", each) for measured in runs for each in measured["rounds"]
    ]
    sources = report.table(
        ["round", "ok", "req/s", "prompt tokens", "from kvlane", "other external", "own prefix cache"],
        [
            [
                name,
                f"{each['requests'] - each['failed']}/{each['requests']}",
                each["requests_per_s"],
                each["prompt_tokens"],
                _count(each["kvlane_hit_tokens"]),
                _count(_other_external(each)),
                _count(each["own_hit_tokens"]),
            ]
            for name, each in rounds
        ],
    )
    times = report.table(
        ["ms", "time", *PARTS],
        [
            [name, what, *(each[key][part] for part in PARTS)]
            for key, what in TIMES.items()
            for name, each in rounds
        ],
    )
    return f"{sources}\n\n{times}"


def _other_external(each: dict[str, Any]) -> int | None:
    external = each["external_hit_tokens"]
    return None if external is None else max(0, external - (each["kvlane_hit_tokens"] or 0))


def _count(tokens: int | None) -> object:
    return "?" if tokens is None else tokens


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
