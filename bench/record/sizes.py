"""Whether a recorded trace says what the daemon hit, and what pools of other sizes would have hit.

    python bench/record/sizes.py --out out/record          # 35 minutes on two cores, with vLLM for the CPU

An engine with kvlane on a small model that is built here gets the same load three times. `kvlane bench serve` asks it
for prompts that come back in another order each round. The first pool has room for about half of the blocks, and
`kvlane record` records it. The others have half and twice that size. The machine should have nothing else to do: where
prompts queue, those that wait hold their hits, and a pool that is too small hits more than without a queue.
`kvlane replay --beside` says from the recording what all three hit; the daemons' own counters say what they did hit.
Writes sizes.json and sizes.png; status 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, publish
from kvlane.bench.processes import beside_python, connector_config, own_daemon, own_engine
from kvlane.demo.model import SHAPES, build_model

# Pools, as multiples of the recorded one, and the keys under which a replay has them.
SIZES = {
    1.0: "replay_hit_percent",
    0.5: "replay_half_the_pool_hit_percent",
    2.0: "replay_twice_the_pool_hit_percent",
}
GOALS = {1.0: 1.0, 0.5: 2.0, 2.0: 2.0}
_BLOCK_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=150, help="a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="default %(default)s")
    parser.add_argument("--rate", type=float, default=3.0, help="prompts a second (default %(default)s)")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--output", type=int, default=48, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/record"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    model = build_model(settings.out / "model-tiny", SHAPES["tiny"])
    trace = settings.out / "trace.jsonl"
    with report.CpuWatch() as watch:
        pool = _pool_bytes(settings, model) // 2
        runs = {
            size: _run(settings, model, int(pool * size), trace if size == 1.0 else None) for size in SIZES
        }
    command = [beside_python("kvlane"), "replay", str(trace), "--beside", "--json"]
    command += ["--plot", str(settings.out / "replay.png")]
    beside = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["beside"]
    header = json.loads(trace.read_text().splitlines()[0])
    requests = settings.prompts * settings.rounds
    figures = [
        # The trace also has the request by which the tool warms the engine up.
        Figure("requests in the trace / asked", header["requests"] / requests, at_least=1.0)
    ]
    for size, key in SIZES.items():
        name = "the recorded pool" if size == 1.0 else f"{size:g} of the pool"
        figures += [
            Figure(f"{name}: hits by the daemon's counters", runs[size]["hit_percent"], "%"),
            Figure(f"{name}: hits by the replay", beside[key], "%"),
            Figure(
                f"{name}: apart", abs(runs[size]["hit_percent"] - beside[key]), "points", at_most=GOALS[size]
            ),
        ]
    figures.append(Figure("bytes of the trace a request", trace.stat().st_size / requests, "B", at_most=2000))
    details = {"runs": {f"{size:g}": run for size, run in runs.items()}, "beside": beside, "header": header}
    note = (
        f"{requests} prompts of {settings.input} tokens at {settings.rate:g} a second, {settings.prompts} different "
        f"ones in {settings.rounds} rounds, each in another order; vLLM on the CPU."
    )
    return publish(settings, Outcome("sizes", figures, details, note), watch)


def _pool_bytes(settings: argparse.Namespace, model: Path) -> int:
    """Room for all blocks of the load, by `kvlane size`."""
    blocks = settings.prompts * ((settings.input + settings.output) // _BLOCK_TOKENS)
    command = [beside_python("kvlane"), "size", str(model), "--tokens", str(blocks * _BLOCK_TOKENS)]
    command += ["--kv-cache-dtype", SHAPES["tiny"].dtype, "--block-size", str(_BLOCK_TOKENS), "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return int(told["pool_bytes"])


def _run(settings: argparse.Namespace, model: Path, pool: int, trace: Path | None) -> dict[str, Any]:
    """One load; what the daemon counted."""
    report.say(f"pool of {pool} bytes" + (", recorded" if trace else ""))
    flags = f"--dtype {SHAPES['tiny'].dtype} --enforce-eager --block-size {_BLOCK_TOKENS}"
    flags += f" --kv-cache-memory-bytes {1 << 26} --no-enable-prefix-caching"
    with own_daemon(str(pool), settings.out) as address:
        recorder = None
        if trace is not None:
            command = [beside_python("kvlane"), "record", str(trace), "--force", "--addr", address]
            recorder = subprocess.Popen(command)
        with own_engine(str(model), connector_config(address), flags.split(), settings.out) as url:
            began = time.monotonic()
            command = [
                sys.executable,
                "-m",
                "kvlane.bench",
                "serve",
                "--base-url",
                url,
                "--model",
                str(model),
            ]
            command += ["--num-prompts", str(settings.prompts), "--input-len", str(settings.input)]
            command += ["--output-len", str(settings.output), "--request-rate", str(settings.rate)]
            command += ["--warm-rounds", str(settings.rounds - 1), "--shuffle-warm", "--seed", "1"]
            command += ["--vocab", "2000", "--out", str(settings.out / "serve")]
            with (settings.out / "serve.log").open("ab") as log:
                subprocess.run(command, check=False, stdout=log, stderr=log)
            seconds = time.monotonic() - began
        if recorder is not None:
            recorder.send_signal(signal.SIGINT)
            assert recorder.wait(60) == 0, "kvlane record failed"
        status = subprocess.run(
            [beside_python("kvlane"), "status", "--json", "--addr", address],
            stdout=subprocess.PIPE,
            check=True,
        )
        spaces = json.loads(status.stdout)["namespaces"]
        hit, missed = (sum(space[f"{what}_blocks"] for space in spaces) for what in ("hit", "missed"))
    return {
        "pool_bytes": pool,
        "seconds": seconds,
        "hit_blocks": hit,
        "missed_blocks": missed,
        "hit_percent": 100 * hit / max(1, hit + missed),
    }


if __name__ == "__main__":
    sys.exit(main())
