"""Pings to a proxy for vLLM's P2P NCCL connector: what it gets, and that an engine does not notice its absence."""

from __future__ import annotations

import logging
import logging.handlers
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from ports import free_port

from kvlane.connector import p2p_pings
from kvlane.connector.p2p_pings import Pings, api_port, start_pings
from kvlane.connector.settings import Settings

OWN = "127.0.0.1:21001"
PATIENCE_MS = 20_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_pings, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(p2p_pings, "RETRY_SECONDS", 0.02)


class Proxy:
    """The proxy's end, as vLLM's example makes it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, 1)
        shown = f"[{host}]" if ":" in host else host
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while True:
            try:
                self.socket.bind(f"tcp://{shown}:{port or '*'}")
                break
            except zmq.ZMQError as error:
                # A socket that was closed has its port until ZeroMQ's own thread closes it.
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self.port = int(self.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])

    def next(self) -> dict[str, str]:
        assert self.socket.poll(PATIENCE_MS), "no ping"
        _, message = self.socket.recv_multipart()
        return msgspec.msgpack.decode(message)

    def waiting(self) -> int:
        """Takes all pings that are there."""
        count = 0
        while self.socket.poll(0):
            self.socket.recv_multipart()
            count += 1
        return count

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.close()


def settings(port: int, host: str = "127.0.0.1", **more: object) -> Settings:
    return Settings.parse({"proxy_ip": host, "proxy_port": str(port), "http_port": "20001", **more})


PING = {"type": "P", "http_address": "127.0.0.1:20001", "zmq_address": OWN}


def test_a_proxy_gets_what_vllms_engines_sent_again_and_again(proxy: Proxy) -> None:
    pings = start_pings(settings(proxy.port), "P", OWN)
    assert pings is not None
    assert [proxy.next() for _ in range(3)] == 3 * [PING]
    pings.close()
    proxy.waiting()
    assert not proxy.socket.poll(300), "it is closed"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_a_proxy_is_an_ipv6_address_or_a_host_name(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this host has no IPv6")
    proxy = Proxy(host if ":" in host else "127.0.0.1")
    pings = start_pings(settings(proxy.port, host), "D", OWN)
    assert pings is not None
    assert proxy.next()["type"] == "D"
    pings.close()
    proxy.close()


def test_two_engines_are_two_to_a_proxy(proxy: Proxy) -> None:
    both = [Pings(("127.0.0.1", proxy.port), "D", "127.0.0.1:1", f"127.0.0.1:2200{n}") for n in (1, 2)]
    seen = set[str]()
    deadline = time.monotonic() + PATIENCE_MS / 1e3
    while len(seen) < 2:
        assert time.monotonic() < deadline
        seen.add(proxy.next()["zmq_address"])
    assert seen == {"127.0.0.1:22001", "127.0.0.1:22002"}
    for each in both:
        each.close()


def test_a_proxy_that_is_away_costs_nothing_is_logged_once_and_gets_no_old_pings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    handler = logging.handlers.QueueHandler(records)
    handler.setLevel(logging.WARNING)
    p2p_pings.logger.addHandler(handler)
    pings = start_pings(settings(port), "P", OWN)
    assert pings is not None
    records.get(timeout=PATIENCE_MS / 1e3)
    p2p_pings.logger.removeHandler(handler)
    for _ in range(2):
        # The proxy comes, goes, and comes back.
        proxy = Proxy(port=port)
        assert proxy.next() == PING
        assert proxy.waiting() <= 2, "pings of before were kept for it"
        assert proxy.next() == PING
        proxy.close()
    pings.close()
    (line,) = said(caplog)
    assert f"no proxy takes pings at 127.0.0.1:{port}" in line


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_an_engine_that_starts_again_at_its_address_is_known_again(proxy: Proxy) -> None:
    """With pings of its former run in flight."""
    for _ in range(3):
        pings = start_pings(settings(proxy.port), "P", OWN)
        assert pings is not None
        assert proxy.next() == PING
        pings.close()


@pytest.mark.parametrize("extra", [{}, {"proxy_ip": "127.0.0.1"}, {"proxy_port": 1}, {"proxy_port": "abc"}])
def test_without_both_of_host_and_port_there_are_no_pings(extra: dict[str, object]) -> None:
    assert start_pings(Settings.parse({"kvlane.direct": "on", **extra}), "P", OWN) is None


def test_a_host_that_is_none_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert start_pings(settings(1, "-."), "P", OWN) is None
    (line,) = said(caplog)
    assert "sends no pings to -." in line


def test_without_a_port_of_the_api_there_are_no_pings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["program.py"])
    assert start_pings(settings(1, http_port=None), "P", OWN) is None
    (line,) = said(caplog)
    assert "give http_port" in line


def test_the_port_of_the_api_is_that_of_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("model: m\nport: 8123\n")
    serve = ["/bin/vllm", "serve", "model"]
    assert api_port(serve) == 8000
    assert api_port([*serve, "--port", "20001"]) == 20001
    assert api_port([*serve, "--port", "1", "--port=20002"]) == 20002
    assert api_port([*serve, "--config", str(config)]) == 8123
    assert api_port([*serve, "--config", str(config), "--port", "9"]) == 9
    assert api_port([*serve, "--config", str(tmp_path / "none")]) == 8000
    assert api_port([*serve, "--port", "many"]) is None
    assert api_port(["/lib/vllm/entrypoints/openai/api_server.py", "--port", "7"]) == 7
    assert api_port(["-c"]) is None and api_port([]) is None
