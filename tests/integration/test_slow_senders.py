"""Clients that send slowly: each has so long for headers and for a body, and none keeps others waiting."""

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack

import httpx
import pytest
import redis
from raw_http import Answer, answer_on, connection, drip, is_closed
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, wait_until
from streaming import CHAT

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Long: "
BODY_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n"
CHUNKED_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
FOREVER = b"x" * 8000


def assert_too_slow(answer: Answer) -> None:
    assert answer.status == 408
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "request_timeout")
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("first", [b"", HEAD], ids=["first line", "headers"])
def test_who_drips_headers_is_told_that_it_took_too_long(start_front_end: StartFrontEnd, first: bytes) -> None:
    front_end = start_front_end(header_timeout=1.0)
    with connection(front_end.port) as slow:
        slow.sendall(first)

        assert_too_slow(drip(slow, FOREVER))

        wait_until(lambda: is_closed(slow), what="the end of the connection")


@pytest.mark.parametrize(
    ("first", "rest"),
    [(BODY_HEAD, FOREVER), (CHUNKED_HEAD, b"f" * 8000), (CHUNKED_HEAD + b"ffff\r\n", FOREVER)],
    ids=["of known length", "size of a chunk", "chunk"],
)
def test_who_drips_a_body_is_told_that_it_took_too_long(
    start_front_end: StartFrontEnd, client: "redis.Redis", first: bytes, rest: bytes
) -> None:
    front_end = start_front_end(body_timeout=1.0)
    with connection(front_end.port) as slow:
        slow.sendall(first)

        assert_too_slow(drip(slow, rest))

        wait_until(lambda: is_closed(slow), what="the end of the connection")
    assert client.keys("rq:job:*") == []


def test_who_says_nothing_at_all_is_let_go_without_a_word(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end(header_timeout=0.5)
    with connection(front_end.port) as silent:
        wait_until(lambda: is_closed(silent), what="the end of the connection")


def test_a_body_that_comes_in_pieces_in_time_is_as_good_as_any(
    start_front_end: StartFrontEnd, start_worker: StartWorker
) -> None:
    start_worker(say_words("ok"))
    front_end = start_front_end(header_timeout=300.0, body_timeout=300.0)
    raw = httpx.Request("POST", front_end.url, json=CHAT).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode()

    with connection(front_end.port) as slow:
        assert drip(slow, head + raw).status == 200


def test_a_connection_may_lie_idle_between_requests_for_longer_than_a_head_may_take(
    start_front_end: StartFrontEnd,
) -> None:
    front_end = start_front_end(header_timeout=0.5)
    with connection(front_end.port) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_on(idle).status == 200
        with connection(front_end.port) as silent:
            wait_until(lambda: is_closed(silent), what="the end of a connection on which nothing has come")

        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_on(idle).status == 200


class Drips:
    """Many slow senders at once, each with one byte a second, and each with a new connection for one that is closed."""

    def __init__(self, port: int, first: bytes, count: int) -> None:
        self._port = port
        self._first = first
        self._stopped = threading.Event()
        self._connections = [self._connect() for _ in range(count)]
        self._thread = threading.Thread(target=self._run, name="drips")

    def __enter__(self) -> "Drips":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)
        for connected in self._connections:
            connected.close()

    def _connect(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        connected.sendall(self._first)
        return connected

    def _run(self) -> None:
        while not self._stopped.wait(1.0):
            for index, connected in enumerate(self._connections):
                try:
                    connected.sendall(b"x")
                except OSError:
                    connected.close()
                    self._connections[index] = self._connect()


@pytest.mark.parametrize("first", [HEAD, BODY_HEAD, b""], ids=["headers", "body", "nothing"])
def test_more_slow_senders_than_there_may_be_connections_keep_nobody_out(
    start_front_end: StartFrontEnd, start_worker: StartWorker, first: bytes
) -> None:
    start_worker(say_words("ok"))
    front_end = start_front_end(connections=10, header_timeout=3000.0, body_timeout=3000.0)

    with Drips(front_end.port, first, 25):
        answers = [
            httpx.post(f"{front_end.url}/v1/chat/completions", json=CHAT, timeout=60, headers={"Connection": "close"})
            for _ in range(3)
        ]

    assert [answer.status_code for answer in answers] == [200] * 3


def test_who_is_let_go_for_others_is_told_so(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end(connections=3, header_timeout=3000.0)

    with ExitStack() as stack:
        slow = [stack.enter_context(connection(front_end.port)) for _ in range(3)]
        for each in slow:
            each.sendall(HEAD)

        assert_too_slow(answer_on(slow[0]))
        assert httpx.get(f"{front_end.url}/health", timeout=30).status_code == 200


def test_what_is_read_without_waiting_does_not_keep_others_from_running(
    start_front_end: StartFrontEnd,
) -> None:
    """A body in the smallest chunks costs most to read, and comes faster than it is read."""
    front_end = start_front_end(max_body=10 * 1024**2)
    stopped = threading.Event()

    def flood() -> None:
        pieces = b"1\r\n \r\n" * 10_000
        with connection(front_end.port) as fast:
            fast.sendall(CHUNKED_HEAD)
            while not stopped.is_set():
                try:
                    fast.sendall(pieces)
                except OSError:
                    return

    flooding = threading.Thread(target=flood, name="flood")
    flooding.start()
    try:
        for _ in range(20):
            assert httpx.get(f"{front_end.url}/health", timeout=5).status_code == 200
    finally:
        stopped.set()
        flooding.join(10)
