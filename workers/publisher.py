"""The publisher: the one thread that writes to event logs.

The engine hands over events and goes on; this thread batches them and sends what is due, for all
requests together, in one round trip. While Redis is away it keeps what it has and tries again, and
decoding does not notice.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum

from shared.domain import Event, Failed, Priority, is_terminal
from shared.errors import ErrorCode
from shared.log import Append, LogWriter, Written
from shared.logs import about
from shared.store import CONNECTION_ERRORS
from workers.attempt import Attempt
from workers.chunks import ChunkBatcher

RETRY_S = 0.25
AWAKE = -math.inf
ASLEEP_FOR_GOOD = math.inf

ABANDONED = Failed(ErrorCode.CANCELLED.value, "Nobody was left to read the answer.")

logger = logging.getLogger("tokenmill.publisher")


class Outcome(Enum):
    """How an attempt left this worker."""

    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"
    """Its request was ended elsewhere, or another attempt has taken over."""


Ended = Callable[[Attempt, Outcome, Failed | None], None]
"""Called once per attempt: after its last entry was written, or by whoever drops it."""


class _Outbox:
    """What one attempt has not sent yet, and the number of its next entry.

    `is_closed` once its terminal event was put: whatever comes after that is too late.
    `unheard_since` is the time since which nobody has listened.
    """

    def __init__(self, attempt: Attempt, batcher: ChunkBatcher) -> None:
        self.attempt = attempt
        self.batcher = batcher
        self.next_seq = 1
        self.is_closed = False
        self.unheard_since: float | None = None


class Publisher:
    """Batches and writes. `put` may be called from any thread and never blocks on Redis.

    An interactive request to which nobody has listened for `abandon_s` is ended: its client is gone, and
    so is the front end that should have said so.
    """

    def __init__(
        self,
        writer: LogWriter,
        ended: Ended,
        *,
        chunk_tokens: int,
        chunk_delay_s: float,
        abandon_s: float = math.inf,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._ended = ended
        self._chunk_tokens = chunk_tokens
        self._chunk_delay_s = chunk_delay_s
        self._abandon_s = abandon_s
        self._monotonic = monotonic
        self._changed = threading.Condition()
        self._outboxes: dict[Attempt, _Outbox] = {}
        self._sleeps_until = AWAKE
        self._stopping = False

    def open(self, attempt: Attempt) -> None:
        """Expect events of this attempt, until its terminal one or until it is fenced off."""
        batcher = ChunkBatcher(max_tokens=self._chunk_tokens, max_delay_s=self._chunk_delay_s)
        with self._changed:
            self._outboxes[attempt] = _Outbox(attempt, batcher)

    def put(self, emitted: Iterable[tuple[Attempt, list[Event]]]) -> None:
        """Take events. Those of an attempt that is not (or no longer) open are dropped.

        Of two terminal events the first counts: a draining worker may give up an answer in the very
        moment in which the engine ends it.
        """
        now = self._monotonic()
        is_early = False
        with self._changed:
            for attempt, events in emitted:
                outbox = self._outboxes.get(attempt)
                if outbox is not None and events and not outbox.is_closed:
                    outbox.batcher.add(events, now)
                    outbox.is_closed = is_terminal(events[-1])
                    due_at = outbox.batcher.due_at()
                    is_early = is_early or (due_at is not None and due_at < self._sleeps_until)
            if is_early:
                self._changed.notify()

    def drop(self, attempt: Attempt) -> None:
        """Send nothing more of this attempt and report it as fenced."""
        self._close(attempt, Outcome.FENCED, None)

    def attempts(self) -> list[Attempt]:
        """The attempts that are open."""
        with self._changed:
            return list(self._outboxes)

    def stop(self) -> None:
        """Let `run` return once everything that was put has been sent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """The publisher's thread."""
        while (due := self._wait_for_due()) is not None:
            self._write(due)

    def _wait_for_due(self) -> list[tuple[_Outbox, list[Event]]] | None:
        """Wait until something is due and take it; None when stopping and nothing is left."""
        with self._changed:
            while True:
                waiting = [(box.batcher.due_at(), box) for box in self._outboxes.values()]
                times = [due_at for due_at, _ in waiting if due_at is not None]
                if not times:
                    if self._stopping:
                        return None
                    self._sleep(ASLEEP_FOR_GOOD)
                    continue
                # What is due within one delay of the first goes along: one round trip for a step.
                if min(times) <= self._monotonic() or self._stopping:
                    return [(box, box.batcher.take()) for due_at, box in waiting if due_at is not None]
                self._sleep(min(times))

    def _sleep(self, until: float) -> None:
        """Sleep until this time on the publisher's clock, or until `put` takes something that is due before it.

        To wake for every token would take the processor from the engine as often, for nothing.
        """
        self._sleeps_until = until
        self._changed.wait(None if until == ASLEEP_FOR_GOOD else until - self._monotonic())
        self._sleeps_until = AWAKE

    def _write(self, due: list[tuple[_Outbox, list[Event]]]) -> None:
        batch = [Append(box.attempt.request.id, box.attempt.number, box.next_seq, events) for box, events in due]
        written = self._append_with_patience(batch)
        for (box, events), was_written in zip(due, written, strict=True):
            if not was_written:
                self.drop(box.attempt)
                continue
            box.next_seq += len(events)
            self._listen(box, was_written)
            last = events[-1]
            if is_terminal(last):
                failure = last if isinstance(last, Failed) else None
                self._close(box.attempt, Outcome.FAILED if failure else Outcome.DONE, failure)

    def _listen(self, box: _Outbox, written: Written) -> None:
        """End what nobody has listened to for too long."""
        now = self._monotonic()
        if written is Written.HEARD or box.attempt.request.priority is Priority.BACKGROUND:
            box.unheard_since = None
        elif box.unheard_since is None:
            box.unheard_since = now
        elif now - box.unheard_since >= self._abandon_s:
            request_id = box.attempt.request.id
            logger.info("nobody listens to request %s: it is ended", request_id, extra=about(request_id))
            self.put([(box.attempt, [ABANDONED])])

    def _close(self, attempt: Attempt, outcome: Outcome, failure: Failed | None) -> None:
        """Report the end of an attempt, if nobody has."""
        with self._changed:
            closed = self._outboxes.pop(attempt, None)
        if closed is not None:
            self._ended(attempt, outcome, failure)

    def _append_with_patience(self, batch: list[Append]) -> list[Written]:
        """Write the batch, however long Redis is away. The explicit ids make repeating it harmless."""
        complained = False
        while True:
            try:
                return self._writer.append(batch)
            except CONNECTION_ERRORS as error:
                if not complained:
                    logger.warning("cannot write to Redis, holding %d requests back: %s", len(batch), error)
                    complained = True
                time.sleep(RETRY_S)
