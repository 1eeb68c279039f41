"""Answers of the real server, judged with the official client."""

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import httpx
import openai
import pytest
import redis
from scripted_worker import ScriptedWorker, Turn, say_words
from servers import FrontEnd, wait_until

from api.request_ids import new_request_id
from shared.domain import ChosenLogprob, FinishReason, Priority, TextPrompt, TokenLogprob, TokenPrompt
from shared.errors import ErrorCode

StartWorker = Callable[..., ScriptedWorker]

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = {"model": "scripted", "messages": HELLO}


@pytest.fixture
def openai_client(front_end: FrontEnd) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def say_with_logprobs(turn: Turn) -> None:
    turn.accept()
    for text, held_back in (("é", False), ("!", True)):
        token = TokenLogprob(text, tuple(text.encode()), -0.25)
        other = TokenLogprob("?", (63,), float("-inf"))
        turn.say("" if held_back else text, logprobs=[ChosenLogprob(token, (token, other))])
    turn.finish()
    turn.done()


def say_in_turns(turn: Turn) -> None:
    """Every choice says its index; the choices advance together and the last ends first."""
    turn.accept()
    for word in ("is", " ", "{}"):
        for choice in range(turn.request.choices):
            turn.say(word.format(choice), choice=choice)
    for choice in reversed(range(turn.request.choices)):
        turn.finish(choice, FinishReason.LENGTH if choice else FinishReason.STOP)
    turn.done(cached=5)


def test_a_whole_chat_answer_is_what_the_worker_said(openai_client: openai.OpenAI, start_worker: StartWorker) -> None:
    worker = start_worker(say_words("Good", " day"))

    answer = openai_client.chat.completions.create(**CHAT)

    assert answer.id == f"chatcmpl-{worker.turns[0].request.id}"
    assert answer.choices[0].message.content == "Good day"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 2, 9)


def test_a_streamed_chat_answer_joins_to_the_same_text(openai_client: openai.OpenAI, start_worker: StartWorker) -> None:
    start_worker(say_words("Good", " day"))

    chunks = list(openai_client.chat.completions.create(**CHAT, stream=True))

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Good day"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]


