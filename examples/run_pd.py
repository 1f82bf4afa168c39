"""Prefill and decode engines on this machine, behind one endpoint: `make demo-pd` runs this.

python examples/run_pd.py                             one of each, and what they do, in ten minutes on two cores
python examples/run_pd.py --prefill 2 --decode 2      more of them
python examples/run_pd.py --device cuda --model M     on the GPUs that this vLLM can use, in turn
python examples/run_pd.py --direct                    without a daemon: from one engine's cache into the other's
python examples/run_pd.py --flip                      with a worker that prefills or decodes as the work needs it
python examples/run_pd.py --serve                     only starts them, for own requests, until Ctrl-C

One `kvlane serve` keeps the blocks, unless engines hand over directly. The engines are `vllm serve`, each with
--kv-transfer-config '{"kv_connector": "KVLaneConnector", "kv_role": "kv_both"}'. Before them stands
`kvlane route --prefill URL --decode URL`. What is started, asked and compared is in python/kvlane/demo/pd.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from kvlane.bench import report
from kvlane.bench.processes import beside_python
from kvlane.demo import running
from kvlane.demo.device import DEVICES, NoSuchDevice, choose, visible_gpus, vllm_here
from kvlane.demo.model import TINY, build_model
from kvlane.demo.pd import plan, results
from kvlane.demo.pd.asking import MODEL_NAME
from kvlane.demo.pd.cluster import Cluster
from kvlane.demo.pd.flip import BALANCE, FlipDemo
from kvlane.demo.pd.scenarios import Demo
from kvlane.demo.processes import ProcessFailed

POOL_BYTES = 1 << 30
KV_CACHE = 256 << 20


def main() -> int:
    arguments = parse()
    try:
        gpus = visible_gpus(beside_python("kvlane")) if arguments.device != "cpu" else []
        setup = choose(arguments.device, gpus, vllm_here())
    except NoSuchDevice as reason:
        sys.exit(f"run_pd --device {arguments.device}: {reason}")
    is_gpu = setup.device == "cuda"
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs = arguments.out / "demo-pd-logs"
    logs.mkdir(exist_ok=True)
    name, shape = (setup.model_name, setup.shape) if is_gpu else ("tiny", TINY)
    model = arguments.model or str(build_model(arguments.out / "models" / name, shape))
    kv_cache = (
        arguments.kv_cache << 20 if arguments.kv_cache else setup.kv_cache_bytes if is_gpu else KV_CACHE
    )
    pool = 0 if arguments.direct else 6 * POOL_BYTES if is_gpu else POOL_BYTES

    # 1. What goes where, and whether there is room for it.
    try:
        places = plan.plan(
            arguments.prefill,
            arguments.decode,
            arguments.prefill_port,
            arguments.decode_port,
            workers=1 if arguments.flip else 0,
            gpus=gpu_names(len(gpus)) if is_gpu else (),
        )
        # On GPUs weights and KV caches are in the GPUs' memory.
        weights = 0 if is_gpu else plan.weight_bytes(Path(model))
        needed = plan.check_memory(
            len(places.engines), weights, 0 if is_gpu else kv_cache, pool, plan.available_memory()
        )
    except plan.NotPossible as reason:
        sys.exit(f"run_pd: {reason}")
    for note in places.notes:
        report.say(note)
    report.say(
        f"{len(places.engines)} engines on {setup.device}; about {needed / (1 << 30):.1f} GiB; logs in {logs}"
    )

    # 2. The daemon, the engines and the router, until Ctrl-C, an error, or the end: then all of them end.
    running.end_at_signals()
    began = time.monotonic()
    # vLLM takes no text of more than six characters for each token that it may have.
    longest = 2 * arguments.prompt_tokens
    cluster = Cluster(
        places,
        model,
        logs,
        longest,
        kv_cache,
        str(pool),
        BALANCE if arguments.flip else "",
        arguments.direct,
        "auto" if is_gpu else "float32",
    )
    with report.CpuWatch() as watch, cluster:
        try:
            cluster.start(report.say)
        except ProcessFailed as error:
            sys.exit(f"run_pd: {error}")
        if arguments.serve:
            serve(places)
        demo = (
            FlipDemo(cluster, arguments.prompt_tokens)
            if arguments.flip
            else Demo(
                cluster, arguments.prompts, arguments.prompt_tokens, arguments.out, arguments.vllm_bench
            )
        )
        scenarios = running.run(demo.all())

    # 3. What came of it.
    machine = report.machine_facts()
    found = results.result(scenarios, len(demo.all()), demo.requests) | {
        "title": f"{arguments.prefill} prefill and {arguments.decode} decode engines"
        f"{', and a worker,' if arguments.flip else ''} on "
        + (f"{len(gpus)} {gpus[0]}" if is_gpu else f"{machine['cpu']}, {machine['cores']} cores")
        + (", which hand over directly" if arguments.direct else ""),
        "device": setup.device,
        "direct": arguments.direct,
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "prompt_tokens": arguments.prompt_tokens,
        "engine_memory_bytes": cluster.memory,
        "model": arguments.model or "built here, tiny",
        "seconds": time.monotonic() - began,
        "machine": machine | {"cpu_use": watch.facts},
        "commit": report.commit(),
    }
    kind = "-flip" if arguments.flip else "-direct" if arguments.direct else ""
    results.publish(found, arguments.out, f"demo-pd{kind}")
    print(f"{found['seconds']:.0f} s in all")
    return 0 if found["passed"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="auto: what this vLLM computes on (default %(default)s)",
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode engines (default %(default)s)")
    parser.add_argument("--model", help="name or folder; default: a small one with random weights, made here")
    parser.add_argument(
        "--prompts", type=int, default=40, help="whose answers are compared (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each (default %(default)s)")
    parser.add_argument("--kv-cache", type=int, help="MiB of each engine (default 256; on GPUs 3072)")
    parser.add_argument(
        "--prefill-port", type=int, default=8100, help="of the first one (default %(default)s)"
    )
    parser.add_argument(
        "--decode-port", type=int, default=8200, help="of the first one (default %(default)s)"
    )
    parser.add_argument(
        "--direct", action="store_true", help="engines hand over to each other, and there is no daemon"
    )
    parser.add_argument("--vllm-bench", action="store_true", help="vLLM's own bench client too")
    parser.add_argument(
        "--flip",
        action="store_true",
        help="a worker beside them, which changes its role with the work; only that is shown",
    )
    parser.add_argument("--serve", action="store_true", help="start everything, and wait for Ctrl-C")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.prompts < 2 or arguments.prompt_tokens < 256:
        parser.error(
            "--prompts must be at least 2, and --prompt-tokens at least 256: shorter ones are not split"
        )
    if arguments.flip and arguments.direct:
        parser.error("--flip shows a worker that takes blocks from the daemon: leave out --direct")
    return arguments


def gpu_names(count: int) -> list[str]:
    """How CUDA_VISIBLE_DEVICES names each of these GPUs."""
    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return named[:count] or [str(number) for number in range(count)]


def serve(places: plan.Plan) -> NoReturn:
    print(
        f"Ask it: curl {places.router_url}/v1/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{MODEL_NAME}", "prompt": "w5 w6 w7", "max_tokens": 8}}\'\n'
        f"Who served it: curl {places.admin_url}/decisions?limit=1\nCtrl-C ends everything.",
        flush=True,
    )
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
