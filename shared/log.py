"""The event log: one Redis stream per request, written under a fence, read from any process.

An entry's id is `<attempt>-<seq>`: attempts count the workers that took the request, `seq` counts
an attempt's entries from 1. Redis refuses an id that is not above the last one, and the append
script refuses an attempt that is not the current one, so the log holds no repeats.
"""

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import redis

from shared import keys
from shared.codec import decode_event, encode_event
from shared.domain import Done, Event, Failed
from shared.errors import ErrorCode, RequestError
from shared.store import MisplacedError, as_text, replies, script


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

    def may_be_followed_by(self, other: "EntryId") -> bool:
        """Whether a log can hold the other entry right after this one: the next of its attempt or a later one's first.

        An attempt that ended before it wrote anything leaves no entry, only its number is passed over.
        """
        return other == (self.attempt, self.seq + 1) or (other.attempt > self.attempt and other.seq == 1)


START = EntryId(0, 0)
"""Before every entry."""

ENTRY_ID_PATTERN = "([0-9]{1,9})-([0-9]{1,18})"
_ENTRY_ID = re.compile(ENTRY_ID_PATTERN)


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
        RequestError: it is none, or the event cannot be read.
    """
    raw_id, _, line = message.partition(b" ")
    found = parse_entry_id(raw_id.decode(errors="replace"))
    if found is None:
        raise RequestError(ErrorCode.REQUEST_LOST, "A message about the request cannot be read.")
    return Entry(found, decode_event(line))


def _entry_id(raw: bytes) -> EntryId:
    attempt, _, seq = raw.partition(b"-")
    return EntryId(int(attempt), int(seq))


def _entry(raw_id: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    return Entry(_entry_id(raw_id), decode_event(fields.get(b"e", b"")))


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


class Written(IntEnum):
    """What became of an item: false if its attempt was fenced off. A repeated item counts as HEARD."""

    FENCED = 0
    HEARD = 1
    UNHEARD = 2
    """Written, and no process listens to the request's channel."""


class LogWriter:
    """Appends for one worker. Used by one thread at a time."""

    def __init__(self, client: "redis.Redis", worker: str) -> None:
        self._client = client
        self._running = keys.running(worker)
        self._append = script(client, "append")

    def append(self, batch: Sequence[Append]) -> list[Written]:
        """Write and publish each item, in one round trip.

        An item is written whole or not at all. Sending a batch again after a broken connection
        writes nothing twice: the ids are explicit.
        """
        try:
            return self._evaluate(batch)
        except redis.exceptions.NoScriptError:
            self._client.script_load(self._append.script)
            return self._evaluate(batch)

    def _evaluate(self, batch: Sequence[Append]) -> list[Written]:
        # Not through redis-py's Script, which would have to be told of a Redis that lost it. One call for all items:
        # a call costs more than what it does.
        names = [self._running]
        arguments: list[str | bytes | int] = []
        for item in batch:
            names += [keys.request(item.request_id), keys.log(item.request_id)]
            arguments += [item.request_id, keys.events(item.request_id), item.attempt, item.first_seq]
            arguments += [terminal_state(item.events[-1]), len(item.events), *map(encode_event, item.events)]
        written: Any = self._client.evalsha(self._append.sha, len(names), *names, *arguments)
        return [Written(outcome) for outcome in written]


class Surroundings(NamedTuple):
    """A log's first and last entry, and `here`, the first that is not before some position; None in an empty log."""

    first: EntryId | None
    here: EntryId | None
    last: EntryId | None


class LogReader:
    """Reads any request's log."""

    PAGE = 256

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    def after(self, request_id: str, position: EntryId) -> list[Entry]:
        """Up to PAGE entries that follow `position`; empty at the end.

        Raises:
            RequestError: `request_lost` when the log holds `position` no more, when an entry or the whole cannot be
                read, or when the ids show that one is missing. They do not for the last of an attempt.
        """
        try:
            rows: Any = self._client.xrange(keys.log(request_id), min=str(position), count=self.PAGE + 1)
        except MisplacedError as error:
            raise RequestError(ErrorCode.REQUEST_LOST, "The request's log has been overwritten.") from error
        entries = [_entry(*row) for row in rows]
        if position != START:
            if not entries or entries[0].id != position:
                raise RequestError(ErrorCode.REQUEST_LOST, "The request's log has lost what was read of it.")
            del entries[0]
        before = position
        for entry in entries:
            if not before.may_be_followed_by(entry.id):
                raise RequestError(ErrorCode.REQUEST_LOST, "A part of the request's log is missing.")
            before = entry.id
        return entries[: self.PAGE]

    def whole(self, request_id: str) -> list[Entry]:
        """All entries there are now.

        Raises:
            RequestError: as `after`.
        """
        entries: list[Entry] = []
        while page := self.after(request_id, entries[-1].id if entries else START):
            entries += page
        return entries

    def around(self, request_id: str, position: EntryId) -> Surroundings:
        """Where `position` lies in the log."""
        key = keys.log(request_id)
        with self._client.pipeline() as pipeline:
            pipeline.xrange(key, count=1)
            pipeline.xrange(key, min=str(position), count=1)
            pipeline.xrevrange(key, count=1)
            rows = [_entry_id(found[0][0]) if found else None for found in replies(pipeline)]
        return Surroundings(*rows)

    def state(self, request_id: str) -> str | None:
        """`queued`, `running`, `done`, `failed`, `cancelled`, or None when the request is not (or no longer) known."""
        try:
            state = self._client.hget(keys.request(request_id), "state")
        except MisplacedError:
            return None
        return as_text(state, errors="replace") if state is not None else None
