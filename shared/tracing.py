"""Traces over OpenTelemetry: off unless an endpoint is set, and nothing of it is imported before that.

A trace goes from the front end's span of a request through the queue, as a W3C `traceparent`, to one span for each
attempt. No attribute holds a prompt or an answer.
"""

import importlib.util
import threading
from typing import TYPE_CHECKING, Any

from shared.errors import StartupError
from shared.settings import source

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
PATH = "/v1/traces"
"""Where OTLP over HTTP takes spans."""

EXPORT_TIMEOUT_S = 5.0
FLUSH_S = 2.0
"""How long the end of a process may wait for a collector to take the last spans."""

TRACEPARENT = "traceparent"

PROVIDER = "tokenmill"


def check_tracing(endpoint: str) -> None:
    """See whether traces can be sent.

    Raises:
        StartupError: an endpoint is set and OpenTelemetry is not installed.
    """
    try:
        is_there = not endpoint or importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise StartupError(
            f"{source('otlp_endpoint')} needs OpenTelemetry: install tokenmill[otlp], or requirements/otlp.txt"
        )


class Tracing:
    """The spans of one process, on their way to a collector."""

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        """`endpoint` is a collector's base URL, or the full one of its traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint.rstrip("/")
        exporter = OTLPSpanExporter(url if url.endswith(PATH) else url + PATH, timeout=EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = self._provider.get_tracer("tokenmill")

    def context(self, traceparent: str) -> "Context":
        """What a span continues; nothing, if the text is not a `traceparent`."""
        return self._propagator.extract({TRACEPARENT: traceparent})

    def traceparent(self, span: "Span") -> str:
        """How others continue this span."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return carrier.get(TRACEPARENT, "")

    def stop(self) -> None:
        """Send what is left, for so long as `FLUSH_S`."""
        last = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(FLUSH_S)


def usage_attributes(*, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Tokens, as OpenTelemetry's conventions for generative AI name them."""
    return {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": completion,
        "gen_ai.usage.cache_read.input_tokens": cached,
    }
