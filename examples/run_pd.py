"""Prefill and decode engines on this machine, behind one endpoint: `make demo-pd` runs this.

python examples/run_pd.py                             one of each, and what they do, in ten minutes on two cores
python examples/run_pd.py --prefill 2 --decode 2      more of them
python examples/run_pd.py --flip                      with a worker that prefills or decodes as the work needs it
python examples/run_pd.py --serve                     only starts them, for own requests, until Ctrl-C

One `kvlane serve` keeps the blocks. The engines are `vllm serve` on the CPU, each with
--kv-transfer-config '{"kv_connector": "KVLaneConnector", "kv_role": "kv_both"}'. Before them stands
`kvlane route --prefill URL --decode URL`. What is started, asked and compared is in python/kvlane/demo/pd.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from kvlane.bench import report
from kvlane.demo import running
from kvlane.demo.model import TINY, build_model
from kvlane.demo.pd import plan, results
from kvlane.demo.pd.asking import MODEL_NAME
from kvlane.demo.pd.cluster import Cluster
from kvlane.demo.pd.flip import BALANCE, FlipDemo
from kvlane.demo.pd.scenarios import Demo
from kvlane.demo.processes import ProcessFailed

POOL_BYTES = 1 << 30


def main() -> int:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    logs = arguments.out / "demo-pd-logs"
    logs.mkdir(exist_ok=True)
    model = arguments.model or str(build_model(arguments.out / "models" / "tiny", TINY))
    kv_cache = arguments.kv_cache << 20

    # 1. What goes where, and whether there is room for it.
    try:
        places = plan.plan(
            arguments.prefill,
            arguments.decode,
            arguments.prefill_port,
            arguments.decode_port,
            workers=1 if arguments.flip else 0,
        )
        needed = plan.check_memory(
            len(places.engines), plan.weight_bytes(Path(model)), kv_cache, POOL_BYTES, plan.available_memory()
        )
    except plan.NotPossible as reason:
        sys.exit(f"run_pd: {reason}")
    for note in places.notes:
        report.say(note)
    report.say(f"{len(places.engines)} engines; about {needed / (1 << 30):.1f} GiB; logs in {logs}")

    # 2. The daemon, the engines and the router, until Ctrl-C, an error, or the end: then all of them end.
    running.end_at_signals()
    began = time.monotonic()
    # vLLM takes no text of more than six characters for each token that it may have.
    longest = 2 * arguments.prompt_tokens
    config = logs / "route.toml" if arguments.flip else None
    if config is not None:
        config.write_text(BALANCE)
    with (
        report.CpuWatch() as watch,
        Cluster(places, model, logs, longest, kv_cache, str(POOL_BYTES), config) as cluster,
    ):
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
        f"{', and a worker,' if arguments.flip else ''} on {machine['cpu']}, "
        f"{machine['cores']} cores",
        "prefill": arguments.prefill,
        "decode": arguments.decode,
        "prompt_tokens": arguments.prompt_tokens,
        "engine_memory_bytes": cluster.memory,
        "model": arguments.model or "built here, tiny",
        "seconds": time.monotonic() - began,
        "machine": machine | {"cpu_use": watch.facts},
        "commit": report.commit(),
    }
    results.publish(found, arguments.out, "demo-pd-flip" if arguments.flip else "demo-pd")
    print(f"{found['seconds']:.0f} s in all")
    return 0 if found["passed"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode engines (default %(default)s)")
    parser.add_argument("--model", help="name or folder; default: a small one with random weights, made here")
    parser.add_argument(
        "--prompts", type=int, default=40, help="whose answers are compared (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="of each (default %(default)s)")
    parser.add_argument("--kv-cache", type=int, default=256, help="MiB of each engine (default %(default)s)")
    parser.add_argument(
        "--prefill-port", type=int, default=8100, help="of the first one (default %(default)s)"
    )
    parser.add_argument(
        "--decode-port", type=int, default=8200, help="of the first one (default %(default)s)"
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
    return arguments


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
