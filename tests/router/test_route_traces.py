"""The router's spans and metrics at an OpenTelemetry collector, and the header that its engines get."""

from __future__ import annotations

import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, Span, collecting, tree
from processes import PATIENCE, until
from routed import CHAT, COMPLETIONS, LONG, Router, ask, chat, connect, routed, wanted

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


def otlp(collector: Collector, *more: str) -> tuple[str, ...]:
    return ("--otlp-endpoint", collector.endpoint, *more)


def exported(collector: Collector, name: str, count: int = 1) -> list[Span]:
    until(f"{count} of {name} have come", lambda: len(collector.named(name)) >= count)
    return collector.spans


def metric(router: Router, name: str) -> float:
    with urllib.request.urlopen(f"http://{router.admin}/metrics", timeout=PATIENCE) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_it_starts_as_the_page_says() -> None:
    """No collector listens there, and the router serves all the same."""
    flags = "--otlp-endpoint http://127.0.0.1:4318 --otlp-sample 0.01 --worker http://127.0.0.1:8001"
    assert f"kvlane route {flags}\n" in (Path(__file__).parents[2] / "docs/operate.md").read_text()
    with Router(*flags.split(), nodes=0) as router:
        assert metric(router, "kvlane_otlp_dropped_spans_total") == 0


def test_a_pair_is_one_tree_and_each_engine_gets_its_legs_span() -> None:
    with (
        collecting() as collector,
        routed(["--pairs", "nixl"], ["--pairs", "nixl"], roles="pd", flags=otlp(collector)) as (
            router,
            engines,
        ),
    ):
        status, _, _ = ask(router.address, COMPLETIONS, wanted(prompt=LONG), SAMPLED)
        assert status == 200
        spans = exported(collector, "kvlane.route")
        until("both legs have come", lambda: len(collector.spans) == 3)
        assert tree(spans) == {
            "": ["kvlane.route"],
            "kvlane.route": ["kvlane.route.decode", "kvlane.route.prefill"],
        }
        assert {span.trace for span in spans} == {TRACE}
        assert {span.service for span in spans} == {"kvlane-router"}
        (route,) = collector.named("kvlane.route")
        assert route.parent == PARENT
        assert route.attributes["http.route"] == COMPLETIONS
        assert route.attributes["http.response.status_code"] == 200
        assert route.attributes["kvlane.prompt_tokens"] > 100
        for name, engine in zip(("prefill", "decode"), engines, strict=True):
            (leg,) = collector.named(f"kvlane.route.{name}")
            (seen,) = engine.log()
            assert seen["headers"]["traceparent"] == f"00-{TRACE}-{leg.id}-01"
            assert route.began <= leg.began <= leg.ended <= route.ended


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_without_a_trace_of_the_client_the_router_begins_one(path: str) -> None:
    with collecting() as collector, routed([], flags=otlp(collector)) as (router, (engine,)):
        body = chat(stream=True) if path == CHAT else wanted(stream=True)
        ask(router.address, path, body)
        exported(collector, "kvlane.route")
        (route,) = collector.named("kvlane.route")
        assert route.parent == "" and route.attributes["http.route"] == path
        (seen,) = engine.log()
        assert seen["headers"]["traceparent"].startswith(f"00-{route.trace}-")


def test_what_the_client_did_not_sample_passes_as_it_is_and_is_not_exported() -> None:
    """Control: the sampled request after it is."""
    with (
        collecting() as collector,
        routed([], flags=otlp(collector, "--otlp-sample", "0")) as (router, (engine,)),
    ):
        ask(router.address, COMPLETIONS, wanted(), UNSAMPLED)
        ask(router.address, COMPLETIONS, wanted())
        ask(router.address, COMPLETIONS, wanted(), SAMPLED)
        exported(collector, "kvlane.route")
        assert {span.parent for span in collector.named("kvlane.route")} == {PARENT}
        first, second, _ = engine.log()
        assert first["headers"]["traceparent"] == UNSAMPLED["traceparent"]
        # The engine must not begin a trace that the router did not sample.
        assert second["headers"]["traceparent"].endswith("-00")


def test_a_retry_is_a_leg_of_its_own_and_the_failed_one_says_so() -> None:
    with (
        collecting() as collector,
        routed([], [], flags=otlp(collector, "--policy", "round-robin")) as (router, (bad, _)),
    ):
        bad.faults(status=503)
        for _ in range(2):
            assert ask(router.address, COMPLETIONS, wanted(), SAMPLED)[0] == 200
        exported(collector, "kvlane.route", 2)
        until("all legs have come", lambda: len(collector.named("kvlane.route.whole")) >= 3)
        legs = collector.named("kvlane.route.whole")
        assert {leg.is_error for leg in legs} == {True, False}
        assert 2 in {span.attributes["kvlane.attempts"] for span in collector.named("kvlane.route")}


def test_a_client_that_leaves_ends_its_span() -> None:
    with collecting() as collector, routed(["--ttft-ms", "60000"], flags=otlp(collector)) as (router, _):
        connection = connect(router.address)
        connection.request("POST", COMPLETIONS, b'{"model": "fake", "prompt": "a"}', SAMPLED)
        until("its engine has it", lambda: metric(router, "kvlane_route_connections") == 1)
        connection.close()
        exported(collector, "kvlane.route")
        (route,) = collector.named("kvlane.route")
        assert route.is_error and route.attributes["http.response.status_code"] == 499


def test_the_last_spans_and_the_metrics_come_when_it_stops() -> None:
    with collecting() as collector:
        with routed([], flags=otlp(collector)) as (router, _):
            ask(router.address, COMPLETIONS, wanted(), SAMPLED)
            router.process.send_signal(signal.SIGTERM)
            router.process.wait(PATIENCE)
        assert [span.parent for span in collector.named("kvlane.route")] == [PARENT]
        points: list[Any] = collector.metrics["kvlane_route_requests_total"]
        assert sum(point.as_double for point in points) == 1


def test_a_collector_that_never_answers_holds_up_no_request_and_not_the_end() -> None:
    with collecting() as collector:
        collector.silent.set()
        with routed([], flags=otlp(collector)) as (router, _):
            ask(router.address, COMPLETIONS, wanted(), SAMPLED)
            until("the collector has the span", lambda: collector.requests)
            for _ in range(50):
                assert ask(router.address, COMPLETIONS, wanted(), SAMPLED)[0] == 200
            began = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            router.process.wait(PATIENCE)
            # Its own bound is 5 s for a request under way and 5 s for the last ones.
            assert time.monotonic() - began < 25
