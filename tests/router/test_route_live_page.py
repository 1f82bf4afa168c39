"""The live page of `kvlane route` in a real browser: what its admin port says, of up to a thousand engines."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import browser_pages
import pytest
from browser_pages import UNREACHED, Chromium, LivePage, Metrics, answer, wait_agreement
from busy import stretched
from playwright.sync_api import expect
from processes import run_kvlane, until
from routed import COMPLETIONS, LONG, Router, ask, connect, routed, wanted

from kvlane.testing.fake_engine import FakeEngine

HOSTILE = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script>'
LONG_NAME = (HOSTILE + "long " * 1000)[:4096]
ENGINES = 1000
# A browser that hangs costs a minute or two of a run, in place of ten.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browser_pages.launched() as found:
        yield found


@pytest.fixture(scope="module")
def rested() -> Iterator[Router]:
    """A router that has answered requests to a pair of engines, and rests."""
    pair = ["--pairs", "nixl"]
    with routed(pair, [*pair, "--itl-ms", "1"], roles="pd") as (router, _):
        for number in range(3):
            status, *_ = ask(
                router.address,
                COMPLETIONS,
                wanted(f"{number} {LONG}", stream=True),
                {"X-Request-Id": "secret-id"},
            )
            assert status == 200
        ask(router.address, COMPLETIONS, wanted("short"))
        ask(router.address, COMPLETIONS, wanted(model="secret-model"))
        ask(router.address, COMPLETIONS, b"{")
        total = "kvlane_route_requests_total"
        until("all are counted", lambda: Metrics(router.admin).sum(total) == 6)
        yield router


def figures_of(router: Router) -> dict[str, Any]:
    return json.loads(answer(router.admin, "/live")[2])


# What the pages answer


def test_the_policy_names_the_nonce_of_this_answer_only(rested: Router) -> None:
    nonces = set()
    for _ in range(2):
        status, headers, body = answer(rested.admin, "/")
        assert status == 200 and headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy and "*" not in policy and "default-src 'none'" in policy
        named = {*re.findall(r"nonce-(\w+)", policy), *re.findall(r'nonce="(\w+)"', body)}
        assert len(named) == 1
        nonces |= named
    assert len(nonces) == 2


def test_pages_answer_only_to_the_router_s_own_names(rested: Router) -> None:
    for path in ("/", "/live"):
        status, _, body = answer(rested.admin, path, "evil.example")
        assert status == 421 and "--admin-host evil.example" in json.loads(body)["error"]
    assert answer(rested.address, "/live")[0] == 404, "not on the clients' port"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("/live?after=x", "after is no number: ask for /live?after=0, or without a query"),
        ("/live?after=-1", "after is no number: ask for /live?after=0, or without a query"),
        ("/decisions?limit=-1", "limit is no number: ask for /decisions?limit=100, or without a query"),
        ("/decisions?limit=x", "limit is no number: ask for /decisions?limit=100, or without a query"),
    ],
)
def test_a_number_that_is_none_gets_a_sentence(rested: Router, query: str, sentence: str) -> None:
    status, _, body = answer(rested.admin, query)
    assert (status, json.loads(body)) == (400, {"error": sentence})


def test_figures_have_no_ids_of_requests_or_clients_and_no_models_that_clients_make_up(
    rested: Router,
) -> None:
    _, page, _ = ask(rested.admin, "/decisions")
    assert [each["client_id"] for each in page["decisions"]].count("secret-id") == 3, "the control"
    text = answer(rested.admin, "/live")[2]
    for secret in ("secret-id", "secret-model", *(each["id"] for each in page["decisions"])):
        assert secret not in text
    decisions = json.loads(text)["decisions"]
    assert len(decisions) == len(page["decisions"])
    assert not {"id", "client_id"} & set().union(*decisions)
    assert {each["model"] for each in decisions} == {"fake"}


def test_a_model_that_no_engine_serves_any_more_is_other(tmp_path: Path) -> None:
    """The names of its former users' models are nobody's business."""
    socket = tmp_path / "route.sock"
    with routed(["--model", "goes"], [], flags=("--socket", str(socket))) as (router, (goes, _)):
        for model in ("goes", "fake"):
            assert ask(router.address, COMPLETIONS, wanted(model=model))[0] == 200
        assert {each["model"] for each in figures_of(router)["decisions"]} == {"goes", "fake"}
        told = run_kvlane("route", "remove", goes.url, "--now", "--socket", str(socket))
        assert told.returncode == 0, told.stderr
        until(
            "its model is gone",
            lambda: {each["model"] for each in figures_of(router)["decisions"]} == {"other", "fake"},
        )


# The page in a browser


def test_the_page_shows_what_metrics_says(chromium: Chromium, rested: Router) -> None:
    client = connect(rested.address)
    client.connect()
    until("it is connected", lambda: Metrics(rested.admin).sum("kvlane_route_connections") == 1)
    with chromium.open(rested.admin) as shown:
        shown.wait_answered()
        wait_agreement(lambda: figures_and_metrics(shown, Metrics(rested.admin)))
        rows = shown.rows("Engines")
        assert [(row["Role"], row["State"]) for row in rows] == [("prefill", "ready"), ("decode", "ready")]
        ready = Metrics(rested.admin)
        assert all(ready.sum("kvlane_route_node_ready", node=row["Engine"]) == 1 for row in rows)
        _, page, _ = ask(rested.admin, "/decisions?limit=25")
        choices = [
            (each["prefill"] or "–", each["node"], each["why"], each["prompt_tokens"], each["attempt"])
            for each in page["decisions"]
        ]
        assert choices == [
            (row["Prefill"], row["Engine"], row["Why"], int(row["Prompt tokens"]), int(row["Attempt"]))
            for row in shown.rows("Choices of engines")
        ]
    client.close()


def figures_and_metrics(shown: LivePage, metrics: Metrics) -> dict[str, tuple[str, float]]:
    """Texts of the page, each with the number that it has to be."""
    one = metrics.sum
    total = "kvlane_route_requests_total"
    statuses = dict(re.findall(r"(\d+): (\S+?)(?:, |$)", shown.card("Errors of 500 and above").hint))
    assert set(statuses) == {"200", "400", "404"}
    refused, shed = shown.card("Refused for lack of an engine").parts(
        "since the start no engine: (.*), overload: (.*)"
    )
    clients = shown.card("Clients connected")
    compared = {
        "requests": (shown.card("Requests").parts("(.*) since the start")[0], one(total)),
        **{status: (count, one(total, status=status)) for status, count in statuses.items()},
        "refused": (refused, one("kvlane_route_refused_total")),
        "shed": (shed, one("kvlane_route_shed_total")),
        "connections": (clients.value, one("kvlane_route_connections")),
        "bodies": (clients.parts("(.*) of requests in memory")[0], one("kvlane_route_body_bytes")),
        "cached": (
            shown.card("Of them probably cached, ten minutes").value,
            one("kvlane_route_cached_tokens_total") / one("kvlane_route_prompt_tokens_total"),
        ),
    }
    columns = {
        "Requests": ("kvlane_route_node_requests", 1.0),
        "Of others": ("kvlane_route_node_other_requests", 1.0),
        "Tokens to prefill": ("kvlane_route_node_prefill_tokens", 1.0),
        "KV cache": ("kvlane_route_node_cache_used_percent", 0.01),
    }
    for row in shown.rows("Engines"):
        for column, (name, unit) in columns.items():
            compared[f"{column} of {row['Engine']}"] = (row[column], unit * one(name, node=row["Engine"]))
    return compared


def test_a_browser_with_another_clock_shows_how_old_a_choice_is(chromium: Chromium, rested: Router) -> None:
    """An hour's difference made every choice an hour old, or new."""
    for hours in (-1, 1):
        with chromium.open(
            rested.admin,
            is_hurried=False,
            before=lambda shown, hours=hours: shown.page.clock.install(time=time.time() + 3600 * hours),
        ) as shown:
            shown.wait_answered()
            newest = max(each["time"] for each in figures_of(rested)["decisions"])
            age, step = browser_pages.number(shown.rows("Choices of engines")[0]["Ago"])
            assert abs(age - (time.time() - newest)) < stretched(5) + step


