"""Pings by which an engine registers with a proxy for vLLM's P2P NCCL connector, or with `kvlane route --ping`.

    DEALER ---- every 3 s ----> the proxy's ROUTER
        MessagePack {"type": "P" or "D", "http_address": HOST:PORT, "zmq_address": HOST:PORT}

A proxy that is away misses pings; none of them is kept for it. It gets the next one when it is back. vLLM's connector
gave its socket the identity `zmq_address`. Here it has none, because a ROUTER drops what a restarted engine sends under
an identity whose former connection is still open. Proxies read the message.
"""

from __future__ import annotations

import ipaddress
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvlane.connector.guard import logger
from kvlane.connector.settings import Settings

PERIOD_SECONDS = 3.0
# At the start, until the connection to the proxy is up.
RETRY_SECONDS = 0.25
# vLLM's default of `--port`.
API_PORT = 8000
_CONFIG_BYTES_MAX = 1 << 20


class Pings:
    """Sends pings from a thread of its own until it is closed."""

    def __init__(self, proxy: tuple[str, int], role: str, http_address: str, zmq_address: str) -> None:
        """`proxy`: host and port. `role`: "P" or "D". Raises ZMQError if the proxy's address cannot
        be connected to."""
        import msgspec
        import zmq

        self.name = f"{proxy[0]}:{proxy[1]}"
        self._message = msgspec.msgpack.encode(
            {"type": role, "http_address": http_address, "zmq_address": zmq_address}
        )
        host = f"[{proxy[0]}]" if ":" in proxy[0] else proxy[0]
        self._zmq = zmq
        # vLLM's KV events go through the common context, and the look-up of a name may hold that up.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        # Only a connected proxy has a queue, so one that comes back gets no old pings.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # A proxy whose host is gone is missed after this time, and not when TCP gives up.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1e3 * PERIOD_SECONDS))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3e3 * PERIOD_SECONDS))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(1e3 * PERIOD_SECONDS))
        try:
            self._socket.connect(f"tcp://{host}:{proxy[1]}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._missed = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlane-pings", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wait_seconds = 0.0
        while not self._is_over.wait(wait_seconds):
            wait_seconds = PERIOD_SECONDS
            if not self._send() and self._missed * RETRY_SECONDS < PERIOD_SECONDS:
                self._missed += 1
                wait_seconds = RETRY_SECONDS
                if self._missed * RETRY_SECONDS >= PERIOD_SECONDS:
                    # Log: no proxy takes this engine's pings, so none sends it requests. Do: start the proxy, or
                    # correct proxy_ip and proxy_port.
                    logger.warning(
                        "kvlane: no proxy takes pings at %s; trying again every %g s (logged once)",
                        self.name,
                        PERIOD_SECONDS,
                    )
        self._context.destroy(linger=0)

    def _send(self) -> bool:
        """Whether the proxy is connected."""
        try:
            self._socket.send(self._message, self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Ends the thread at once, and waits for it."""
        self._is_over.set()
        self._thread.join(PERIOD_SECONDS)


def start_pings(settings: Settings, role: str, address: str) -> Pings | None:
    """Pings for the engine whose direct hand-offs have this address, if its settings name a proxy."""
    if not settings.pings() or settings.proxy_port is None:
        return None
    port = settings.http_port or api_port()
    if port is None:
        # Log: the settings name a proxy, and this engine cannot tell it where its API is. Do: give http_port.
        logger.warning("kvlane: this engine sends no pings: give http_port, the port of its API server")
        return None
    if why := unreachable(settings):
        # Log: a proxy on another host is told addresses of this host's loopback, which it cannot use. Do: give
        # kvlane.direct.listen and kvlane.direct.token.
        logger.warning("kvlane: %s", why)
    host = address.rpartition(":")[0]
    try:
        pings = Pings((settings.proxy_ip, settings.proxy_port), role, f"{host}:{port}", address)
    except Exception as error:  # noqa: BLE001 - of ZeroMQ, or a vLLM without it
        # Log: the proxy's address makes no sense to ZeroMQ, for the reason named. Do: correct proxy_ip.
        logger.warning("kvlane: this engine sends no pings to %s: %s", settings.proxy_ip, error)
        return None
    # Log: a proxy is told of this engine; it is P (it computes prompts) or D (it continues them).
    logger.info(
        "kvlane: pings to %s: %s, API at %s:%d, hand-offs at %s", pings.name, role, host, port, address
    )
    return pings


def unreachable(settings: Settings) -> str | None:
    """A sentence if a proxy on another host is pinged that it may reach this engine on loopback."""
    listens = ipaddress.ip_address(settings.direct_listen.rpartition(":")[0].strip("[]"))
    try:
        is_here = ipaddress.ip_address(settings.proxy_ip).is_loopback
    except ValueError:
        # Only a look-up would tell.
        is_here = True
    if not settings.pings() or is_here or not listens.is_loopback:
        return None
    return (
        f"pings name {settings.direct_listen}, which the proxy {settings.proxy_ip} reaches on its own host only: give "
        "kvlane.direct.listen an address of this host's, and a kvlane.direct.token"
    )


def api_port(arguments: Sequence[str] | None = None) -> int | None:
    """The port of this engine's API server by its command line, which vLLM's processes share: `--port`, or that of its
    `--config` file. None if this is no `vllm serve`."""
    arguments = sys.argv if arguments is None else arguments
    is_served = "serve" in arguments[1:3] or any("api_server" in each for each in arguments[:1])
    if not is_served:
        return None
    given = _option(arguments, "--port")
    if given is None:
        given = _port_in(_option(arguments, "--config"))
    if given is None:
        return API_PORT
    return int(given) if given.isdecimal() and 0 < int(given) < 65536 else None


def _option(arguments: Sequence[str], name: str) -> str | None:
    """The value that counts of `--name value` or `--name=value`: the last one."""
    found = None
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            found = arguments[at + 1]
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found


def _port_in(config: str | None) -> str | None:
    """`port:` of a file of `vllm serve --config`, which is flat YAML."""
    if config is None:
        return None
    try:
        with Path(config).open() as file:
            found = re.search(r"^port:\s*['\"]?(\d+)", file.read(_CONFIG_BYTES_MAX), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else None
