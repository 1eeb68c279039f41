"""gunicorn's worker and log for a front end: how a connection is served, and what is said when that fails."""

import logging
import socket
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gunicorn.glogging import Logger
from gunicorn.http.errors import (
    InvalidResponseHeader,
    InvalidResponseHeaderName,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from api.connections import KEEP_ALIVE_S, READ_SIZE, STALL_LIMIT_S, Connection, Connections, SenderTooSlowError
from api.drain import Drain

if TYPE_CHECKING:
    from api.exchange import Observer

UNREADABLE = {
    SenderTooSlowError: HTTPStatus.REQUEST_TIMEOUT,
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    UnsupportedTransferCoding: HTTPStatus.NOT_IMPLEMENTED,
    InvalidResponseHeader: HTTPStatus.INTERNAL_SERVER_ERROR,
    InvalidResponseHeaderName: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""Requests that gunicorn refuses before the app sees them; all others are a 400."""

logger = logging.getLogger("tokenmill.api")


class Worker(GeventWorker):  # type: ignore[misc]  # gunicorn has no types
    """A worker process; `drain` tells its streams that it was told to stop."""

    drain: Drain | None = None
    observer: "Observer | None" = None
    connections: Connections

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve one connection."""
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self.connections.opened(client) as connection:
            AsyncWorker.handle(self, listener, connection, addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Connection, addr: Any) -> None:
        """Serve one request, and read what its client still sends of it."""
        sock.expect_body(req.force_close)
        is_last = False
        try:
            super().handle_request(listener_name, req, sock, addr)
        except StopIteration:
            is_last = True
        if not _read_rest(req, sock):
            sock.part()
            is_last = True
        if is_last:
            raise StopIteration
        sock.expect_request(KEEP_ALIVE_S)

    def timeout_ctx(self) -> AbstractContextManager[None]:
        """How long a request may take to arrive the connection itself knows."""
        return nullcontext()

    def notify(self) -> None:
        """Runs every second."""
        super().notify()
        self.connections.make_room()

    def handle_error(self, req: Any, client: Connection, addr: Any, exc: BaseException) -> None:  # noqa: ARG002
        """Answer what is not even HTTP, and what broke before the app saw it, in the shape of every other error.

        gunicorn's own would show the URL in the log, and in the answer what it did not like.
        """
        import msgspec

        from api.errors import refusal_body
        from api.security import SECURITY_HEADERS

        if not isinstance(exc, Exception):
            return  # the end of this greenlet
        if isinstance(exc, ParseException):
            status = next((code for kind, code in UNREADABLE.items() if isinstance(exc, kind)), HTTPStatus.BAD_REQUEST)
        else:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status is not HTTPStatus.NOT_IMPLEMENTED:
            logger.error("a request broke outside of the app", exc_info=exc)
        if self.observer is not None:
            self.observer.refused(status)
        body = msgspec.json.encode(refusal_body(status))
        headers = {"Connection": "close", "Content-Type": "application/json", "Content-Length": len(body)}
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | SECURITY_HEADERS).items()]
        with suppress(OSError):
            client.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body)
            client.part()

    def handle_exit(self, sig: int, frame: Any) -> None:
        """SIGTERM: gunicorn closes the listener and waits for the connections."""
        if self.drain is not None:
            self.drain.begin()
        super().handle_exit(sig, frame)


def _read_rest(req: Any, connection: Connection) -> bool:
    """Read what is left of a body that nobody wanted; whether it has ended in time."""
    connection.expect_rest()
    try:
        while not req.body.failed and req.body.read(READ_SIZE):
            pass
    except (OSError, ParseException):
        return False
    return not req.body.failed


class Log(Logger):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's log as part of this process's own."""

    def setup(self, cfg: Any) -> None:
        """Hand everything to the root logger; what gunicorn says of its own life is only for debugging.

        What it says of single requests is for nobody: it would show their URLs.
        """
        self.error_log.propagate = True
        self.error_log.setLevel(logging.INFO if cfg.loglevel == "debug" else logging.WARNING)

    def exception(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """A client that stalls is not an error of the server."""
        if isinstance(sys.exc_info()[1], TimeoutError):
            self.error_log.info("a client stalled for %g s and was let go", STALL_LIMIT_S)
        else:
            super().exception(msg, *args, **kwargs)
