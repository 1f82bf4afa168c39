"""The cost of a router: `kvlane route` and vllm-router before the same fake engines, in turns.

    pip install vllm-router==0.1.17                                  # in any environment
    cargo build --release -p kvlane-router --example relay           # the least that a router can cost
    python bench/route_peers.py --vllm-router PATH/TO/vllm-router --relay target/release/examples/relay
    python bench/route_peers.py --rounds 0 --streams 10000           # two minutes: many streams at once

The engines take no time of their own, so what is measured is the router: its CPU time for each request, from /proc,
and what it adds to the median latency of one client. Client, routers and engines share the machine's cores; CPU time
is not wall time, so that matters little. With --relay, a program on the same runtime stands beside them that passes
bytes on and looks at none: what a router costs above that is its own work. Rounds are interleaved, figures are medians
over them; five take four minutes on two cores. With --streams, that many streams with a chunk a second each, with and
without `kvlane route` (route_streams.py). Writes route_peers.json and route_peers.png; status 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import route_streams

from kvlane.bench import drawing, report
from kvlane.bench.drawing import Bar, Panel, Picture
from kvlane.testing.fake_engine import FakeEngine

START_S = 60.0
RELAY = "bare relay"
ROUTERS = ("kvlane", "vllm-router", RELAY)
PREFIXES = 64
TICKS = os.sysconf("SC_CLK_TCK")
STREAM_CHUNKS = 45
STREAM_ADDED_MS = 20.0
STREAM_MEMORY_MB = 400.0


@dataclass(frozen=True)
class Case:
    """One kind of load, and what is wanted of it."""

    name: str
    routers: str
    """Which of the routers' configurations serve it."""
    goal: float
    """kvlane's figure as a share of vllm-router's; of the latency case: milliseconds."""
    body_bytes: int = 2048
    is_stream: bool = True
    clients: int = 16
    requests: int = 2000
    chunks: int = 16
    unit: str = "us of CPU a request"


