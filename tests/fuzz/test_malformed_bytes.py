"""Whatever bytes come to any endpoint, the answer is an error in OpenAI's shape or none, and the server lives on."""

import io
import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest
import redis
from fuzzing import tries
from hypothesis import given
from hypothesis import strategies as st
from made_up import changed
from raw_http import Answer, exchange
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, Valkey

from api.openapi.document import document
from api.request_ids import new_request_id
from shared.settings import ApiSettings

PATIENCE_S = 20.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

PATHS = {"/v1/streams/{id}": f"/v1/streams/{new_request_id()}", "/v1/models/{id}": "/v1/models/scripted"}
ENDPOINTS = [
    (method.upper(), PATHS.get(path, path))
    for path, methods in document(ApiSettings())["paths"].items()
    for method in methods
]
ENDPOINTS += [("GET", "/docs"), ("GET", "/docs/docs.js"), ("GET", "/nothing")]

VALID = {
    "/v1/chat/completions": {"model": "scripted", "messages": [{"role": "user", "content": "hé"}], "stream": True},
    "/v1/completions": {"model": "scripted", "prompt": "hé", "max_tokens": 3},
}

BODIES = {
    "nothing": b"",
    "no JSON": b"\x00\xff\xfe<xml/>",
    "half of it": b'{"model": "scripted", "prom',
    "bad UTF-8": b'{"model": "scripted\xff", "prompt": "x", "messages": []}',
    "overlong UTF-8": b'{"model": "\xc0\xaf", "prompt": "\xed\xa0\x80", "messages": []}',
    "lone surrogates": b'{"model": "\\ud800", "prompt": "\\udfff", "messages": ["\\ud800"]}',
    "UTF-16": json.dumps(VALID["/v1/completions"]).encode("utf-16"),
    "with a mark": b"\xef\xbb\xbf" + json.dumps(VALID["/v1/completions"]).encode(),
    "arrays in arrays": b"[" * 500_000,
    "objects in objects": b'{"model":' * 100_000,
    "closed nesting": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "huge integer": b'{"model": "scripted", "prompt": "x", "n": ' + b"9" * 100_000 + b"}",
    "huge exponent": b'{"model": "scripted", "prompt": "x", "temperature": 1e99999}',
    "long decimal": b'{"model": "scripted", "prompt": "x", "temperature": 0.' + b"1" * 100_000 + b"}",
    "no numbers": b'{"model": "scripted", "prompt": "x", "temperature": NaN, "top_p": -Infinity}',
    "duplicate keys": b'{"model": "scripted", "model": 1, "prompt": "x", "prompt": {}, "messages": [], "messages": 7}',
    "many keys": b"{" + b",".join(b'"k%d": %d' % (n, n) for n in range(50_000)) + b"}",
    "NUL": b'{"model": "scr\x00ipted", "prompt": "x"}',
    "escaped NUL": b'{"model": "scripted\\u0000", "prompt": "\\u0000", "messages": []}',
    "two documents": b'{"model": "scripted"}{"model": "scripted"}',
}

CHUNKED = b"POST PATH HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
FORM = b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"