def test_an_engine_that_dies_is_said_in_words(chromium: Chromium) -> None:
    with routed([], []) as (router, (lives, dies)), chromium.open(router.admin) as shown:
        shown.wait_answered()
        shown.wait_no_problem()
        dies.kill(signal.SIGKILL)
        shown.wait_problem("warning: 1 of 2 engines do not answer probes. Look at their logs.")
        states = {row["Engine"]: row["State"] for row in shown.rows("Engines")}
        assert states == {lives.url: "ready", dies.url: "suspect"}
        expect(shown.state).not_to_have_class("lost")


def test_a_router_without_engines_says_so_and_its_page_outlives_it(chromium: Chromium) -> None:
    with (
        Router("--ping", "127.0.0.1:0", nodes=0) as router,
        chromium.open(router.admin, tolerated=UNREACHED) as shown,
    ):
        shown.wait_problem("critical: The router knows no engine.")
        expect(shown.state).to_have_text(re.compile("no node is ready"))
        expect(shown.state).to_have_class("lost")
        assert ask(router.address, COMPLETIONS, wanted())[0] == 503
        errors = shown.page.locator(".card", has_text="Errors of 500 and above")
        expect(errors.locator(".hint")).to_have_text("503: 1")
        router.process.kill()
        shown.wait_lost()
        assert errors.locator(".hint").inner_text() == "503: 1", "the last figures stay"