CASES = (
    Case("round robin, 2 kB, 16 chunks", "round robin, streamed", 0.35),
    Case("round robin, 2 kB, not streamed", "round robin", 0.67, is_stream=False, requests=4000),
    Case("by prefix, 2 kB, 16 chunks", "by prefix, streamed", 0.25),
    Case(
        "by prefix, 32 kB, not streamed", "by prefix", 0.35, body_bytes=32768, is_stream=False, requests=1000
    ),
    Case("prefill then decode, 2 kB", "pairs", 0.5, is_stream=False),
    Case(
        "a paced chunk (10 ms)",
        "paced",
        0.5,
        clients=64,
        requests=192,
        chunks=100,
        unit="us of CPU a chunk",
    ),
)
LATENCY = Case(
    "added median, one client", "round robin", 0.10, is_stream=False, clients=1, requests=1000, unit="ms"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-router", default=shutil.which("vllm-router"), metavar="PROGRAM")
    parser.add_argument("--kvlane", default=shutil.which("kvlane"), metavar="PROGRAM")
    parser.add_argument("--relay", metavar="PROGRAM", help="crates/router/examples/relay.rs, compiled")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/route_peers"))
    parser.add_argument(
        "--streams", type=int, default=0, help="at once, beside the rounds; default %(default)s"
    )
    parser.add_argument(
        "--threads", type=int, help="of kvlane's, with --streams; default: as kvlane route chooses"
    )
    settings = parser.parse_args()
    if not settings.kvlane or (settings.rounds and not settings.vllm_router):
        parser.error("give --vllm-router and --kvlane, or have both in PATH")
    settings.out.mkdir(parents=True, exist_ok=True)
    values: dict[str, dict[str, list[float]]] = {}
    streams: dict[str, Any] = {}
    with report.CpuWatch() as watch:
        if settings.rounds:
            measure(settings, values)
        if settings.streams:
            streams = many_streams(settings.kvlane, settings.streams, settings.threads)
    result = {
        "benchmark": "routers",
        "date": time.strftime("%Y-%m-%d"),
        "settings": {"rounds": settings.rounds, "streams": settings.streams},
        "versions": versions(settings),
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        "values": values,
        "compared": compared(values),
        "streams": streams,
    }
    report.write_json(settings.out / "route_peers.json", result)
    if values:
        drawing.save(picture(result), settings.out / "route_peers.png")
        print(table(result["compared"]))
    if streams:
        print(streams_table(streams))
    print(f"written: {settings.out}/route_peers.json")
    holds = [row["holds"] for row in result["compared"]] + [streams[key] for key in streams if key == "holds"]
    return 0 if all(holds) else 1


def measure(settings: argparse.Namespace, values: dict[str, dict[str, list[float]]]) -> None:
    """All cases, in turns."""
    with routers(settings.kvlane, settings.vllm_router, settings.relay) as started:
        for number in range(settings.rounds):
            for case in CASES:
                names = [name for name in ROUTERS if (name, case.routers) in started.running]
                for name in names[:: 1 if number % 2 == 0 else -1]:
                    value = cpu_of(case, started.router(name, case.routers))
                    report.say(f"[{number + 1}/{settings.rounds}] {case.name}: {name} {value:.1f}")
                    values.setdefault(case.name, {}).setdefault(name, []).append(value)
            for name in ("direct", *ROUTERS):
                if name != "direct" and (name, LATENCY.routers) not in started.running:
                    continue
                value = latency_of(started, name)
                report.say(f"[{number + 1}/{settings.rounds}] median of one client: {name} {value:.3f} ms")
                values.setdefault(LATENCY.name, {}).setdefault(name, []).append(value)


def many_streams(kvlane: str, streams: int, threads: int | None) -> dict[str, Any]:
    """Delays of chunks with the router and without it, what was lost, and the router's memory."""
    route_streams.raise_descriptor_limit(streams)
    with route_streams.engine(streams) as addresses, ExitStack() as stack:
        direct = route_streams.measured(addresses[0], streams, STREAM_CHUNKS)
        report.say(f"{streams} streams without a router: {direct}")
        if direct["lost_streams"]:
            raise SystemExit(
                f"without a router {direct['lost_streams']} of {streams} streams were not served in time either: this "
                "machine is too busy for that many, so nothing can be said of a router"
            )
        started = Started()
        named = [word for address in addresses for word in ("--worker", f"http://{address}")]
        command = [
            kvlane,
            "route",
            "--policy",
            "round-robin",
            "--max-connections",
            str(streams + 100),
            *([] if threads is None else ["--threads", str(threads)]),
            *named,
        ]
        start(stack, started, ("kvlane", "streams"), command)
        router = started.router("kvlane", "streams")
        before = cpu_seconds(router.pid)
        ours = route_streams.measured(router.address, streams, STREAM_CHUNKS)
        report.say(f"{streams} streams through kvlane: {ours}")
        cpu = cpu_seconds(router.pid) - before
        memory = route_streams.memory_mb(router.pid)
    added = ours["delay_ms"]["p99"] - direct["delay_ms"]["p99"]
    return {
        "direct": direct,
        "kvlane": ours,
        "added_p99_ms": added,
        "memory_mb": memory,
        "threads": threads,
        "cpu_us_a_chunk": cpu * 1e6 / (streams * STREAM_CHUNKS),
        "goals": {"lost": 0, "added_p99_ms": STREAM_ADDED_MS, "memory_mb": STREAM_MEMORY_MB},
        "holds": ours["lost_streams"] == ours["lost_chunks"] == 0
        and added <= STREAM_ADDED_MS
        and memory <= STREAM_MEMORY_MB,
    }


def streams_table(streams: dict[str, Any]) -> str:
    lines = [f"{'streams':12} {'lost':>6} {'p50 ms':>8} {'p99 ms':>8} {'p99.9 ms':>9}"]
    for name in ("direct", "kvlane"):
        row, delay = streams[name], streams[name]["delay_ms"]
        lines.append(
            f"{name:12} {row['lost_streams']:>6} {delay['p50']:>8.2f} {delay['p99']:>8.2f} {delay['p99.9']:>9.2f}"
        )
    lines.append(
        f"p99 +{streams['added_p99_ms']:.2f} ms (goal +{STREAM_ADDED_MS:.0f}), {streams['memory_mb']:.0f} MB (goal "
        f"{STREAM_MEMORY_MB:.0f}), {streams['cpu_us_a_chunk']:.1f} us of CPU a chunk"
        f"{'' if streams['holds'] else ': missed'}"
    )
    return "\n".join(lines)


def compared(values: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians of each case, and whether its goal holds."""
    rows = []
    for case in (*CASES, LATENCY):
        if case.name not in values:
            continue
        medians = {name: statistics.median(each) for name, each in values[case.name].items()}
        if case is LATENCY:
            direct = medians.pop("direct")
            medians = {name: median - direct for name, median in medians.items()}
            ours, theirs = medians["kvlane"], medians["vllm-router"]
            holds = ours <= case.goal
        else:
            ours, theirs = medians["kvlane"], medians["vllm-router"]
            holds = ours <= case.goal * theirs
        rows.append(
            {
                "case": case.name,
                "unit": case.unit,
                **medians,
                "share": ours / theirs,
                "goal": case.goal,
                "holds": holds,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'case':34} {'kvlane':>9} {'vllm-router':>12} {RELAY:>12} {'share':>6} {'goal':>6}"]
    for row in rows:
        digits = 3 if row["unit"] == "ms" else 1
        relay = f"{row[RELAY]:.{digits}f}" if RELAY in row else ""
        lines.append(
            f"{row['case']:34} {row['kvlane']:>9.{digits}f} {row['vllm-router']:>12.{digits}f} {relay:>12} "
            f"{row['share']:>6.2f} {row['goal']:>6.2f} {'' if row['holds'] else 'missed'} {row['unit']}"
        )
    return "\n".join(lines)


BARS = (("vllm-router", drawing.COLOURS[7]), ("kvlane", drawing.COLOURS[0]), (RELAY, drawing.COLOURS[3]))


def picture(result: dict[str, Any]) -> Picture:
    """Each case with vllm-router as 1."""
    rows = [row for row in result["compared"] if row["unit"] != "ms"]
    panels = tuple(
        Panel(
            row["case"],
            tuple(
                Bar(name, row[name] / row["vllm-router"], f"{row[name]:.1f} {row['unit']}", colour)
                for name, colour in BARS
                if name in row
            ),
            row["goal"],
        )
        for row in rows
    )
    about = f"two fake engines that take no time; {result['versions']['vllm-router']}; {result['date']}"
    return Picture("CPU that a router takes; the line is the goal", about, panels)


def versions(settings: argparse.Namespace) -> dict[str, str]:
    return {
        "kvlane": kvlane_version(settings.kvlane),
        "vllm-router": package_beside(settings.vllm_router) if settings.rounds else "not run",
    }


def kvlane_version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.removeprefix("kvlane ").strip()


def package_beside(program: str) -> str:
    """The version of vllm-router in the environment that the program is of: it does not tell its version itself."""
    ask = "import importlib.metadata as m; print('vllm-router', m.version('vllm-router'))"
    python = Path(program).with_name("python")
    command = [str(python), "-c", ask]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


@dataclass
class Process:
    """A running router."""

    pid: int
    address: str


@dataclass
class Started:
    """All that runs."""

    engines: dict[str, list[FakeEngine]] = field(default_factory=dict)
    running: dict[tuple[str, str], Process] = field(default_factory=dict)

    def router(self, name: str, configuration: str) -> Process:
        return self.running[name, configuration]


@contextmanager
def routers(kvlane: str, vllm_router: str, relay: str | None) -> Iterator[Started]:
    """Each router in each configuration, before engines of their kind."""
    with ExitStack() as stack:
        started = Started()
        kinds = {
            "at once": [],
            # Else the engine writes all chunks at once, and a router sees them as one.
            "streamed": ["--itl-ms", "1"],
            "paced": ["--itl-ms", "10"],
            "pairs": ["--pairs", "nixl"],
        }
        for kind, flags in kinds.items():
            common = ["--max-num-seqs", "4096", "--cache-blocks", "100000", *flags]
            started.engines[kind] = [stack.enter_context(FakeEngine(*common)) for _ in range(2)]
        urls = {kind: [engine.url for engine in engines] for kind, engines in started.engines.items()}
        for configuration, kind, ours, theirs in (
            ("round robin", "at once", "round-robin", "round_robin"),
            ("round robin, streamed", "streamed", "round-robin", "round_robin"),
            ("by prefix", "at once", "least-work", "cache_aware"),
            ("by prefix, streamed", "streamed", "least-work", "cache_aware"),
            ("paced", "paced", "round-robin", "round_robin"),
        ):
            named = [word for url in urls[kind] for word in ("--worker", url)]
            start(stack, started, ("kvlane", configuration), [kvlane, "route", "--policy", ours, *named])
            command = [vllm_router, "--worker-urls", *urls[kind], "--policy", theirs]
            start(stack, started, ("vllm-router", configuration), command)
            # It looks at no prefix.
            if relay and configuration.startswith(("round robin", "paced")):
                start(stack, started, (RELAY, configuration), [relay], urls[kind])
        prefill, decode = urls["pairs"]
        command = [kvlane, "route", "--prefill", prefill, "--decode", decode, "--policy", "round-robin"]
        # All prompts are prefilled apart, as vllm-router does.
        start(stack, started, ("kvlane", "pairs"), [*command, "--short-prompt", "0"])
        command = [vllm_router, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        start(stack, started, ("vllm-router", "pairs"), [*command, "--policy", "round_robin"])
        yield started


def start(
    stack: ExitStack,
    started: Started,
    name: tuple[str, str],
    command: list[str],
    engines: list[str] | None = None,
) -> None:
    port = free_port()
    if engines is not None:
        command = [*command, f"127.0.0.1:{port}", *(engine.removeprefix("http://") for engine in engines)]
    elif name[0] == "kvlane":
        command = [*command, "--listen", f"127.0.0.1:{port}", "--admin", "off", "--log", "warn"]
        if name[1] != "streams":
            # As the relay has: the cost of a request, not how many are served at once.
            command += ["--threads", "1"]
    else:
        command = [*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(end, process)
    address = f"127.0.0.1:{port}"
    body = request("", 2048, is_stream=False, chunks=1)
    deadline = time.monotonic() + START_S
    while True:
        try:
            asyncio.run(load(address, [body], 1, 1))
            break
        except (OSError, Failed):
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.2)
    started.running[name] = Process(process.pid, address)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_of(case: Case, router: Process) -> float:
    """Microseconds of the router's CPU time, for each request or each chunk."""
    bodies = [
        request(f"{number} ", case.body_bytes, case.is_stream, case.chunks) for number in range(PREFIXES)
    ]
    asyncio.run(load(router.address, bodies, case.clients, min(case.requests, 4 * PREFIXES)))
    before = cpu_seconds(router.pid)
    asyncio.run(load(router.address, bodies, case.clients, case.requests))
    spent = cpu_seconds(router.pid) - before
    return spent * 1e6 / (case.requests * (case.chunks if "chunk" in case.unit else 1))


def latency_of(started: Started, name: str) -> float:
    """Milliseconds from a request to the end of its answer: the median of one client over one connection."""
    address = (
        started.engines["at once"][0].address
        if name == "direct"
        else started.router(name, LATENCY.routers).address
    )
    bodies = [request("", LATENCY.body_bytes, LATENCY.is_stream, LATENCY.chunks)]
    times = asyncio.run(load(address, bodies, LATENCY.clients, LATENCY.requests))
    return statistics.median(times) * 1e3


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of all that it has started."""
    seconds, pids = 0.0, [pid]
    for each in pids:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(") ")[2].split()
            children = Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except OSError:
            continue
        seconds += (int(fields[11]) + int(fields[12])) / TICKS
        pids += [int(child) for child in children]
    return seconds


def request(name: str, body_bytes: int, is_stream: bool, chunks: int) -> bytes:
    prompt = (name + "The lanes of a harbour, seen from above. ") * (body_bytes // 40 + 1)
    body = json.dumps(
        {"model": "fake", "prompt": prompt[:body_bytes], "max_tokens": chunks, "stream": is_stream}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Failed(Exception):
    """An answer that is no 200."""


class _Client(asyncio.Protocol):
    """Sends one request after the other over one connection."""

    def __init__(self, bodies: Iterator[bytes], done: asyncio.Future[None], times: list[float]) -> None:
        self._bodies, self._done, self._times = bodies, done, times
        self._buffer = b""
        self._head = -1

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def _next(self) -> None:
        body = next(self._bodies, None)
        if body is None:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
        self._buffer, self._head = b"", -1
        self._started = time.perf_counter()
        self._transport.write(body)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._head < 0:
            self._head = self._buffer.find(b"\r\n\r\n")
            if self._head < 0:
                return
            head = self._buffer[: self._head].lower()
            if not head.startswith(b"http/1.1 200"):
                self._fail(self._buffer.decode(errors="replace"))
                return
            _, found, length = head.partition(b"content-length: ")
            self._length = int(length.split(b"\r\n")[0]) if found else None
        if self._length is None:
            is_over = self._buffer.endswith(b"0\r\n\r\n")
        else:
            is_over = len(self._buffer) >= self._head + 4 + self._length
        if is_over:
            self._times.append(time.perf_counter() - self._started)
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection ended: {exc}")

    def _fail(self, why: str) -> None:
        if not self._done.done():
            self._done.set_exception(Failed(why))


async def load(address: str, bodies: list[bytes], clients: int, requests: int) -> list[float]:
    """Seconds that each of the requests took."""
    host, _, port = address.partition(":")
    loop = asyncio.get_running_loop()
    times: list[float] = []
    wanted = iter([bodies[number % len(bodies)] for number in range(requests)])
    ends = []
    for _ in range(clients):
        done: asyncio.Future[None] = loop.create_future()
        ends.append(done)
        await loop.create_connection(lambda done=done: _Client(wanted, done, times), host, int(port))
    await asyncio.gather(*ends)
    return times


if __name__ == "__main__":
    sys.exit(main())
