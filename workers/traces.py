"""The span of an attempt, in the trace of its request."""

import time
from typing import TYPE_CHECKING, Any

from shared.domain import ChatPrompt, Failed
from shared.queue import Claim
from shared.tracing import PROVIDER, Tracing, usage_attributes
from workers.attempt import Attempt

if TYPE_CHECKING:
    from opentelemetry.trace import Span

NANOSECONDS = 1_000_000_000


class AttemptTraces:
    """Opens and closes spans; `worker` is the name of this worker in the fleet."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker

    def open(self, attempt: Attempt, claim: Claim) -> "Span":
        """The span of an attempt that begins now, from the time since which its request waits."""
        queued_at = time.time_ns() - _ns(claim.waited_s)
        if claim.died:
            self._stand_in_for_dead(attempt, claim, queued_at)
        span = self._start(attempt, attempt.number, self._worker, queued_at)
        span.add_event("queue", timestamp=queued_at)
        span.add_event("claim")
        return span

    def close(self, span: "Span", attempt: Attempt, outcome: str, failure: Failed | None) -> None:
        """The attempt has ended."""
        from opentelemetry.trace import StatusCode

        usage = attempt.usage
        span.set_attributes(
            usage_attributes(prompt=usage.prompt, completion=usage.completion, cached=usage.cached)
            | {"tokenmill.outcome": outcome}
        )
        reasons = [answer.finish.value for answer in attempt.answers if answer.finish is not None]
        if reasons:
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if failure is not None:
            span.set_attribute("error.type", failure.code)
            span.set_status(StatusCode.ERROR, failure.code)
        span.add_event("end")
        span.end()

    def _stand_in_for_dead(self, attempt: Attempt, claim: Claim, ended_at: int) -> None:
        """Close the span of the attempt before, whose worker can't any more.

        Its tokens are this attempt's as well, so it says nothing of them.
        """
        from opentelemetry.trace import StatusCode

        span = self._start(attempt, attempt.number - 1, claim.died, ended_at - _ns(claim.ran_s))
        span.set_attributes({"tokenmill.outcome": "worker_died", "error.type": "worker_died"})
        span.set_status(StatusCode.ERROR, "the worker died")
        span.add_event("end", timestamp=ended_at)
        span.end(ended_at)

    def _start(self, attempt: Attempt, number: int, worker: str, started_at: int) -> "Span":
        from opentelemetry.trace import SpanKind

        request = attempt.request
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if isinstance(request.prompts[0], ChatPrompt) else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request.model,
            "gen_ai.response.id": request.id,
            "tokenmill.attempt": number,
            "tokenmill.worker": worker,
        }
        return self._tracing.tracer.start_span(
            f"attempt {number}",
            context=self._tracing.context(request.trace or ""),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            start_time=started_at,
        )


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
