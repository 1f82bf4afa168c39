"""`kvlane bench serve` as a whole, against a server that plays a vLLM with an external cache."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvlane.bench import serve
from kvlane.bench.__main__ import main
from kvlane.bench.drawing import Picture
from kvlane.bench.load import Timing
from kvlane.bench.sources import Sources

# The counters of an endpoint's two engines; the second one does nothing.
COUNTERS = {
    "kvlane": ("vllm:external_prefix_cache_hits", "vllm:kvlane_hit_tokens"),
    "another connector": ("vllm:external_prefix_cache_hits",),
    "own prefix cache": ("vllm:prefix_cache_hits",),
    "nothing": (),
}
ALWAYS = ("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits")

NEW_PROMPT_S = 0.03
"""How long the fake engine takes for a prompt that it has not seen."""


class FakeVllm:
    """Counts a hit for each token of a prompt that it has seen, as one of what `cache` says; refuses the first reset,
    as while blocks are saved."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.cache = "kvlane"
        self.offers_reset = True
        self.has_metrics = True
        self.hits = 0
        self.resets = 0
        self.requests = 0
        self.fail_every = 0
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
        if not self.offers_reset:
            return web.Response(status=404)
        self.resets += 1
        return web.json_response({"success": self.resets > 1})

    async def metrics(self, _: web.Request) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        counted = COUNTERS[self.cache]
        lines = ["# HELP vllm:external_prefix_cache_hits_total hits"]
        for name in dict.fromkeys((*ALWAYS, *counted)):
            hits = self.hits if name in counted else 0
            lines += [f'{name}_total{{engine="0"}} {hits}', f'{name}_total{{engine="1"}} 0']
        return web.Response(text="\n".join(lines) + "\n")

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


