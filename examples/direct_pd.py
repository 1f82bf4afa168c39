"""Prompts go from a prefill engine straight into the cache of a decode engine: `make demo-direct` runs this.

python examples/direct_pd.py                             one of each, and what they do, in five minutes on two cores
python examples/direct_pd.py --prefill 1 --decode 2      more of them

The engines are `vllm serve` on the CPU, each with --kv-transfer-config '{"kv_connector": "KVLaneConnector", "kv_role":
"kv_both", "kv_connector_extra_config": {"kvlane.direct": "on"}}'. There is no daemon and no router: this program asks
both engines at once, as docs/handoff.md says. What is started, asked and compared is in python/kvlane/demo/direct.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from kvlane.bench import pictures, report
from kvlane.bench.drawing import save
from kvlane.demo import running
from kvlane.demo.direct.cluster import CHUNK_TOKENS, Cluster
from kvlane.demo.direct.scenarios import KILLED_PROMPT, Demo
from kvlane.demo.model import TINY, build_model
from kvlane.demo.pd import plan
from kvlane.demo.processes import ProcessFailed
from kvlane.demo.scenarios import Scenario


def main() -> int:
    arguments = parse()
    logs = arguments.out / "demo-direct-logs"
    logs.mkdir(parents=True, exist_ok=True)
    model = arguments.model or str(build_model(arguments.out / "models" / "tiny", TINY))
    kv_cache = arguments.kv_cache << 20
    try:
        places = plan.plan(arguments.prefill, arguments.decode, arguments.prefill_port, arguments.decode_port)
        needed = plan.check_memory(
            len(places.engines), plan.weight_bytes(Path(model)), kv_cache, 0, plan.available_memory()
        )
    except plan.NotPossible as reason:
        sys.exit(f"direct_pd: {reason}")
    report.say(f"{len(places.engines)} engines; about {needed / (1 << 30):.1f} GiB; logs in {logs}")
    running.end_at_signals()
    began = time.monotonic()
    longest = (KILLED_PROMPT + 1) * arguments.prompt_tokens
    with (
        report.CpuWatch() as watch,
        Cluster(places, model, logs, longest, kv_cache) as cluster,
    ):
        try:
            cluster.start(report.say)
        except ProcessFailed as error:
            sys.exit(f"direct_pd: {error}")
        demo = Demo(cluster, arguments.prompts, arguments.prompt_tokens, kv_cache)
        scenarios = running.run(demo.all())
    machine = report.machine_facts()
    found: dict[str, Any] = {
        "title": f"{arguments.prefill} prefill and {arguments.decode} decode engines on {machine['cpu']}, "
        f"{machine['cores']} cores",
        "passed": len(scenarios) == len(demo.all()) and all(each.passed for each in scenarios),
        "answers_equal": passed(scenarios, "answers equal"),
        "control_failed_as_it_must": passed(scenarios, "control"),
        "landed_tokens": sum(each["landed_tokens"] for each in demo.handed_over),
        "prompt_tokens": arguments.prompt_tokens,
        "handed_over": demo.handed_over,
        "scenarios": [
            {"name": each.name, "passed": each.passed, "figures": each.figures, "problems": each.problems}
            for each in scenarios
        ],
        "model": arguments.model or "built here, tiny",
        "seconds": time.monotonic() - began,
        "machine": machine | {"cpu_use": watch.facts},
        "commit": report.commit(),
    }
    publish(found, arguments.out)
    return 0 if found["passed"] else 1


def passed(scenarios: list[Scenario], name: str) -> bool:
    """Whether the scenario whose name begins so came, and passed."""
    return any(each.name.startswith(name) and each.passed for each in scenarios)


def publish(found: dict[str, Any], out: Path) -> None:
    """Print the tables, write demo-direct.json and demo-direct.png."""
    print(report.paragraph(found["title"]))
    rows = [
        [
            each["prefill"],
            each["decode"],
            str(each["landed_tokens"]),
            str(each["computed_tokens"]),
            "-" if each["prefill_ms"] is None else f"{each['prefill_ms']:.0f}",
            f"{each['first_token_ms']:.0f}",
        ]
        for each in found["handed_over"]
    ]
    head = ["computed by", "landed in", "tokens landed", "computed there", "prefill ms", "first token ms"]
    print(report.table(head, rows))
    print()
    for scenario in found["scenarios"]:
        print(f"{'passed' if scenario['passed'] else 'FAILED'}: {scenario['name']}")
        for problem in scenario["problems"]:
            print(report.paragraph(problem))
    report.write_json(out / "demo-direct.json", found)
    save(pictures.direct(found), out / "demo-direct.png")
    print(f"written: {out / 'demo-direct.json'}, {out / 'demo-direct.png'}; {found['seconds']:.0f} s in all")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", type=int, default=1, help="prefill engines (default %(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode engines (default %(default)s)")
    parser.add_argument("--model", help="name or folder; default: a small one with random weights, made here")
    parser.add_argument(
        "--prompts", type=int, default=10, help="whose answers are compared (default %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=1000,
        help=f"of each; one prompt has {KILLED_PROMPT} times as many (default %(default)s)",
    )
    parser.add_argument("--kv-cache", type=int, default=256, help="MiB of each engine (default %(default)s)")
    parser.add_argument(
        "--prefill-port", type=int, default=8100, help="of the first one (default %(default)s)"
    )
    parser.add_argument(
        "--decode-port", type=int, default=8200, help="of the first one (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the results (default %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.prompts < 2 or arguments.prompt_tokens < CHUNK_TOKENS:
        parser.error(f"--prompts must be at least 2, and --prompt-tokens at least {CHUNK_TOKENS}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
