"""From the relay's entries to an HTTP body: one whole answer, or a stream of events."""

import logging
import time
from collections.abc import Callable, Iterator

from api import sse
from api.errors import request_error, request_error_body
from api.exchange import Exchange
from api.relay import ClientGone, Following
from api.schemas.error import error_body
from api.translate.answer import Answer, WholeChoice
from shared.domain import Accepted, Chunk, Done, Failed, Finished, Usage
from shared.errors import ErrorCode, RequestError
from shared.log import Entry, EntryId
from shared.logs import about

logger = logging.getLogger("tokenmill.api")


def first_entries(
    following: Following, *, wait_s: float, monotonic: Callable[[], float] = time.monotonic
) -> list[Entry]:
    """The first entries, or none if no worker answers within `wait_s`.

    Raises:
        RequestError: the request was rejected, so its answer can still be a real HTTP error.
        ClientGone: nobody waits any more.
    """
    until = monotonic() + wait_s
    while monotonic() < until:
        entries = next(following)
        if entries:
            _raise_if_failed(entries[0])
            return entries
    return []


def whole(following: Following, exchange: Exchange, *, choices: int) -> tuple[list[WholeChoice], Usage]:
    """All choices and the usage, once the request is done.

    Raises:
        RequestError: it failed.
        ClientGone: nobody waits any more.
    """
    gathered = [WholeChoice() for _ in range(choices)]
    for entries in following:
        exchange.passes_on(entries)
        for entry in entries:
            _raise_if_failed(entry)
            match entry.event:
                case Chunk(choice) | Finished(choice) if choice >= choices:
                    raise RequestError(ErrorCode.REQUEST_LOST, "The answer has a choice that was not asked for.")
                case Chunk() as chunk:
                    gathered[chunk.choice].add(chunk)
                case Finished(choice, reason):
                    gathered[choice].finish_reason = reason
                case Done(usage):
                    return gathered, usage
    raise RequestError(ErrorCode.REQUEST_LOST, "The answer ended without its last event.")


def stream(
    following: Following,
    answer: Answer,
    exchange: Exchange,
    *,
    held: list[Entry],
    after: EntryId,
    keep_alive_s: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """The events of `held`, then of all that follows, but only those after the position `after`.

    The first piece comes at once, since no header leaves before it; a comment fills every silence.
    """
    try:
        entries = held
        written_at = float("-inf")
        while True:
            exchange.passes_on(entries)
            piece = b"".join(_events(answer, entry, shown=entry.id > after) for entry in entries)
            if piece:
                yield piece
                written_at = monotonic()
            elif monotonic() - written_at >= keep_alive_s:
                yield sse.KEEP_ALIVE
                written_at = monotonic()
            following_entries = next(following, None)
            if following_entries is None:
                return
            entries = following_entries
    except ClientGone:
        return
    except RequestError as error:
        exchange.fails(error)
        yield sse.event_without_id(request_error_body(error))
    except Exception:
        exchange.breaks()
        logger.exception("the stream of request %s broke", following.request_id, extra=about(following.request_id))
        yield sse.event_without_id(error_body("The server had an error.", "server_error", code="internal_error"))
    finally:
        following.close()


def _events(answer: Answer, entry: Entry, *, shown: bool) -> bytes:
    """The events of one entry. Those that the client has are made all the same: an answer counts along."""
    done = False
    match entry.event:
        case Accepted():
            payloads = answer.opening()
        case Chunk() as chunk:
            payloads = answer.chunk(chunk)
        case Finished(choice, reason):
            payloads = answer.finish(choice, reason)
        case Done(usage):
            payloads, done = answer.closing(usage), True
        case Failed() as failure:
            payloads = [request_error_body(request_error(failure))]
    return sse.events(payloads, id=str(entry.id), done=done) if shown else b""


def _raise_if_failed(entry: Entry) -> None:
    if isinstance(entry.event, Failed):
        raise request_error(entry.event)
