"""What the live page costs: its bytes and first paint from a cold cache, and the daemon's CPU while browsers show it.

    python bench/live_page/cost.py --out out/live_page            # 16 minutes; needs Chromium: scripts/browser.py

Twice a browser with a cold cache loads the page of a daemon: right after its start, and once it has ten minutes of
samples. Meanwhile and afterwards the page is open in three browsers, and closed again, by turns: while three models get
requests, and while nothing happens. The same is done with a router before a thousand engines. Writes live-page.json and
live-page.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from playwright.sync_api import Browser
from programs import Program, chromium, daemon, router, traffic

from kvlane.bench import report
from kvlane.bench.daemon import cpu_seconds
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.processes import beside_python

SAMPLES_MAX = 600
# Notes when the page shows its first figures: the state then names the version.
WATCH = """
new MutationObserver(() => {
  const state = document.getElementById('state');
  if (window.shownAt === undefined && state && state.textContent.startsWith('kvlane')) {
    window.shownAt = performance.now();
  }
}).observe(document, { childList: true, subtree: true, characterData: true });
"""
READ = """() => {
  const bytes = (kind) => performance.getEntriesByType(kind).reduce((sum, each) => sum + each.transferSize, 0);
  return {
    paint_ms: performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null,
    figures_ms: window.shownAt ?? null,
    page_bytes: bytes('navigation'),
    figures_bytes: bytes('resource'),
  };
}"""


@dataclass(frozen=True)
class Load:
    """A page that was loaded once. Times count from the start of the navigation."""

    paint_ms: float
    figures_ms: float
    page_bytes: int
    figures_bytes: int


@dataclass(frozen=True)
class Turn:
    """A while with the page closed, and as long with it open: a program's CPU, in cores."""

    is_closed: float
    is_open: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", help="the kvlane to measure (default: the one beside this Python)")
    parser.add_argument("--loads", type=int, default=30, help="of the page, each time (default %(default)s)")
    parser.add_argument(
        "--turns", type=int, default=5, help="closed and open, each time (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of half a turn (default %(default)s)")
    parser.add_argument("--browsers", type=int, default=3, help="default %(default)s")
    parser.add_argument("--engines", type=int, default=1000, help="of the router (default %(default)s)")
    parser.add_argument("--per-second", type=float, default=20.0, help="requests (default %(default)s)")
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLES_MAX,
        help="to wait for before the second loads (default %(default)s)",
    )
    add_out(parser)
    settings = parser.parse_args()
    program = settings.program or beside_python("kvlane")
    loads: dict[str, list[Load]] = {}
    turns: dict[str, list[Turn]] = {}
    with report.CpuWatch() as watch, chromium() as browser:
        with daemon(program) as shown:
            loads["new"] = load_often(browser, shown, settings.loads)
            with traffic(shown.address, settings.per_second):
                turns["busy"] = take_turns(browser, shown, settings)
                wait_for_samples(shown, settings.samples)
            loads["full"] = load_often(browser, shown, settings.loads)
            turns["idle"] = take_turns(browser, shown, settings)
        with router(program, settings.engines) as shown:
            loads["router"] = load_often(browser, shown, settings.loads)
            turns["router"] = take_turns(browser, shown, settings)
    details = {
        "loads": {name: [asdict(each) for each in found] for name, found in loads.items()},
        "turns": {name: [asdict(each) for each in found] for name, found in turns.items()},
        "browser": browser.version,
    }
    note = (
        f"{settings.loads} loads, each with a cold cache; {settings.turns} turns of {settings.seconds:g} s closed and "
        f"as long open in {settings.browsers} browsers, medians. Loopback; nothing is compressed. Full: after "
        f"{settings.samples} s with {settings.per_second:g} requests of 16 blocks a second. Router: {settings.engines} "
        f"engines."
    )
    return publish(settings, Outcome("live-page", list(figures(loads, turns)), details, note), watch)


def figures(loads: dict[str, list[Load]], turns: dict[str, list[Turn]]) -> Iterator[Figure]:
    """The figures, those with a goal first."""
    both = [*loads["new"], *loads["full"]]
    paint = report.summary(each.paint_ms for each in both)
    yield Figure(
        "bytes until the first paint", max(each.page_bytes for each in both) / 1e3, "kB", at_most=100
    )
    yield Figure("first paint, p50", paint["p50"], "ms", at_most=200)
    yield Figure("first paint, p95", paint["p95"], "ms", at_most=200)
    yield Figure("daemon, open in browsers less closed", more(turns["idle"]), "cores", at_most=0.01)
    yield Figure("daemon, the same beside requests", more(turns["busy"]), "cores", at_most=0.01)
    for name, what in (("new", "new daemon"), ("full", "full history"), ("router", "router")):
        yield Figure(f"{what}: bytes of the first figures", mean(loads[name], "figures_bytes") / 1e3, "kB")
        yield Figure(f"{what}: first figures shown, p50", median(loads[name], "figures_ms"), "ms")
    yield Figure("router: open in browsers less closed", more(turns["router"]), "cores")
    for name, what in (("idle", "daemon"), ("busy", "daemon beside requests"), ("router", "router")):
        yield Figure(f"{what}, closed", statistics.median(each.is_closed for each in turns[name]), "cores")


def more(turns: list[Turn]) -> float:
    return statistics.median(each.is_open - each.is_closed for each in turns)


def median(loads: list[Load], member: str) -> float:
    return statistics.median(getattr(each, member) for each in loads)


def mean(loads: list[Load], member: str) -> float:
    return statistics.fmean(getattr(each, member) for each in loads)


def load_often(browser: Browser, shown: Program, times: int) -> list[Load]:
    """Loads the page, each time in a context of its own, whose cache is empty. The first one warms the browser up."""
    return [_load(browser, shown) for _ in range(times + 1)][1:]


def _load(browser: Browser, shown: Program) -> Load:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        context.add_init_script(WATCH)
        page = context.new_page()
        page.goto(f"http://{shown.page}/")
        for _ in itertools.count():
            found = page.evaluate(READ)
            if None not in found.values() and found["figures_bytes"]:
                return Load(**found)
            page.wait_for_timeout(50)
        raise AssertionError
    finally:
        context.close()


@contextmanager
def opened(browser: Browser, shown: Program, browsers: int) -> Iterator[None]:
    """The page in so many browsers, each of which has the samples of so far."""
    with ExitStack() as stack:
        for _ in range(browsers):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            stack.callback(context.close)
            page = context.new_page()
            page.goto(f"http://{shown.page}/")
            page.locator("#state", has_text="kvlane").wait_for()
        yield


def take_turns(browser: Browser, shown: Program, settings: argparse.Namespace) -> list[Turn]:
    """The program's CPU, closed and open by turns."""
    found = []
    for number in range(settings.turns):
        is_closed = _cores(shown.pid, settings.seconds)
        with opened(browser, shown, settings.browsers):
            is_open = _cores(shown.pid, settings.seconds)
        found.append(Turn(is_closed, is_open))
        report.say(f"turn {number + 1}: {is_closed:.4f} cores closed, {is_open:.4f} open")
    return found


def _cores(pid: int, seconds: float) -> float:
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def wait_for_samples(shown: Program, samples: int) -> None:
    """Until the program has kept so many."""
    while True:
        with urllib.request.urlopen(f"http://{shown.page}/live") as answer:
            has = json.load(answer)["history"]["next"]
        if has >= samples:
            return
        report.say(f"{has} of {samples} samples")
        time.sleep(min(60, samples - has))


if __name__ == "__main__":
    raise SystemExit(main())
