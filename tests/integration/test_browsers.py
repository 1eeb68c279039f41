"""What answers tell browsers: who may read them from another origin, and that there is nothing in them to run."""

import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
import redis
from raw_http import Answer, exchange
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, Valkey
from streaming import CHAT, STREAM

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]

PATH = "/v1/chat/completions"
OURS, OTHER, THEIRS = "https://chat.example.com", "http://localhost:3000", "https://evil.example.com"
ASKED = {
    "Origin": OURS,
    "Access-Control-Request-Method": "POST",
    # What OpenAI's client for JavaScript sends, and what is ours.
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os,x-stainless-retry-count,"
    "openai-organization,idempotency-key,last-event-id,x-api-key,x-request-id,x-secret",
}
SECURITY = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


@pytest.fixture(scope="module")
def open_to_two(valkey: Valkey) -> Iterator[FrontEnd]:
    front_end = FrontEnd(valkey.url, cors_origins=f"{OURS}, {OTHER}").start().ready()
    yield front_end
    front_end.stop()


@pytest.fixture(scope="module")
def open_to_all(valkey: Valkey) -> Iterator[FrontEnd]:
    front_end = FrontEnd(valkey.url, cors_origins="*", max_headers=20).start().ready()
    yield front_end
    front_end.stop()


@pytest.fixture(autouse=True)
def worker(client: "redis.Redis", start_worker: StartWorker) -> ScriptedWorker:  # noqa: ARG001 - empties Redis first
    return start_worker(say_words("ok"))


def cors_headers(answer: httpx.Response) -> dict[str, str]:
    """The headers of an answer that are about other origins."""
    return {
        name: value
        for name, value in answer.headers.items()
        if name.startswith("access-control-") or (name == "vary" and "Origin" in value)
    }


def names(value: str) -> set[str]:
    return {name.strip().lower() for name in value.split(",")}


# -- other origins --


def test_unless_it_is_asked_for_no_answer_has_a_header_about_other_origins(front_end: FrontEnd) -> None:
    answers = [
        httpx.post(front_end.url + PATH, json=CHAT, headers={"Origin": OURS}),
        httpx.get(front_end.url + "/v1/nothing", headers={"Origin": OURS}),
        httpx.options(front_end.url + PATH, headers=ASKED),
    ]

    assert [answer.status_code for answer in answers] == [200, 404, 200]
    assert [cors_headers(answer) for answer in answers] == [{}, {}, {}]
    assert names(answers[2].headers["Allow"]) == {"options", "post"}


def test_a_browser_that_asks_first_is_told_what_a_page_of_a_listed_origin_may_send(open_to_two: FrontEnd) -> None:
    answer = httpx.options(open_to_two.url + PATH, headers=ASKED)

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == OURS
    assert names(answer.headers["Access-Control-Allow-Methods"]) >= {"post"}
    taken = names(answer.headers["Access-Control-Allow-Headers"])
    assert taken == names(ASKED["Access-Control-Request-Headers"]) - {"x-secret"}
    assert int(answer.headers["Access-Control-Max-Age"]) > 0
    assert "Origin" in answer.headers["Vary"]


def test_a_page_of_another_origin_is_told_nothing(open_to_two: FrontEnd) -> None:
    asked = httpx.options(open_to_two.url + PATH, headers=ASKED | {"Origin": THEIRS})
    posted = httpx.post(open_to_two.url + PATH, json=CHAT, headers={"Origin": THEIRS})
    unnamed = httpx.post(open_to_two.url + PATH, json=CHAT)

    # A cache must not give these to a page that may read its own.
    assert [cors_headers(answer) for answer in (asked, posted, unnamed)] == [{"vary": "Origin"}] * 3


