"""A collector of traces: takes OTLP over HTTP and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from servers import wait_until


@dataclass(frozen=True)
class Span:
    """A span as the collector got it; ids in hex, times in nanoseconds."""

    name: str
    service: str
    trace: str
    id: str
    parent: str
    kind: int
    status: int
    began_at: int
    ended_at: int
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Collector:
    """What has arrived so far."""

    url: str
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""

    def wait_for(self, count: int) -> list[Span]:
        """All spans, once there are so many."""
        wait_until(lambda: len(self.spans) >= count, limit_s=20, what=f"{count} spans")
        return list(self.spans)

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_span(span, service) for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, name="collector", daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        service=service,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        status=span.status.code,
        began_at=span.start_time_unix_nano,
        ended_at=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=[event.name for event in span.events],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
