"""Programs that serve a live page, and requests to three models, for the page's picture and its cost."""

from __future__ import annotations

import hashlib
import itertools
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlane import _core
from kvlane.bench.memory import Memory
from kvlane.bench.processes import wait_for_health

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
BLOCK_BYTES = 64 << 10
TOKENS_PER_BLOCK = 16
PROMPT_BLOCKS = 16
POOL = "64mib"
MODELS = ("llama-3.3-70b-instruct", "qwen3-32b", "gemma-3-27b-it")
"""Three times as many requests go to the first one as to the last one."""
PROMPTS = 40
"""Of each model, together about twice what the pool holds."""
_TIMEOUT_MS = 30_000.0


@dataclass(frozen=True)
class Program:
    """A process that serves a live page."""

    page: str
    """The page's HOST:PORT."""
    pid: int
    address: str = ""
    """The socket for engines, of a daemon."""


def free_port() -> int:
    """A free TCP port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def daemon(program: str) -> Iterator[Program]:
    """A daemon with an SSD, which is a file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="kvlane-") as folder:
        address, page = f"unix:{folder}/kvlane.sock", f"127.0.0.1:{free_port()}"
        flags = ["--listen", address, "--http", page, "--pool-size", POOL, "--ssd", f"{folder}/blocks:80mib"]
        with running([program, "serve", *flags, "--gpu", "off"], page, Path(folder) / "log") as pid:
            yield Program(page, pid, address)


@contextmanager
def router(program: str, engines: int) -> Iterator[Program]:
    """A router before so many engines, which are ranks of one fake engine."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
        engine, page = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        fake = [sys.executable, "-m", "kvlane.testing.fake_engine", "--port", engine.rpartition(":")[2]]
        stack.enter_context(running(fake, engine, folder / "engine.log"))
        config = folder / "route.toml"
        config.write_text(f'[[node]]\nurl = "http://{engine}"\nrole = "worker"\nranks = {engines}\n')
        command = [program, "route", "--config", str(config), "--listen", f"127.0.0.1:{free_port()}"]
        command += ["--admin", page, "--socket", "off"]
        yield Program(page, stack.enter_context(running(command, page, folder / "route.log")))


@contextmanager
def running(
    command: list[str], page: str, log: Path, environment: dict[str, str] | None = None
) -> Iterator[int]:
    """Its pid, once it is healthy."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment
        )
    try:
        wait_for_health(f"http://{page}", process, log)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Model:
    """An engine that serves a model: it looks each prompt up, loads the hits and saves the rest."""

    def __init__(self, address: str, name: str) -> None:
        self.name = name
        self._memory = Memory(BLOCK_BYTES * PROMPT_BLOCKS)
        region = (self._memory.address, BLOCK_BYTES, PROMPT_BLOCKS, BLOCK_BYTES, [0])
        namespace = hashlib.sha256(name.encode()).digest()[:16]
        self._worker = _core.Worker(
            address, name, "live page", 0, 1, [(namespace, namespace, [region])], save_timeout_ms=_TIMEOUT_MS
        )
        groups = [(namespace, name, TOKENS_PER_BLOCK, 0)]
        self._scheduler = _core.Scheduler(
            address, name, "live page", groups, 1, lookup_timeout_ms=_TIMEOUT_MS
        )
        if not self._worker.wait_registered(_TIMEOUT_MS):
            raise RuntimeError(f"{name} could not register: {self._worker.reason}")
        self._jobs = itertools.count(1)

    def request(self, prompt: int) -> None:
        """Serves a prompt, of which so many exist."""
        names = [
            hashlib.sha256(f"{self.name}/{prompt}/{at}".encode()).digest() for at in range(PROMPT_BLOCKS)
        ]
        tokens = len(names) * TOKENS_PER_BLOCK + 1
        hit = self._scheduler.lookup([names], tokens, timeout_ms=_TIMEOUT_MS)
        hits = hit.tokens // TOKENS_PER_BLOCK
        if hits:
            self._worker.load(next(self._jobs), hit.boot, [(0, list(range(hits)), hit.pages(0, 0))])
            self._finish()
            self._scheduler.release(hit.boot, hit.lease)
        if hits < PROMPT_BLOCKS:
            parent = names[hits - 1] if hits else b""
            self._worker.save(next(self._jobs), [(0, parent, names[hits:], list(range(hits, PROMPT_BLOCKS)))])
            self._finish()

    def close(self) -> None:
        """Closes the connections to the daemon."""
        self._scheduler.close()
        self._worker.close()

    def _finish(self) -> None:
        self._worker.wait(_TIMEOUT_MS)
        self._worker.poll()


@contextmanager
def traffic(address: str, per_second: float) -> Iterator[None]:
    """Requests to all models while the context lasts, at fixed times; their order is always the same."""
    ends = threading.Event()
    dice = random.Random(1)
    ranks = range(1, PROMPTS + 1)
    models = [Model(address, name) for name in MODELS]

    def work() -> None:
        due = time.monotonic()
        while not ends.wait(max(0.0, due - time.monotonic())):
            (model,) = dice.choices(models, range(len(models), 0, -1))
            (prompt,) = dice.choices(ranks, [1 / rank for rank in ranks])
            model.request(prompt)
            due += 1 / per_second

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        for model in models:
            model.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser that scripts/browser.py finds."""
    # Only here, because itl.py runs beside a vLLM, without it.
    from playwright.sync_api import sync_playwright

    command = [sys.executable, str(ROOT / "scripts/browser.py"), "--path"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stderr.strip())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found.stdout.strip())
        try:
            yield browser
        finally:
            browser.close()
