"""Clients' connections: how long each may take to send what it has to, and who has to go where there are too many.

A greenlet per connection reads from it; nothing here blocks but that reading.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gevent
from gunicorn import util
from gunicorn.http.errors import ParseException

from shared.settings import ApiSettings

STALL_LIMIT_S = 60.0
"""How long a client may not take what is sent to it."""

KEEP_ALIVE_S = 15.0
"""How long a connection may lie idle after an answer."""

REST_S = 5.0
"""How long what is left of a body is read after the answer, since closing before would take the answer back."""

PATIENCE_S = 1.0
"""How long a connection has kept us waiting before it can be closed in favour of another."""

READ_SIZE = 65536

LINE_READ_SIZE = 8192
"""What gunicorn asks for while it looks for the end of a line; for the inside of a body it asks for more."""

PIECE_SIZE = 2048
"""What it then gets of a body. It copies all of it for each line, so that 8 KiB of the smallest chunks kept everybody
else waiting for some 15 ms."""


class SenderTooSlowError(ParseException):  # type: ignore[misc]  # gunicorn has no types
    """A request did not arrive in time."""


class Connection:
    """A client's socket that raises once its request takes too long; in all else it is the socket.

    The clock runs for a whole head or body, not from byte to byte: who sends one a second gains nothing.
    """

    def __init__(self, client: Any, connections: "Connections") -> None:
        client.settimeout(STALL_LIMIT_S)
        self._client = client
        self._connections = connections
        self._give_up: Callable[[], None] | None = None
        self._is_idle = True
        self._is_dropped = False
        self.since = self._until = 0.0
        self.expect_request(connections.settings.header_timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def expect_request(self, idle_s: float) -> None:
        """A request may begin within so long; if none does, that is no error."""
        self._is_idle = True
        self._give_up = None
        self._start(idle_s)

    def expect_body(self, give_up: Callable[[], None]) -> None:
        """The head is there. `give_up` is called if the body does not come in time."""
        self._is_idle = False
        self._give_up = give_up
        self._start(self._connections.settings.body_timeout)

    def expect_rest(self) -> None:
        """The answer is written; what of the body nobody has read may still come for a moment."""
        self._start(REST_S)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Some bytes, or none at the end; and none from a connection on which no request has begun in time.

        Raises:
            SenderTooSlowError: the request that has begun is not there in time.
        """
        if flags:
            # A peek, by whoever looks whether the client is still there.
            peeked: bytes = self._client.recv(size, flags)
            return peeked
        data = self._receive(PIECE_SIZE if self._give_up is not None and size <= LINE_READ_SIZE else size)
        if data is None:
            if self._is_idle:
                return b""
            if self._give_up is not None:
                self._give_up()
            raise SenderTooSlowError
        if self._is_idle:
            self._is_idle = False
            self._start(self._connections.settings.header_timeout)
        else:
            # What is there is read without waiting, so a fast sender would keep everybody else from running.
            gevent.sleep(0)
        return data

    def drop(self) -> None:
        """Let go of what the client has not sent yet: whoever reads gets the same as when time is up."""
        self._is_dropped = True
        with suppress(OSError):
            self._client.shutdown(socket.SHUT_RD)

    def part(self) -> None:
        """Close it once the client has what was sent to it: with something unread, closing would take that back."""
        util.close_graceful(self._client)

    def _start(self, limit_s: float) -> None:
        self.since = self._connections.monotonic()
        self._until = self.since + limit_s

    def _receive(self, size: int) -> bytes | None:
        """What comes in time; None if nothing does, or the connection was dropped meanwhile."""
        left_s = self._until - self._connections.monotonic()
        if left_s <= 0:
            return None
        self._client.settimeout(left_s)
        self._connections.waiting.add(self)
        try:
            data: bytes = self._client.recv(size)
        except OSError as error:
            # gevent ends the waiting of whoever reads from a connection that is dropped.
            if not self._is_dropped and not isinstance(error, TimeoutError):
                raise
            return None
        finally:
            self._connections.waiting.discard(self)
            self._client.settimeout(STALL_LIMIT_S)
        return None if self._is_dropped else data


class Connections:
    """The open connections of a process."""

    def __init__(self, settings: ApiSettings, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.monotonic = monotonic
        self.waiting: set[Connection] = set()
        """Those that are read from and have nothing to read."""
        self._open = 0

    @contextmanager
    def opened(self, client: Any) -> Iterator[Connection]:
        """A connection for as long as it is served."""
        self._open += 1
        try:
            self.make_room()
            yield Connection(client, self)
        finally:
            self._open -= 1

    def make_room(self) -> None:
        """Where there are as many connections as there may be, close the one that has kept us waiting longest.

        gunicorn accepts no more until one has gone, so without this a few slow senders would keep everybody out.
        """
        if self._open < self.settings.connections or not self.waiting:
            return
        slowest = min(self.waiting, key=lambda connection: connection.since)
        if self.monotonic() - slowest.since >= PATIENCE_S:
            slowest.drop()
