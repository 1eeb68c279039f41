"""Connections on which a test sends what no HTTP library would, at the pace it likes."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple

from servers import wait_until

DRIP_S = 0.05
ANSWER_LIMIT_S = 60.0


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    """Their names in lower case."""
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


@contextmanager
def connection(port: int) -> Iterator[socket.socket]:
    """A connection to a server on this machine."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_LIMIT_S) as connected:
        yield connected


def answer_on(connected: socket.socket) -> Answer:
    """The answer that comes on a connection."""
    with HTTPResponse(connected) as response:
        response.begin()
        body = response.read()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def exchange(port: int, raw: bytes) -> Answer:
    """What the server answers to these bytes."""
    with connection(port) as connected:
        connected.sendall(raw)
        return answer_on(connected)


def has_news(connected: socket.socket, wait_s: float = 0.0) -> bool:
    """Whether something has come on the connection, be it its end."""
    return bool(select.select([connected], [], [], wait_s)[0])


def is_closed(connected: socket.socket) -> bool:
    """Whether the server has closed the connection without a word."""
    try:
        return has_news(connected) and connected.recv(1, socket.MSG_PEEK) == b""
    except ConnectionResetError:
        return True


def drip(connected: socket.socket, raw: bytes) -> Answer:
    """Send one byte after the other, with pauses, until the server has something to say; that is returned."""
    rest = bytearray(raw)

    def has_answered() -> bool:
        connected.sendall(rest[:1])
        del rest[:1]
        return has_news(connected)

    wait_until(has_answered, limit_s=ANSWER_LIMIT_S, what="an answer", pause_s=DRIP_S)
    return answer_on(connected)
