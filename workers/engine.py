"""The engine: schedule, run, postprocess, over and over, on a thread of its own.

The engine's thread is the only one that touches the backend's slots, the scheduler and the answers.
Other threads hand it attempts and cancellations through an inbox; it hands out events, as frozen
values, through `emit`. It never touches Redis.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from shared.domain import Done, Event, Failed, Finished
from shared.errors import ErrorCode
from workers.answer import Answer
from workers.attempt import Attempt
from workers.backends.protocol import Backend, Logits, StepError
from workers.observer import Observer
from workers.scheduler.scheduler import ScheduledStep, Scheduler, Sequence

Emit = Callable[[list[tuple[Attempt, list[Event]]]], None]
"""Takes the events of one step. Must not block."""

logger = logging.getLogger("tokenmill.engine")


class Engine:
    """Runs attempts to their end.

    `slots` is how many choices may be in flight before `wait_for_room` makes the caller wait.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        emit: Emit,
        *,
        observer: Observer,
        slots: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self._scheduler = scheduler
        self._emit = emit
        self._observer = observer
        self._slots = slots
        self._monotonic = monotonic
        self._attempts: set[Attempt] = set()
        self._answers: dict[Sequence, tuple[Attempt, Answer]] = {}
        # Guards the inbox, the count of choices in flight and the wish to stop.
        self._changed = threading.Condition()
        self._submitted: deque[Attempt] = deque()
        self._cancelled: deque[Attempt] = deque()
        self._in_flight = 0
        self._steps = 0
        self._longest_step_s = 0.0
        self._is_exclusive = False
        self._stopping = False

    @property
    def in_flight(self) -> int:
        """Choices that were submitted and have not ended."""
        return self._in_flight

    @property
    def steps(self) -> int:
        """Steps completed so far."""
        return self._steps

    @property
    def longest_step_s(self) -> float:
        """How long the longest completed step took."""
        return self._longest_step_s

    def submit(self, attempt: Attempt) -> None:
        """Start an attempt at the next step, unless it was cancelled before it came this far."""
        with self._changed:
            if attempt.is_cancelled:
                return
            self._submitted.append(attempt)
            self._in_flight += sum(answer.finish is None for answer in attempt.answers)
            self._is_exclusive = attempt.is_alone
            self._changed.notify_all()

    def cancel(self, attempt: Attempt) -> None:
        """Drop what is left of an attempt, without a further event.

        One that has ended is fine, and so is one whose prompt is still being prepared.
        """
        with self._changed:
            attempt.is_cancelled = True
            self._cancelled.append(attempt)
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until a choice more could run; False if none could within the timeout."""
        with self._changed:
            return self._changed.wait_for(self._has_room, timeout_s)

    def _has_room(self) -> bool:
        return self._in_flight < (1 if self._is_exclusive else self._slots)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False if something still is after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._in_flight == 0, timeout_s)

    def stop(self) -> None:
        """Let `run` return after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        """The engine's thread: step while there is work, sleep while there is none."""
        while self._take_inbox():
            self._end_overdue()
            scheduled = self._scheduler.schedule()
            if scheduled.sequences:
                self._run_step(scheduled)
        self.backend.close()

    def _take_inbox(self) -> bool:
        """Accept new attempts and cancellations, waiting while idle; False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._submitted or self._cancelled or self._answers)
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for attempt in submitted:
            self._attempts.add(attempt)
            for answer in attempt.answers:
                if answer.finish is not None:
                    continue
                self._answers[answer.sequence] = (attempt, answer)
                self._scheduler.add(answer.sequence)
        for attempt in cancelled:
            if attempt in self._attempts:
                self._drop(attempt)
        return True

    def _end_overdue(self) -> None:
        now = self._monotonic()
        overdue = [attempt for attempt in self._attempts if attempt.deadline <= now]
        if overdue:
            self._fail(overdue, ErrorCode.DEADLINE_EXCEEDED, "The request was not finished before its deadline.")

    def _run_step(self, scheduled: ScheduledStep) -> None:
        started_at = self._monotonic()
        try:
            for start in scheduled.step.starts:
                self.backend.start(start.slot, keep=start.keep, source=start.source)
            logits = self.backend.step(scheduled.step.work)
        except StepError as error:
            logger.error("a step with %d sequences failed: %s", len(scheduled.sequences), error)
            at_fault = self._scheduler.fail(scheduled)
            attempts = {attempt for attempt, _ in map(self._answers.__getitem__, at_fault)}
            self._fail(attempts, ErrorCode.ENGINE_ERROR, "The model failed on this request.")
            return
        self._scheduler.complete(scheduled)
        self._steps += 1
        ended_at = self._monotonic()
        self._longest_step_s = max(self._longest_step_s, ended_at - started_at)
        self._observer.stepped(started_at, ended_at)
        self._postprocess(scheduled, logits)

    def _postprocess(self, scheduled: ScheduledStep, logits: Logits) -> None:
        """Draw a token for every sequence that has logits and emit what may leave."""
        emitted: dict[Attempt, list[Event]] = {}
        ended = 0
        row = 0
        for work, sequence in zip(scheduled.step.work, scheduled.sequences, strict=True):
            attempt, answer = self._answers[sequence]
            self._observer.worked_on(attempt)
            if not work.wants_logits:
                continue
            chunk = answer.draw(logits[row])
            self._observer.drew(attempt, answer, chunk)
            row += 1
            events = emitted.setdefault(attempt, [])
            if chunk is not None:
                events.append(chunk)
            if answer.finish is not None:
                events.append(Finished(answer.choice, answer.finish))
                self._forget(sequence)
                ended += 1
                if attempt.is_finished:
                    events.append(Done(attempt.usage))
                    self._attempts.remove(attempt)
        self._emit(list(emitted.items()))
        if ended:
            self._free(ended)

    def _fail(self, attempts: Iterable[Attempt], code: ErrorCode, message: str) -> None:
        for attempt in list(attempts):
            # First the event: once nothing is in flight, a draining worker stops what sends it.
            self._emit([(attempt, [Failed(code.value, message)])])
            self._drop(attempt)

    def _drop(self, attempt: Attempt) -> None:
        """Forget an attempt and free its slots."""
        self._attempts.remove(attempt)
        left = [answer for answer in attempt.answers if answer.sequence in self._answers]
        for answer in left:
            self._forget(answer.sequence)
        self._free(len(left))

    def _forget(self, sequence: Sequence) -> None:
        del self._answers[sequence]
        self._scheduler.remove(sequence)

    def _free(self, choices: int) -> None:
        with self._changed:
            self._in_flight -= choices
            self._changed.notify_all()
