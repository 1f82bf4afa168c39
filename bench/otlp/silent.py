"""A routed request beside a collector that takes spans and never answers, and without OTLP.

    python bench/otlp/silent.py [--rounds 40] [--requests 250] [--out out/otlp]

Two routers stand before one fake engine. One exports a span of each request and leg to a collector that accepts
connections and answers nothing. A client asks both in turns, a block of requests each, over connections that stay open.
The ratios are medians over the rounds. Memory is the router's own (RssAnon), before the first and after the
last request. Writes silent.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvlane.bench import report
from kvlane.bench.processes import beside_python
from kvlane.testing.fake_engine import FakeEngine

BODY = json.dumps({"model": "fake", "prompt": "of ships and harbours", "max_tokens": 1}).encode()
HEADERS = {
    "content-type": "application/json",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}
GOAL = 1.01
PATIENCE_S = 30.0


@contextmanager
def silent_collector() -> Iterator[int]:
    """Its port. It reads what comes, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


@contextmanager
def router(engine: str, *flags: str) -> Iterator[tuple[str, int]]:
    """The address at which it routes, and its process."""
    command = [beside_python("kvlane"), "route", "--worker", engine, "--socket", "off", "--admin", "off"]
    command += ["--listen", "127.0.0.1:0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address, is_ready = "", False
            for line in process.stderr:
                found = re.search(r"routes at http://([\d.]+:\d+)", line)
                address = found[1] if found else address
                is_ready = is_ready or "node ready" in line
                if address and is_ready:
                    break
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            yield address, process.pid
        finally:
            process.kill()


def ask(connection: http.client.HTTPConnection, requests: int) -> list[float]:
    """Milliseconds of each request."""
    took = []
    for _ in range(requests):
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", BODY, HEADERS)
        answer = connection.getresponse()
        answer.read()
        took.append((time.perf_counter() - start) * 1e3)
        assert answer.status == 200, answer.status
    return took


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def measure(settings: argparse.Namespace) -> dict[str, object]:
    """All rounds."""
    with ExitStack() as stack:
        port = stack.enter_context(silent_collector())
        engine = stack.enter_context(FakeEngine())
        routers = {
            "without": stack.enter_context(router(engine.url)),
            "silent": stack.enter_context(router(engine.url, "--otlp-endpoint", f"http://127.0.0.1:{port}")),
        }
        connections = {
            name: http.client.HTTPConnection(address, timeout=PATIENCE_S)
            for name, (address, _) in routers.items()
        }
        for connection in connections.values():
            ask(connection, settings.requests)
        before = {name: anonymous_bytes(pid) for name, (_, pid) in routers.items()}
        rounds = []
        for number in range(settings.rounds):
            order = list(routers) if number % 2 else list(reversed(routers))
            rounds.append({name: report.summary(ask(connections[name], settings.requests)) for name in order})
        after = {name: anonymous_bytes(pid) for name, (_, pid) in routers.items()}
    ratios = {
        part: statistics.median(each["silent"][part] / each["without"][part] for each in rounds)
        for part in ("p50", "p99")
    }
    return {
        "ratios": {part: round(ratio, 4) for part, ratio in ratios.items()},
        "goal_p99": GOAL,
        "memory_bytes": {name: {"before": before[name], "after": after[name]} for name in routers},
        "spans": 2 * settings.requests * (settings.rounds + 1),
        "rounds_ms": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=40, help="of each router, in turns (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=250, help="in a round (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/otlp"))
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    with report.CpuWatch() as watch:
        found = measure(settings)
    result = {
        "benchmark": "a routed request beside a collector that never answers",
        "settings": {"rounds": settings.rounds, "requests": settings.requests},
        "machine": report.machine_facts() | {"cpu_use": watch.facts},
        **found,
    }
    report.write_json(settings.out / "silent.json", result)
    print(f"silent / without: {found['ratios']}, goal p99 {GOAL}; memory {found['memory_bytes']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
