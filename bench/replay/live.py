"""The real `kvlane route` before eight engines that take the replay's times, beside the replay of the same requests.

    python bench/replay/live.py KVLANE LIVE TRACE [--minutes N] [--load SHARE] [--out FOLDER]

KVLANE is the program, LIVE is target/release/examples/live (`cargo build --release -p kvlane-fleet --example live`),
TRACE Mooncake's conversation trace. All policies at once, each with engines, a router and clients of its own; nothing
else should run. Writes live.json.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from kvlane.bench import report  # noqa: E402

POLICIES = ("round-robin", "least-work", "least-delay")
NODES = 8
TTFT_S, TPOT_S = 2.0, 0.05
GOAL = 0.10


def cut(trace: Path, into: Path, minutes: float, speed: float) -> list[dict[str, Any]]:
    """The requests of the first minutes, at this speed."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    rows = [row for row in rows if row["timestamp"] / speed <= minutes * 60e3]
    into.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def replay(program: str, trace: Path, folder: Path, file: str) -> dict[str, Any]:
    """A report of `kvlane replay`."""
    route = folder / "fleet.toml"
    route.write_text(file)
    done = subprocess.run(
        [program, "replay", str(trace), "--route", str(route), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def wait_for(port: int) -> None:
    """Until somebody listens there."""
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nobody listens at port {port}")


def wait_for_engines(admin: str) -> None:
    """Until a router has found all of them ready."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://{admin}/health") as page:
                if json.load(page)["nodes_ready"] == NODES:
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"the router with its pages at {admin} does not find its engines ready")


def summary(rows: list[dict[str, Any]], served: list[list[float] | None]) -> dict[str, float]:
    """As the replay's."""
    within, first_s = 0, []
    for row, one in zip(rows, served, strict=True):
        if one is None:
            continue
        first, last = one
        behind = max(1, row["output_length"]) - 1
        first_s.append(first)
        within += first <= TTFT_S and (behind == 0 or (last - first) / behind <= TPOT_S)
    return {
        "ttft_p50_ms": statistics.median(first_s) * 1e3,
        "ttft_p99_ms": sorted(first_s)[int(len(first_s) * 0.99)] * 1e3,
        "within_limits_percent": 100 * within / len(rows),
        "lost": len(rows) - len(first_s),
    }


def live(program: str, engines: str, trace: Path, speed: float, folder: Path) -> dict[str, dict[str, Any]]:
    """The times that clients saw with each policy."""
    asking: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        for number, policy in enumerate(POLICIES):
            base = 21000 + 100 * number
            start(engines, "engines", str(base), str(NODES))
            workers = [word for at in range(NODES) for word in ("--worker", f"http://127.0.0.1:{base + at}")]
            wait_for(base + NODES - 1)
            admin = f"127.0.0.1:{base + 51}"
            listen = ("--listen", f"127.0.0.1:{base + 50}", "--admin", admin, "--socket", "off")
            start(program, "route", *listen, "--policy", policy, "--log", "warn", *workers)
            wait_for(base + 50)
            wait_for_engines(admin)
        for number, policy in enumerate(POLICIES):
            out = folder / f"{policy}.json"
            url = f"http://127.0.0.1:{21050 + 100 * number}"
            asking[policy] = (start(engines, "ask", url, str(trace), str(speed), str(out)), out)
        for policy, (process, _) in asking.items():
            if process.wait() != 0:
                raise SystemExit(f"the clients of {policy} failed")
        return {policy: json.loads(out.read_text()) for policy, (_, out) in asking.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", metavar="KVLANE")
    parser.add_argument("engines", metavar="LIVE")
    parser.add_argument("trace", metavar="TRACE", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0, help="of requests (default %(default)s)")
    parser.add_argument(
        "--load", type=float, default=0.8, help="share of what they can serve (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    names = ", ".join(f'"{policy}"' for policy in POLICIES)
    with tempfile.TemporaryDirectory() as name, report.CpuWatch() as watch:
        folder = Path(name)
        whole = replay(arguments.program, arguments.trace, folder, 'policies = ["random"]\nloads = [0.1]\n')
        speed = arguments.load * whole["capacity_requests_per_second"] / whole["recorded_requests_per_second"]
        trace = folder / "trace.jsonl"
        rows = cut(arguments.trace, trace, arguments.minutes, speed)
        simulated = replay(arguments.program, trace, folder, f"policies = [{names}]\nspeeds = [{speed}]\n")
        seen = live(arguments.program, arguments.engines, trace, speed, folder)
    found: dict[str, Any] = {"requests": len(rows), "speed": speed, "minutes": arguments.minutes}
    found["policies"] = {}
    for result in simulated["results"]:
        policy = result["policy"]
        real = summary(rows, seen[policy]["served"])
        keys = ("ttft_p50_ms", "within_limits_percent")
        apart = {key: abs(real[key] / result[key] - 1) for key in keys}
        simulated_one = {key: result[key] for key in real}
        found["policies"][policy] = {"replay": simulated_one, "real": real, "apart": apart}
        print(policy, "replay", simulated_one, "real", real, "apart", apart)
    found["sent_late_at_most_s"] = max(each["sent_late_at_most_s"] for each in seen.values())
    found["reached"] = all(
        value <= GOAL for each in found["policies"].values() for value in each["apart"].values()
    )
    found |= {"machine": report.machine_facts() | {"cpu_use": watch.facts}, "commit": report.commit()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "live.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