def test_a_thousand_engines(chromium: Chromium, tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Ranks of one server are engines of their own.
        engine = stack.enter_context(FakeEngine())
        config = tmp_path / "route.toml"
        config.write_text(f'[[node]]\nurl = "{engine.url}"\nrole = "worker"\nranks = {ENGINES}\n')
        router = stack.enter_context(Router("--config", str(config), nodes=ENGINES))
        shown = stack.enter_context(chromium.open(router.admin, is_hurried=False))
        shown.wait_answered()
        rows = shown.rows("Engines")
        assert [row["Engine"] for row in rows] == [f"{engine.url}#{rank}" for rank in range(ENGINES)]
        assert {row["State"] for row in rows} == {"ready"}
        expect(shown.page.locator("caption").first).to_have_text("Engines: 1,000")
        assert shown.width() == 1280
        assert ask(router.address, COMPLETIONS, wanted())[0] == 200
        expect(shown.page.locator("caption").last).to_have_text("Choices of engines: 1")


def test_names_of_models_are_text(chromium: Chromium) -> None:
    longest = HOSTILE.ljust(256, "x")
    with (
        routed(["--model", HOSTILE, "--model", longest]) as (router, _),
        chromium.open(router.admin, width=360) as shown,
    ):
        shown.wait_answered()
        assert {row["Model"] for row in shown.rows("Engines")} == {f"{HOSTILE}, {longest}"}
        assert ask(router.address, COMPLETIONS, wanted(model=longest))[0] == 200
        expect(shown.page.locator("caption").last).to_have_text("Choices of engines: 1")
        assert shown.rows("Choices of engines")[0]["Model"] == longest
        assert_only_text(shown)


def test_names_of_4_kb_are_text(chromium: Chromium, rested: Router) -> None:
    """The router takes no name of more than 256 bytes; the page would stand longer ones."""

    def lengthen(figures: dict[str, Any]) -> None:
        for row in figures["nodes"]:
            row |= dict.fromkeys(("node", "models", "condition"), LONG_NAME)
        for row in figures["decisions"]:
            row |= dict.fromkeys(("node", "prefill", "model", "why"), LONG_NAME)

    with chromium.open(rested.admin, width=360, before=lambda shown: shown.answer_instead(lengthen)) as shown:
        shown.wait_answered()
        assert {row["Engine"] for row in shown.rows("Engines")} == {LONG_NAME}
        assert {row["Why"] for row in shown.rows("Choices of engines")} == {LONG_NAME}
        assert_only_text(shown)


def assert_only_text(shown: LivePage) -> None:
    assert shown.page.evaluate("window.ran") is None
    expect(shown.page.locator("img")).to_have_count(0)
    assert shown.width() <= 360


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(chromium: Chromium, rested: Router, is_dark: bool) -> None:
    with chromium.open(rested.admin, width=360 if is_dark else 1280, is_dark=is_dark) as shown:
        shown.wait_answered()
        assert shown.grave_findings() == []


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_no_part_is_wider_than_the_screen(chromium: Chromium, rested: Router, width: int) -> None:
    with chromium.open(rested.admin, width=width) as shown:
        shown.wait_answered()
        assert shown.width() <= width
        columns = shown.columns()
        assert columns == 1 if width == 360 else columns >= 4


def test_all_of_it_is_reached_with_the_keyboard(chromium: Chromium, rested: Router) -> None:
    with chromium.open(rested.admin) as shown:
        shown.wait_answered()
        focused = shown.page.locator(":focus")
        for name, value in (
            ("aria-label", "Engines"),
            ("aria-label", "Choices of engines"),
            ("href", "/metrics"),
            ("href", "/health"),
        ):
            shown.page.keyboard.press("Tab")
            expect(focused).to_have_attribute(name, value)
