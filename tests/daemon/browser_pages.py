"""A real Chromium for tests of the live page. It reaches loopback only, and notes what each page asks for and logs.

scripts/browser.py gets Chromium and axe-core. Without them a test fails in CI, and is skipped elsewhere.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from processes import PATIENCE, until

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/browser.py"
# No other name or address is resolved.
CUT_OFF = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
OWN_PATHS = ("/", "/live")
UNREACHED = "net::ERR_"
"""Part of the line that Chromium itself logs for a request that nobody answers."""
GRAVE = ("serious", "critical")
# Chromium hides a tab only behind another one of the same window, which a headless one does not draw.
HIDE = """(isHidden) => {
  const before = asked;
  Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
  return before;
}"""
# Counts the page's questions, in the page, so that a test knows how many it has asked at a moment.
COUNT = """
window.asked = 0;
{
  const really = window.fetch;
  window.fetch = (...given) => { window.asked += 1; return really(...given); };
}
"""
# Makes the second between two questions pass in 50 ms.
HURRY = """
{
  const really = window.setTimeout;
  window.setTimeout = (work, ms, ...more) => really(work, ms === 1000 ? 50 : ms, ...more);
}
"""
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS = {
    "": 1.0,
    "B": 1.0,
    **{f"{prefix}B": size for prefix, size in _PREFIXES.items()},
    "%": 0.01,
    **dict(zip(("µs", "ms", "s", "min", "h", "days"), (1e-6, 1e-3, 1.0, 60.0, 3600.0, 86400.0), strict=True)),
}


def need(what: str) -> Path:
    """Where `chromium` or `axe` is."""
    command = [sys.executable, str(SCRIPT), "--path", what]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(found.stdout.strip()) if found.returncode == 0 else do_without(found.stderr.strip())


def do_without(why: str) -> NoReturn:
    """Fails the test in CI, which has to try the page in a browser; skips it elsewhere."""
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(f"{why}, as root on Debian; elsewhere install Chromium and npm first")
    pytest.fail(f"{why} (without CI in the environment, tests of the live page are skipped)")


@dataclass(frozen=True)
class Card:
    """The texts of a card: its figure, and the line below."""

    value: str
    hint: str

    def parts(self, pattern: str) -> tuple[str, ...]:
        """The groups of a pattern in the line below the figure."""
        found = re.fullmatch(pattern, self.hint)
        assert found is not None, (self.hint, pattern)
        return found.groups()


class LivePage:
    """A page that is open, and everything that it has asked for and logged."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.errors.append(f"page: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda opened: self.requests.append(opened.url))

    @property
    def state(self) -> Locator:
        return self.page.locator("#state")

    @property
    def age(self) -> Locator:
        return self.page.locator("#age")

    def wait_answered(self) -> None:
        """Waits until the page shows figures of a program that answers, and is ready to work."""
        expect(self.state).to_have_text(re.compile("^kvlane [0-9.]+, "))

    def wait_lost(self) -> None:
        """Waits until the page says that nobody answers."""
        expect(self.state).to_have_text(re.compile("^No answer"))
        expect(self.state).to_have_class("lost")

    def wait(self, condition: str) -> None:
        """Waits for a condition of the page's script. Playwright's own way needs eval, which the policy refuses."""
        self.page.evaluate(f"""async () => {{
          const deadline = Date.now() + {PATIENCE * 1000};
          while (!({condition})) {{
            if (Date.now() > deadline) throw new Error('not within {PATIENCE:.0f} s');
            await new Promise((done) => setTimeout(done, 10));
          }}
        }}""")

    def asked(self) -> int:
        """How often the page has asked for figures."""
        return self.page.evaluate("asked")

    def wait_next(self) -> None:
        """Waits until the page shows an answer to a question that it asked after this call."""
        # The page asks again only after it has shown the answer.
        self.wait(f"asked >= {self.asked() + 2}")

    def card(self, label: str) -> Card:
        """The only card of this name."""
        card = self.page.locator(".card", has=self.page.get_by_role("heading", name=label, exact=True))
        return Card(card.locator(".value").inner_text(), card.locator(".hint").inner_text())

    def value(self, label: str) -> Locator:
        """The figure of a card, to wait for."""
        card = self.page.locator(".card", has=self.page.get_by_role("heading", name=label, exact=True))
        return card.locator(".value")

    def chart(self, label: str) -> str:
        """The path of a card's line."""
        card = self.page.locator(".card", has=self.page.get_by_role("heading", name=label, exact=True))
        return card.locator("path.edge").get_attribute("d") or ""

    def rows(self, caption: str) -> list[dict[str, str]]:
        """The rows of a table, by the heads of its columns."""
        read = """table => {
          const texts = (row) => [...row.cells].map((cell) => cell.textContent);
          return [texts(table.tHead.rows[0]), ...[...table.tBodies[0].rows].map(texts)];
        }"""
        head, *rows = (
            self.page.get_by_role("region", name=caption, exact=True).locator("table").evaluate(read)
        )
        return [dict(zip(head, row, strict=True)) for row in rows]

    def headings(self) -> list[str]:
        """The names of the sections."""
        return self.page.locator("h2").all_inner_texts()

    def problems(self) -> list[str]:
        """The problems that the page names."""
        return self.page.locator(".problems li").all_inner_texts()

    def wait_problem(self, words: str | re.Pattern[str]) -> None:
        """Waits until the page names such a problem."""
        expect(self.page.locator(".problems li", has_text=words)).to_have_count(1)

    def wait_no_problem(self) -> None:
        """Waits until the page says that there is none."""
        expect(self.page.locator(".problems + .hint")).to_be_visible()
        assert self.problems() == []

    def samples(self, series: str) -> list[float | None]:
        """A series, as the page's script holds it."""
        return self.page.evaluate(f"[...(series['{series}'] || [])]")

    def hide(self, is_hidden: bool) -> int:
        """Tells the page what a browser does when its tab goes to the back, or comes to the front. Returns how often
        the page had asked for figures until then."""
        return self.page.evaluate(HIDE, is_hidden)

    def answer_instead(self, change: Any) -> None:
        """From now on `change` gets the figures of each answer, and may write other ones into them."""

        def handle(route: Any) -> None:
            answer = route.fetch()
            figures = answer.json()
            change(figures)
            route.fulfill(response=answer, json=figures)

        self.page.route(re.compile(r"/live\?"), handle)

    def width(self) -> float:
        """The width that the page takes, in CSS pixels."""
        return self.page.evaluate("document.documentElement.scrollWidth")

    def columns(self) -> int:
        """How many cards stand side by side, where the most do."""
        count = (
            "all => Math.max(...all.map((e) => getComputedStyle(e).gridTemplateColumns.split(' ').length))"
        )
        return self.page.locator(".cards").evaluate_all(count)

    def grave_findings(self) -> list[str]:
        """The serious and critical findings of axe-core."""
        self.page.evaluate(need("axe").read_text())
        found = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert found["passes"], "axe-core has looked at the page"
        return [
            f"{each['id']}: {node['target']}: {node['failureSummary']}"
            for each in found["violations"]
            if each["impact"] in GRAVE
            for node in each["nodes"]
        ]

    def check(self, tolerated: str | None) -> None:
        """The page has logged nothing, and has asked its own program for its own pages only."""
        logged = [line for line in self.errors if tolerated is None or tolerated not in line]
        assert logged == []
        origin = urlsplit(self.url).netloc
        asked = [urlsplit(url) for url in self.requests]
        foreign = [url.geturl() for url in asked if url.netloc != origin or url.path not in OWN_PATHS]
        assert foreign == []
        assert {url.path for url in asked} == set(OWN_PATHS)


