"""The daemon's spans and metrics at an OpenTelemetry collector."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from collector import Collector, Span, collecting, tree
from processes import KVLANE, PATIENCE, Daemon, Engine, clean_environment, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


def exported(collector: Collector, *names: str) -> list[Span]:
    """All spans, once one of each name has come."""
    until(f"{names} have come", lambda: all(collector.named(name) for name in names))
    return collector.spans


def metric(daemon: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"http://{daemon.http_at}/metrics", timeout=PATIENCE) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.parametrize("method", ["process_vm", "mapped"])
def test_a_request_is_one_tree_below_its_callers_span(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine], method: str
) -> None:
    with collecting() as collector:
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        engine = make_engine(daemon, "e", save_method=method)
        assert engine.call("lookup", prompt="p", count=6, traceparent=SAMPLED)["tokens"] == 0
        assert engine.call("save", prompt="p", count=4)["ok"]
        assert engine.call("save", prompt="p", count=2, first=4)["ok"]
        until("all is sealed", lambda: engine.call("check", prompt="p", count=6)["blocks"] == 6)
        hit = engine.call("lookup", prompt="p", count=6, traceparent=SAMPLED)
        engine.call("load", prompt="p", lease=hit["lease"])
        spans = exported(collector, "kvlane.load")
        assert {span.trace for span in spans} == {TRACE}
        assert {span.parent for span in spans} == {PARENT}
        assert {span.service for span in spans} == {"kvlane"}
        assert tree(spans) == {
            "": ["kvlane.load", "kvlane.lookup", "kvlane.lookup", "kvlane.save", "kvlane.save"]
        }
        miss, found = sorted(collector.named("kvlane.lookup"), key=lambda span: span.began)
        assert (miss.attributes["kvlane.tier"], miss.attributes["kvlane.looked_up_blocks"]) == ("none", 6)
        assert (found.attributes["kvlane.tier"], found.attributes["kvlane.hit_blocks.ram"]) == ("ram", 6)
        saved = sorted(span.attributes["kvlane.blocks"] for span in collector.named("kvlane.save"))
        assert saved == [2, 4]
        (load,) = collector.named("kvlane.load")
        assert load.attributes["kvlane.tokens"] == hit["tokens"]
        assert all(span.began <= span.ended and not span.is_error for span in spans)
        assert found.ended <= load.began + 1_000_000, "the load begins with the answer"


def test_requests_that_their_caller_did_not_sample_are_not_exported(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine]
) -> None:
    """Control: the sampled request after them is."""
    with collecting() as collector:
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        engine = make_engine(daemon, "e")
        for text in ("", f"00-{TRACE}-{PARENT}-00", "nonsense", "00-" + "0" * 32 + f"-{PARENT}-01"):
            engine.call("lookup", prompt="p", count=2, traceparent=text)
        engine.call("lookup", prompt="p", count=3, traceparent=SAMPLED)
        exported(collector, "kvlane.lookup")
        assert [span.attributes["kvlane.looked_up_blocks"] for span in collector.spans] == [3]


def test_a_fetch_from_the_ssd_is_a_child_of_its_lookup(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine], folder: Path
) -> None:
    with collecting() as collector:
        daemon = make_daemon(
            *("--otlp-endpoint", collector.endpoint, "--ssd", f"{folder / 'blocks'}:64mib"), pool="8mib"
        )
        engine = make_engine(daemon, "e")
        for number in range(12):
            assert engine.call("save", prompt=f"p{number}", count=64)["ok"]
            # Blocks that are evicted before their turn are not written.
            wanted = (number + 1) * 64 - 1
            until(
                "it is written",
                lambda least=wanted: metric(daemon, "kvlane_ssd_written_blocks_total") >= least,
            )
        engine.call("lookup", prompt="p0", count=64, traceparent=SAMPLED)
        spans = exported(collector, "kvlane.lookup", "kvlane.fetch")
        assert tree(spans)["kvlane.lookup"] == ["kvlane.fetch"]
        (lookup,) = collector.named("kvlane.lookup")
        assert (lookup.attributes["kvlane.tier"], lookup.attributes["kvlane.hit_blocks.ssd"]) == ("ssd", 64)


def test_the_metrics_are_those_of_the_page(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine]
) -> None:
    """The daemon sends them every 15 s, and once more when it stops."""
    with collecting() as collector:
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        engine = make_engine(daemon, "e")
        engine.call("save", prompt="p", count=5)
        # A block is found once its checksum is taken, which nobody waits for.
        daemon.settle()
        assert engine.call("check", prompt="p", count=5)["blocks"] == 5
        until("the blocks are counted", lambda: metric(daemon, "kvlane_blocks") == 5)
        until("hits are counted", lambda: metric(daemon, 'kvlane_hit_bytes_total{tier="ram"}') > 0)
        daemon.stop()
        assert collector.metrics["kvlane_blocks"][0].as_double == 5
        tiers = {
            point.attributes[0].value.string_value: point.as_double
            for point in collector.metrics["kvlane_hit_bytes_total"]
        }
        assert tiers["ram"] > 0 and tiers["ssd"] == 0
        durations = {
            point.attributes[0].value.string_value: point
            for point in collector.metrics["kvlane_request_duration_seconds"]
        }
        assert durations["Lookup"].count == sum(durations["Lookup"].bucket_counts) == 1


def test_a_collector_that_fails_costs_nothing_but_a_counter(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine]
) -> None:
    with collecting() as collector:
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        engine = make_engine(daemon, "e")
        # Refused for good: dropped at once.
        collector.status = 500
        engine.call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        until("a span is dropped", lambda: metric(daemon, "kvlane_otlp_dropped_spans_total") == 1)
        assert "it answered 500" in daemon.log.wait_for("OTLP export of traces fails")
        # Another address is none that the operator chose.
        collector.status, collector.location = 307, "http://127.0.0.1:1/v1/traces"
        engine.call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        until("it is not followed", lambda: metric(daemon, "kvlane_otlp_dropped_spans_total") == 2)
        # Refused for now: sent again.
        collector.status, collector.location = 503, ""
        before = len(collector.requests)
        engine.call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        until("it is asked again", lambda: len(collector.requests) >= before + 2)
        collector.status = 200
        until("it takes the span", lambda: metric(daemon, "kvlane_otlp_exported_spans_total") == 1)
        daemon.log.wait_for("OTLP export of traces works again")
        # A part is rejected.
        collector.rejected = 1
        engine.call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        until("it is counted", lambda: metric(daemon, "kvlane_otlp_dropped_spans_total") == 3)
        assert metric(daemon, "kvlane_otlp_failed_requests_total") >= 3


def test_a_collector_that_never_answers_holds_up_nothing(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine]
) -> None:
    with collecting() as collector:
        collector.silent.set()
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        engine = make_engine(daemon, "e")
        engine.call("save", prompt="p", count=4)
        engine.call("lookup", prompt="p", count=4, traceparent=SAMPLED)
        until("the collector has the spans", lambda: collector.requests)
        # More spans than may wait.
        sent = 6000
        for _ in range(sent // 500):
            engine.call("lookups", prompt="q", count=4, times=500, traceparent=SAMPLED)
        until("the rest is dropped", lambda: metric(daemon, "kvlane_otlp_dropped_spans_total") > 500)
        assert metric(daemon, "kvlane_otlp_waiting_spans") <= 4096
        assert engine.call("check", prompt="p", count=4)["blocks"] == 4


def _certificate(folder: Path) -> tuple[Path, Path, Path]:
    """A certificate for this host, its key, and the authority that signed it."""
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    authority, key, asked, certificate = (folder / name for name in ("ca.pem", "key", "asked", "certificate"))
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        ["req", "-x509", *ec, "-keyout", folder / "ca.key", "-out", authority, "-subj", "/CN=authority"],
        ["req", *ec, "-keyout", key, "-out", asked, "-subj", "/CN=collector"],
        [
            *("x509", "-req", "-in", asked, "-CA", authority, "-CAkey", folder / "ca.key", "-CAcreateserial"),
            *("-out", certificate, "-days", "2", "-extfile", folder / "names"),
        ],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=PATIENCE)
    return certificate, key, authority


def test_over_tls_with_headers_of_a_file(
    make_daemon: Callable[..., Daemon], make_engine: Callable[..., Engine], folder: Path
) -> None:
    certificate, key, authority = _certificate(folder)
    headers = folder / "headers"
    headers.write_text("Authorization: Bearer secret-key\n")
    headers.chmod(0o600)
    with collecting((certificate, key)) as collector:
        flags = ("--otlp-endpoint", collector.endpoint, "--otlp-headers-file", str(headers))
        daemon = make_daemon(*flags, "--otlp-ca-file", str(authority))
        engine = make_engine(daemon, "e")
        engine.call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        exported(collector, "kvlane.lookup")
        assert collector.requests[0][1]["authorization"] == "Bearer secret-key"
        daemon.stop()
        assert "secret-key" not in daemon.log.rest()
    # Control: without the authority the certificate is one of a stranger.
    with collecting((certificate, key)) as collector:
        daemon = make_daemon("--otlp-endpoint", collector.endpoint)
        make_engine(daemon, "f").call("lookup", prompt="p", count=2, traceparent=SAMPLED)
        daemon.log.wait_for("OTLP export of traces fails")
        assert not collector.requests


def test_mistakes_say_what_to_write_and_never_show_a_secret() -> None:
    for endpoint, wanted in (
        ("127.0.0.1:4318", "it has no scheme: write http://HOST:4318"),
        ("http://me:secret@127.0.0.1:4318", "it holds credentials"),
    ):
        done = subprocess.run(
            [KVLANE, "serve", "--otlp-endpoint", endpoint, "--listen", "unix:/nowhere"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env=clean_environment(),
        )
        assert done.returncode != 0
        assert wanted in done.stderr and "secret" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
