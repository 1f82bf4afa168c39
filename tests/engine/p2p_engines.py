"""xPyD as in vLLM's guide to its P2P NCCL connector: its configurations, with kvlane's engines on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairs import PROMPT_TOKENS, alone, complete, prompt
from ports import free_port
from processes import KVLANE
from served import ReservedPort, ServedEngine, wait_for
from tiny_model import build_tiny_model

from kvlane.demo.pd import asking
from kvlane.demo.pd.asking import PromptTokens

HERE = Path(__file__).parent
# The guide's flags beside those that every test gives.
FLAGS = ("--tensor-parallel-size", "1", "--seed", "1024", "--max-num-seqs", "256", "--trust-remote-code")


def configuration(
    kind: str, http_port: int | None, kv_port: int, ping_port: int, **more: Any
) -> dict[str, Any]:
    """What the guide gives an engine of kind P or D, with `kv_buffer_size` where vLLM 0.32 takes it."""
    extra = {"kv_buffer_size": "1e1" if kind == "P" else "8e9", "proxy_ip": "127.0.0.1"}
    extra |= {"proxy_port": str(ping_port)} | ({"http_port": str(http_port)} if http_port else {})
    return {
        "kv_connector": "P2pNcclConnector",
        "kv_role": "kv_producer" if kind == "P" else "kv_consumer",
        "kv_port": str(kv_port),
        "kv_connector_extra_config": {**extra, **more},
    }


@dataclass(frozen=True)
class Engines:
    """All engines, and the port for their pings."""

    prefill: list[ServedEngine]
    decode: list[ServedEngine]
    kv_ports: dict[str, int]
    """By the engine's URL."""
    ping_port: int

    @property
    def all(self) -> list[ServedEngine]:
        return [*self.prefill, *self.decode]

    def addresses(self, kind: str) -> list[str]:
        """Of the APIs of engines of kind P or D."""
        engines = self.prefill if kind == "P" else self.decode
        return sorted(each.url.removeprefix("http://") for each in engines)

    def decoded(self) -> PromptTokens:
        """Prompt tokens of all decode engines."""
        return sum((asking.prompt_tokens(each.url) for each in self.decode), PromptTokens())


@contextmanager
def engines(folder: Path, prefill: int, decode: int, **more: Any) -> Iterator[Engines]:
    """So many of each kind, once all answer. `more`: keys of all of them."""
    model, ping_port = build_tiny_model(folder / "tiny"), free_port()
    started: dict[str, list[ServedEngine]] = {"P": [], "D": []}
    kv_ports: dict[str, int] = {}
    with ExitStack() as stack:
        for kind, count in (("P", prefill), ("D", decode)):
            for number in range(count):
                port, kv_port = ReservedPort(), free_port()
                # Each second one names no http_port: then its API's own port is pinged.
                named = port.number if number % 2 == 0 else None
                transfer = configuration(kind, named, kv_port, ping_port, **more)
                log = folder / f"{kind}{number + 1}.log"
                engine = ServedEngine(model, "", log, *FLAGS, transfer=transfer, port=port)
                stack.callback(engine.close)
                started[kind].append(engine)
                kv_ports[engine.url] = kv_port
        for each in (*started["P"], *started["D"]):
            each.wait()
        yield Engines(started["P"], started["D"], kv_ports, ping_port)


@contextmanager
def proxy(engines: Engines, log: Path) -> Iterator[str]:
    """The guide's proxy, once all engines have registered; its URL."""
    port = free_port()
    command = [sys.executable, str(HERE / "p2p_proxy.py"), str(port), str(engines.ping_port)]
    with started(command, log):
        url = f"http://127.0.0.1:{port}"
        wanted = {kind: engines.addresses(kind) for kind in ("P", "D")}
        wait_for("all engines to register", lambda: page(url, "/engines") == wanted)
        yield url


@contextmanager
def router(engines: Engines, log: Path) -> Iterator[str]:
    """`kvlane route` in the proxy's place, once all engines are ready; its URL."""
    port, admin = free_port(), free_port()
    command = [str(KVLANE), "route", "--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    command += ["--ping", f"127.0.0.1:{engines.ping_port}", "--socket", str(log.with_suffix(".sock"))]
    with started(command, log):

        def is_ready() -> bool:
            nodes = (page(f"http://127.0.0.1:{admin}", "/nodes") or {}).get("nodes", [])
            return len(nodes) == len(engines.all) and all(each["state"] == "ready" for each in nodes)

        wait_for("all engines to be ready", is_ready)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def started(command: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


def page(url: str, path: str) -> Any:
    """A page of JSON; None while nobody answers."""
    try:
        return asking.page(url, path)
    except asking.AskFailed:
        return None


def check_prompts(engines: Engines, url: str, name: str, count: int = 12) -> None:
    """Each of `count` answers is that of one engine alone, and a decode engine computes one token of its prompt."""
    answers = set[tuple[int, ...]]()
    for number in range(count):
        text = prompt(f"{name} {number}")
        expected = alone(engines.prefill[0], text)
        before = engines.decoded()
        assert complete(url, text, request_id=f"client-{number}") == expected, f"prompt {number}"
        grown = asking.counted(engines.decoded, before, PROMPT_TOKENS)
        assert grown.computed == 1, f"prompt {number}: {grown}"
        answers.add(tuple(expected))
    assert len(answers) == count, "the model answers different prompts alike"
