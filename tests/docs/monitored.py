"""Programs to monitor, and a Prometheus that does: two daemons, one with an SSD, their engines, a router and
its fake engines.

Prometheus reads examples/monitoring/prometheus.yml, with the addresses of these programs and an interval of 1 s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from ports import free_port
from processes import Daemon, Engine, until
from routed import COMPLETIONS, LONG, Router, ask, routed, wanted
from wire import GET_STATUS, Wire

from kvlane.testing.fake_engine import FakeEngine

EXAMPLE = ROOT / "examples/monitoring/prometheus.yml"
RULES = ROOT / "examples/prometheus"
BLOCKS = 64
PROMPTS = 6
"""Three times what a pool of 128 blocks holds."""
SMALL = {"piece_bytes": 2048, "layout": "05" * 16}
"""Blocks of one page. Two of them take a slab of the pool, so three leave a free place."""
FAKE_ENGINE = ["--pairs", "kvlane", "--prefill-tokens-per-second", "40000", "--itl-ms", "1"]
# Roles are scored 20 times a second.
BALANCE = "[balance]\nevery-ms = 50\n"
POISON = "poison"


def program(name: str) -> Path:
    """promtool or prometheus, which scripts/promtool.py fetches."""
    command = ["python3", str(ROOT / "scripts/promtool.py"), "--path", name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    return Path(found.stdout.strip())


class Monitored:
    """The programs and their Prometheus."""

    def __init__(
        self,
        daemons: list[Daemon],
        engines: list[Engine],
        router: Router,
        fakes: list[FakeEngine],
        prometheus: str,
    ) -> None:
        self.daemons, self.engines = daemons, engines
        self.router, self.fakes = router, fakes
        self._prometheus = prometheus
        self._rounds = 0

    def work(self) -> None:
        """Gives each program something to count."""
        self._rounds += 1
        self._serve_blocks()
        self._await_a_save(f"awaited-{self._rounds}")
        self._keep_small_blocks()
        with Wire(self.daemons[0].path) as wire:
            wire.refused(GET_STATUS)
        for body in (
            wanted(max_tokens=4, stream=True),
            wanted(f"{self._rounds} {LONG}", max_tokens=2),
            wanted(POISON, max_tokens=1),
        ):
            ask(self.router.address, COMPLETIONS, body)

    def _serve_blocks(self) -> None:
        """More prompts than the pool holds: they come back from the SSD."""
        saves = self.engines[0]
        prompts = [f"prompt-{number}" for number in range(PROMPTS)]
        for prompt in prompts:
            assert saves.call("save", prompt=prompt, count=BLOCKS)["ok"]
            self.daemons[0].settle()
        for prompt in (*prompts, "unknown"):
            saves.call("check", prompt=prompt, count=BLOCKS)

    def _await_a_save(self, prompt: str) -> None:
        """A new prompt, which the other daemon then fetches."""
        saves, waits, elsewhere, _ = self.engines
        handoff = saves.call("hand_over", count=BLOCKS, wait_ms=30_000)
        waits.send("lookup", prompt=prompt, count=BLOCKS, handoff=handoff)
        until(
            "the lookup waits", lambda: "\nkvlane_hand_offs_waiting 1" in self.daemons[0].http("/metrics")[1]
        )
        saves.call("save", prompt=prompt, count=BLOCKS)
        hit = waits.answer()
        waits.call("release", lease=hit["lease"])
        elsewhere.call("check", prompt=prompt, count=BLOCKS)

    def _keep_small_blocks(self) -> None:
        """The same each time: a use keeps them in the pool."""
        small = self.engines[-1]
        assert small.call("save", prompt="small", count=3)["ok"]
        small.call("check", prompt="small", count=3)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now, without those that are not a number."""
        told = self._get("query", query=expression)
        return [sample for sample in told["result"] if sample["value"][1] != "NaN"]

    def label_values(self, selector: str, label: str) -> list[str]:
        """As Grafana asks for the values of a variable."""
        return self._get(f"label/{label}/values", **{"match[]": selector})

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules, each with its health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **given: str) -> Any:
        url = f"http://{self._prometheus}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        return json.loads(_page(url))["data"]


@contextmanager
def monitored(counters: Iterable[str]) -> Iterator[Monitored]:
    """Everything, ready. The page of a vLLM engine is made up from the names of its counters."""
    binary = program("prometheus")
    with ExitStack() as stack:
        # Short, because the path of a socket has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-")))
        daemons = list(_daemons(folder, stack))
        engines = [
            Engine(daemons[0].address, "saves"),
            Engine(daemons[0].address, "waits"),
            Engine(daemons[1].address, "elsewhere"),
            Engine(daemons[1].address, "small", **SMALL),
        ]
        for engine in engines:
            stack.callback(engine.kill)
            engine.wait_connected()
        config = folder / "route.toml"
        config.write_text(BALANCE)
        router, fakes = stack.enter_context(routed(FAKE_ENGINE, FAKE_ENGINE, flags=("--config", str(config))))
        for fake in fakes:
            fake.faults(poison=POISON)
        page = stack.enter_context(_engine_page(counters))
        addresses = {9091: [daemon.http_at for daemon in daemons], 9092: [router.admin], 8000: [page]}
        prometheus = stack.enter_context(_prometheus(binary, folder, addresses))
        yield Monitored(daemons, engines, router, fakes, prometheus)


def _daemons(folder: Path, stack: ExitStack) -> Iterator[Daemon]:
    """Two that lend each other blocks, the first one with an SSD. No GPU, because a machine may have some."""
    ports = [free_port(), free_port()]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    for port in ports:
        home = folder / str(port)
        home.mkdir()
        ssd = ("--ssd", f"{home}/blocks:64mib") if port == ports[0] else ()
        cluster = ("--peers", peers, "--cluster-listen", f"127.0.0.1:{port}", "--cluster-answer-ms", "500")
        daemon = Daemon(home, *cluster, *ssd, "--gpu", "off", pool="2mib")
        stack.callback(daemon.kill)
        daemon.start()
        yield daemon


@contextmanager
def _engine_page(counters: Iterable[str]) -> Iterator[str]:
    """The address of a server whose counters grow with the time."""
    names, began = list(counters), time.monotonic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seconds = time.monotonic() - began
            lines = (f'{name}{{engine="0",model_name="tiny"}} {seconds}\n' for name in names)
            data = "".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _prometheus(binary: Path, folder: Path, addresses: dict[int, list[str]]) -> Iterator[str]:
    """The address of a Prometheus that scrapes these addresses in place of the example's ports."""
    text = EXAMPLE.read_text().replace("15s", "1s")
    for port, there in addresses.items():
        example = f'"127.0.0.1:{port}"'
        assert text.count(example) == 1
        text = text.replace(example, ", ".join(f'"{address}"' for address in there))
    config = folder / "prometheus.yml"
    config.write_text(text)
    shutil.copytree(RULES, folder / "rules")
    address = f"127.0.0.1:{free_port()}"
    command = [
        str(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/prometheus",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
    try:
        until("Prometheus is ready", lambda: _is_ready(process, address, folder / "prometheus.log"))
        yield address
    finally:
        process.kill()
        process.wait()


def _is_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return _page(f"http://{address}/-/ready") != ""
    except OSError:
        return False


def _page(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return answer.read().decode()


def wait_working(programs: Monitored, seconds: float, is_done: Callable[[], bool]) -> None:
    """Lets the programs work until the condition holds, or the time is over."""
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        programs.work()
