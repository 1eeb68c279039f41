"""One HTTP request from its arrival to the last byte of its answer, told once: to metrics, log and trace.

Routes, relay and the writer of streams say what happens; what is made of it is here. Used by one greenlet at a time.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from api.errors import request_error
from api.metrics import NO_MODEL, ApiMetrics
from api.relay import Following
from shared.domain import Accepted, Chunk, Done, Failed, Usage
from shared.errors import RequestError
from shared.log import Entry
from shared.tracing import PROVIDER, Tracing, usage_attributes

if TYPE_CHECKING:
    from opentelemetry.trace import Span

API_PREFIX = "/v1/"
"""What is not below it is asked by machines every few seconds, and logged only for debugging."""

OTHER = "other"
"""The endpoint of a URL that is none of ours."""

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""The endpoints that have a trace, and what OpenTelemetry calls what they do."""

logger = logging.getLogger("tokenmill.access")


class Observer:
    """Makes an `Exchange` of each request of a process."""

    def __init__(
        self,
        metrics: ApiMetrics,
        *,
        tracing: Tracing | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.monotonic = monotonic

    def arrived(self, *, request_id: str, method: str, endpoint: str | None, traceparent: str = "") -> "Exchange":
        """A request came in. `endpoint` is the URL's pattern, if it has one."""
        return Exchange(self, request_id, method, endpoint or OTHER, traceparent)

    def refused(self, status: int) -> None:
        """What came in was not even HTTP, and no request was made of it."""
        self.metrics.responded(OTHER, status)


class Exchange:
    """What is known of one request; each method is one fact. `closed` comes last."""

    def __init__(self, observer: Observer, request_id: str, method: str, endpoint: str, traceparent: str) -> None:
        self.request_id = request_id
        self.model = NO_MODEL
        self._metrics = observer.metrics
        self._monotonic = observer.monotonic
        self._method = method
        self._endpoint = endpoint
        self._arrived_at = observer.monotonic()
        self._following: Following | None = None
        self._is_stream = False
        self._is_resumed = False
        self._accepted_after_s: float | None = None
        self._first_token_after_s: float | None = None
        self._tokens = 0
        self._usage: Usage | None = None
        self._error: RequestError | None = None
        self._has_broken = False
        self._holder = ""
        self._prompt_tokens = 0
        self._when_closed: Callable[[int], None] | None = None
        self._span: Span | None = None
        self.trace = ""
        """The `traceparent` that a worker's spans continue."""
        if observer.tracing is not None and endpoint in OPERATIONS:
            self._open_span(observer.tracing, traceparent)

    def is_of(self, holder: str) -> None:
        """The request carries the key of this holder."""
        self._holder = holder

    def when_closed(self, tell: Callable[[int], None]) -> None:
        """Tell in the end how many tokens of prompt and answer were used."""
        self._when_closed = tell

    def names_model(self, model: str) -> None:
        """The request is for this model, which is or was lately served."""
        self.model = model

    def follows(self, following: Following, *, model: str) -> None:
        """The request is queued, or joined to an earlier one, whose id it then has."""
        self._following = following
        self.request_id = following.request_id
        self.model = model

    def streams(self, *, is_resumed: bool = False) -> None:
        """The answer is a stream, from now on."""
        self._is_stream, self._is_resumed = True, is_resumed
        self._metrics.opened(self.model)
        if is_resumed:
            self._metrics.resumed(self.model)

    def passes_on(self, entries: Iterable[Entry]) -> None:
        """These entries are about to be written to the client."""
        for entry in entries:
            match entry.event:
                case Chunk() as chunk:
                    self._tokens += len(chunk.tokens)
                    if self._first_token_after_s is None and chunk.text:
                        self._first_token_after_s = self._elapsed()
                case Accepted(prompt_tokens):
                    self._accepted_after_s = self._elapsed()
                    self._prompt_tokens = prompt_tokens
                case Done(usage):
                    self._usage = usage
                case Failed() as failure:
                    self._error = request_error(failure)

    def fails(self, error: RequestError) -> None:
        """The answer is an error, or ends in one."""
        self._error = error

    def breaks(self) -> None:
        """The answer ended because of a bug."""
        self._has_broken = True

    def closed(self, status: int) -> None:
        """The answer has been written, or nobody takes it any more."""
        self._metrics.responded(self._endpoint, status)
        seconds = self._elapsed()
        outcome = self._outcome(status)
        if self._is_stream:
            self._metrics.closed(self.model)
        if outcome == "cancelled":
            self._metrics.cancelled(self.model)
        if self._error is not None and self._is_stream:
            self._metrics.failed(self.model, self._error.code)
        elif self._error is not None:
            self._metrics.rejected(self.model, self._error.code)
        if not self._is_resumed:
            if self._is_stream and self._first_token_after_s is not None:
                self._metrics.first_token(self.model, self._first_token_after_s)
            if self._usage is not None:
                self._metrics.done(self.model, seconds)
        self._log(status, outcome, seconds)
        if self._span is not None:
            self._close_span(self._span, status, outcome)
        if self._when_closed is not None:
            used = self._usage.prompt + self._usage.completion if self._usage else self._prompt_tokens + self._tokens
            try:
                self._when_closed(used)
            except RequestError as error:
                logger.warning("the tokens of request %s are not counted: %s", self.request_id, error)

    def _elapsed(self) -> float:
        return self._monotonic() - self._arrived_at

    def _outcome(self, status: int) -> str:
        """How it ended: a stream that has no end is one that nobody read any longer."""
        if self._has_broken:
            return "broken"
        if self._error is not None:
            return "failed" if self._is_stream else "rejected"
        if self._following is None:
            return "done" if status < 400 else "rejected"
        if self._usage is not None:
            return "done"
        return "cancelled" if self._following.was_cancelled else "left"

    def _log(self, status: int, outcome: str, seconds: float) -> None:
        facts: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self._method,
            "endpoint": self._endpoint,
            "status": status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
        }
        if self._error is not None:
            facts["code"] = self._error.code.value
        if self.model:
            facts["model"] = self.model
        if self._holder:
            facts["key"] = self._holder
        if self._following is not None:
            usage = self._usage or Usage(completion=self._tokens)
            facts |= {
                "stream": self._is_stream,
                "accepted_s": _rounded(self._accepted_after_s),
                "first_token_s": _rounded(self._first_token_after_s),
                "prompt_tokens": usage.prompt,
                "cached_tokens": usage.cached,
                "completion_tokens": usage.completion,
            }
        shown = " ".join(f"{name}={value}" for name, value in facts.items() if name not in ("method", "endpoint"))
        level = logging.INFO if self._endpoint.startswith(API_PREFIX) else logging.DEBUG
        logger.log(level, "%s %s %s", self._method, self._endpoint, shown, extra=facts)

    def _open_span(self, tracing: Tracing, traceparent: str) -> None:
        from opentelemetry.trace import SpanKind

        self._span = tracing.tracer.start_span(
            f"{self._method} {self._endpoint}",
            context=tracing.context(traceparent),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": self._method,
                "http.route": self._endpoint,
                "gen_ai.operation.name": OPERATIONS[self._endpoint],
                "gen_ai.provider.name": PROVIDER,
            },
        )
        self.trace = tracing.traceparent(self._span)

    def _close_span(self, span: "Span", status: int, outcome: str) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attributes(
            {"http.response.status_code": status, "gen_ai.response.id": self.request_id, "tokenmill.outcome": outcome}
        )
        if self.model:
            span.set_attribute("gen_ai.request.model", self.model)
        if self._usage is not None:
            usage = self._usage
            span.set_attributes(usage_attributes(prompt=usage.prompt, completion=usage.completion, cached=usage.cached))
        if self._is_stream:
            span.set_attribute("gen_ai.request.stream", True)
        if self._is_stream and self._first_token_after_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", self._first_token_after_s)
        if self._error is not None:
            span.set_attribute("error.type", self._error.code.value)
        # By OpenTelemetry's rules a client's own mistake is no error of the server's span.
        if self._has_broken or status >= 500 or outcome == "failed":
            span.set_status(StatusCode.ERROR)
        span.end()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