def bench(fake: FakeVllm, out: Path, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the rounds."""
    status = main(["serve", "--base-url", fake.base_url, "--out", str(out), *ARGUMENTS, *flags])
    return status, json.loads((out / "serve.json").read_text())["runs"][0]["rounds"]


def test_cold_and_warm_are_told_apart(
    fake: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["serve", "--base-url", fake.base_url + "/v1/", "--out", str(tmp_path), *ARGUMENTS])
    assert status == 0
    result = json.loads((tmp_path / "serve.json").read_text())
    cold, warm = result["runs"][0]["rounds"]
    assert (cold["round"], warm["round"]) == ("cold", "warm")
    assert (cold["kvlane_hit_tokens"], warm["kvlane_hit_tokens"]) == (0, 240)
    assert cold["own_hit_tokens"] == warm["own_hit_tokens"] == 0
    assert cold["prompt_tokens"] == 240 and cold["output_tokens"] == 18
    # A new prompt takes at least as long as the server waits with it; a busy machine takes any time more.
    assert cold["ttft_ms"]["mean"] >= 1000 * NEW_PROMPT_S and warm["ttft_ms"]["mean"] > 0
    assert cold["e2el_ms"]["p50"] >= cold["ttft_ms"]["p50"]
    assert cold["own_prefix_cache_reset"] is True and fake.resets == 3
    assert result["machine"]["cores"] >= 1 and result["machine"]["cpu_use"]["seconds"] > 0
    assert "api_key" not in result["settings"]
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "E2EL" in printed and "p95" in printed and "240" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100


@pytest.mark.parametrize(
    ("cache", "offers_reset", "why"),
    [
        # Its prefix cache cannot be emptied, as usual, and has all prompts.
        ("own prefix cache", False, "240 tokens were in the engine's own prefix cache"),
        ("another connector", True, "does not say that this is kvlane"),
        ("nothing", True, "does not name kvlane"),
    ],
)
def test_what_is_not_known_to_be_kvlanes_is_called_repeat(
    fake: FakeVllm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    offers_reset: bool,
    why: str,
) -> None:
    """A plain vLLM has its own prefix cache on. `kvlane bench serve` against one called the second round warm, drew it
    as warm and ended with 0: somebody took the engine's own cache for kvlane."""
    fake.cache, fake.offers_reset = cache, offers_reset
    drawn: list[Picture] = []
    monkeypatch.setattr("kvlane.bench.serve.save", lambda picture, _: drawn.append(picture))
    status, rounds = bench(fake, tmp_path)
    assert status == 3
    assert [each["round"] for each in rounds] == ["cold", "repeat"]
    assert rounds[0]["not_warm"] is None and why in rounds[1]["not_warm"]
    [picture] = drawn
    assert [bar.name for panel in picture.panels for bar in panel.bars] == [
        "cold",
        "repeat (not known\nto be kvlane's)",
    ]
    printed = " ".join(capsys.readouterr().out.split())
    assert why in printed and "endpoint, repeat" in printed and "warm" not in printed
    assert "kvlane status" in printed


def test_another_seed_has_a_cold_round(fake: FakeVllm, tmp_path: Path) -> None:
    """The prompt that warms an engine up was the first one of the next seed."""
    for seed in ("0", "1", "2"):
        status, rounds = bench(fake, tmp_path, "--seed", seed)
        assert (status, rounds[0]["round"], rounds[0]["kvlane_hit_tokens"]) == (0, "cold", 0)


def test_a_baseline_is_not_meant_to_be_warm(fake: FakeVllm, tmp_path: Path) -> None:
    fake.cache = "nothing"
    status, rounds = bench(fake, tmp_path, "--connector", "none", "--warm-rounds", "2")
    assert status == 0
    assert [each["round"] for each in rounds] == ["cold", "repeat 1", "repeat 2"]


def test_an_endpoint_that_tells_nothing_is_not_believed(fake: FakeVllm, tmp_path: Path) -> None:
    fake.has_metrics = False
    status, rounds = bench(fake, tmp_path)
    assert (status, rounds[1]["round"]) == (3, "repeat")
    assert rounds[1]["kvlane_hit_tokens"] is None


def test_prompts_that_were_cached_before_make_no_cold_round(fake: FakeVllm, tmp_path: Path) -> None:
    """The same command again, with the daemon still running, had a "cold" round that came from the daemon."""
    assert bench(fake, tmp_path)[0] == 0
    status, rounds = bench(fake, tmp_path)
    assert (status, rounds[0]["round"], rounds[1]["round"]) == (3, "not cold", "warm")
    assert "--seed" in rounds[0]["not_cold"]
    assert bench(fake, tmp_path, "--seed", "2")[0] == 0


@pytest.mark.parametrize(
    ("sources", "warm"),
    [
        (Sources(kvlane=240, external=240, own=0, reset=True), True),
        (Sources(kvlane=240, external=240, own=0, reset=False), True),
        # Prompts find their shared tokens in the engine, within one round.
        (Sources(kvlane=200, external=200, own=40, reset=True), True),
        (Sources(kvlane=200, external=200, own=40, reset=False), False),
        (Sources(kvlane=240, external=240, own=None, reset=False), False),
        (Sources(kvlane=0, external=0, own=0, reset=True), False),
        (Sources(kvlane=None, external=None, own=None, reset=True), False),
    ],
)
def test_warm_needs_kvlanes_counter_and_an_empty_own_cache(sources: Sources, warm: bool) -> None:
    assert (sources.not_warm() is None) == warm


def test_prompts_with_a_shared_prefix_may_find_that_in_a_cold_round() -> None:
    found = Sources(kvlane=0, external=0, own=160, reset=True)
    assert found.not_cold(shared=160) is None
    assert found.not_cold(shared=159) is not None


def test_tables_fit_a_terminal_whatever_was_measured() -> None:
    """16 columns with the name of the engine in front were 153 wide."""
    figures = serve.round_figures([Timing(started=0.0, chunks=[123.4567, 2345.6], tokens=2, total=2345.6)])
    counted = {"kvlane_hit_tokens": 987_654_321, "external_hit_tokens": 987_654_321, "own_hit_tokens": None}
    rounds = [
        {**figures, **counted, "round": name, "prompt_tokens": 987_654_321} for name in ("cold", "repeat 12")
    ]
    table = serve.table([{"name": name, "rounds": rounds} for name in ("vLLM alone", "vLLM with kvlane")])
    assert max(map(len, table.splitlines())) <= 100


def test_failed_requests_are_counted_and_make_the_status_one(fake: FakeVllm, tmp_path: Path) -> None:
    fake.fail_every = 5
    status, rounds = bench(fake, tmp_path)
    assert status == 1
    assert sum(each["failed"] for each in rounds) == 2
    assert rounds[0]["errors"] == ["ValueError: status 500: out of luck"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs --base-url"),
        (["--model", "m", "--input-len", "4", "--shared-prefix", "5"], "--shared-prefix 5"),
        (["--model", "m", "--vocab", "100"], "--vocab 100"),
        (["--base-url", "http://127.0.0.1:1", "--connector", "both"], "--connector both"),
        (["--base-url", "127.0.0.1:8000"], "--base-url '127.0.0.1:8000'"),
        (["--base-url", ""], "--base-url ''"),
        (["--base-url", "http://127.0.0.1:1"], "no endpoint answers at http://127.0.0.1:1"),
    ],
)
def test_wrong_arguments_get_a_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["serve", *arguments])
    assert sentence in str(refused.value)


def test_an_endpoint_that_serves_nothing_is_told_once(fake: FakeVllm, tmp_path: Path) -> None:
    """Somebody named a model that the engine has not, and got a table of failures; with a page that is no OpenAI
    endpoint, a traceback."""
    fake.fail_every = 1
    with pytest.raises(SystemExit) as refused:
        bench(fake, tmp_path)
    assert "did not serve one prompt" in str(refused.value)
    assert "status 500: out of luck" in str(refused.value)


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
    assert figures["e2el_ms"]["p90"] == pytest.approx(400)
