"""The open-loop client against a small server that answers as vLLM does, and as broken endpoints do."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from kvlane.bench import load

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve_and_load(
    handler: Handler, prompts: list[list[int]], arrivals: list[float], tokens: int
) -> list[load.Timing]:
    async def both() -> list[load.Timing]:
        application = web.Application()
        application.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            return await load.run_round(
                f"http://127.0.0.1:{port}", "m", prompts, arrivals, tokens, timeout_s=20
            )
        finally:
            await runner.cleanup()

    return asyncio.run(both())


def streaming(gap_s: float, usage: bool = True) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(asked["max_tokens"]):
            await asyncio.sleep(gap_s)
            await response.write(b'data: {"choices": [{"text": "w"}]}\n\n')
        if usage:
            counts = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
            await response.write(f"data: {json.dumps(counts)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


@pytest.mark.parametrize("usage", [True, False])
def test_times_of_a_stream(usage: bool) -> None:
    (timing,) = serve_and_load(streaming(0.02, usage), [[1, 2, 3]], [0.0], 5)
    assert timing.error == ""
    assert timing.tokens == 5
    assert len(timing.chunks) == 5 and len(timing.gaps) == 4
    assert timing.ttft >= 0.02
    assert timing.tpot is not None and timing.tpot >= 0.015
    assert timing.total >= timing.chunks[-1] >= 0.1
    assert timing.tpot == pytest.approx(sum(timing.gaps) / 4)


def test_the_request_is_what_the_endpoint_must_get() -> None:
    seen: list[dict[str, object]] = []
    stream = streaming(0.0)

    async def remember(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await stream(request)

    serve_and_load(remember, [[7, 8]], [0.0], 2)
    assert seen[0]["prompt"] == [7, 8]
    assert seen[0]["max_tokens"] == 2
    assert seen[0]["stream"] is True and seen[0]["ignore_eos"] is True


def test_the_loop_is_open() -> None:
    """A request leaves at its time although all before it still wait for their answer."""
    inside = 0
    most = 0
    all_here = asyncio.Event()

    async def answer_when_all_are_here(request: web.Request) -> web.StreamResponse:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 8:
            all_here.set()
        await all_here.wait()
        return await streaming(0.0)(request)

    timings = serve_and_load(answer_when_all_are_here, [[1]] * 8, [i * 0.01 for i in range(8)], 1)
    assert most == 8
    assert [timing.error for timing in timings] == [""] * 8
    assert timings[7].started >= 0.07
    assert all(timing.late >= 0 for timing in timings)


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=400, text="no such model")


async def _error_event(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
    return response


async def _garbage(_: web.Request) -> web.StreamResponse:
    return web.Response(text="data: {not json\n\n")


async def _nothing(_: web.Request) -> web.StreamResponse:
    return web.Response(text="data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("handler", "sentence"),
    [
        (_refuse, "status 400: no such model"),
        (_error_event, "engine died"),
        (_garbage, "JSONDecodeError"),
        (_nothing, "had no text"),
    ],
)
def test_a_failed_request_says_why_and_hurts_no_other(handler: Handler, sentence: str) -> None:
    good = streaming(0.0)

    async def every_second(request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        return await (handler if prompt == [1] else good)(request)

    timings = serve_and_load(every_second, [[1], [2], [1], [2]], [0.0] * 4, 2)
    assert [bool(timing.error) for timing in timings] == [True, False, True, False]
    assert sentence in timings[0].error


def test_arrivals() -> None:
    assert load.arrival_times(3, math.inf, "poisson", 0) == [0.0, 0.0, 0.0]
    assert load.arrival_times(3, 4.0, "fixed", 0) == [0.0, 0.25, 0.5]
    poisson = load.arrival_times(5000, 10.0, "poisson", 1)
    assert poisson == sorted(poisson) and poisson[0] == 0.0
    assert poisson[-1] / 4999 == pytest.approx(0.1, rel=0.1)
    assert (
        poisson
        == load.arrival_times(5000, 10.0, "poisson", 1)
        != load.arrival_times(5000, 10.0, "poisson", 2)
    )


def test_prompts_share_exactly_the_prefix() -> None:
    prompts = load.make_prompts(20, 64, 48, seed=3, vocab=5000)
    assert prompts == load.make_prompts(20, 64, 48, seed=3, vocab=5000)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:48]) for prompt in prompts}) == 1
    assert len({tuple(prompt[48:]) for prompt in prompts}) == 20
    assert all(100 <= token < 5000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in load.make_prompts(3, 8, 8, 0, 200)}) == 1
