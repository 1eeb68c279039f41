"""How long a connection waits for what a client sends."""

import socket
from collections.abc import Iterator

import pytest

from api.connections import KEEP_ALIVE_S, Connection, Connections, SenderTooSlowError
from shared.settings import ApiSettings


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ends(clock: Clock) -> Iterator[tuple[Connection, socket.socket]]:
    """Our end of a connection, and the client's."""
    ours, theirs = socket.socketpair()
    settings = ApiSettings(header_timeout=10, body_timeout=60)
    with ours, theirs, Connections(settings, monotonic=clock).opened(ours) as connection:
        yield connection, theirs


Ends = tuple[Connection, socket.socket]


def test_a_head_has_its_time_from_the_first_byte_however_often_another_comes(ends: Ends, clock: Clock) -> None:
    connection, theirs = ends
    for now in (9.0, 14.0, 18.0):
        clock.now = now
        theirs.send(b"x")
        assert connection.recv(1) == b"x"
    clock.now = 19.1
    theirs.send(b"x")

    with pytest.raises(SenderTooSlowError):
        connection.recv(1)


def test_a_connection_on_which_no_request_begins_ends_like_one_that_the_client_closed(ends: Ends, clock: Clock) -> None:
    connection, _ = ends
    connection.expect_request(KEEP_ALIVE_S)
    clock.now = KEEP_ALIVE_S + 0.1

    assert connection.recv(1) == b""


def test_whoever_serves_the_request_hears_that_its_body_did_not_come(ends: Ends, clock: Clock) -> None:
    connection, theirs = ends
    heard: list[str] = []
    connection.expect_body(lambda: heard.append("too slow"))
    clock.now = 59.0
    theirs.send(b"x")
    assert connection.recv(1) == b"x"
    clock.now = 60.1

    with pytest.raises(SenderTooSlowError):
        connection.recv(1)

    assert heard == ["too slow"]


def test_a_look_at_whether_the_client_is_there_takes_no_notice_of_time(ends: Ends, clock: Clock) -> None:
    connection, theirs = ends
    clock.now = 1000.0
    theirs.send(b"x")

    assert connection.recv(1, socket.MSG_PEEK) == b"x"


def test_what_comes_after_a_connection_was_dropped_does_not_count(ends: Ends) -> None:
    connection, theirs = ends
    connection.expect_body(lambda: None)
    theirs.send(b"x")
    connection.drop()

    with pytest.raises(SenderTooSlowError):
        connection.recv(1)