def test_usage_is_in_a_stream_only_when_asked_for_and_then_in_its_last_chunk(
    front_end: FrontEnd, openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    start_worker(say_words("a", "b"))

    asked = list(openai_client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    unasked = httpx.post(f"{front_end.url}/v1/chat/completions", json={**CHAT, "stream": True})

    assert all(chunk.usage is None for chunk in asked[:-1])
    assert asked[-1].choices == []
    assert asked[-1].usage.total_tokens == 9
    assert "usage" not in unasked.text
    assert "tool_calls" not in unasked.text


def test_the_choices_of_n_are_separable_and_finish_once_each(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    start_worker(say_in_turns)
    texts = {0: "", 1: "", 2: ""}
    finishes = []

    for chunk in openai_client.chat.completions.create(**CHAT, n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finishes.append((choice.index, choice.finish_reason))
    whole = openai_client.chat.completions.create(**CHAT, n=3)

    assert texts == {0: "is 0", 1: "is 1", 2: "is 2"}
    assert sorted(finishes) == [(0, "stop"), (1, "length"), (2, "length")]
    assert [choice.message.content for choice in whole.choices] == ["is 0", "is 1", "is 2"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length", "length"]
    assert whole.usage.prompt_tokens_details.cached_tokens == 5


def test_chat_logprobs_have_one_item_for_each_token_streamed_or_not(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    worker = start_worker(say_with_logprobs)
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}

    whole = openai_client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [
        item
        for chunk in openai_client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content
    ]

    assert worker.turns[0].request.logprobs == 2
    assert [item.token for item in whole] == ["é", "!"]
    assert whole[0].bytes == list("é".encode())
    assert [top.logprob for top in whole[0].top_logprobs] == [-0.25, -9999.0]
    assert streamed == whole


def test_completion_logprobs_are_parallel_arrays_with_running_offsets(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    start_worker(say_with_logprobs)

    whole = openai_client.completions.create(model="scripted", prompt="x", logprobs=1).choices[0].logprobs
    chunks = list(openai_client.completions.create(model="scripted", prompt="x", logprobs=1, stream=True))

    assert whole.tokens == ["é", "!"]
    assert whole.token_logprobs == [-0.25, -0.25]
    assert whole.top_logprobs[0] == {"é": -0.25, "?": -9999.0}
    assert whole.text_offset == [0, 1]
    assert [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].logprobs] == [[0], [1]]


def test_lists_of_prompts_give_n_choices_each(openai_client: openai.OpenAI, start_worker: StartWorker) -> None:
    worker = start_worker(say_in_turns)

    texts = openai_client.completions.create(model="scripted", prompt=["one", "two"], n=2)
    openai_client.completions.create(model="scripted", prompt=[[1, 2], [3]])
    openai_client.completions.create(model="scripted", prompt=[4, 5])

    assert [choice.text for choice in texts.choices] == ["is 0", "is 1", "is 2", "is 3"]
    assert worker.turns[0].request.prompts == (TextPrompt("one"), TextPrompt("two"))
    assert worker.turns[1].request.prompts == (TokenPrompt((1, 2)), TokenPrompt((3,)))
    assert worker.turns[2].request.prompts == (TokenPrompt((4, 5)),)


def test_a_streamed_text_completion_joins_to_the_same_text(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    start_worker(say_words("Once", " upon"))

    chunks = list(openai_client.completions.create(model="scripted", prompt="x", stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once upon"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]


@pytest.mark.parametrize(("tier", "priority"), [("flex", Priority.BACKGROUND), ("default", Priority.INTERACTIVE)])
def test_flex_requests_wait_in_the_background(
    openai_client: openai.OpenAI, start_worker: StartWorker, tier: Any, priority: Priority
) -> None:
    worker = start_worker(say_words("ok"))

    answer = openai_client.chat.completions.create(**CHAT, service_tier=tier)

    assert worker.turns[0].request.priority is priority
    assert answer.service_tier == tier


def test_a_seed_is_drawn_for_each_request_that_has_none(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    worker = start_worker(say_words("ok"))

    for _ in range(2):
        openai_client.chat.completions.create(**CHAT)
    openai_client.chat.completions.create(**CHAT, seed=-7)

    drawn, drawn_again, given = (turn.request.sampling.seed for turn in worker.turns)
    assert drawn != drawn_again
    assert given == -7


def test_two_requests_with_one_x_request_id_stay_apart(front_end: FrontEnd, start_worker: StartWorker) -> None:
    start_worker(say_words("ok"))

    answers = [
        httpx.post(f"{front_end.url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})
        for _ in range(2)
    ]

    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert answers[0].json()["id"] != answers[1].json()["id"]


def test_models_are_those_of_live_workers_and_ids_may_hold_slashes(
    openai_client: openai.OpenAI, start_worker: StartWorker
) -> None:
    start_worker(say_words("ok"), model="org/scripted", slots=4)

    model = wait_until(
        lambda: [model for model in openai_client.models.list() if model.id == "org/scripted"], what="the model"
    )[0]

    assert model.owned_by == "tokenmill"
    assert model.model_extra == {
        "context_length": 512,
        "backend": "scripted",
        "device": "cpu",
        "state": "ready",
        "workers": 1,
        "slots": 4,
    }
    assert openai_client.models.retrieve("org/scripted") == model
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("org/other")


def test_a_model_that_nobody_ever_served_is_not_found(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="never-served", messages=HELLO)

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_model_whose_worker_left_is_unavailable_for_now(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    worker = start_worker(say_words("ok"), model="left")
    client.delete(f"tokenmill:worker:{worker.name}")

    answer = wait_until(
        lambda: (
            (got := httpx.post(f"{front_end.url}/v1/chat/completions", json={**CHAT, "model": "left"})).status_code
            == 503
            and got
        ),
        what="the 503",
    )

    assert answer.json()["error"]["code"] == "model_unavailable"
    assert int(answer.headers["Retry-After"]) >= 1


def test_a_full_queue_is_a_429_and_takes_nothing_away_from_those_in_it(
    start_front_end: Callable[..., FrontEnd], start_worker: StartWorker, client: Any
) -> None:
    front_end = start_front_end(queue_limit=1)
    # A worker that is announced and takes nothing.
    worker = start_worker(say_words("ok"), model="busy")
    worker.stop()
    body = {**CHAT, "model": "busy", "stream": True}

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=body, timeout=30):
        answer = httpx.post(f"{front_end.url}/v1/chat/completions", json=body)

        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert answer.json()["error"]["code"] == "queue_full"
        assert "Retry-After" in answer.headers
        assert client.zcard("tokenmill:waiting:busy") == 1


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, openai.BadRequestError),
        (ErrorCode.ENGINE_ERROR, 500, openai.InternalServerError),
        (ErrorCode.WORKER_LOST, 503, openai.InternalServerError),
        (ErrorCode.DEADLINE_EXCEEDED, 504, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_rejection_is_an_http_error_with_its_code_streaming_or_not(
    openai_client: openai.OpenAI,
    start_worker: StartWorker,
    stream: bool,
    code: ErrorCode,
    status: int,
    error: type[openai.APIStatusError],
) -> None:
    start_worker(lambda turn: turn.fail(code, "Too long.", "messages"))

    with pytest.raises(error) as caught:
        openai_client.chat.completions.create(**CHAT, stream=stream)

    assert caught.value.status_code == status
    assert caught.value.body == {
        "message": "Too long.",
        "type": "invalid_request_error" if status == 400 else "server_error",
        "param": "messages",
        "code": code.value,
    }


def test_a_request_that_outlives_its_deadline_is_a_504(
    start_front_end: Callable[..., FrontEnd], start_worker: StartWorker
) -> None:
    front_end = start_front_end(request_timeout=1.0)
    worker = start_worker(say_words("ok"), model="absent")
    worker.stop()

    answer = httpx.post(f"{front_end.url}/v1/chat/completions", json={**CHAT, "model": "absent"}, timeout=10)

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/streams/not-an-id", 404),
        ("GET", f"/v1/streams/{new_request_id()}", 410),
    ],
)
def test_every_refusal_has_openai_s_error_shape(front_end: FrontEnd, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, front_end.url + path)

    assert answer.status_code == status
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_an_unknown_url_is_told_as_openai_tells_it(front_end: FrontEnd) -> None:
    answer = httpx.post(f"{front_end.url}/v1/engines?x=1")

    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "Invalid URL (POST /v1/engines)",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_of_a_long_unknown_url_only_the_beginning_is_repeated(front_end: FrontEnd) -> None:
    answer = httpx.get(f"{front_end.url}/{'x' * 3000}")

    assert answer.status_code == 404
    assert len(answer.json()["error"]["message"]) < 250


def test_a_wrong_method_is_told_which_are_right(front_end: FrontEnd) -> None:
    answer = httpx.get(f"{front_end.url}/v1/chat/completions")

    assert (answer.status_code, answer.headers["Allow"]) == (405, "OPTIONS, POST")
    error = answer.json()["error"]
    assert error["message"] == "GET is not allowed on /v1/chat/completions, which takes OPTIONS, POST."
    assert error["code"] == "method_not_allowed"


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, "invalid_request"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400, "invalid_request"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n", 501, "not_implemented"),
        (CHUNKED + b"zz\r\nhi\r\n0\r\n\r\n", 400, "invalid_request"),
        (CHUNKED + b"-2\r\nhi\r\n0\r\n\r\n", 400, "invalid_request"),
        (CHUNKED + b"2\r\n{}xx0\r\n\r\n", 400, "invalid_request"),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "request_uri_too_long"),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(200)) + b"\r\n",
            431,
            "request_header_fields_too_large",
        ),
    ],
    ids=[
        *("no request", "bad length", "unknown coding", "chunk of no size", "chunk of less than nothing"),
        *("chunk without an end", "long URL", "too many headers"),
    ],
)
def test_what_is_no_http_is_answered_in_the_same_shape(front_end: FrontEnd, raw: bytes, status: int, code: str) -> None:
    with socket.create_connection(("127.0.0.1", front_end.port), timeout=5) as connection:
        connection.sendall(raw)
        with HTTPResponse(connection) as answer:
            answer.begin()
            body = answer.read()

    assert answer.status == status
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["message"].startswith("The request")


def test_a_body_in_chunks_of_unknown_length_is_read_and_limited_all_the_same(
    front_end: FrontEnd, start_worker: StartWorker
) -> None:
    start_worker(say_words("ok"))
    url = f"{front_end.url}/v1/chat/completions"
    raw = json.dumps(CHAT).encode()

    assert httpx.post(url, content=iter([raw[:10], raw[10:]])).status_code == 200
    assert httpx.post(url, content=(b" " * 2**20 for _ in range(11))).status_code == 413


def test_a_body_in_a_content_coding_is_refused_by_that_name(front_end: FrontEnd) -> None:
    packed = gzip.compress(json.dumps(CHAT).encode())

    answer = httpx.post(f"{front_end.url}/v1/chat/completions", content=packed, headers={"Content-Encoding": "gzip"})

    assert answer.status_code == 400
    assert "Content-Encoding 'gzip'" in answer.json()["error"]["message"]


def test_several_processes_share_the_port(start_front_end: Callable[..., FrontEnd], start_worker: StartWorker) -> None:
    front_end = start_front_end(api_processes=2)
    start_worker(say_words("ok"))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: httpx.post(f"{front_end.url}/v1/chat/completions", json=CHAT), range(16)))

    assert [answer.status_code for answer in answers] == [200] * 16


def test_a_body_that_is_too_large_is_a_413_and_the_server_lives(front_end: FrontEnd) -> None:
    answer = httpx.post(f"{front_end.url}/v1/chat/completions", content=b" " * (10 * 1024 * 1024 + 1))

    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{front_end.url}/health").status_code == 200


def test_ready_tells_what_is_missing(
    start_front_end: Callable[..., FrontEnd], start_worker: StartWorker, own_valkey: Any
) -> None:
    front_end = start_front_end(own_valkey.url)

    before = httpx.get(f"{front_end.url}/ready")
    start_worker(say_words("ok"), redis_url=own_valkey.url).stop()
    served = wait_until(
        lambda: (got := httpx.get(f"{front_end.url}/ready")).status_code == 200 and got, what="readiness"
    )
    own_valkey.stop()
    after = httpx.get(f"{front_end.url}/ready", timeout=30)

    assert (before.status_code, before.json()["missing"]) == (503, ["no worker serves a model"])
    assert served.json()["models"] == ["scripted"]
    assert (after.status_code, after.json()["missing"]) == (503, ["Redis cannot be reached"])
    assert httpx.get(f"{front_end.url}/health").status_code == 200


def test_ready_is_not_said_of_a_redis_that_takes_no_writes(
    start_front_end: Callable[..., FrontEnd],
    start_worker: StartWorker,
    own_valkey: Any,
    connect_to: "Callable[[str], redis.Redis]",
) -> None:
    front_end = start_front_end(own_valkey.url)
    start_worker(say_words("ok"), redis_url=own_valkey.url).stop()
    redis_itself = connect_to(own_valkey.url)
    wait_until(lambda: httpx.get(f"{front_end.url}/ready").status_code == 200, what="readiness")
    found = []

    for setting, bad, good in (("maxmemory", 1, 0), ("min-replicas-to-write", 1, 0)):
        redis_itself.config_set(setting, bad)
        refused = httpx.get(f"{front_end.url}/ready")
        redis_itself.config_set(setting, good)
        found.append((refused.status_code, refused.json()["missing"], httpx.get(f"{front_end.url}/ready").status_code))

    assert found == [(503, ["Redis is out of memory"], 200), (503, ["Redis takes no writes"], 200)]
    assert not redis_itself.keys("*ready*")


def test_a_taken_port_is_one_clear_line(start_front_end: Callable[..., FrontEnd]) -> None:
    first = start_front_end()
    second = FrontEnd(str(first.settings["redis"]), port=first.port).start()

    status, errors = second.wait()

    assert status == 1
    assert errors == f"cannot listen on 127.0.0.1:{first.port}: Address already in use\n"