HEADS = {
    "nothing": b"",
    "empty lines": b"\r\n\r\n\r\n\r\n",
    "no request": b"HELO there\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n",
    "unknown version": b"GET PATH HTTP/9.9\r\n\r\n",
    "no host": b"GET PATH HTTP/1.1\r\n\r\n",
    "NUL in the path": b"GET PATH\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the path": b"GET PATH/\xff\xfe\xc0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "escapes in the path": b"GET PATH%00%ff%0d%0a%2e%2e%2f HTTP/1.1\r\nHost: x\r\n\r\n",
    "half an escape": b"GET PATH%f HTTP/1.1\r\nHost: x\r\n\r\n",
    "slashes": b"GET //PATH// HTTP/1.1\r\nHost: x\r\n\r\n",
    "dots": b"GET PATH/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "another host": b"GET http://elsewherePATH HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in a header": b"GET PATH HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n",
    "bytes in a header": b"GET PATH HTTP/1.1\r\nHost: x\r\nLast-Event-ID: \xff\xfe\r\nX-Request-Id: \xff\r\n\r\n",
    "bytes in a name": b"GET PATH HTTP/1.1\r\nHost: x\r\nX-\xff: 1\r\n\r\n",
    "no colon": b"GET PATH HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "folded": b"GET PATH HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n  2\r\n\r\n",
    "lone line feeds": b"GET PATH HTTP/1.1\nHost: x\n\n",
    "two lengths": b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "length and chunks": CHUNKED.replace(b"Host: x", b"Host: x\r\nContent-Length: 4") + b"0\r\n\r\n",
    "length below zero": b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    "endless length": b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    "long length": b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 6000 + b"\r\n\r\n{}",
    "body too short": b"POST PATH HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{}",
    "no length": b"POST PATH HTTP/1.1\r\nHost: x\r\n\r\n{}",
    "chunk too large": CHUNKED + b"f" * 40 + b"\r\nxx",
    "chunk without end": CHUNKED + b"5\r\nab",
    "two at once": b"GET PATH HTTP/1.1\r\nHost: x\r\n\r\nGET PATH HTTP/1.1\r\nHost: x\r\n\r\n",
    "a form": FORM + b"Content-Length: 5\r\n\r\n--x--",
    "waiting to go on": b"POST PATH HTTP/1.1\r\nHost: x\r\nExpect: 200-maybe\r\nContent-Length: 2\r\n\r\n{}",
    "an upgrade": b"GET PATH HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.fixture(scope="module")
def worker(valkey: Valkey) -> Iterator[ScriptedWorker]:
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    with ScriptedWorker(valkey.url, say_words("ok")) as worker:
        yield worker


@pytest.fixture(scope="module")
def front_end_to_attack(valkey: Valkey, worker: ScriptedWorker) -> Iterator[FrontEnd]:  # noqa: ARG001 - comes first
    front_end = FrontEnd(valkey.url, keep_alive=0.5, log_level="error").start().ready()
    yield front_end
    assert front_end.stop() == "", "a byte has surprised it"


@pytest.fixture
def attacked(front_end_to_attack: FrontEnd, worker: ScriptedWorker) -> FrontEnd:
    """A front end, and a worker that is there for as long as a test takes."""
    worker.announce()
    return front_end_to_attack


class _Received(io.BytesIO):
    """What came back, to be read as one answer after the other."""

    def makefile(self, *_: Any) -> "_Received":
        return self

    def close(self) -> None:
        """An answer that is read to its end closes what it was read from."""


def answers(port: int, raw: bytes) -> list[Answer]:
    """What the server answers to bytes after which nothing more will come, until it closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                received += more
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not want to hear the rest
    found = []
    stream = _Received(received)
    while stream.tell() < len(received):
        answer = HTTPResponse(stream)  # type: ignore[arg-type]
        answer.begin()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        found.append(Answer(answer.status, headers, answer.read()))
    return found


def check(front_end: FrontEnd, raw: bytes) -> list[int]:
    """The statuses of the answers to these bytes. Whatever they are, each error has its shape and the server lives."""
    statuses = []
    for answer in answers(front_end.port, raw):
        statuses.append(answer.status)
        assert answer.status == 200 or 400 <= answer.status != 500, answer
        if answer.status >= 400 and "ready" not in answer.body.decode():
            assert answer.headers["content-type"] == "application/json"
            assert answer.error.keys() == {"message", "type", "param", "code"}
    assert exchange(front_end.port, HEALTH).status == 200
    return statuses


def framed(method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


ALL_ENDPOINTS = pytest.mark.parametrize(
    ("method", "path"), ENDPOINTS, ids=[" ".join(endpoint) for endpoint in ENDPOINTS]
)


@ALL_ENDPOINTS
def test_a_body_that_is_none_is_refused_where_one_is_wanted(attacked: FrontEnd, method: str, path: str) -> None:
    for name, body in BODIES.items():
        statuses = check(attacked, framed(method, path, body))

        if method == "POST":
            assert statuses in ([400], [404], [499]), name
        else:
            assert len(statuses) == 1, name


@pytest.mark.parametrize("path", sorted({path for _, path in ENDPOINTS}))
def test_a_head_that_is_none_is_refused_or_not_answered(attacked: FrontEnd, path: str) -> None:
    for head in HEADS.values():
        check(attacked, head.replace(b"PATH", path.encode()))


@ALL_ENDPOINTS
@tries(40, shared_fixtures=True)
@given(data=st.data())
def test_a_request_of_which_some_bytes_are_others_breaks_nothing(
    attacked: FrontEnd, method: str, path: str, data: st.DataObject
) -> None:
    body = json.dumps(VALID.get(path, {})).encode()

    check(attacked, data.draw(changed(framed(method, path, body))))


@tries(200, shared_fixtures=True)
@given(st.binary(max_size=400))
def test_bytes_that_are_no_request_break_nothing(attacked: FrontEnd, raw: bytes) -> None:
    check(attacked, raw)


@pytest.mark.parametrize("path", sorted(VALID))
@tries(60, shared_fixtures=True)
@given(data=st.data())
def test_a_body_of_which_some_bytes_are_others_breaks_nothing(
    attacked: FrontEnd, path: str, data: st.DataObject
) -> None:
    check(attacked, framed("POST", path, data.draw(changed(json.dumps(VALID[path]).encode()))))
