"""The process's one pub/sub connection: channels in, a bounded mailbox for each stream out.

Threads: one reader thread (a greenlet under gevent) owns the connection and alone reads, connects
and reconnects. Any thread may subscribe and leave; writes and the bookkeeping that must agree with
their order are under one lock, which is never held while connecting.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import redis

from shared import keys
from shared.errors import ErrorCode, RequestError

MAILBOX_LIMIT = 256
"""Messages that wait for a slow client before its mailbox is dropped in favour of the log."""

SUBSCRIBE_TIMEOUT_S = 5.0
PING_AFTER_S = 5.0
"""Silence after which Redis is pinged; as much again without an answer, and the connection is replaced."""

RECONNECT_PAUSE_S = 0.25

logger = logging.getLogger("tokenmill.subscriber")


class Delivery(NamedTuple):
    """What had arrived. With `gap`, something before or among the messages may be missing."""

    messages: list[bytes]
    gap: bool


class Mailbox:
    """The messages of one channel for one reader. Bounded: what does not fit is in the log."""

    def __init__(self, leave: "Callable[[Mailbox], None]", *, limit: int = MAILBOX_LIMIT) -> None:
        self._leave = leave
        self._limit = limit
        # A plain lock: nothing here locks twice, and gevent's reentrant one costs as much as the rest.
        self._arrived = threading.Condition(threading.Lock())
        self._messages: list[bytes] = []
        self._gap = False

    def put(self, message: bytes) -> None:
        """Add a message, or trade all that wait for a gap when there is no room."""
        with self._arrived:
            if len(self._messages) >= self._limit:
                self._messages.clear()
                self._gap = True
            if not self._gap:
                self._messages.append(message)
            self._arrived.notify()

    def mark_gap(self) -> None:
        """Note that messages may have been missed."""
        with self._arrived:
            self._messages.clear()
            self._gap = True
            self._arrived.notify()

    def take(self, timeout_s: float) -> Delivery:
        """Everything that has arrived, waiting up to `timeout_s` for something."""
        with self._arrived:
            if not self._messages and not self._gap:
                self._arrived.wait(timeout_s)
            delivery = Delivery(self._messages, self._gap)
            self._messages, self._gap = [], False
            return delivery

    def close(self) -> None:
        """Give the subscription up. May be called twice."""
        self._leave(self)

    def __enter__(self) -> "Mailbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Channel:
    """A subscribed channel and who listens to it."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.mailboxes: list[Mailbox] = []
        self.acknowledged = threading.Event()


class Subscriber:
    """Subscribes to the channels of requests, for every stream of a process."""

    def __init__(
        self,
        client: "redis.Redis",
        *,
        ping_after_s: float = PING_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection: Any = client.connection_pool.make_connection()
        self._ping_after_s = ping_after_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._up = False
        self._stopped = threading.Event()
        self._channels: dict[bytes, _Channel] = {}
        # One entry for each SUBSCRIBE (its channel) or UNSUBSCRIBE (None) that Redis has not answered.
        # Redis answers in order, so an answer can't be taken for that of a later subscription.
        self._unanswered: deque[_Channel | None] = deque()

    def start(self) -> None:
        """Start the reader thread."""
        threading.Thread(target=self._run, name="subscriber", daemon=True).start()

    def stop(self) -> None:
        """End the reader thread and close the connection."""
        self._stopped.set()
        with self._lock:
            self._up = False
            self._connection.disconnect()

    def subscribe(self, request_id: str, *, timeout_s: float = SUBSCRIBE_TIMEOUT_S) -> Mailbox:
        """A mailbox that gets everything published for the request from now on.

        Returns once Redis has acknowledged: what is published afterwards is heard.

        Raises:
            RequestError: `store_unavailable` when it does not within `timeout_s`.
        """
        name = keys.events(request_id).encode()
        mailbox = Mailbox(lambda mailbox: self._unsubscribe(name, mailbox))
        with self._lock:
            channel = self._channels.get(name)
            if channel is None:
                channel = self._channels[name] = _Channel(name)
                self._send(("SUBSCRIBE", name), channel)
            channel.mailboxes.append(mailbox)
        try:
            acknowledged = channel.acknowledged.wait(timeout_s)
        except BaseException:
            mailbox.close()
            raise
        if not acknowledged:
            mailbox.close()
            raise RequestError(ErrorCode.STORE_UNAVAILABLE, "The request queue is unavailable. Retry shortly.")
        return mailbox

    def is_up(self) -> bool:
        """Whether the connection is believed to work."""
        return self._up

    def channels(self) -> int:
        """How many channels are subscribed now."""
        return len(self._channels)

    def _unsubscribe(self, name: bytes, mailbox: Mailbox) -> None:
        with self._lock:
            channel = self._channels.get(name)
            if channel is None or mailbox not in channel.mailboxes:
                return
            channel.mailboxes.remove(mailbox)
            if not channel.mailboxes:
                del self._channels[name]
                self._send(("UNSUBSCRIBE", name), None)

    def _send(self, command: tuple[Any, ...], expects: "_Channel | None") -> None:
        """Write a command, if the connection is up; the reader does it again after reconnecting."""
        if not self._up:
            return
        self._unanswered.append(expects)
        self._write([command])

    def _write(self, commands: list[tuple[Any, ...]]) -> None:
        try:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except (redis.RedisError, OSError):
            # redis-py has closed the socket, so the reader wakes up and reconnects.
            self._up = False

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._connect()
                self._read()
            except (redis.RedisError, OSError) as error:
                with self._lock:
                    was_up, self._up = self._up, False
                    self._connection.disconnect()
                if not self._stopped.is_set():
                    log = logger.warning if was_up else logger.debug
                    log("the subscription to Redis broke, connecting again: %s", error)
                    self._stopped.wait(RECONNECT_PAUSE_S)

    def _connect(self) -> None:
        self._connection.connect()
        # redis-py's own handler makes a text of every message, for a log that nobody reads.
        self._connection._parser.set_pubsub_push_handler(lambda message: message)
        with self._lock:
            self._unanswered.clear()
            self._up = True
            channels = list(self._channels.values())
            if channels:
                self._unanswered.extend(channels)
                self._write([("SUBSCRIBE", channel.name) for channel in channels])

    def _read(self) -> None:
        """Read until the connection breaks, or stays silent although it was pinged."""
        pinged = False
        while True:
            try:
                message = self._connection.read_response(
                    timeout=self._ping_after_s, disconnect_on_error=False, push_request=True
                )
            except redis.TimeoutError:
                if pinged:
                    raise
                with self._lock:
                    if not self._up:
                        raise
                    self._write([("PING",)])
                pinged = True
                continue
            pinged = False
            if isinstance(message, list):
                self._dispatch(message)

    def _dispatch(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == b"message":
            with self._lock:
                channel = self._channels.get(message[1])
                mailboxes = tuple(channel.mailboxes) if channel else ()
            for mailbox in mailboxes:
                mailbox.put(message[2])
        elif kind in (b"subscribe", b"unsubscribe"):
            with self._lock:
                channel = self._unanswered.popleft() if self._unanswered else None
                mailboxes = tuple(channel.mailboxes) if channel else ()
            if channel is None:
                return
            if channel.acknowledged.is_set():
                # A second acknowledgement: the connection was replaced, and nothing was heard meanwhile.
                for mailbox in mailboxes:
                    mailbox.mark_gap()
            channel.acknowledged.set()
