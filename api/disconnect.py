"""Is the client still there? A look at the connection's socket that neither blocks nor reads."""

import select
import socket
from collections.abc import Mapping
from typing import Any

from gevent import monkey

_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL


class ClientConnection:
    """The connection that a request came over; without a socket to look at, the client never leaves."""

    def __init__(self, environ: Mapping[str, Any]) -> None:
        self._socket: socket.socket | None = environ.get("gunicorn.socket")
        self._poller: Any = None
        if self._socket is not None:
            # gevent's own poll would go through its event loop and yield to other greenlets.
            self._poller = monkey.get_original("select", "poll")()
            self._poller.register(self._socket.fileno(), select.POLLIN | _LEFT)

    def is_gone(self) -> bool:
        """Whether the client has closed its side, or the connection broke."""
        if self._socket is None:
            return False
        if self._socket.fileno() < 0:
            return True
        events = self._poller.poll(0)
        if not events:
            return False
        if events[0][1] & _LEFT:
            return True
        # Readable. Where the system has no POLLRDHUP only a peek tells the end from a next request.
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True
