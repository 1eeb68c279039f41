"""What becomes of a worker's requests, told once: to its metrics, its pulse, its log and the request's trace.

Intake, engine and publisher say what happens; what is made of it is here.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.domain import Chunk, Failed, FinishReason
from shared.queue import Claim
from workers.answer import Answer
from workers.attempt import Attempt
from workers.metrics import WorkerMetrics
from workers.publisher import Outcome
from workers.pulse import Pulse
from workers.traces import AttemptTraces

if TYPE_CHECKING:
    from opentelemetry.trace import Span

HANDED_OVER = "handed_over"

logger = logging.getLogger("tokenmill.worker")


@dataclass(slots=True)
class _Course:
    """How an attempt has gone so far; times are on the observer's clock."""

    claimed_at: float
    submitted_at: float
    waited_s: float
    span: "Span | None" = None
    is_carried_on: bool = False
    is_handed_over: bool = False
    prefill_at: float | None = None
    first_token_at: float | None = None
    drawn_at: dict[int, float] = field(default_factory=dict)
    tokens: int = 0


class Observer:
    """Each method is one fact. `claimed` comes first and `ended` last, whichever thread they come from.

    `stepped`, `worked_on` and `drew` are the engine's: all that happens in a step has the times of the step.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        *,
        traces: AttemptTraces | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pulse = Pulse(monotonic=monotonic)
        self._metrics = metrics
        self._traces = traces
        self._monotonic = monotonic
        self._courses: dict[Attempt, _Course] = {}
        self._step_began_at = self._step_ended_at = 0.0

    def claimed(self, attempt: Attempt, claim: Claim) -> None:
        """The worker has taken a request."""
        now = self._monotonic()
        span = self._traces.open(attempt, claim) if self._traces else None
        self._courses[attempt] = _Course(now, now - claim.age_s, claim.waited_s, span)
        self._metrics.attempts.inc()
        self._metrics.queue_time.observe(claim.waited_s)
        if attempt.number > 1:
            self._metrics.carried_on.inc()

    def prepared(self, attempt: Attempt) -> None:
        """Its prompt is tokens, and what earlier attempts have written is taken over."""
        course = self._courses.get(attempt)
        if course is not None:
            course.is_carried_on = any(answer.sent_tokens for answer in attempt.answers)

    def unreadable(self, code: str) -> None:
        """What the worker has taken was no request."""
        self._metrics.failed(code)

    def stepped(self, began_at: float, ended_at: float) -> None:
        """The engine has computed a step."""
        self._step_began_at, self._step_ended_at = began_at, ended_at
        self._metrics.step_time.observe(ended_at - began_at)

    def worked_on(self, attempt: Attempt) -> None:
        """The step computed something of this attempt."""
        course = self._courses.get(attempt)
        if course is not None and course.prefill_at is None:
            course.prefill_at = self._step_began_at
            if course.span is not None:
                course.span.add_event("prefill")

    def drew(self, attempt: Attempt, answer: Answer, chunk: Chunk | None) -> None:
        """A token was drawn for this answer; `chunk` is what of the answer may leave now."""
        course = self._courses.get(attempt)
        if course is None:
            return
        now = self._step_ended_at
        before = course.drawn_at.get(answer.choice)
        course.drawn_at[answer.choice] = now
        if before is None:
            self._first(course, attempt, answer, now)
        else:
            self._metrics.token_gap.observe(now - before)
            self.pulse.gap(now, now - before)
        if chunk is not None:
            tokens = len(chunk.tokens)
            course.tokens += tokens
            self._metrics.generation_tokens.inc(tokens)
            self.pulse.tokens(now, tokens)

    def handed_over(self, attempt: Attempt) -> None:
        """The worker gave the request back; `ended` follows."""
        course = self._courses.get(attempt)
        if course is not None:
            course.is_handed_over = True
            self._metrics.handed_over.inc()

    def ended(self, attempt: Attempt, outcome: Outcome, failure: Failed | None) -> None:
        """The attempt has left this worker."""
        course = self._courses.pop(attempt, None)
        if course is None:
            return
        if outcome is Outcome.DONE:
            was_cut_off = any(answer.finish is FinishReason.LENGTH for answer in attempt.answers)
            self._metrics.succeeded(FinishReason.LENGTH if was_cut_off else FinishReason.STOP)
        elif failure is not None:
            self._metrics.failed(failure.code)
        said = HANDED_OVER if course.is_handed_over else outcome.value
        if course.span is not None and self._traces is not None:
            self._traces.close(course.span, attempt, said, failure)
        self._log(course, attempt, said, failure)

    def _first(self, course: _Course, attempt: Attempt, answer: Answer, now: float) -> None:
        """The first token that this attempt drew for a choice."""
        if not course.is_carried_on and answer.choice % attempt.request.n == 0:
            # One of the choices that share a prompt stands for it.
            prompt = answer.sequence.prompt_length
            self._metrics.prompt_tokens.inc(prompt)
            self._metrics.cached_tokens.inc(min(answer.sequence.cached, prompt))
        if course.first_token_at is not None:
            return
        course.first_token_at = now
        if course.prefill_at is not None:
            self._metrics.prefill_time.observe(now - course.prefill_at)
        if not course.is_carried_on:
            self.pulse.first_token(now, now - course.submitted_at)
        if course.span is not None:
            course.span.add_event("first token")

    def _log(self, course: _Course, attempt: Attempt, outcome: str, failure: Failed | None) -> None:
        seconds = self._monotonic() - course.claimed_at
        facts = {
            "request_id": attempt.request.id,
            "model": attempt.request.model,
            "attempt": attempt.number,
            "outcome": outcome,
            "code": failure.code if failure is not None else None,
            "queue_s": round(course.waited_s, 3),
            "seconds": round(seconds, 3),
            "prompt_tokens": attempt.prompt_tokens,
            "tokens": course.tokens,
        }
        why = f" ({failure.code})" if failure is not None else ""
        # The front end has a line for each request; of attempts only those are news that did not go as they should.
        is_news = outcome != Outcome.DONE.value or attempt.number > 1
        logger.log(
            logging.INFO if is_news else logging.DEBUG,
            "request %s: attempt %d %s%s after %.3f s, %d tokens",
            attempt.request.id,
            attempt.number,
            outcome,
            why,
            seconds,
            course.tokens,
            extra=facts,
        )
