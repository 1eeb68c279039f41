"""The chunk batcher: single tokens in, chunks worth sending out.

A choice's first token goes at once, since that is what people wait for. After it, tokens gather until
there are enough of them or the oldest could not wait for the next one, which is expected to take as
long as the last. Whatever is not a chunk goes at once and takes what was waiting along, in order.
"""

from collections.abc import Iterable

import msgspec

from shared.domain import Chunk, Event


class ChunkBatcher:
    """The events of one attempt at one request that are not sent yet.

    `now` is any clock in seconds that never goes back.
    """

    def __init__(self, *, max_tokens: int, max_delay_s: float) -> None:
        self._max_tokens = max_tokens
        self._max_delay_s = max_delay_s
        self._events: list[Event] = []
        self._open: dict[int, int] = {}
        self._started: set[int] = set()
        self._tokens = 0
        self._due_at: float | None = None
        self._added_at: float | None = None
        self._pace_s = 0.0

    def add(self, events: Iterable[Event], now: float) -> None:
        """Take events of this moment."""
        if self._added_at is not None and now > self._added_at:
            self._pace_s = now - self._added_at
        self._added_at = now
        for event in events:
            if isinstance(event, Chunk):
                self._add_chunk(event, now)
            else:
                self._events.append(event)
                self._open.clear()
                self._due_at = now

    def due_at(self) -> float | None:
        """When the next events should be sent; None while there are none."""
        return self._due_at

    def take(self) -> list[Event]:
        """Everything that waits, to be sent."""
        events, self._events = self._events, []
        self._open.clear()
        self._tokens = 0
        self._due_at = None
        return events

    def _add_chunk(self, chunk: Chunk, now: float) -> None:
        index = self._open.get(chunk.choice)
        if index is None:
            self._open[chunk.choice] = len(self._events)
            self._events.append(chunk)
        else:
            earlier = self._events[index]
            assert isinstance(earlier, Chunk)
            self._events[index] = msgspec.structs.replace(
                earlier,
                text=earlier.text + chunk.text,
                tokens=earlier.tokens + chunk.tokens,
                logprobs=earlier.logprobs + chunk.logprobs,
            )
        self._tokens += len(chunk.tokens)
        is_first = chunk.choice not in self._started
        if is_first and chunk.text:
            self._started.add(chunk.choice)
        if is_first or self._tokens >= self._max_tokens:
            self._due_at = now
            return
        if self._due_at is None:
            self._due_at = now + self._max_delay_s
        if self._due_at < now + self._pace_s:
            self._due_at = min(self._due_at, now)
