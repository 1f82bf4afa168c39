"""Behaves as the proxy in vLLM's guide to its P2P NCCL connector: engines register by pings, and each request goes to a
prefill engine first and then to a decode engine, in turn, under an id that names both.

    python p2p_proxy.py HTTP_PORT PING_PORT
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

FORGET_SECONDS = 30.0
ANSWER_SECONDS = 300.0
PATHS = ("/v1/completions", "/v1/chat/completions")
COPIED = ("Content-Type",)


class Proxy:
    """The engines of both kinds, by the address of their API: (their KV address, when they are forgotten)."""

    def __init__(self) -> None:
        self.engines: dict[str, dict[str, tuple[str, float]]] = {"P": {}, "D": {}}
        self.asked = 0
        self.client: aiohttp.ClientSession

    async def listen(self, port: int) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.bind(f"tcp://127.0.0.1:{port}")
        while True:
            _, message = await socket.recv_multipart()
            ping = msgspec.msgpack.decode(message)
            until = time.monotonic() + FORGET_SECONDS
            self.engines[ping["type"]][ping["http_address"]] = (ping["zmq_address"], until)

    def choose(self, kind: str) -> tuple[str, str]:
        """The API and the KV address of the engine whose turn it is."""
        now = time.monotonic()
        living = [(api, kv) for api, (kv, until) in self.engines[kind].items() if until > now]
        if not living:
            raise web.HTTPServiceUnavailable(text=f"no engine of kind {kind} has sent a ping")
        return living[self.asked % len(living)]

    async def ask(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        (prefill, prefill_kv), (decode, decode_kv) = self.choose("P"), self.choose("D")
        self.asked += 1
        name = f"___prefill_addr_{prefill_kv}___decode_addr_{decode_kv}_{uuid.uuid4().hex}"
        headers = {"X-Request-Id": name}
        first = {**body, "max_tokens": 1}
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        async with self.client.post(f"http://{prefill}{request.path}", json=first, headers=headers) as answer:
            await answer.read()
        async with self.client.post(f"http://{decode}{request.path}", json=body, headers=headers) as answer:
            kept = {key: answer.headers[key] for key in COPIED if key in answer.headers}
            passed_on = web.StreamResponse(status=answer.status, headers=kept)
            await passed_on.prepare(request)
            async for chunk in answer.content.iter_chunked(1024):
                await passed_on.write(chunk)
            await passed_on.write_eof()
            return passed_on

    async def show(self, _: web.Request) -> web.Response:
        """Not of vLLM's proxy: who has registered."""
        return web.json_response({kind: sorted(engines) for kind, engines in self.engines.items()})


async def main() -> None:
    http_port, ping_port = (int(argument) for argument in sys.argv[1:3])
    proxy = Proxy()
    app = web.Application()
    app.router.add_get("/engines", proxy.show)
    for path in PATHS:
        app.router.add_post(path, proxy.ask)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as proxy.client:
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", http_port).start()
        await proxy.listen(ping_port)


if __name__ == "__main__":
    asyncio.run(main())
