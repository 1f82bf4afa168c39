"""An OpenTelemetry collector for tests: takes OTLP over HTTP, keeps what came, and can be slow, cut or refuse."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    trace: str
    id: str
    parent: str
    """Empty for a root."""
    name: str
    service: str
    attributes: dict[str, Any]
    began: int
    ended: int
    is_error: bool


class Collector:
    """Answers 200, unless told otherwise. With `counts_only` it keeps no request, span or metric, but counts them."""

    def __init__(self, certificate: tuple[Path, Path] | None = None, counts_only: bool = False) -> None:
        self.status = 200
        self.rejected = 0
        """Spans that each answer rejects."""
        self.location = ""
        """Where it redirects to, with a status of 3xx."""
        self.silent = threading.Event()
        """Set: it accepts requests and never answers."""
        self.ending = threading.Event()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.spans: list[Span] = []
        self.metrics: dict[str, list[Any]] = {}
        self.counts: Counter[str] = Counter()
        """With `counts_only`: requests by path, spans by name, and spans that end in an error."""
        self._counts_only = counts_only
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer._take(self.path, dict(self.headers), body)
                if outer.silent.is_set():
                    outer.ending.wait(60)
                    return
                answer = ExportTraceServiceResponse()
                if outer.rejected:
                    answer.partial_success.rejected_spans = outer.rejected
                data = answer.SerializeToString()
                self.send_response(outer.status)
                if outer.location:
                    self.send_header("location", outer.location)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.endpoint = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        if self._counts_only:
            self._count(path, body)
            return
        with self._lock:
            self.requests.append((path, {name.lower(): value for name, value in headers.items()}))
            if self.status >= 300:
                return
            if path.endswith("/v1/traces"):
                self._take_spans(ExportTraceServiceRequest.FromString(body))
            elif path.endswith("/v1/metrics"):
                for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    for scope in of_resource.scope_metrics:
                        for metric in scope.metrics:
                            data = getattr(metric, str(metric.WhichOneof("data")))
                            self.metrics[metric.name] = list(data.data_points)

    def _count(self, path: str, body: bytes) -> None:
        counted = Counter({path: 1})
        if path.endswith("/v1/traces"):
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                    counted[span.name] += 1
                    counted["errors"] += span.status.code == 2
        with self._lock:
            self.counts += counted

    def _take_spans(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.name,
                            named["service.name"],
                            {each.key: _value(each.value) for each in span.attributes},
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == 2,
                        )
                    )

    def named(self, name: str) -> list[Span]:
        with self._lock:
            return [span for span in self.spans if span.name == name]

    def stop(self) -> None:
        self.ending.set()
        self.server.shutdown()
        self.server.server_close()


def _value(value: Any) -> Any:
    return getattr(value, str(value.WhichOneof("value")))


@contextlib.contextmanager
def collecting(
    certificate: tuple[Path, Path] | None = None, counts_only: bool = False
) -> Iterator[Collector]:
    collector = Collector(certificate, counts_only)
    try:
        yield collector
    finally:
        collector.stop()


def tree(spans: list[Span]) -> dict[str, list[str]]:
    """The names of each span's children, by its own name; "" has the roots, and those whose parent did not come."""
    names = {span.id: span.name for span in spans}
    children: dict[str, list[str]] = {}
    for span in spans:
        children.setdefault(names.get(span.parent, ""), []).append(span.name)
    return {name: sorted(of_name) for name, of_name in children.items()}