@pytest.mark.parametrize("origin", [OURS, OTHER])
def test_each_answer_to_a_page_of_a_listed_origin_may_be_read_by_it_errors_included(
    open_to_two: FrontEnd, origin: str
) -> None:
    headers = {"Origin": origin}
    url = open_to_two.url
    answers = [
        httpx.post(url + PATH, json=CHAT, headers=headers),
        httpx.post(url + PATH, json=STREAM, headers=headers),
        httpx.get(url + "/v1/models", headers=headers),
        httpx.post(url + PATH, json={}, headers=headers),
        httpx.post(url + PATH, content=b" " * (10 * 1024**2 + 1), headers=headers),
        httpx.get(url + "/v1/nothing", headers=headers),
        httpx.get(url + PATH, headers=headers),
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 413, 404, 405]
    for answer in answers:
        assert answer.headers["Access-Control-Allow-Origin"] == origin
        assert "Origin" in answer.headers["Vary"]
        assert "x-request-id" in names(answer.headers["Access-Control-Expose-Headers"])
        assert "Access-Control-Allow-Credentials" not in answer.headers
    assert "x-resume-url" in names(answers[1].headers["Access-Control-Expose-Headers"])


def test_a_page_may_read_when_to_come_back(open_to_two: FrontEnd, client: "redis.Redis") -> None:
    client.set("tokenmill:model:away", b"x", ex=60)

    answer = httpx.post(open_to_two.url + PATH, json=CHAT | {"model": "away"}, headers={"Origin": OURS})

    assert answer.status_code == 503
    assert "retry-after" in names(answer.headers["Access-Control-Expose-Headers"])


def test_a_star_lets_every_page_in_but_none_with_cookies(open_to_all: FrontEnd) -> None:
    asked = httpx.options(open_to_all.url + PATH, headers=ASKED | {"Origin": THEIRS})
    posted = httpx.post(open_to_all.url + PATH, json=CHAT, headers={"Origin": THEIRS})

    for answer in (asked, posted):
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Access-Control-Allow-Credentials" not in answer.headers


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready"])
def test_what_is_for_the_operator_is_for_no_page(open_to_all: FrontEnd, path: str) -> None:
    answer = httpx.get(open_to_all.url + path, headers={"Origin": OURS})

    assert answer.status_code == 200
    assert cors_headers(answer) == {}
    assert cors_headers(httpx.options(open_to_all.url + path, headers=ASKED)) == {}


@pytest.mark.parametrize("wrong", ["https://chat.example.com/", "chat.example.com", "https://a.com *", "null"])
def test_what_is_no_origin_ends_the_start_with_one_line(valkey: Valkey, wrong: str) -> None:
    status, errors = FrontEnd(valkey.url, cors_origins=wrong).start().wait()

    assert status == 1
    assert errors.startswith("--cors-origins (TOKENMILL_CORS_ORIGINS): ")
    assert errors.count("\n") == 1


# -- what browsers make of an answer --


def assert_safe(headers: "httpx.Headers | dict[str, str]") -> None:
    assert {name: headers[name] for name in SECURITY} == SECURITY
    assert "no-store" in headers["cache-control"]
    assert not any(character.isdigit() for character in headers.get("server", ""))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", PATH, CHAT, 200),
        ("POST", PATH, STREAM, 200),
        ("POST", PATH, {}, 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/none", None, 404),
        ("GET", "/nothing", None, 404),
        ("GET", PATH, None, 405),
        ("OPTIONS", PATH, None, 200),
        ("HEAD", "/health", None, 200),
        ("GET", "/ready", None, 200),
        ("GET", "/metrics", None, 200),
    ],
)
def test_every_answer_keeps_browsers_from_running_or_storing_it(
    front_end: FrontEnd, method: str, path: str, body: object, status: int
) -> None:
    answer = httpx.request(method, front_end.url + path, json=body)

    assert answer.status_code == status
    assert_safe(answer.headers)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(30)) + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n", 501),
    ],
)
def test_so_does_the_answer_to_what_is_no_http(open_to_all: FrontEnd, raw: bytes, status: int) -> None:
    answer: Answer = exchange(open_to_all.port, raw)

    assert answer.status == status
    assert_safe(answer.headers)


def test_so_does_the_answer_to_who_is_too_slow(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end(header_timeout=0.5)
    with socket.create_connection(("127.0.0.1", front_end.port), timeout=20) as slow:
        slow.sendall(b"GET")
        answered = slow.recv(4096).decode().lower()

    assert answered.startswith("http/1.1 408 ")
    for name, value in SECURITY.items():
        assert f"\r\n{name}: {value}\r\n" in answered
