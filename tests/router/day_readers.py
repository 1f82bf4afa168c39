"""Readers of daemon and router during a day's soak: recordings in files that are rotated, and the live pages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from day_loads import has
from processes import PATIENCE, Daemon
from recordings import Recording

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A daemon or router forgets a recording that nobody has read for 10 s.
FORGOTTEN_S = 11.0


def page_of(address: str, path: str) -> str:
    """As Prometheus asks, but for its gzip: one request a connection."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE) as answer:
        return answer.read().decode()


class Rotation:
    """`kvlane record` and `kvlane route record`, each in one file after the other.

    A recording remembers the number of each block, in up to 143 MB, so that its growth would hide that of others. The
    programs forget it before the next file begins.
    """

    def __init__(self, daemon: Daemon, socket: Path, folder: Path) -> None:
        both = {
            "daemon": ["record", "--addr", daemon.address],
            "router": ["route", "record", "--socket", str(socket)],
        }
        self._commands = both if has("recordings") else {}
        self._folder = folder
        self._running: dict[str, Recording] = {}
        self.records = dict.fromkeys(self._commands, 0)
        self.files = 0

    def begin(self) -> None:
        for name, command in self._commands.items():
            self.files += 1
            self._running[name] = Recording(command, self._folder / f"{name}-{self.files}.jsonl")

    def end(self) -> None:
        """Ends both, and counts what is in their files, which have to be complete."""
        for name, running in list(self._running.items()):
            trace = running.end()
            del self._running[name]
            self.records[name] += len(trace.requests)
            running.file.unlink()

    def kill(self) -> None:
        for running in self._running.values():
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait(PATIENCE)


class LivePages(Protocol):
    """The live pages, open."""

    how: str

    def polls(self) -> dict[str, int]:
        """The number of the newest sample that each page has."""
        ...


@contextlib.contextmanager
def open_pages(addresses: dict[str, str]) -> Iterator[LivePages]:
    """Opens the pages in a headless browser, if there is one, or asks as the page does."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or importlib.util.find_spec("playwright") is None:
        poller = Poller(addresses)
        try:
            yield poller
        finally:
            poller.stop()
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=browser, args=flags)
        try:
            yield InBrowser(chromium, addresses)
        finally:
            chromium.close()


class InBrowser:
    """Both pages in one Chromium, each in a window of its own: a hidden page would not poll."""

    def __init__(self, chromium: Any, addresses: dict[str, str]) -> None:
        self.how = f"headless Chromium {chromium.version}"
        self._pages = {}
        for name, address in addresses.items():
            page = chromium.new_context().new_page()
            page.goto(f"http://{address}/")
            page.wait_for_function("Object.keys(series).length > 0", timeout=1000 * PATIENCE)
            self._pages[name] = page

    def polls(self) -> dict[str, int]:
        newest = "Object.values(series)[0].next"
        return {name: int(page.evaluate(newest)) for name, page in self._pages.items()}


class Poller:
    """A client that asks for /live once a second, as the page's script does."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.how = "a client that asks as the page does, because there is no Chromium or no playwright"
        self._next = dict.fromkeys(addresses, 0)
        self._over = threading.Event()
        for name, address in addresses.items():
            threading.Thread(target=self._poll, args=(name, address), daemon=True).start()

    def _poll(self, name: str, address: str) -> None:
        while not self._over.wait(1.0):
            # A page tries again, too.
            with contextlib.suppress(OSError):
                answer = json.loads(page_of(address, f"/live?after={self._next[name]}"))
                self._next[name] = answer["history"]["next"]

    def polls(self) -> dict[str, int]:
        return dict(self._next)

    def stop(self) -> None:
        self._over.set()
