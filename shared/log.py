"""The event log: one Redis stream per request, written under a fence, read from any process.

An entry's id is `<attempt>-<seq>`: attempts count the workers that took the request, `seq` counts
an attempt's entries from 1. Redis refuses an id that is not above the last one, and the append
script refuses an attempt that is not the current one, so the log holds no repeats.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from shared import keys
from shared.codec import decode_event, encode_event
from shared.domain import Done, Event, Failed
from shared.store import as_text, script


class EntryId(NamedTuple):
    """Where an entry stands in its log; compares as the log is ordered."""

    attempt: int
    seq: int

    def __str__(self) -> str:
        return f"{self.attempt}-{self.seq}"

    def is_followed_by(self, other: "EntryId") -> bool:
        """Whether nothing can be missing between this entry and the other.

        Across attempts that cannot be known from the ids: the old attempt may have written more.
        Before the first attempt there was none.
        """
        return other == (self.attempt, self.seq + 1) or (self == START and other == (1, 1))


START = EntryId(0, 0)
"""Before every entry."""

_ENTRY_ID = re.compile(r"(\d{1,9})-(\d{1,18})")


def parse_entry_id(text: str) -> EntryId | None:
    """The id in `text`, or None if it is not one."""
    match = _ENTRY_ID.fullmatch(text)
    return EntryId(int(match[1]), int(match[2])) if match else None


class Entry(NamedTuple):
    """An event at its place in the log."""

    id: EntryId
    event: Event


def entry_from_message(message: bytes) -> Entry:
    """The entry in a published message: its id, a space, the event.

    Raises:
        RequestError: the event cannot be read.
    """
    text_id, _, line = message.partition(b" ")
    attempt, _, seq = text_id.partition(b"-")
    return Entry(EntryId(int(attempt), int(seq)), decode_event(line))


def terminal_state(event: Event) -> str:
    """The state that a request is in after this event; empty while it runs."""
    if isinstance(event, Done):
        return "done"
    return "failed" if isinstance(event, Failed) else ""


class Append(NamedTuple):
    """Some events of one attempt, to be written together; only the last may be terminal."""

    request_id: str
    attempt: int
    first_seq: int
    events: Sequence[Event]


class LogWriter:
    """Appends for one worker. Used by one thread at a time."""

    def __init__(self, client: "redis.Redis", worker: str) -> None:
        self._client = client
        self._running = keys.running(worker)
        self._append = script(client, "append")

    def append(self, batch: Sequence[Append]) -> list[bool]:
        """Write and publish each item, in one round trip; False where the attempt was fenced off.

        An item is written whole or not at all. Sending a batch again after a broken connection
        writes nothing twice: the ids are explicit.
        """
        try:
            return self._evaluate(batch)
        except redis.exceptions.NoScriptError:
            self._client.script_load(self._append.script)
            return self._evaluate(batch)

    def _evaluate(self, batch: Sequence[Append]) -> list[bool]:
        # Not through redis-py's Script, which would have to be told of a Redis that lost it. One call for all items:
        # a call costs more than what it does.
        names = [self._running]
        arguments: list[str | bytes | int] = []
        for item in batch:
            names += [keys.request(item.request_id), keys.log(item.request_id)]
            arguments += [item.request_id, keys.events(item.request_id), item.attempt, item.first_seq]
            arguments += [terminal_state(item.events[-1]), len(item.events), *map(encode_event, item.events)]
        written: Any = self._client.evalsha(self._append.sha, len(names), *names, *arguments)
        return [outcome == 1 for outcome in written]


class LogReader:
    """Reads any request's log."""

    PAGE = 256

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    def after(self, request_id: str, position: EntryId) -> list[Entry]:
        """Up to PAGE entries that follow `position`; empty at the end.

        Raises:
            RequestError: an entry cannot be read.
        """
        rows: Any = self._client.xrange(keys.log(request_id), min=f"({position}", count=self.PAGE)
        entries = []
        for raw_id, fields in rows:
            attempt, _, seq = raw_id.partition(b"-")
            entries.append(Entry(EntryId(int(attempt), int(seq)), decode_event(fields[b"e"])))
        return entries

    def has(self, request_id: str, position: EntryId) -> bool:
        """Whether the log holds an entry with this very id."""
        return bool(self._client.xrange(keys.log(request_id), min=str(position), max=str(position)))

    def state(self, request_id: str) -> str | None:
        """`queued`, `running`, `done`, `failed`, `cancelled`, or None when the request is not (or no longer) known."""
        state = self._client.hget(keys.request(request_id), "state")
        return as_text(state) if state is not None else None
