"""The relay: from a request's subscription to the entries of its log, in order, each exactly once.

Entries come over pub/sub as long as each follows the last. At a gap, at a new attempt, after a
reconnect or in silence they are read from the log, which holds all of them.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import redis

from api.disconnect import ClientConnection
from api.drain import Drain
from api.subscriber import Mailbox, Subscriber
from shared.domain import Failed, GenerationRequest, Priority, is_terminal
from shared.errors import ErrorCode, RequestError
from shared.log import START, Entry, LogReader, entry_from_message
from shared.logs import about
from shared.queue import Idempotency, Owner, RequestQueue, Submitted

TICK_S = 0.5
"""The longest that a step takes, and so the longest until it is noticed that a client has left."""

SILENCE_S = 3.0
"""After so long without an entry, the log is asked."""

CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client closed the connection.")
TIMED_OUT = Failed(ErrorCode.DEADLINE_EXCEEDED.value, "The request did not finish within its time limit.")

logger = logging.getLogger("tokenmill.relay")


class ClientGone(Exception):
    """Nobody is left to answer."""


class Relay:
    """Submits requests and follows them."""

    def __init__(
        self,
        *,
        queue: RequestQueue,
        reader: LogReader,
        subscriber: Subscriber,
        drain: Drain,
        silence_s: float = SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self.reader = reader
        self.drain = drain
        self.silence_s = silence_s
        self.monotonic = monotonic
        self._subscriber = subscriber

    def submit(
        self,
        request: GenerationRequest,
        client: ClientConnection,
        *,
        limit: int,
        timeout_s: float,
        attributes: Mapping[str, str],
        idempotency: Idempotency | None = None,
        owner: Owner | None = None,
    ) -> "Following":
        """Subscribe, then queue the request, and follow it. The caller must close what it gets.

        With `idempotency` it may be an earlier request that is followed instead, from the start of its
        log; and whoever leaves cancels nothing, since the key is there to come back with.

        Raises:
            RequestError: `queue_full`, `store_unavailable`, `idempotency_key_reused`.
        """
        started_at = self.monotonic()
        mailbox = self._subscriber.subscribe(request.id)
        try:
            accepted = self.queue.submit(
                request,
                limit=limit,
                timeout_s=timeout_s,
                attributes=attributes,
                idempotency=idempotency,
                owner=owner,
            )
        except BaseException as error:
            mailbox.close()
            if isinstance(error, RequestError) and error.code is ErrorCode.STORE_UNAVAILABLE and idempotency is None:
                # Redis may have taken the request before it went away; its client is told otherwise. With a key
                # the client's next try joins it, and others may have done so.
                with suppress(redis.RedisError):
                    self.queue.conclude(request.id, CANCELLED)
            raise
        if accepted != request.id:
            mailbox.close()
            return self.join(accepted, client)
        cancels = request.priority is not Priority.BACKGROUND and idempotency is None
        deadline = started_at + timeout_s
        return Following(self, request.id, mailbox, client, attributes=attributes, deadline=deadline, cancels=cancels)

    def join(self, request_id: str, client: ClientConnection) -> "Following":
        """Follow a request that was found by its idempotency key, from the start of its log.

        Raises:
            RequestError: `request_lost` when it has expired since, `store_unavailable`.
        """
        submitted = self.queue.submitted(request_id)
        if submitted is None:
            raise RequestError(ErrorCode.REQUEST_LOST, "The request has just expired. It can be sent again.")
        return self.resume(request_id, submitted, client)

    def resume(self, request_id: str, submitted: Submitted, client: ClientConnection) -> "Following":
        """Follow a request that was submitted earlier, from the start of its log.

        Whoever leaves such a stream cancels nothing: others may follow the same request.
        """
        mailbox = self._subscriber.subscribe(request_id)
        deadline = self.monotonic() + max(submitted.remaining_s, 0.0)
        following = Following(
            self, request_id, mailbox, client, attributes=submitted.attributes, deadline=deadline, cancels=False
        )
        mailbox.mark_gap()
        return following


class Following:
    """One request on its way to one client: an iterator over batches of entries.

    A batch is empty when nothing came for TICK_S, so that the caller can do what is due. The last
    batch ends with the request's terminal entry; instead of it, a RequestError says what went
    wrong in following, or ClientGone that there is no use. `attributes` are those that the request was
    submitted with; `was_cancelled` once it was ended here because its client left. Used by one thread.
    """

    def __init__(
        self,
        relay: Relay,
        request_id: str,
        mailbox: Mailbox,
        client: ClientConnection,
        *,
        attributes: Mapping[str, str],
        deadline: float,
        cancels: bool,
    ) -> None:
        self.request_id = request_id
        self.attributes = attributes
        self.was_cancelled = False
        self._relay = relay
        self._mailbox = mailbox
        self._client = client
        self._deadline = deadline
        self._cancels = cancels
        self._position = START
        self._heard_at = relay.monotonic()
        self._gap = False
        self._more = False
        self._closed = False

    def __iter__(self) -> "Following":
        return self

    def __next__(self) -> list[Entry]:
        if self._closed:
            raise StopIteration
        try:
            entries = self._step()
        except BaseException:
            self.close()
            raise
        if entries and is_terminal(entries[-1].event):
            self._finish()
        return entries

    def close(self) -> None:
        """Stop following; if that is because the client left, cancel. May be called twice.

        A client that only reads too slowly is still there: its request goes on, to be resumed.
        """
        if self._closed:
            return
        self._finish()
        if self._cancels and self._client.is_gone():
            try:
                self.was_cancelled = self._relay.queue.conclude(self.request_id, CANCELLED)
            except redis.RedisError as error:
                logger.warning(
                    "request %s could not be cancelled: %s", self.request_id, error, extra=about(self.request_id)
                )

    def _finish(self) -> None:
        self._closed = True
        self._mailbox.close()

    def _step(self) -> list[Entry]:
        if self._client.is_gone():
            self._abandon()
        if self._relay.drain.is_over():
            raise RequestError(
                ErrorCode.SERVER_STOPPING, "This server is stopping. The stream can be resumed at its resume URL."
            )
        remaining_s = self._deadline - self._relay.monotonic()
        if remaining_s <= 0:
            return self._expire()
        delivery = self._mailbox.take(0.0 if self._more else min(TICK_S, remaining_s))
        entries = self._in_order(delivery.messages)
        self._gap = self._gap or delivery.gap
        now = self._relay.monotonic()
        if entries:
            self._heard_at = now
            if is_terminal(entries[-1].event):
                # Nothing can be missing after it, and a log that is asked would say that nothing more comes.
                return entries
        if self._gap or now - self._heard_at >= self._relay.silence_s:
            entries += self._from_log()
            self._heard_at = self._relay.monotonic()
        return entries

    def _in_order(self, messages: list[bytes]) -> list[Entry]:
        """The entries that follow the last one; at the first that does not, note the gap and stop."""
        entries: list[Entry] = []
        for message in messages:
            try:
                entry = entry_from_message(message)
            except RequestError:
                # Anybody may publish: the log tells.
                self._gap = True
                break
            if entry.id <= self._position:
                continue
            if not self._position.is_followed_by(entry.id):
                self._gap = True
                break
            self._position = entry.id
            entries.append(entry)
        return entries

    def _from_log(self) -> list[Entry]:
        """The next page of the log. While Redis is away: nothing, and the gap stays."""
        try:
            page = self._relay.reader.after(self.request_id, self._position) or self._last_look()
        except redis.RedisError as error:
            logger.debug("the log of %s cannot be read now: %s", self.request_id, error, extra=about(self.request_id))
            self._gap, self._more = True, False
            return []
        # One page a step, so that a slow client's backlog is never in memory as a whole.
        self._gap = self._more = len(page) == self._relay.reader.PAGE
        if page:
            self._position = page[-1].id
        return page

    def _last_look(self) -> list[Entry]:
        """Nothing while the request lives; if it ended between two looks, what the second one finds.

        Raises:
            RequestError: `request_lost` when it can bring nothing more.
        """
        if self._relay.reader.state(self.request_id) in ("queued", "running"):
            return []
        page = self._relay.reader.after(self.request_id, self._position)
        if not page:
            raise RequestError(ErrorCode.REQUEST_LOST, "The request was lost. It can be sent again.")
        return page

    def _expire(self) -> list[Entry]:
        """End the request at its deadline, and give what its log still holds."""
        try:
            self._relay.queue.conclude(self.request_id, TIMED_OUT)
        except redis.RedisError as error:
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, TIMED_OUT.message) from error
        entries = self._from_log()
        if not entries:
            # Nothing was left to be ended, or nothing that can be: somebody has written over it.
            raise RequestError(ErrorCode.DEADLINE_EXCEEDED, TIMED_OUT.message)
        return entries

    def _abandon(self) -> None:
        """The client has left: cancel, however long Redis takes to hear of it."""
        while self._cancels and self._relay.monotonic() < self._deadline and not self._relay.drain.is_over():
            try:
                self.was_cancelled = self._relay.queue.conclude(self.request_id, CANCELLED)
                break
            except redis.RedisError:
                self._mailbox.take(TICK_S)
        self._finish()
        raise ClientGone
