"""Whether a recording made at the router says which policy brings the first tokens soonest, and when they come.

    python bench/record/route.py --out out/route-record        # ten minutes and a half

For each policy two fake engines, each a process of its own, behind a `kvlane route`. All get the same conversations at
the same times (chats.py). `kvlane route record` records each router; the recording of the round-robin router is
replayed for all policies by `kvlane replay --route`. The fleet file has the fake engines' own options, and nothing that
was measured here. Compared is the time to the first token: as clients saw it, and by the replay. Writes route.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import chats

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, publish
from kvlane.bench.processes import beside_python
from kvlane.testing.fake_engine import FakeEngine
from kvlane.testing.fake_engine.options import parse as engine_options

POLICIES = ("round-robin", "least-loaded", "least-work", "prefix-affinity")
RECORDED = "round-robin"
ENGINES = 2
ENGINE_FLAGS = (
    "--prefill-tokens-per-second 10000 --ttft-ms 20 --itl-ms 5 --max-num-seqs 16 --cache-blocks 8192"
)
GOAL_PERCENT = 15.0
# A fake engine computes a prompt as a whole, and the replay in steps of at most so many tokens: vLLM's usual size.
STEP_TOKENS = 2048
OTHER_STEP_TOKENS = (256, 512, 1024, 4096, 8192)
# Replays of the recording with each request up to so much sooner or later: the spread that comes from chance alone.
SHIFTED, SHIFT_MS = 10, 5
START_S, END_S = 30.0, 60.0

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Fleet:
    """A file for `kvlane replay --route`, from the options of a fake engine."""

    options: argparse.Namespace
    rate_times: float = 1.0
    cache_times: float = 1.0
    step_tokens: int = STEP_TOKENS

    def text(self) -> str:
        options = self.options
        return f"""policies = {json.dumps(POLICIES)}