class Chromium:
    """A browser, in which each page starts with an empty cache."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def open(
        self,
        address: str,
        *,
        width: int = 1280,
        is_dark: bool = False,
        tolerated: str | None = None,
        is_checked: bool = True,
        is_hurried: bool = True,
        before: Any = None,
    ) -> Iterator[LivePage]:
        """The live page of the program at this address. At the end of the context it must not have logged anything,
        but for lines that contain `tolerated`, and must have asked its own program only. A page that is not hurried
        asks once a second. `before` gets the page before it is loaded."""
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if is_dark else "light"
        )
        try:
            context.set_default_timeout(PATIENCE * 1000)
            context.add_init_script(COUNT + (HURRY if is_hurried else ""))
            shown = LivePage(context.new_page(), f"http://{address}/")
            if before is not None:
                before(shown)
            shown.page.goto(shown.url)
            yield shown
            if is_checked:
                shown.check(tolerated)
        finally:
            # An answer that `answer_instead` is about to change may be under way.
            context.unroute_all(behavior="ignoreErrors")
            for page in context.pages:
                page.unroute_all(behavior="ignoreErrors")
            context.close()


@contextmanager
def launched() -> Iterator[Chromium]:
    """A Chromium while the context lasts. A module takes one for all of its tests."""
    program = need("chromium")
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CUT_OFF)
        try:
            yield Chromium(browser)
        finally:
            browser.close()


def says(text: str, value: float) -> bool:
    """Whether a text of the page is this number, in its unit and rounded to its last digit: "12.6 MB"."""
    shown, unit = number(text)
    # A little more than half of the last digit, for the rounding of either side.
    return abs(shown - value) <= 0.501 * unit


def number(text: str) -> tuple[float, float]:
    """The number that a text of the page is, and what a step of its last digit is worth."""
    found = re.fullmatch(r"([\d,]+)(\.\d+)? ?([^\d\s]*?)(?:/s)?", text)
    assert found is not None and found[3] in _UNITS, text
    whole, fraction, unit = found[1].replace(",", ""), found[2] or "", _UNITS[found[3]]
    return float(whole + fraction) * unit, unit * 10.0 ** -max(0, len(fraction) - 1)


def answer(address: str, path: str, host: str | None = None) -> tuple[int, dict[str, str], str]:
    """Status, headers and body that a client gets who names this host."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("GET", path, headers={"Host": host or address})
        given = connection.getresponse()
        body = given.read().decode()
        return given.status, {name.lower(): value for name, value in given.getheaders()}, body
    finally:
        connection.close()


def wait_agreement(read: Callable[[], dict[str, tuple[str, float]]]) -> None:
    """Waits until each text is the number beside it. The page may be an answer behind, and hits by window 5 s."""
    wrong: dict[str, tuple[str, float]] = {}

    def agree() -> bool:
        wrong.clear()
        wrong.update({name: pair for name, pair in read().items() if not says(*pair)})
        return not wrong

    try:
        until("the page and /metrics agree", agree)
    finally:
        assert wrong == {}


class Metrics:
    """The page /metrics, read once."""

    def __init__(self, address: str) -> None:
        status, _, page = answer(address, "/metrics")
        assert status == 200
        rows = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", page, re.MULTILINE)
        self._rows = [(name, labels, float(value)) for name, labels, value in rows]

    def sum(self, metric: str, **labels: str) -> float:
        """The sum of the rows of a metric that have these labels; at least one has to be there."""
        found = [
            value
            for name, given, value in self._rows
            if name == metric and all(f'{label}="{word}"' in given for label, word in labels.items())
        ]
        assert found, (metric, labels)
        return sum(found)
