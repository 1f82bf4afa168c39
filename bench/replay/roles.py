"""Replays traces of `shapes.py` with nodes that change their roles, beside every fixed division and nodes that do both.

    python bench/replay/roles.py KVLANE [--out FOLDER]

KVLANE is the program. Each trace at its own rate, eight nodes, within 500 ms to a first token and 30 ms between tokens.
Then two classes of nodes, and two hosts between which a hand-over takes longer.
The same on every machine. Writes roles.json, and roles.png: what was served within the limits over time, and roles.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench/replay")]

import shapes  # noqa: E402

from kvlane.bench import report  # noqa: E402
from kvlane.bench.drawing import COLOURS, page, write  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = "ttft-ms = 500\ntpot-ms = 30\n"
BALANCE = f"[balance]\n{LIMITS}"
NODES = 8
OURS, TOGETHER = "roles that change", "both on each node"
# Each mechanism's setting to turn it off, which shows its benefit.
SWITCHES = {
    "roles stay": "flips = false\n",
    "no relief": "relief = 0\n",
    "nodes drain before they change": "drains = true\n",
}
# Bandwidth-rich: an H20's peak figures beside an H100's, 148 of 989 TFLOPS (bf16) and 4.0 of 3.35 TB/s. Not measured.
CLASSES = """[[class]]
name = "compute-rich"
[[class]]
name = "bandwidth-rich"
prefill-times = 6.7
decode-times = 0.84
kv-tokens = 500000
"""
# Multiples of the traces' rates, below 1 because these two classes can serve less.
CLASS_SPEEDS = {"prefill-heavy": (0.6, 0.7, 0.75), "swinging": (0.6, 0.7, 0.8)}
# Between two hosts, each with three prefill and two decode nodes: milliseconds a token of 128 KiB, by 35 and 10 Gb/s.
FAR_TOKEN_MS = (0.03, 0.105)
HOSTS_SPEED = 0.75


def nodes(role: str, count: int, **keys: str) -> str:
    """A table, or none."""
    lines = "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    return f'[[node]]\nrole = "{role}"\ncount = {count}\n{lines}' if count else ""


def fleets() -> dict[str, str]:
    """Fleets of equal nodes, by name."""
    fixed = {
        f"{count} prefill, {NODES - count} decode": nodes("prefill", count) + nodes("decode", NODES - count)
        for count in range(1, NODES)
    }
    workers = nodes("worker", NODES)
    return {
        OURS: workers + BALANCE,
        TOGETHER: workers,
        **fixed,
        **{name: workers + BALANCE + switch for name, switch in SWITCHES.items()},
    }


def class_fleets() -> dict[str, str]:
    """Fleets of two kinds of nodes, by name."""
    half = NODES // 2
    compute, bandwidth = "compute-rich", "bandwidth-rich"
    workers = nodes("worker", half, **{"class": compute}) + nodes("worker", half, **{"class": bandwidth})
    fixed = nodes("prefill", half, **{"class": compute}) + nodes("decode", half, **{"class": bandwidth})
    return {
        "classes told": workers + BALANCE,
        "compute-rich prefill, bandwidth-rich decode": fixed,
    }


def hosts(far_token_ms: float) -> str:
    """Two of them, and what a token takes from one to the other."""
    both = [nodes("prefill", 3, host=host) + nodes("decode", 2, host=host) for host in "ab"]
    return "".join(both) + f"[hand-over]\nfar-token-ms = {far_token_ms}\n"


def replay(program: str, trace: Path, file: str) -> dict[str, Any]:
    """The only result."""
    with tempfile.TemporaryDirectory() as folder:
        route = Path(folder) / "fleet.toml"
        route.write_text(file)
        command = [program, "replay", str(trace), "--route", str(route), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    [result] = found["results"]
    return result | {"requests": found["requests"]}


def head(policy: str, speed: float) -> str:
    """The first lines of a fleet's file."""
    return f'policies = ["{policy}"]\nspeeds = [{speed}]\n{LIMITS}'


