"""The description of the API, held to what a real server answers: whole answers, streams, every error."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from described import EVENTS, JSON, Description
from raw_http import exchange
from scripted_worker import ScriptedWorker, Turn, say_words
from servers import FrontEnd, Valkey, wait_until
from streaming import CHAT, STREAM
from worker_processes import Office, WorkerProcess

from api.access.keys import new_key
from api.openapi.document import document
from api.openapi.errors import GENERATION_CODES
from api.request_ids import new_request_id
from api.schemas.examples import CHATS, COMPLETIONS, MODEL
from shared.errors import ErrorCode
from shared.settings import ApiSettings

StartFrontEnd = Callable[..., FrontEnd]
StartWorker = Callable[..., ScriptedWorker]

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
BODIES = [(CHAT_PATH, name, body) for name, body in CHATS.items()]
BODIES += [(TEXT_PATH, name, body) for name, body in COMPLETIONS.items()]


@pytest.fixture(scope="module")
def served(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """A front end with a real worker, which serves the model of the examples."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
        folder: Path = tmp_path_factory.mktemp("worker")
        worker = WorkerProcess(valkey.url, folder, model=f"{MODEL}=fake:")
        front_end = FrontEnd(valkey.url).start().ready()
        Office(client).ready(worker)
        yield front_end
        front_end.stop()
        worker.kill()


@pytest.fixture(scope="module")
def description() -> Description:
    return Description(document(ApiSettings()))


def check(description: Description, answer: httpx.Response) -> httpx.Response:
    """The answer, if it is as described."""
    request = answer.request
    description.check(request.method, request.url.path, answer.status_code, answer.headers, answer.content)
    return answer


# -- what it is --


def test_the_description_is_that_of_this_server(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end(max_n=3, max_stop=2)

    answer = httpx.get(f"{front_end.url}/openapi.json")

    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json() == document(ApiSettings(max_n=3, max_stop=2))
    check(Description(answer.json()), answer)


# -- what is asked for and given --


@pytest.mark.parametrize(("path", "name", "body"), BODIES, ids=[f"{path} {name}" for path, name, _ in BODIES])
def test_each_example_of_a_request_is_taken_and_its_answer_is_as_described(
    served: FrontEnd, description: Description, path: str, name: str, body: Any
) -> None:
    answer = check(description, httpx.post(served.url + path, json=body, timeout=30))

    assert answer.status_code == 200, (name, answer.text)
    assert answer.headers["Content-Type"].startswith(EVENTS if body.get("stream") else JSON)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("stream", [False, True])
def test_so_is_an_answer_with_several_choices_logprobs_and_usage(
    served: FrontEnd, description: Description, path: str, stream: bool
) -> None:
    body = CHATS["with logprobs"] if path == CHAT_PATH else COMPLETIONS["several prompts of tokens"]
    more = {"n": 2, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})

    check(description, httpx.post(served.url + path, json=body | more, timeout=30)).raise_for_status()


def test_a_stream_that_is_resumed_is_as_described(served: FrontEnd, description: Description) -> None:
    streamed = httpx.post(served.url + CHAT_PATH, json=CHATS["streamed"], timeout=30)

    url = served.url + streamed.headers["X-Resume-Url"]
    assert check(description, httpx.get(url)).text == streamed.text
    assert check(description, httpx.get(url, params={"after": "1-1"})).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/metrics", "/openapi.json"]
)
def test_what_can_only_be_asked_is_answered_as_described(served: FrontEnd, description: Description, path: str) -> None:
    assert check(description, httpx.get(served.url + path)).status_code == 200


# -- keys --


def test_a_server_with_keys_lets_in_and_keeps_out_as_described(
    start_front_end: StartFrontEnd, start_worker: StartWorker
) -> None:
    key, hashed = new_key()
    guarded: dict[str, Any] = {"api_keys": f"alice={hashed}", "key_requests": 1, "key_tokens": 1000}
    front_end = start_front_end(**guarded, metrics_access="key")
    start_worker(say_words("ok"))
    description = Description(document(ApiSettings(**guarded, metrics_access="key")))
    schemes = description.document["components"]["securitySchemes"]
    bearer, header = {"Authorization": f"Bearer {key}"}, {schemes["header"]["name"]: key}

    for path, methods in description.document["paths"].items():
        (method,) = methods
        answer = check(description, httpx.request(method, front_end.url + path.replace("{id}", "x")))
        assert (answer.status_code == 401) == ("security" in methods[method]), path
    first = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT, headers=bearer))
    second = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT, headers=header))

    assert (first.status_code, second.status_code) == (200, 429)
    for answer in (first, second):
        response = description.response("POST", CHAT_PATH, answer.status_code)
        told = {name for name in answer.headers if name.startswith("x-ratelimit-")}
        assert told == {name for name in response["headers"] if name.startswith("x-ratelimit-")}


# -- errors --


