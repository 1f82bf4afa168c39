"""`kvlane bench serve` as a whole, against a server that plays a vLLM with an external cache."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from kvlane.bench import serve
from kvlane.bench.__main__ import main
from kvlane.bench.load import Timing

PAGE = """# HELP vllm:external_prefix_cache_hits_total hits
vllm:external_prefix_cache_hits_total{engine="0"} %d
vllm:external_prefix_cache_hits_total{engine="1"} 0
vllm:prefix_cache_hits_total{engine="0"} 5.0
"""


NEW_PROMPT_S = 0.03
"""How long the fake engine takes for a prompt that it has not seen."""


class FakeVllm:
    """Counts a hit for each token of a prompt that it has seen; refuses the first reset, as while blocks are saved."""

    def __init__(self, fail_every: int = 0) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.hits = 0
        self.resets = 0
        self.requests = 0
        self.fail_every = fail_every
        self.base_url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests += 1
        if self.fail_every and self.requests % self.fail_every == 0:
            return web.Response(status=500, text="out of luck")
        prompt = tuple(asked["prompt"])
        if prompt in self.seen:
            self.hits += len(prompt)
        else:
            await asyncio.sleep(NEW_PROMPT_S)
        self.seen.add(prompt)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(asked["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "w"}]}\n\n')
        return response

    async def reset(self, _: web.Request) -> web.Response:
        self.resets += 1
        return web.json_response({"success": self.resets > 1})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE % self.hits)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    vllm = FakeVllm()
    loop = asyncio.new_event_loop()
    application = web.Application()
    application.router.add_post("/v1/completions", vllm.completions)
    application.router.add_get("/v1/models", vllm.models)
    application.router.add_get("/metrics", vllm.metrics)
    application.router.add_post("/reset_prefix_cache", vllm.reset)
    runner = web.AppRunner(application)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        vllm.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield vllm
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


ARGUMENTS = ["--num-prompts", "6", "--input-len", "40", "--output-len", "3", "--request-rate", "inf"]


def test_cold_and_warm_are_told_apart(
    fake: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["serve", "--base-url", fake.base_url + "/v1/", "--out", str(tmp_path), *ARGUMENTS])
    assert status == 0
    result = json.loads((tmp_path / "serve.json").read_text())
    cold, warm = result["runs"][0]["rounds"]
    assert (cold["round"], warm["round"]) == ("cold", "warm")
    assert (cold["hit_tokens"], warm["hit_tokens"]) == (0, 240)
    assert cold["own_hit_tokens"] == 0
    assert cold["prompt_tokens"] == 240 and cold["output_tokens"] == 18
    # What the server waits with a new prompt is the least that it takes; how much more, a busy machine decides.
    assert cold["ttft_ms"]["mean"] >= 1000 * NEW_PROMPT_S and warm["ttft_ms"]["mean"] > 0
    assert cold["own_prefix_cache_reset"] is True and fake.resets == 3
    assert result["machine"]["cores"] >= 1 and result["machine"]["cpu_use"]["seconds"] > 0
    assert "api_key" not in result["settings"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "TTFT p99" in printed and "240" in printed


def test_failed_requests_are_counted_and_make_the_status_one(fake: FakeVllm, tmp_path: Path) -> None:
    fake.fail_every = 5
    assert main(["serve", "--base-url", fake.base_url, "--out", str(tmp_path), *ARGUMENTS]) == 1
    rounds = json.loads((tmp_path / "serve.json").read_text())["runs"][0]["rounds"]
    assert sum(each["failed"] for each in rounds) == 2
    assert rounds[0]["errors"] == ["ValueError: status 500: out of luck"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs --base-url"),
        (["--model", "m", "--input-len", "4", "--shared-prefix", "5"], "--shared-prefix 5"),
        (["--model", "m", "--vocab", "100"], "--vocab 100"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", *arguments])
    assert sentence in str(refused.value)


@pytest.mark.parametrize("rate", ["0", "-1", "nan"])
def test_wrong_rates_are_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", "m", "--request-rate", rate])
    assert "must be above 0" in capsys.readouterr().err


def test_figures_leave_failed_requests_out() -> None:
    good = Timing(started=0.0, chunks=[0.1, 0.2, 0.4], tokens=3, total=0.4)
    bad = Timing(started=0.0, total=90.0, error="TimeoutError: ")
    figures = serve.round_figures([good, bad])
    assert figures["failed"] == 1 and figures["requests"] == 2
    assert figures["duration_s"] == 0.4 and figures["requests_per_s"] == pytest.approx(2.5)
    assert figures["ttft_ms"]["p99"] == pytest.approx(100)
    assert figures["tpot_ms"]["mean"] == pytest.approx(150)
    assert figures["itl_ms"]["p50"] == pytest.approx(100)