speeds = [1.0]
[[class]]
name = "fake"
steps = "steps.json"
kv-tokens = {options.max_num_seqs * options.max_model_len}
cached-tokens = {int(options.cache_blocks * options.block_size * self.cache_times)}
requests-max = {options.max_num_seqs}
step-tokens = {self.step_tokens}
[[node]]
count = {ENGINES}
"""

    def steps(self) -> dict[str, Any]:
        """As bench/gpu/steps.py would fit them. A step without a prompt takes the time between two tokens."""
        options = self.options
        token_ms = 1e3 / (options.prefill_tokens_per_second * self.rate_times)
        prefill = {"base_ms": options.ttft_ms, "token_ms": token_ms, "known_ms": 0.0, "pair_ms": 0.0}
        decode = {"base_ms": options.itl_ms, "request_ms": 0.0, "token_ms": 0.0}
        return {"found": {"fit": {"prefill": prefill, "decode": decode}}}

    def replay(self, program: str, trace: Path) -> Results:
        """A replay's results, by policy."""
        folder = trace.parent
        (folder / "steps.json").write_text(json.dumps(self.steps()))
        (folder / "fleet.toml").write_text(self.text())
        command = [program, "replay", str(trace), "--route", str(folder / "fleet.toml"), "--json"]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        assert told["requests_without_lengths"] == 0, told
        return {each["policy"]: each for each in told["results"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of requests (default %(default)s)")
    parser.add_argument(
        "--rate", type=float, default=0.6, help="conversations a second that begin (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the conversations (default %(default)s)")
    parser.add_argument("--kvlane", help="the program (default: the one beside this Python)")
    parser.add_argument("--out", type=Path, default=Path("out/route-record"))
    settings = parser.parse_args()
    program = settings.kvlane or beside_python("kvlane")
    settings.out.mkdir(parents=True, exist_ok=True)
    turns = chats.conversations(settings.seconds, settings.rate, settings.seed)
    report.say(f"{len(turns)} requests in {settings.seconds:g} s, by each of {', '.join(POLICIES)}")
    with report.CpuWatch() as watch:
        seen, engines, traces = _serve(program, turns, settings.out)
    measured = {policy: _summary(seen[policy], engines[policy]) for policy in POLICIES}
    fleet = Fleet(engine_options([*ENGINE_FLAGS.split()]))
    trace = traces[RECORDED]
    replayed = fleet.replay(program, trace)
    controls = {
        "half the prefill rate": Fleet(fleet.options, rate_times=0.5).replay(program, trace),
        "caches for a block": Fleet(fleet.options, cache_times=1e-9).replay(program, trace),
    }
    spread = _spread(fleet, program, trace)
    figures = _figures(measured, replayed, spread, traces, len(turns))
    for name, results in controls.items():
        apart = [abs(_apart(results[policy], measured[policy])) for policy in POLICIES]
        figures.append(Figure(f"control, {name}: least apart of all", min(apart), "%", at_least=GOAL_PERCENT))
    others = {policy: fleet.replay(program, traces[policy]) for policy in POLICIES if policy != RECORDED}
    steps = {
        str(tokens): Fleet(fleet.options, step_tokens=tokens).replay(program, trace)
        for tokens in OTHER_STEP_TOKENS
    }
    moved = max(
        abs(results[policy]["ttft_p50_ms"] / replayed[policy]["ttft_p50_ms"] - 1)
        for results in others.values()
        for policy in POLICIES
    )
    figures.append(Figure("a median by another router's recording: most apart", 100 * moved, "%"))
    print(_table(measured, replayed), end="\n\n")
    details = {
        "measured": measured,
        "replayed": _short(replayed),
        "controls": {name: _short(results) for name, results in controls.items()},
        "replays_of_other_recordings": {policy: _short(results) for policy, results in others.items()},
        "replays_with_other_step_tokens": {tokens: _short(results) for tokens, results in steps.items()},
        "replayed_p50_ms_with_shifted_times": spread,
        "header": json.loads(trace.read_text().splitlines()[0]),
        "fleet": fleet.text(),
        "steps": fleet.steps(),
    }
    note = (
        f"{len(turns)} requests of conversations in {settings.seconds:g} s, the same ones by each policy at the "
        f"same time; for each policy a router and {ENGINES} fake engines ({ENGINE_FLAGS}). "
        f"The recording is of {RECORDED}."
    )
    return publish(settings, Outcome("route", figures, details, note), watch)


def _serve(
    program: str, turns: Sequence[chats.Turn], folder: Path
) -> tuple[dict[str, chats.Seen], dict[str, list[dict[str, Any]]], dict[str, Path]]:
    """All policies at once. By policy: what clients saw, what its engines logged, and its recording."""
    with ExitStack() as stack:
        # Paths of sockets have to be short.
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
        fakes: dict[str, list[FakeEngine]] = {}
        routers: dict[str, str] = {}
        recorders: dict[str, subprocess.Popen[bytes]] = {}
        traces = {policy: folder / policy / "trace.jsonl" for policy in POLICIES}
        for policy in POLICIES:
            traces[policy].parent.mkdir(exist_ok=True)
            traces[policy].unlink(missing_ok=True)
            enter = stack.enter_context
            fakes[policy] = [enter(FakeEngine(*ENGINE_FLAGS.split())) for _ in range(ENGINES)]
            control = sockets / f"{policy}.sock"
            routers[policy] = enter(_router(program, policy, [each.url for each in fakes[policy]], control))
            recorders[policy] = enter(_recorder(program, traces[policy], control))
        seen = chats.ask(turns, routers)
        for policy, recorder in recorders.items():
            recorder.send_signal(signal.SIGINT)
            if recorder.wait(END_S) != 0:
                sys.exit(f"kvlane route record of {policy} failed")
        logs = {policy: [entry for each in fakes[policy] for entry in each.log()] for policy in POLICIES}
    return seen, logs, traces


@contextmanager
def _router(program: str, policy: str, engines: Sequence[str], control: Path) -> Iterator[str]:
    """The address of a router that has found its engines ready."""
    command = [program, "route", "--listen", "127.0.0.1:0", "--admin", "off", "--log", "info"]
    command += ["--socket", str(control), "--policy", policy]
    for engine in engines:
        command += ["--worker", engine]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address, ready = "", 0
        for line in process.stderr:
            found = re.search(r"routes at http://(\S+?):? ", line)
            address = found[1] if found else address
            ready += "node ready" in line
            if address and ready == len(engines):
                break
        else:
            sys.exit(f"the router of {policy} ended before it was ready")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield address
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _recorder(program: str, trace: Path, control: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A recording that has begun."""
    command = [program, "route", "record", str(trace), "--socket", str(control)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        # The header is written once requests are recorded.
        while not trace.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"kvlane route record {trace} did not begin")
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _summary(seen: chats.Seen, logged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A policy as it was measured, with the names that a replay has for it."""
    first_s = [first for first in seen.first_token_s if first is not None]
    # Of nearest rank, as a replay's.
    first_ms = {name: value * 1e3 for name, value in report.summary(first_s).items()}
    prompts = sum(entry["prompt_tokens"] for entry in logged)
    return {
        **{f"ttft_{name}_ms": first_ms[name] for name in ("mean", "p50", "p99")},
        "found_percent": 100 * sum(entry["cached_tokens"] for entry in logged) / prompts,
        "answered": len(first_s),
        "prompt_tokens_mean": prompts / len(logged),
        "sent_late_at_most_ms": seen.sent_late_s * 1e3,
        "under_way_at_most": seen.under_way_most,
    }


def _table(measured: Results, replayed: Results) -> str:
    """A line for each policy, the one with the soonest first tokens first."""
    lines: list[list[object]] = []
    for policy in sorted(POLICIES, key=lambda policy: measured[policy]["ttft_p50_ms"]):
        pair = measured[policy], replayed[policy]
        p50, mean, found = (
            [each[key] for each in pair] for key in ("ttft_p50_ms", "ttft_mean_ms", "found_percent")
        )
        lines.append([policy, *p50, p50[1] / p50[0], *mean, mean[1] / mean[0], *found])
    heads = ["policy", "p50 ms", "replay", "ratio", "mean ms", "replay", "ratio", "found %", "replay"]
    return report.table(heads, lines)


def _figures(
    measured: Results, replayed: Results, spread: dict[str, list[float]], traces: dict[str, Path], asked: int
) -> list[Figure]:
    rows = {policy: _requests(trace) for policy, trace in traces.items()}
    figures = [
        Figure(
            "requests with a whole answer",
            min(each["answered"] for each in measured.values()) / asked,
            at_least=1.0,
        ),
        Figure("requests in the recording / asked", len(rows[RECORDED]) / asked, at_least=1.0),
        Figure(
            "requests that differ between the routers' recordings",
            max(_different(rows[RECORDED], rows[policy]) for policy in POLICIES),
            "of all",
            at_most=0,
        ),
    ]
    own = report.summary(row["ttft_ms"] for row in rows[RECORDED])["p50"]
    figures.append(
        Figure(f"{RECORDED}: median, the recording's own / clients'", own / measured[RECORDED]["ttft_p50_ms"])
    )
    for policy in POLICIES:
        apart = _apart(replayed[policy], measured[policy])
        name = f"{policy}: median, replay / measured - 1"
        figures.append(Figure(f"{name} = {apart:+.1f} %: apart", abs(apart), "%", at_most=GOAL_PERCENT))
    for key, name in (("ttft_p50_ms", "median"), ("ttft_mean_ms", "mean")):
        orders = [sorted(POLICIES, key=lambda policy: of[policy][key]) for of in (measured, replayed)]
        goal = 0 if name == "median" else None
        swapped = sum(
            orders[1].index(one) > orders[1].index(other) for one, other in combinations(orders[0], 2)
        )
        figures.append(Figure(f"pairs of policies in another order by {name}", swapped, "of 6", at_most=goal))
    apart_pairs = [
        (one, other)
        for one, other in combinations(POLICIES, 2)
        if max(spread[one]) < min(spread[other]) or max(spread[other]) < min(spread[one])
    ]
    wrong = sum(
        (replayed[one]["ttft_p50_ms"] < replayed[other]["ttft_p50_ms"])
        != (measured[one]["ttft_p50_ms"] < measured[other]["ttft_p50_ms"])
        for one, other in apart_pairs
    )
    figures.append(
        Figure(
            "the same, of the pairs that no shift of times swaps in the replay",
            wrong,
            f"of {len(apart_pairs)}",
        )
    )
    return figures


def _apart(replayed: dict[str, Any], measured: dict[str, Any]) -> float:
    """How much later the replay's median is, in percent."""
    return 100 * (replayed["ttft_p50_ms"] / measured["ttft_p50_ms"] - 1)


def _requests(trace: Path) -> list[dict[str, Any]]:
    """A recording's requests, ordered by their lengths, with blocks numbered anew in this order."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    # Not by their times: requests that come within a millisecond may change places.
    rows = sorted((line for line in lines if "timestamp" in line), key=_length)
    numbers: dict[int, int] = {}
    for row in rows:
        ids: list[int] = []
        for each in row["hash_ids"]:
            ids += range(each[0], each[1] + 1) if isinstance(each, list) else [each]
        row["blocks"] = [numbers.setdefault(block, len(numbers)) for block in ids]
    return rows


def _length(row: dict[str, Any]) -> tuple[int, ...]:
    return row["input_length"], row["output_length"], row["timestamp"]


def _different(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> int:
    """Requests that have other blocks or lengths in the other recording."""
    keys = ("input_length", "output_length", "blocks")
    pairs = zip(one, other, strict=False)
    return abs(len(one) - len(other)) + sum(any(a[key] != b[key] for key in keys) for a, b in pairs)


def _spread(fleet: Fleet, program: str, trace: Path) -> dict[str, list[float]]:
    """Medians by replays of the recording with each time shifted by chance."""
    header, *lines = trace.read_text().splitlines()
    shifted = trace.with_name("shifted.jsonl")
    found: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(SHIFTED):
        chance = random.Random(number)
        rows = [json.loads(line) for line in lines]
        for row in rows:
            if "timestamp" in row:
                row["timestamp"] = max(0, row["timestamp"] + chance.randint(-SHIFT_MS, SHIFT_MS))
        shifted.write_text("\n".join([header, *map(json.dumps, rows)]) + "\n")
        for policy, result in fleet.replay(program, shifted).items():
            found[policy].append(result["ttft_p50_ms"])
    return found


def _short(results: Results) -> Results:
    """Without the curves over time."""
    return {
        policy: {key: value for key, value in result.items() if key not in ("policy", "over_time")}
        for policy, result in results.items()
    }


if __name__ == "__main__":
    sys.exit(main())
