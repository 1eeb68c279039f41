"""What a client may send and ask for: what is one past a limit is refused by name, and nothing of it is queued."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis
from raw_http import answer_on, connection, exchange, has_news
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, Valkey
from streaming import STREAM, endless, post

from shared.jobs import MOST_DATA_BYTES
from shared.settings import MOST_BODY, Limits

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
LIMITS: dict[str, Any] = {
    "max_body": 4096,
    "max_messages": 4,
    "max_prompt": 60,
    "max_n": 3,
    "max_choices": 5,
    "max_stop": 2,
    "max_stop_length": 10,
    "max_top_logprobs": 3,
    "max_logit_bias": 5,
    "max_headers": 20,
    "max_header_size": 400,
}
URL_LIMIT = 4094


@pytest.fixture(scope="module")
def limited(valkey: Valkey) -> Iterator[FrontEnd]:
    front_end = FrontEnd(valkey.url, **LIMITS).start().ready()
    yield front_end
    front_end.stop()


@pytest.fixture(autouse=True)
def worker(client: "redis.Redis", start_worker: StartWorker) -> ScriptedWorker:  # noqa: ARG001 - empties Redis first
    return start_worker(say_words("ok"))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def parts(count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": "x"}] * count


@pytest.mark.parametrize(
    ("path", "at", "past", "param"),
    [
        (CHAT_PATH, {"messages": [user("x")] * 4}, {"messages": [user("x")] * 5}, "messages"),
        (CHAT_PATH, {"messages": [user(parts(4))]}, {"messages": [user(parts(5))]}, "messages"),
        (CHAT_PATH, {"messages": [user("é" * 60)]}, {"messages": [user("é" * 61)]}, "messages"),
        (CHAT_PATH, {"messages": [user("x" * 30)] * 2}, {"messages": [user("x" * 30), user("x" * 31)]}, "messages"),
        (CHAT_PATH, {"n": 3}, {"n": 4}, "n"),
        (CHAT_PATH, {"stop": ["a", "b"]}, {"stop": ["a", "b", "c"]}, "stop"),
        (CHAT_PATH, {"stop": "x" * 10}, {"stop": "x" * 11}, "stop"),
        (CHAT_PATH, {"logprobs": True, "top_logprobs": 3}, {"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        (
            CHAT_PATH,
            {"logit_bias": {str(token): 1 for token in range(5)}},
            {"logit_bias": {str(token): 1 for token in range(6)}},
            "logit_bias",
        ),
        (CHAT_PATH, {"logit_bias": {"1": -100}}, {"logit_bias": {"1": -101}}, "logit_bias"),
        (TEXT_PATH, {"prompt": "x" * 60}, {"prompt": "x" * 61}, "prompt"),
        (TEXT_PATH, {"prompt": ["x" * 30] * 2}, {"prompt": ["x" * 30, "x" * 31]}, "prompt"),
        (TEXT_PATH, {"prompt": [1] * 60}, {"prompt": [1] * 61}, "prompt"),
        (TEXT_PATH, {"prompt": [[1] * 30] * 2}, {"prompt": [[1] * 30, [1] * 31]}, "prompt"),
        (TEXT_PATH, {"prompt": ["x"] * 5}, {"prompt": ["x"] * 6}, "prompt"),
        (TEXT_PATH, {"prompt": ["x"] * 2, "n": 2}, {"prompt": ["x"] * 2, "n": 3}, "n"),
        (TEXT_PATH, {"logprobs": 3}, {"logprobs": 4}, "logprobs"),
    ],
    ids=[
        *("messages", "parts", "prompt of a chat", "prompt of several messages", "n", "stop strings", "stop string"),
        *(
            "top_logprobs",
            "tokens in logit_bias",
            "bias",
            "prompt",
            "several prompts",
            "tokens",
            "several token prompts",
        ),
        *("prompts", "choices", "logprobs"),
    ],
)
def test_what_is_asked_for_is_limited_by_field(
    limited: FrontEnd, client: "redis.Redis", path: str, at: dict[str, Any], past: dict[str, Any], param: str
) -> None:
    base: dict[str, Any] = {"model": "scripted"} | ({"messages": [user("x")]} if path == CHAT_PATH else {"prompt": "x"})

    refused = httpx.post(limited.url + path, json=base | past)
    assert client.keys("tokenmill:request:*") == client.keys("rq:job:*") == []
    taken = httpx.post(limited.url + path, json=base | at)

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["code"] == "invalid_request"
    assert param in refused.json()["error"]["message"]
    assert taken.status_code == 200, taken.text


def test_a_request_has_as_many_choices_as_one_may_have_whatever_n_may_be(
    start_front_end: StartFrontEnd,
) -> None:
    front_end = start_front_end(max_choices=2)

    refused = httpx.post(front_end.url + CHAT_PATH, json={"model": "scripted", "messages": [user("x")], "n": 3})

    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def padded(size: int) -> bytes:
    """A request whose body has so many bytes."""
    raw = json.dumps({"model": "scripted", "prompt": "x"}).encode()
    return raw + b" " * (size - len(raw))


@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "in chunks"])
def test_a_body_may_have_so_many_bytes(limited: FrontEnd, client: "redis.Redis", is_chunked: bool) -> None:
    def send(size: int) -> httpx.Response:
        raw = padded(size)
        return httpx.post(limited.url + TEXT_PATH, content=iter([raw[:100], raw[100:]]) if is_chunked else raw)

    refused = send(4097)
    assert client.keys("rq:job:*") == []
    taken = send(4096)

    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_entity_too_large"
    assert taken.status_code == 200


def test_a_body_that_is_far_too_large_is_answered_before_it_is_sent(limited: FrontEnd) -> None:
    head = f"POST {TEXT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n"

    assert exchange(limited.port, head.encode()).status == 413


def test_a_connection_is_used_again_after_a_body_that_was_too_large(limited: FrontEnd) -> None:
    with httpx.Client(base_url=limited.url, limits=httpx.Limits(max_connections=1)) as client:
        assert client.post(TEXT_PATH, content=padded(50_000)).status_code == 413
        assert client.post(TEXT_PATH, content=padded(100)).status_code == 200


def test_a_request_may_have_so_many_headers(limited: FrontEnd) -> None:
    def send(count: int) -> int:
        lines = ["Host: x", "Connection: close", *(f"X-{number}: y" for number in range(count - 2))]
        head = "".join(f"{line}\r\n" for line in lines)
        return exchange(limited.port, f"GET /health HTTP/1.1\r\n{head}\r\n".encode()).status

    assert (send(20), send(21)) == (200, 431)


def test_a_header_may_have_so_many_bytes(limited: FrontEnd) -> None:
    def send(size: int) -> int:
        line = "X-Long: ".ljust(size, "y")
        return exchange(limited.port, f"GET /health HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode()).status

    assert (send(400), send(401)) == (200, 431)


def test_a_request_s_first_line_may_have_so_many_bytes(limited: FrontEnd) -> None:
    def send(size: int) -> int:
        line = f"GET /{'y' * (size - len('GET / HTTP/1.1'))} HTTP/1.1"
        assert len(line) == size
        return exchange(limited.port, f"{line}\r\nHost: x\r\n\r\n".encode()).status

    assert (send(URL_LIMIT), send(URL_LIMIT + 1)) == (404, 414)


def test_what_an_error_repeats_of_a_request_is_short(limited: FrontEnd) -> None:
    base = {"model": "scripted", "prompt": "x"}
    answers = [
        httpx.post(limited.url + TEXT_PATH, json=base | {"y" * 3000: 1}),
        httpx.post(limited.url + TEXT_PATH, json=base | {"model": "y" * 3000}),
        httpx.post(limited.url + TEXT_PATH, json=base | {"metadata": {"y" * 3000: 1}}),
        httpx.post(limited.url + TEXT_PATH, json=base | {"logit_bias": {"y" * 3000: 1}}),
        httpx.post(limited.url + TEXT_PATH, content=b'{"model": "scripted", "prompt": "x", "n": ' + b"9" * 3000 + b"}"),
        httpx.post(limited.url + TEXT_PATH, content=b"{}", headers={"Content-Encoding": "y" * 300}),
        httpx.get(limited.url + "/v1/models/" + "y" * 3000),
        httpx.get(limited.url + "/v1/streams/" + "y" * 3000),
        httpx.get(limited.url + "/v1/" + "y" * 3000),
    ]

    assert [answer.status_code for answer in answers] == [400] * 6 + [404] * 3
    assert [answer for answer in answers if len(answer.content) > 500] == []


def test_one_connection_more_than_there_may_be_waits_until_another_ends(
    start_front_end: StartFrontEnd, start_worker: StartWorker
) -> None:
    start_worker(endless, model="endless")
    front_end = start_front_end(connections=3)
    streams = [post(front_end, {**STREAM, "model": "endless"}) for _ in range(3)]
    for stream in streams:
        assert stream.recv(100)

    with connection(front_end.port) as fourth:
        fourth.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for _ in range(10):  # in the time in which the others have been written to ten times
            assert streams[0].recv(4096)
        assert not has_news(fourth)
        streams[1].close()

        assert answer_on(fourth).status == 200
    for stream in streams:
        stream.close()


def test_the_defaults_are_openai_s_where_it_has_limits() -> None:
    limits = Limits()

    assert (limits.max_n, limits.max_stop, limits.max_top_logprobs, limits.max_logit_bias) == (128, 4, 20, 300)


def test_no_body_that_a_front_end_takes_is_too_large_for_a_worker() -> None:
    # Each byte may become a third of `\\u1234`, as RQ writes JSON.
    assert MOST_BODY * 3 < MOST_DATA_BYTES