def test_a_server_without_a_worker_is_not_ready_as_described(front_end: FrontEnd, description: Description) -> None:
    wait_until(lambda: httpx.get(f"{front_end.url}/ready").status_code == 503, what="the end of the workers")

    check(description, httpx.get(f"{front_end.url}/ready"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", sorted(GENERATION_CODES))
def test_whatever_fails_a_request_is_answered_as_described(
    front_end: FrontEnd, start_worker: StartWorker, description: Description, code: ErrorCode, stream: bool
) -> None:
    start_worker(lambda turn: turn.fail(code, "It failed.", "messages"))

    answer = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT | {"stream": stream}))

    assert answer.json()["error"]["code"] == code


def test_so_is_what_fails_a_stream_that_has_begun(
    front_end: FrontEnd, start_worker: StartWorker, description: Description
) -> None:
    def say_and_fail(turn: Turn) -> None:
        turn.accept()
        turn.say("x")
        turn.fail(ErrorCode.ENGINE_ERROR, "It failed.")

    start_worker(say_and_fail)

    answer = check(description, httpx.post(front_end.url + CHAT_PATH, json=STREAM))

    assert answer.status_code == 200
    assert "engine_error" in answer.text


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", CHAT_PATH, {"json": {**CHAT, "temperature": "hot"}}, 400),
        ("POST", CHAT_PATH, {"json": {**CHAT, "tools": [{}]}}, 400),
        ("POST", CHAT_PATH, {"content": b"{"}, 400),
        ("POST", CHAT_PATH, {"json": CHAT, "headers": {"Idempotency-Key": "a,b"}}, 400),
        ("POST", TEXT_PATH, {"json": {"model": "none", "prompt": "x"}}, 404),
        ("POST", TEXT_PATH, {"content": b" " * (10 * 1024**2 + 1)}, 413),
        ("GET", "/v1/models/none", {}, 404),
        ("GET", "/v1/streams/none", {}, 404),
        ("GET", "/v1/streams/none/at/all", {}, 404),
        ("GET", f"/v1/streams/{new_request_id()}", {}, 410),
        ("GET", "/v1/nothing", {}, 404),
        ("DELETE", "/v1/models", {}, 405),
        ("GET", CHAT_PATH, {}, 405),
    ],
)
def test_whatever_is_refused_is_refused_as_described(
    front_end: FrontEnd, description: Description, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    assert check(description, httpx.request(method, front_end.url + path, **options)).status_code == status


def test_a_key_that_is_used_again_and_a_position_that_is_none_are_refused_as_described(
    front_end: FrontEnd, start_worker: StartWorker, description: Description
) -> None:
    start_worker(say_words("ok"))
    headers = {"Idempotency-Key": "key"}
    streamed = httpx.post(front_end.url + CHAT_PATH, json=STREAM, headers=headers)
    url = front_end.url + streamed.headers["X-Resume-Url"]

    reused = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT, headers=headers))
    unknown = check(description, httpx.get(url, headers={"Last-Event-ID": "nonsense"}))
    beyond = check(description, httpx.get(url, headers={"Last-Event-ID": "1-1000"}))

    assert [answer.status_code for answer in (reused, unknown, beyond)] == [422, 404, 409]


def test_a_full_queue_and_a_model_without_a_worker_are_told_as_described(
    start_front_end: StartFrontEnd, start_worker: StartWorker, client: "redis.Redis", description: Description
) -> None:
    front_end = start_front_end(queue_limit=1)
    start_worker(say_words("ok"), model="busy").stop()
    client.set("tokenmill:model:away", b"x", ex=60)

    with httpx.stream("POST", front_end.url + CHAT_PATH, json=STREAM | {"model": "busy"}, timeout=30):
        full = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT | {"model": "busy"}))
    away = check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT | {"model": "away"}))

    assert [answer.status_code for answer in (full, away)] == [429, 503]


def test_a_redis_that_is_away_is_told_as_described(
    start_front_end: StartFrontEnd, own_valkey: Valkey, description: Description
) -> None:
    front_end = start_front_end(own_valkey.url)
    own_valkey.stop()

    for path in ("/v1/models", "/v1/models/x", f"/v1/streams/{new_request_id()}", "/ready"):
        assert check(description, httpx.get(front_end.url + path, timeout=30)).status_code == 503
    assert check(description, httpx.post(front_end.url + CHAT_PATH, json=CHAT, timeout=30)).status_code == 503


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET /v1/models/" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(200)) + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n", 501),
    ],
    ids=["no number", "long URL", "many headers", "unknown coding"],
)
def test_what_no_route_sees_is_refused_as_described(
    front_end: FrontEnd, description: Description, raw: bytes, status: int
) -> None:
    answer = exchange(front_end.port, raw)
    method, path = raw.decode().split(" ")[:2]

    assert answer.status == status
    description.check(method, path, answer.status, answer.headers, answer.body)


def test_who_is_too_slow_is_told_as_described(start_front_end: StartFrontEnd, description: Description) -> None:
    front_end = start_front_end(body_timeout=0.2)

    answer = exchange(front_end.port, f"POST {TEXT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())

    assert answer.status == 408
    description.check("POST", TEXT_PATH, answer.status, answer.headers, answer.body)
    assert json.loads(answer.body)["error"]["code"] == "request_timeout"
