"""`Idempotency-Key`: one request and one answer, however often and from wherever it is sent."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import httpx
import openai
import pytest
from scripted_worker import ScriptedWorker, Turn, say_words
from servers import FrontEnd, wait_until
from streaming import CHAT, STREAM, Gate, events, post, request_state

from shared.errors import ErrorCode

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]

KEY = {"Idempotency-Key": "the key"}
TEXT: Any = {"model": "scripted", "prompt": "hello"}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def ask(front_end: FrontEnd, body: Any = CHAT, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(front_end.url + path, json=body, headers=headers or KEY, timeout=20)


def said(answer: httpx.Response) -> str:
    """All that an answer says, without what only keeps its connection open."""
    return answer.text.replace(": ping\n", "")


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("more", [{}, USAGE], ids=["whole", "stream"])
def test_a_key_gives_a_finished_answer_again_from_any_process(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, path: str, body: Any, more: Any
) -> None:
    worker = start_worker(say_words("Good", " day"))
    other = start_front_end()

    first = ask(front_end, {**body, **more}, path)
    again = [ask(asked, {**body, **more}, path) for asked in (front_end, other)]

    assert first.status_code == 200
    assert [said(answer) for answer in again] == [said(first)] * 2
    assert [answer.headers.get("X-Resume-Url") for answer in again] == [first.headers.get("X-Resume-Url")] * 2
    assert len(worker.turns) == 1


def test_a_key_joins_a_running_stream_from_its_start(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    worker = start_worker(gate)
    other = start_front_end()

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, headers=KEY, timeout=20) as first:
        lines = first.iter_lines()
        seen = [next(lines)]
        with httpx.stream("POST", f"{other.url}/v1/chat/completions", json=STREAM, headers=KEY, timeout=20) as joined:
            joined_lines = joined.iter_lines()
            joined_seen = [next(joined_lines)]
            gate.go_on.set()
            joined_seen += joined_lines
        seen += lines

    assert events("\n".join(joined_seen)) == events("\n".join(seen))
    assert events("\n".join(seen))[-1][1] == "[DONE]"
    assert len(worker.turns) == 1


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
def test_a_key_that_is_sent_many_times_at_once_runs_once(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, client: Any, body: Any
) -> None:
    worker = start_worker(say_words("once"))
    other = start_front_end()

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask((front_end, other)[number % 2], body), range(12)))

    assert [answer.status_code for answer in answers] == [200] * 12
    assert len({said(answer) for answer in answers}) == 1
    assert len(worker.turns) == 1
    assert len(list(client.scan_iter("rq:job:*"))) == len(list(client.scan_iter("tokenmill:request:*"))) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {**CHAT, "seed": 2}), ("/v1/chat/completions", STREAM), ("/v1/completions", TEXT)],
    ids=["body", "stream", "path"],
)
def test_a_key_cannot_be_used_again_for_something_else(
    front_end: FrontEnd, start_worker: StartWorker, path: str, body: Any
) -> None:
    worker = start_worker(say_words("ok"))
    ask(front_end)

    answer = ask(front_end, body, path)

    assert answer.status_code == 422
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["code"] == "idempotency_key_reused"
    assert answer.json()["error"]["param"] == "Idempotency-Key"
    assert len(worker.turns) == 1


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "a\tb", "é", "one,two"], ids=ascii)
def test_a_key_that_cannot_be_one_is_refused_by_the_name_of_the_header(front_end: FrontEnd, key: str) -> None:
    with closing(post(front_end, CHAT, Idempotency_Key=key, Connection="close")) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.split()[1] == b"400"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "Idempotency-Key"


@pytest.mark.parametrize("second", ["another", "the-same"])
def test_a_header_that_is_sent_twice_is_refused(front_end: FrontEnd, second: str) -> None:
    headers = [("Idempotency-Key", "the-same"), ("Idempotency-Key", second)]

    answer = httpx.post(f"{front_end.url}/v1/chat/completions", json=CHAT, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"


def test_the_longest_key_is_good(front_end: FrontEnd, start_worker: StartWorker) -> None:
    start_worker(say_words("ok"))
    key = "".join(map(chr, range(0x21, 0x7F))).replace(",", "").ljust(255, "~")

    first, again = (ask(front_end, **{"Idempotency-Key": key}) for _ in range(2))

    assert first.status_code == 200
    assert again.json() == first.json()


def test_a_request_that_was_refused_does_not_use_up_its_key(
    start_front_end: StartFrontEnd, start_worker: StartWorker, client: Any
) -> None:
    front_end = start_front_end(queue_limit=1)
    bad = ask(front_end, {**CHAT, "n": 0})
    unknown = ask(front_end)
    busy = start_worker(say_words("ok"))
    busy.stop()
    (key,) = client.keys(f"tokenmill:worker:{busy.name}")
    wait_until(lambda: ask(front_end, {**CHAT, "n": 0, "model": "x"}).status_code == 400)

    with post(front_end, {**STREAM, "seed": 1}):
        wait_until(lambda: client.zcard("tokenmill:waiting:scripted") == 1, what="the queue to be full")
        full = wait_until(lambda: (got := ask(front_end)).status_code == 429 and got, what="the 429")
        client.delete(key)
        absent = wait_until(lambda: (got := ask(front_end)).status_code == 503 and got, what="the 503")
    wait_until(lambda: client.zcard("tokenmill:waiting:scripted") == 0, what="room in the queue")
    start_worker(say_words("at last"))
    answer = wait_until(lambda: (got := ask(front_end, {**CHAT, "n": 2})).status_code == 200 and got, what="the 200")

    assert [refused.status_code for refused in (bad, unknown, full, absent)] == [400, 404, 429, 503]
    assert answer.json()["choices"][1]["message"]["content"] == "at last"


def fail_before_any_token(code: ErrorCode) -> Callable[[Turn], None]:
    return lambda turn: turn.fail(code, "Not this time.", "messages")


@pytest.mark.parametrize("code", [ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.ENGINE_ERROR])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
def test_a_key_gives_a_failure_again(
    front_end: FrontEnd, start_worker: StartWorker, code: ErrorCode, body: Any
) -> None:
    worker = start_worker(fail_before_any_token(code))

    first, again = ask(front_end, body), ask(front_end, body)

    assert first.status_code == again.status_code == (500 if code is ErrorCode.ENGINE_ERROR else 400)
    assert first.json() == again.json()
    assert len(worker.turns) == 1


def test_a_key_gives_a_failure_after_some_tokens_as_it_was(front_end: FrontEnd, start_worker: StartWorker) -> None:
    def script(turn: Turn) -> None:
        turn.accept()
        turn.say("half")
        turn.fail(ErrorCode.ENGINE_ERROR, "The engine failed.")

    worker = start_worker(script)

    first, again = ask(front_end, STREAM), ask(front_end, STREAM)

    assert json.loads(events(first.text)[-1][1])["error"]["code"] == "engine_error"
    assert said(again) == said(first)
    assert len(worker.turns) == 1


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.WORKER_LOST,
        ErrorCode.REQUEST_LOST,
        ErrorCode.CANCELLED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.MODEL_UNAVAILABLE,
        ErrorCode.PAYLOAD_VERSION,
    ],
)
def test_after_a_failure_that_is_worth_another_try_a_key_runs_anew_and_once(
    front_end: FrontEnd, start_worker: StartWorker, code: ErrorCode
) -> None:
    def script(turn: Turn) -> None:
        if len(worker.turns) == 1:
            turn.fail(code, "Not this time.")
        else:
            say_words("well")(turn)

    worker = start_worker(script)
    first = ask(front_end)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(front_end), range(4)))
    other_body = ask(front_end, {**CHAT, "seed": 1})

    assert first.json()["error"]["code"] == code
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["well"] * 4
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert other_body.status_code == 422
    assert len(worker.turns) == 2


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
def test_a_client_with_a_key_that_leaves_finds_its_answer_when_it_comes_back(
    front_end: FrontEnd, start_worker: StartWorker, client: Any, gate: Gate, body: Any
) -> None:
    worker = start_worker(gate)
    connection = post(front_end, body, Idempotency_Key="the key")
    (turn,) = wait_until(lambda: worker.turns, what="the worker's turn")
    channel = f"tokenmill:events:{turn.request.id}"

    connection.close()
    wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 0, what="the end of the subscription")
    gate.go_on.set()
    wait_until(lambda: request_state(client, turn.request.id) == "done", what="the end")
    answer = ask(front_end, body)

    assert answer.status_code == 200
    assert turn.request.id in answer.text
    assert len(worker.turns) == 1


def test_a_key_gives_its_answer_when_no_worker_is_left(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    worker = start_worker(say_words("ok"))
    first = ask(front_end)
    client.delete(f"tokenmill:worker:{worker.name}")
    wait_until(lambda: httpx.post(f"{front_end.url}/v1/completions", json=TEXT).status_code == 503, what="the 503")

    again, reused, fresh = ask(front_end), ask(front_end, STREAM), ask(front_end, **{"Idempotency-Key": "another"})

    assert again.json() == first.json()
    assert reused.status_code == 422
    assert fresh.status_code == 503


def test_a_key_is_free_again_when_its_request_has_expired(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    worker = start_worker(say_words("ok"))
    first = ask(front_end)
    client.delete(*client.keys("tokenmill:request:*"), *client.keys("tokenmill:log:*"))

    later = ask(front_end, {**CHAT, "seed": 1})

    assert later.status_code == 200
    assert later.json()["id"] != first.json()["id"]
    assert len(worker.turns) == 2


def test_an_answer_whose_log_was_lost_is_made_anew(front_end: FrontEnd, start_worker: StartWorker, client: Any) -> None:
    worker = start_worker(say_words("ok"))
    ask(front_end)
    client.delete(*client.keys("tokenmill:log:*"))

    assert ask(front_end).status_code == 200
    assert len(worker.turns) == 2


class CuttingProxy:
    """Passes connections on to a server, and cuts the first ones when their request has reached it."""

    def __init__(self, port: int, *, cuts: int, reached: Callable[[], Any]) -> None:
        self._target = port
        self._cuts = cuts
        self._reached = reached
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._copy, args=(near, far), daemon=True).start()
            if self.connections <= self._cuts:
                wait_until(self._reached, what="the request")
                for end in (near, far):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            else:
                threading.Thread(target=self._copy, args=(far, near), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            try:
                while piece := source.recv(65536):
                    sink.sendall(piece)
            except OSError:
                return


@pytest.fixture
def start_proxy(front_end: FrontEnd) -> Iterator[Callable[..., CuttingProxy]]:
    started: list[CuttingProxy] = []

    def start(**options: Any) -> CuttingProxy:
        started.append(CuttingProxy(front_end.port, **options))
        return started[-1]

    yield start
    for proxy in started:
        proxy.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_official_client_s_own_retries_join_when_the_connection_was_cut_before_the_headers(
    start_proxy: Callable[..., CuttingProxy], start_worker: StartWorker, gate: Gate, stream: bool
) -> None:
    gate.accept.clear()
    worker = start_worker(gate)
    proxy = start_proxy(cuts=2, reached=lambda: worker.turns)
    threading.Timer(1.0, lambda: (gate.accept.set(), gate.go_on.set())).start()

    with openai.OpenAI(base_url=f"http://127.0.0.1:{proxy.port}/v1", api_key="none", max_retries=3) as client:
        answer = client.chat.completions.create(**CHAT, stream=stream, extra_headers=KEY)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content

    assert text == "abc"
    assert proxy.connections == 3
    assert len(worker.turns) == 1
