"""Whether the live page disturbs engines: time between tokens of a real vLLM, the page open and closed by turns.

    python bench/live_page/itl.py out/tiny-model --out out/live_page_itl      # six minutes, beside a vLLM

An engine with the connector streams answers to four clients all the time. Three readers ask the daemon for `/live`
once a second, as three browsers do, and rest, by turns. No browser runs: it would take the engine's own cores. Compared
is the 99th percentile of the gaps between tokens within each turn. Writes live-page-itl.json and .png.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from programs import Program, daemon, free_port, running

from kvlane.bench import report
from kvlane.bench.figures import Figure, Outcome, add_out, publish
from kvlane.bench.processes import beside_python

CONNECTOR = '{"kv_connector": "KVLaneConnector", "kv_role": "kv_both"}'
PROMPT_TOKENS, ANSWER_TOKENS = 200, 800


@dataclass(frozen=True)
class Turn:
    """p99 of the gaps between tokens in ms, and how many gaps, of both halves of a turn."""

    closed_ms: float
    open_ms: float
    gaps: tuple[int, int]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model for vLLM, such as one of kvlane.demo.model")
    parser.add_argument("--program", help="the kvlane to measure (default: the one beside this Python)")
    parser.add_argument("--turns", type=int, default=12, help="closed and open (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of half a turn (default %(default)s)")
    parser.add_argument("--readers", type=int, default=3, help="default %(default)s")
    parser.add_argument("--clients", type=int, default=4, help="default %(default)s")
    add_out(parser)
    settings = parser.parse_args()
    program = settings.program or beside_python("kvlane")
    with report.CpuWatch() as watch, daemon(program) as shown, engine(settings.model, shown) as address:
        clients = Clients(address, settings.model, settings.clients)
        try:
            clients.wait_for_tokens()
            turns = [take_turn(clients, shown, settings, number) for number in range(settings.turns)]
        finally:
            clients.stop()
    note = (
        f"{settings.clients} streamed answers at once; {settings.turns} turns of {settings.seconds:g} s closed and as "
        f"long with {settings.readers} readers of /live, in either order; medians of the turns. Loopback."
    )
    details = {"turns": [asdict(each) for each in turns]}
    return publish(settings, Outcome("live-page-itl", list(figures(turns)), details, note), watch)


def figures(turns: list[Turn]) -> Iterator[Figure]:
    """The figures, that with a goal first."""
    yield Figure(
        "p99 of the ITL, page open / closed",
        statistics.median(each.open_ms / each.closed_ms for each in turns),
        at_most=1.01,
    )
    yield Figure("p99 of the ITL, page closed", statistics.median(each.closed_ms for each in turns), "ms")
    yield Figure("p99 of the ITL, page open", statistics.median(each.open_ms for each in turns), "ms")
    yield Figure(
        "chance: closed / closed of the turn before",
        statistics.median(
            max(a.closed_ms / b.closed_ms, b.closed_ms / a.closed_ms) for a, b in itertools.pairwise(turns)
        ),
    )


@contextmanager
def engine(model: str, shown: Program) -> Iterator[str]:
    """The HOST:PORT of a vLLM that uses the daemon."""
    address = f"127.0.0.1:{free_port()}"
    command = [beside_python("vllm"), "serve", model, "--port", address.rpartition(":")[2]]
    command += ["--max-model-len", "4096", "--enforce-eager", "--kv-transfer-config", CONNECTOR]
    environment = os.environ | {"KVLANE_ADDR": shown.address, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="kvlane-") as folder,
        running(command, address, Path(folder) / "log", environment),
    ):
        yield address


class Clients:
    """Threads that have answers streamed to them, one after the other, and note when each token came."""

    def __init__(self, address: str, model: str, count: int) -> None:
        self._address, self._model = address, model
        self._ends = threading.Event()
        self._gaps: list[tuple[float, float]] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def wait_for_tokens(self) -> None:
        """Until all clients have had some."""
        while len(self._gaps) < 200 * len(self._threads):
            if not all(thread.is_alive() for thread in self._threads):
                raise SystemExit("a client failed")
            time.sleep(0.1)

    def gaps(self, seconds: float) -> list[float]:
        """Those of the next seconds."""
        begun = time.monotonic()
        time.sleep(seconds)
        return [gap for at, gap in list(self._gaps) if at >= begun]

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._ends.is_set():
            turn += 1
            self._stream([(number * 1000 + turn * 7 + at) % 500 + 3 for at in range(PROMPT_TOKENS)])

    def _stream(self, prompt: list[int]) -> None:
        body = {"model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        connection = http.client.HTTPConnection(self._address)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        before = None
        for line in answer:
            if self._ends.is_set():
                break
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if before is not None:
                    self._gaps.append((now, now - before))
                before = now
        connection.close()


def take_turn(clients: Clients, shown: Program, settings: argparse.Namespace, number: int) -> Turn:
    """Closed, then open; every second turn the other way round."""
    found: dict[bool, list[float]] = {}
    for is_open in (False, True) if number % 2 == 0 else (True, False):
        with ExitStack() as stack:
            if is_open:
                stack.enter_context(reading(shown, settings.readers))
            found[is_open] = clients.gaps(settings.seconds)
    closed, opened = (1e3 * report.summary(found[is_open])["p99"] for is_open in (False, True))
    report.say(f"turn {number + 1}: p99 {closed:.2f} ms closed, {opened:.2f} open")
    return Turn(closed, opened, (len(found[False]), len(found[True])))


@contextmanager
def reading(shown: Program, readers: int) -> Iterator[None]:
    """So many readers of the page's data, which first take all samples."""
    ends = threading.Event()

    def read() -> None:
        after = 0
        while not ends.wait(1.0):
            connection = http.client.HTTPConnection(shown.page)
            connection.request("GET", f"/live?after={after}")
            after = json.loads(connection.getresponse().read())["history"]["next"]
            connection.close()

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    raise SystemExit(main())
