"""A day's work of a daemon and a router in an hour: memory, descriptors and threads stay flat. `make soak-day`.

```text
  3 engines, killed and restarted --> kvlane serve  <-- kvlane record, live page, /metrics every 5 s
  3 clients, some of which leave  --> kvlane route  <-- kvlane route record, live page, /metrics every 5 s
                                          |  '--> 2 fake engines, killed and restarted
                        both --> an OpenTelemetry collector
```
An hour has about as many requests as a day at four requests a second. Memory is sampled under load. Descriptors and
threads are compared at quiet moments, at which all loads wait, the same engines are connected, and both recordings run.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from collector import Collector, collecting
from day_clients import CLIENTS, Client, EngineKills, ready_nodes
from day_engines import METHODS, EngineLives, Namespaces
from day_figures import WARM_UP, Comparison, Program, Sampler, compare, document
from day_loads import WITHOUT, Loads, has
from day_readers import FORGOTTEN_S, LivePages, Rotation, open_pages
from ports import free_port
from processes import KVLANE, PATIENCE, Daemon, until
from routed import Router

from kvlane.testing.fake_engine import FakeEngine

MINUTES = float(os.environ.get("KVLANE_TEST_MINUTES", "60"))
OUT = Path(os.environ.get("KVLANE_TEST_OUT", Path(__file__).parents[2] / "out"))
# A file of each recording, and a quiet moment, for each of these. An hour has 24.
CYCLE_S = min(150.0, max(60.0, 60 * MINUTES / 24))


class Day:
    """All that runs, and what the test does meanwhile."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
        self.loads = Loads(seed)
        self.collector: Collector = stack.enter_context(collecting(counts_only=True))
        otlp = ("--otlp-endpoint", self.collector.endpoint) if has("traces") else ()
        ssd = ("--ssd", f"{folder / 'blocks'}:64mib") if has("ssd") else ()
        self.daemon = Daemon(
            folder,
            *("--policy", "auto", *ssd, *otlp),
            # The default windows fill for a day, a sketch of 12 KiB a slot and namespace. These are full in 5 minutes.
            *("--hit-windows", "5m"),
            pool="8mib",
        )
        stack.callback(self.daemon.kill)
        self.daemon.start()
        flags = [["--port", str(free_port()), "--itl-ms", "2"] for _ in range(2)]
        self.engines = [FakeEngine(*each).__enter__() for each in flags]
        stack.callback(lambda: [engine.__exit__() for engine in self.engines])
        socket = folder / "route.sock"
        workers = [word for engine in self.engines for word in ("--worker", engine.url)]
        self.router = stack.enter_context(
            Router(*workers, "--socket", str(socket), *otlp, nodes=2, log="info")
        )
        self.programs = [
            Program("daemon", self.daemon.pid, self.daemon.http_at),
            Program("router", self.router.process.pid, self.router.admin),
        ]
        addresses = {program.name: program.address for program in self.programs if has("pages")}
        self.pages: LivePages = stack.enter_context(open_pages(addresses))
        self.rotation = Rotation(self.daemon, socket, folder)
        stack.callback(self.rotation.kill)
        self.polls = self.pages.polls()
        stack.callback(self.loads.end)
        namespaces = Namespaces(self.daemon, self.loads)
        for number in range(len(METHODS)):
            self.loads.start(EngineLives(self.daemon, number, namespaces, self.loads).run)
        for number in range(CLIENTS if has("clients") else 0):
            self.loads.start(Client(self.router, number, self.loads).run)
        self.loads.start(EngineKills(self.router, flags, self.engines, self.loads).run)
        self.sampler = Sampler(self.programs)
        stack.callback(self.sampler.stop)

    def go_on(self, until_age: float) -> None:
        """Waits for the loads, of which none may fail."""
        while self.sampler.age() < until_age:
            self.check()
            time.sleep(0.2)
        self.check()

    def check(self) -> None:
        failures = self.loads.failures + self.sampler.failures
        assert not failures, "\n".join(failures[:5])
        assert self.daemon.process is not None and self.daemon.process.poll() is None, self.daemon.log.text()
        assert self.router.process.poll() is None, "\n".join(self.router.lines)

    def cycle(self, ends: float, seconds: float) -> None:
        """Records until `ends`, looks at a quiet moment, and has the recordings forgotten."""
        self.rotation.begin()
        self.go_on(ends - PATIENCE / 2)
        with self.loads.gate.closed():
            self._wait_until_quiet()
            for watched in self.sampler.watched:
                watched.look(self.sampler.age(), self.sampler.age() >= WARM_UP * seconds)
        self.check()
        polls = self.pages.polls()
        assert all(polls[name] > before for name, before in self.polls.items()), f"{self.polls} {polls}"
        self.polls = polls
        self.rotation.end()
        self.go_on(self.sampler.age() + FORGOTTEN_S)

    def _wait_until_quiet(self) -> None:
        busy: list[str] = []

        def is_quiet() -> bool:
            busy[:] = self._busy()
            return not busy

        try:
            until("daemon and router are quiet", is_quiet)
        except AssertionError as error:
            raise AssertionError(f"{error}: {', '.join(busy)}") from None

    def _busy(self) -> list[str]:
        """What daemon and router still do, with nothing to do."""
        daemon, router = (program.metrics() for program in self.programs)
        wanted = {"scheduler": len(METHODS), "worker": len(METHODS), "tool": int(has("recordings"))}
        sessions = {role: daemon[f'kvlane_sessions{{role="{role}"}}'] for role in wanted}
        at_rest = ("kvlane_limbo_sessions", "kvlane_leased_blocks", "kvlane_claimed_blocks")
        busy = [
            f"{sessions[role]:.0f} sessions of a {role}" for role in wanted if sessions[role] != wanted[role]
        ]
        busy += [
            f"{name} {daemon[name]:.0f}"
            for name in (*at_rest, "kvlane_otlp_waiting_spans")
            if daemon.get(name)
        ]
        if router["kvlane_route_connections"]:
            busy.append(f"{router['kvlane_route_connections']:.0f} connections of the router's clients")
        if (ready := ready_nodes(self.router)) != len(self.engines):
            busy.append(f"{ready} engines ready for requests")
        return busy

    def totals(self) -> dict[str, object]:
        """What daemon and router counted."""
        daemon, router = (program.metrics() for program in self.programs)
        names = (
            *("kvlane_sealed_blocks_total", "kvlane_evicted_blocks_total", "kvlane_ssd_written_blocks_total"),
            *(
                "kvlane_ssd_fetched_blocks_total",
                "kvlane_ssd_dropped_blocks_total",
                "kvlane_policy_switches_total",
            ),
            *("kvlane_otlp_exported_spans_total", "kvlane_otlp_dropped_spans_total"),
        )
        otlp = {f"router's {name}": router[name] for name in names if name in router}
        return {**{name: daemon[name] for name in names if name in daemon}, **otlp}


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 900)
def test_a_day_leaves_memory_descriptors_and_threads_flat() -> None:
    seed = int(os.environ.get("KVLANE_TEST_SEED", time.time_ns() // 1000))
    version = subprocess.run([KVLANE, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    seconds = 60 * MINUTES
    cycles = max(4, round(seconds / CYCLE_S))
    print(f"{cycles} cycles of {seconds / cycles:.0f} s with {version}, KVLANE_TEST_SEED={seed}", flush=True)
    if WITHOUT:
        print(f"without {', '.join(sorted(WITHOUT))}")
    with ExitStack() as stack:
        day = Day(stack, seed)
        try:
            for number in range(1, cycles + 1):
                day.cycle(number * seconds / cycles, seconds)
                print(_progress(day), flush=True)
            took = day.sampler.age()
            done = {
                "minutes": took / 60,
                "program": version,
                "live pages": day.pages.how,
                "polls of the pages": day.polls,
                "scrapes": day.sampler.scrapes,
                "recordings": day.rotation.files,
                "records": day.rotation.records,
                "loads": day.loads.counts(),
                "collector": dict(day.collector.counts),
                "counters": day.totals(),
            }
        finally:
            OUT.mkdir(parents=True, exist_ok=True)
            programs = {watched.program.name: document(watched) for watched in day.sampler.watched}
            _write({"seed": seed, "programs": programs})
        compared = [each for watched in day.sampler.watched for each in compare(watched, took)]
    _report(done, compared)
    _write({"seed": seed, "done": done, "compared": [vars(each) for each in compared], "programs": programs})
    assert done["loads"]["engine_loads"] and all(day.rotation.records.values()), done
    if not WITHOUT:
        assert day.collector.counts["kvlane.route"] and day.collector.counts["kvlane.lookup"], done
    grows = [each.shown() for each in compared if not each.is_flat]
    assert not grows, "\n".join(grows)


def _progress(day: Day) -> str:
    figures = []
    for watched in day.sampler.watched:
        sample, quiet = watched.samples[-1], watched.quiet[-1]
        memory = f"{sample.anonymous / (1 << 20):.1f} MiB"
        figures.append(f"{watched.program.name} {memory}, {quiet.descriptors} fds, {quiet.threads} threads")
    return f"{day.sampler.age():6.0f} s  {'; '.join(figures)}"


def _report(done: dict[str, object], compared: list[Comparison]) -> None:
    print("\n==> the day")
    for name, value in done.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for row, number in rows:
            shown = f"{number:,.0f}" if isinstance(number, (int, float)) and row else str(number)
            print(f"{name:20} {row:42} {shown:>14}")
    print(f"\n{'==> medians':42} {'1st quarter':>12} {'last quarter':>12} {'change':>10}")
    for each in compared:
        print(each.shown())


def _write(what: dict[str, object]) -> None:
    (OUT / "soak-day.json").write_text(json.dumps(what, indent=1) + "\n")
