"""Starts a fake engine: `python -m kvlane.testing.fake_engine --help`."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from kvlane.testing.fake_engine import options
from kvlane.testing.fake_engine.generation import Engine
from kvlane.testing.fake_engine.http import Connection
from kvlane.testing.fake_engine.kv_events import Publisher
from kvlane.testing.fake_engine.model import EngineModel, Latencies, PrefixCache
from kvlane.testing.fake_engine.models import Models
from kvlane.testing.fake_engine.pairs import Pairing
from kvlane.testing.fake_engine.ping import Pinger
from kvlane.testing.fake_engine.server import Server, Settings
from kvlane.testing.fake_engine.words import Words

_WAITING_CONNECTIONS = 4096


async def serve(given: argparse.Namespace) -> None:
    """Listens until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    publisher = None
    if given.kv_events_port is not None:
        publisher = Publisher(
            given.host,
            given.kv_events_port,
            given.kv_replay_port,
            given.kv_events_topic,
            given.kv_events_maps,
        )
        publisher.start()
    latencies = Latencies(
        given.prefill_tokens_per_second, given.ttft_ms / 1000, given.itl_ms / 1000, given.max_num_seqs
    )
    engine = Engine(EngineModel(latencies, PrefixCache(given.cache_blocks), given.block_size), publisher)
    connections: set[Connection] = set()
    handlers: list[Server] = []
    listener = await loop.create_server(
        lambda: Connection(handlers[0], connections),
        given.host,
        given.port,
        backlog=_WAITING_CONNECTIONS,
        start_serving=False,
    )
    port = listener.sockets[0].getsockname()[1]
    address = f"[{given.host}]:{port}" if ":" in given.host else f"{given.host}:{port}"
    pairing = Pairing(
        form=given.pairs,
        engine_id=given.engine_id or address,
        role=given.role,
        zmq_address=given.zmq_address,
        host=given.host,
        block_size=given.block_size,
    )
    words = None if given.words is None else Words(Path(given.words))
    handlers.append(
        Server(Settings(Models(given.model, given.max_model_len), pairing, words, given.pool), engine)
    )
    await listener.start_serving()
    pinger = None
    if given.ping_router is not None:
        pinger = Pinger(
            given.ping_router,
            given.role,
            given.http_address or address,
            given.zmq_address,
            given.ping_seconds,
        )
        pinger.start()
    print(f"ready http://{address}", flush=True)
    await ended.wait()
    listener.close()
    for connection in list(connections):
        connection.transport.abort()
    if pinger is not None:
        pinger.close()
    if publisher is not None:
        publisher.close()


def main() -> None:
    asyncio.run(serve(options.parse()))


if __name__ == "__main__":
    main()
