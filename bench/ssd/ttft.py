"""Time to first token of a real vLLM whose prompts come from the SSD, beside the same from the pool.

    python bench/ssd/ttft.py FOLDER --out out/ttft     # ten minutes on two cores, with vLLM for the CPU

One engine with the demo's model, and a daemon that is restarted for each turn, with `--ssd-path` staged and direct.
After a restart the prompts come from the SSD. Once the engine has forgotten them, they come from the pool. The file
is in FOLDER.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.demo.device import SETUPS
from kvlane.demo.model import build_model
from kvlane.demo.processes import Daemon, Engine, close_all
from kvlane.demo.scenarios import open_tool

WAYS = ("staged", "direct")
# What a request from the SSD may take beside its bytes at the disk's rate.
ROOM_MS = 5.0
_TIMEOUT_S = 30


class Ttft:
    """The engine, its daemon and the prompts."""

    def __init__(self, folder: Path, logs: Path, model: Path, prompts: int) -> None:
        self._setup = SETUPS["cpu"]
        self.daemon = Daemon(folder, self._setup.pool_size, logs)
        self.engine = Engine("A", model, self.daemon.address, logs, self._setup)
        dice = random.Random(1)
        tokens = self._setup.prompt_tokens
        self.prompts = [[dice.randrange(4, 32_000) for _ in range(tokens)] for _ in range(prompts)]

    def answers(self) -> list[dict[str, Any]]:
        """The answer to each prompt, one after the other."""
        return [
            self.engine.ask("generate", prompts=[prompt], tokens=2)["answers"][0] for prompt in self.prompts
        ]

    def forget(self) -> None:
        """Everything is saved, and the engine's own prefix cache is empty."""
        self.engine.ask("drain")
        with open_tool(self.daemon.address) as tool:
            tool.settle(30_000)
        if not self.engine.ask("reset_prefix_cache")["reset"]:
            raise SystemExit("the engine keeps blocks pinned")

    def restart(self, way: str) -> dict[str, Any]:
        """An empty pool, and blocks on the SSD only. Returns the SSD's status."""
        self.daemon.close()
        self.daemon.flags = ("--ssd-path", way)
        self.daemon.start()
        until = time.monotonic() + _TIMEOUT_S
        with open_tool(self.daemon.address) as tool:
            while True:
                # A prompt too short to be kept: it makes the engine look for the daemon.
                self.engine.ask("generate", prompts=[self.prompts[0][:8]], tokens=2)
                status: Any = tool.status()
                roles = {session["role"] for session in status["sessions"]}
                (ssd,) = status["ssds"]
                measured = way != "auto" or "not measured yet" not in ssd["path_reason"]
                if {"scheduler", "worker"} <= roles and measured:
                    return ssd
                if time.monotonic() > until:
                    raise SystemExit("the engine did not register again")


def main() -> int:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the SSD")
    parser.add_argument(
        "--prompts",
        type=int,
        default=16,
        help="of 2,000 tokens; the first of a turn does not count (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of both ways, in turns (default %(default)s)")
    add_out(parser)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = build_model(arguments.folder / "demo-model", SETUPS["cpu"].shape, 0)
    with report.CpuWatch() as watch, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        outcome = measure(Path(folder), arguments.out, model, arguments.prompts, arguments.rounds)
    shown = {key: value for key, value in vars(arguments).items() if key != "folder"}
    return publish(argparse.Namespace(**shown), outcome, watch)


def measure(folder: Path, logs: Path, model: Path, prompts: int, rounds: int) -> Outcome:
    """Medians over all prompts of all rounds."""
    ttft = Ttft(folder, logs, model, prompts)
    times: dict[str, dict[str, list[float]]] = {way: {"ssd": [], "pool": []} for way in WAYS}
    try:
        ttft.daemon.start()
        ttft.engine.wait_ready()
        report.say("the engine computes the prompts")
        computed = ttft.answers()
        ttft.forget()
        rates = ttft.restart("auto")
        hit = 0
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                report.say(f"round {number + 1} of {rounds}: {way}")
                ttft.restart(way)
                for source in ("ssd", "pool"):
                    answers = ttft.answers()
                    if any(answer["cached_tokens"] == 0 for answer in answers):
                        raise SystemExit(f"a prompt was computed instead of loaded from the {source}")
                    hit = answers[0]["cached_tokens"]
                    # The first one after a restart also maps the pool.
                    times[way][source] += [answer["ttft_ms"] for answer in answers[1:]]
                    ttft.forget()
    finally:
        close_all([ttft.engine, ttft.daemon])
    shape = SETUPS["cpu"].shape
    kv_bytes = hit * shape.layers * 2 * shape.kv_heads * shape.head_dim * 4
    medians = {
        way: {source: statistics.median(values) for source, values in times[way].items()} for way in WAYS
    }
    figures = [Figure("computed", statistics.median(answer["ttft_ms"] for answer in computed), "ms")]
    for way in WAYS:
        figures += [
            Figure(f"from the {source}, {way}", medians[way][source], "ms") for source in ("pool", "ssd")
        ]
    direct, rate = rates["direct_bytes_per_second"], rates["staged_bytes_per_second"]
    at_rate = kv_bytes / rate * 1e3 if rate else float("nan")
    figures += [
        Figure(f"{kv_bytes / 1e6:.1f} MB at the staged rate", at_rate, "ms"),
        Figure(
            "from the SSD, staged, less the pool's and the bytes'",
            medians["staged"]["ssd"] - medians["staged"]["pool"] - at_rate,
            "ms",
            at_most=ROOM_MS,
        ),
        Figure(
            "from the SSD, staged / direct", medians["staged"]["ssd"] / medians["direct"]["ssd"], at_most=1.0
        ),
    ]
    note = (
        f"Prompts of {SETUPS['cpu'].prompt_tokens} tokens, {hit} of them from kvlane; {prompts} prompts, {rounds} "
        f"rounds in which both ways take turns. Measured by the daemon: direct {direct / 1e9:.2f}, "
        f"staged {rate / 1e9:.2f} GB/s."
    )
    return Outcome("ssd-ttft", figures, {"times": times, "medians": medians, "rates": rates}, note)


if __name__ == "__main__":
    sys.exit(main())