def measure(program: str, traces: Mapping[str, Path]) -> dict[str, Any]:
    """All of it."""
    equal, classes = {}, {}
    for name, trace in traces.items():
        equal[name] = {}
        for fleet, tables in fleets().items():
            print(f"{name}: {fleet}", file=sys.stderr)
            equal[name][fleet] = replay(program, trace, head("least-work", 1.0) + tables)
    for name, speeds in CLASS_SPEEDS.items():
        for speed in speeds:
            case = classes.setdefault(f"{name}, {speed:.0%} of its rate", {})
            for fleet, tables in class_fleets().items():
                print(f"{name}: {fleet} at {speed}", file=sys.stderr)
                file = head("least-delay", speed) + CLASSES + tables
                case[fleet] = replay(program, traces[name], file)
    apart: dict[str, Any] = {}
    for far in FAR_TOKEN_MS:
        case = apart.setdefault(f"two hosts, {far} ms a token between them", {})
        for policy in ("least-work", "least-delay"):
            print(f"two hosts, {far}: {policy}", file=sys.stderr)
            file = head(policy, HOSTS_SPEED) + hosts(far)
            case[policy] = replay(program, traces["prefill-heavy"], file)
    return {"roles": equal, "classes": classes, "hosts": apart}


def best_fixed(results: Mapping[str, Any]) -> str:
    """The fixed split that served a trace best, known only afterwards."""
    fixed = [name for name in results if name.endswith(" decode") and name[0].isdigit()]
    return max(fixed, key=lambda name: results[name]["within_limits_percent"])


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = []
    for kind in ("roles", "classes", "hosts"):
        for name, results in found[kind].items():
            for fleet, result in results.items():
                lines.append(
                    f"{name:28} {fleet:44} within {result['within_limits_percent']:5.1f} %  "
                    f"first token {result['ttft_p50_ms']:7.0f} {result['ttft_p99_ms']:9.0f} ms  "
                    f"token {result['tpot_p99_ms']:5.1f} ms  turns {result['turns']}"
                )
    return "\n".join(lines)


def shorten(found: dict[str, Any]) -> None:
    """Leaves what happened over time only where the picture shows it."""
    shown = found["roles"]["swinging"]
    fleets = (OURS, TOGETHER, best_fixed(shown))
    keep = [id(shown[name]) for name in fleets]
    for kind in ("roles", "classes", "hosts"):
        for results in found[kind].values():
            for result in results.values():
                if id(result) not in keep:
                    del result["over_time"]


def facts(found: Mapping[str, Any]) -> dict[str, Any]:
    """The names and values in the picture, as JSON gives them back."""
    results = found["roles"]["swinging"]
    fleets = [OURS, TOGETHER, best_fixed(results)]
    within = {
        name: [
            (span["from_s"] / 60, span["within_limits_percent"])
            for span in results[name]["over_time"]
            if span["within_limits_percent"] is not None
        ]
        for name in fleets
    }
    roles = [(span["from_s"] / 60, span["prefill_nodes"]) for span in results[OURS]["over_time"]]
    shown = {
        "title": "Work that swings every five minutes, simulated: 8 H100s",
        "within": within,
        "roles": roles,
    }
    return json.loads(json.dumps(shown))


def picture(found: Mapping[str, Any]) -> Figure:
    """Above what was served within limits, below the roles, by the minute."""
    shown = facts(found)
    figure, (above, below) = page(shown["title"], 4.6, 2, sharex=True, height_ratios=[2, 1])
    for name, points in shown["within"].items():
        above.plot(*zip(*points, strict=True), label=name, linewidth=1.4)
    above.set_title("requests within 500 ms and 30 ms a token, %", fontsize=9, loc="left")
    above.set_ylim(0, 102)
    above.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, -0.02))
    minutes, counts = zip(*shown["roles"], strict=True)
    below.fill_between(minutes, counts, step="post", color=COLOURS[0], alpha=0.35, linewidth=0)
    below.set_title(f"nodes that prefill, of {NODES}, where roles change", fontsize=9, loc="left")
    below.set_ylim(0, NODES)
    below.set_xlabel("minutes")
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", metavar="KVLANE")
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.program, shapes.write(Path(folder)))
    print(table(found))
    found |= {"limits": {"ttft_ms": 500, "tpot_ms": 30}, "commit": report.commit()}
    shorten(found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "roles.json").write_text(json.dumps(found, indent=1) + "\n")
    write(picture(found), facts(found), arguments.out / "roles.png")


if __name__ == "__main__":
    main()
