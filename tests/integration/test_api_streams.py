"""Streams of the real server: what is sent when, resuming, clients that leave, crowds, and stopping."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from scripted_worker import ScriptedWorker, Turn, say_words
from servers import FrontEnd, Valkey, wait_until
from streaming import CHAT, STREAM, Gate, endless, events, post, request_state

from shared.errors import ErrorCode

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]


def test_no_status_line_is_sent_before_a_worker_accepts(
    start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    front_end = start_front_end(accept_wait=20)
    gate.accept.clear()
    worker = start_worker(gate)

    with post(front_end, STREAM) as connection:
        wait_until(lambda: worker.turns, what="the worker's turn")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        gate.accept.set()
        connection.settimeout(10)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_stream_that_waits_too_long_for_a_worker_starts_with_comments_that_clients_swallow(
    front_end: FrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    gate.accept.clear()
    start_worker(gate)

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=20) as answer:
        lines = answer.iter_lines()
        comments = [next(lines), next(lines)]
        gate.accept.set()
        gate.go_on.set()
        rest = list(lines)

    assert comments == [": ping", ": ping"]
    assert rest[-2] == "data: [DONE]"
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store, no-transform"
    assert answer.headers["X-Accel-Buffering"] == "no"


def test_the_official_client_reads_over_keep_alive_comments(
    front_end: FrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    start_worker(gate)
    # Longer than the front end's keep-alive interval of 0.3 s, in the middle of the stream.
    threading.Timer(1.0, gate.go_on.set).start()

    with openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**STREAM))

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"


def test_line_separators_in_the_text_stay_inside_their_event(front_end: FrontEnd, start_worker: StartWorker) -> None:
    text = "a\u2028b\u2029c\u0085d\ne\rf"
    start_worker(say_words(text))

    raw = httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM).text

    assert not set(raw) & set("\u2028\u2029\u0085\r")
    assert [json.loads(data)["choices"][0]["delta"].get("content") for _, data in events(raw)[1:2]] == [text]


def test_a_failure_in_mid_stream_is_an_error_event_and_no_made_up_end(
    front_end: FrontEnd, start_worker: StartWorker
) -> None:
    def script(turn: Turn) -> None:
        turn.accept()
        turn.say("half")
        turn.fail(ErrorCode.WORKER_LOST, "The worker died.")

    start_worker(script)

    raw = httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM).text
    with (
        openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.APIError, match="The worker died"),
    ):
        list(client.chat.completions.create(**STREAM))

    assert events(raw)[-1] == (
        "1-3",
        '{"error":{"message":"The worker died.","type":"server_error","param":null,"code":"worker_lost"}}',
    )
    assert "[DONE]" not in raw
    assert '"finish_reason":"stop"' not in raw


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_finished_stream_can_be_read_again_from_any_event_and_from_another_process(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, path: str
) -> None:
    start_worker(say_words("one", " two", " three"))
    body = {**STREAM, "stream_options": {"include_usage": True}, "n": 2}
    if path == "/v1/completions":
        body = {key: value for key, value in body.items() if key != "messages"} | {"prompt": "x"}
    other = start_front_end()

    original = httpx.post(front_end.url + path, json=body)
    url = other.url + original.headers["X-Resume-Url"]

    assert events(httpx.get(url).text) == events(original.text)
    all_events = events(original.text)
    for place, (id, _) in enumerate(all_events):
        if id is not None:
            assert events(httpx.get(url, params={"after": id}).text) == all_events[place + 1 :]
            assert events(httpx.get(url, headers={"Last-Event-ID": id}).text) == all_events[place + 1 :]


def test_a_running_stream_can_be_followed_by_another_process(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    start_worker(gate)
    other = start_front_end()

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=20) as original:
        lines = original.iter_lines()
        ids = [line[4:] for line in (next(lines) for _ in range(3)) if line.startswith("id: ")]
        with httpx.stream("GET", other.url + original.headers["X-Resume-Url"], params={"after": ids[-1]}) as resumed:
            gate.go_on.set()
            rest = "\n".join(resumed.iter_lines())
        original_rest = "\n".join(lines)

    assert events(rest) == events(original_rest)
    assert events(rest)[-1][1] == "[DONE]"


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "queued"])
def test_a_client_that_leaves_is_noticed_within_two_seconds(
    front_end: FrontEnd, start_worker: StartWorker, client: Any, body: Any, running: bool
) -> None:
    worker = start_worker(endless)
    if not running:
        worker.stop()
    connection = post(front_end, body)
    (key,) = wait_until(lambda: list(client.scan_iter("tokenmill:request:*")), what="the request")
    id = key.decode().rpartition(":")[2]
    if running:
        wait_until(lambda: client.xlen(f"tokenmill:log:{id}") > 2, what="the first tokens")

    connection.close()

    wait_until(lambda: request_state(client, id) == "cancelled", limit_s=2, what="the cancellation")
    if running:
        wait_until(lambda: worker.fenced == [id], limit_s=2, what="the worker's notice")
    else:
        wait_until(lambda: client.llen("rq:queue:scripted.interactive") == 0, limit_s=2, what="the job's withdrawal")


def test_a_background_request_goes_on_when_its_client_leaves(
    front_end: FrontEnd, start_worker: StartWorker, client: Any, gate: Gate
) -> None:
    worker = start_worker(gate)
    connection = post(front_end, {**STREAM, "service_tier": "flex"})
    (turn,) = wait_until(lambda: worker.turns, what="the worker's turn")
    connection.recv(100)
    channel = f"tokenmill:events:{turn.request.id}"

    connection.close()
    wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 0, what="the end of the subscription")
    gate.go_on.set()

    wait_until(lambda: request_state(client, turn.request.id) == "done", what="the end")
    rest = httpx.get(f"{front_end.url}/v1/streams/{turn.request.id}")
    assert events(rest.text)[-1][1] == "[DONE]"


def test_a_client_that_stops_reading_harms_nobody_and_still_gets_everything(
    front_end: FrontEnd, start_worker: StartWorker
) -> None:
    count, size = 1000, 8000

    def script(turn: Turn) -> None:
        turn.accept()
        for number in range(count if turn.request.max_tokens is None else 1):
            turn.say(f"{number:>{size}}")
        turn.finish()
        turn.done()

    start_worker(script)
    received = b""
    with post(front_end, STREAM) as slow:
        for _ in range(5):
            quick = httpx.post(f"{front_end.url}/v1/chat/completions", json={**STREAM, "max_tokens": 1}, timeout=5)
            assert events(quick.text)[-1][1] == "[DONE]"
        while b"[DONE]" not in received[-200:]:
            piece = slow.recv(1 << 20)
            assert piece, "the stream was cut"
            received += piece

    for number in range(count):
        assert f"{number:>{size}}".encode() in received


def test_a_hundred_streams_at_once_all_complete_and_nothing_crosses_over(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    def script(turn: Turn) -> None:
        turn.accept()
        for _ in range(5):
            turn.say(f"<{turn.request.sampling.seed}>")
        turn.finish()
        turn.done()

    start_worker(script)

    def ask(seed: int) -> str:
        raw = http.post(f"{front_end.url}/v1/chat/completions", json={**STREAM, "seed": seed}).text
        found = events(raw)
        assert found[-1][1] == "[DONE]"
        return "".join(json.loads(data)["choices"][0]["delta"].get("content", "") for _, data in found[:-1])

    limits = httpx.Limits(max_connections=100)
    with httpx.Client(timeout=30, limits=limits) as http, ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(ask, range(100)))

    assert answers == [f"<{seed}>" * 5 for seed in range(100)]
    wait_until(lambda: client.pubsub_channels("tokenmill:events:*") == [], what="the end of all subscriptions")


def test_a_stopping_front_end_lets_short_streams_finish(
    start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    front_end = start_front_end()
    start_worker(gate)

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        front_end.terminate()
        threading.Timer(0.5, gate.go_on.set).start()
        rest = list(lines)

    assert rest[-2] == "data: [DONE]"
    assert front_end.wait()[0] == 0


def test_a_stopping_front_end_refuses_connections_instead_of_leaving_them_waiting(
    start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    front_end = start_front_end()
    start_worker(gate)

    def is_refused() -> bool:
        try:
            httpx.get(f"{front_end.url}/health", timeout=5)
        except httpx.ConnectError:
            return True
        return False

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        front_end.terminate()
        wait_until(is_refused, limit_s=5, what="the port to be closed")
        gate.go_on.set()
        rest = list(lines)

    assert rest[-2] == "data: [DONE]"


def test_a_stopping_front_end_ends_long_streams_in_a_way_that_can_be_resumed(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, gate: Gate
) -> None:
    stopping = start_front_end(drain_timeout=1.0)
    start_worker(gate)

    with httpx.stream("POST", f"{stopping.url}/v1/chat/completions", json=STREAM, timeout=20) as answer:
        lines = answer.iter_lines()
        first = [next(lines)]
        stopping.terminate()
        text = "\n".join(first + list(lines))
    last_id, _ = events(text)[-2]
    gate.go_on.set()
    rest = httpx.get(front_end.url + answer.headers["X-Resume-Url"], params={"after": last_id}).text

    assert json.loads(events(text)[-1][1])["error"]["code"] == "server_stopping"
    assert events(rest)[-1][1] == "[DONE]"
    contents = [
        json.loads(data)["choices"][0]["delta"].get("content") for _, data in (events(text)[:-1] + events(rest)[:-1])
    ]
    assert "".join(content for content in contents if content) == "abc"


def test_streams_pause_while_redis_restarts_and_then_go_on(
    start_front_end: StartFrontEnd, start_worker: StartWorker, own_durable_valkey: Valkey
) -> None:
    valkey = own_durable_valkey
    front_end = start_front_end(valkey.url)
    gone, back = threading.Event(), threading.Event()

    def script(turn: Turn) -> None:
        turn.accept()
        turn.say("before")
        gone.set()
        assert back.wait(20)
        turn.say(" after")
        turn.finish()
        turn.done()

    start_worker(script, redis_url=valkey.url)
    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert gone.wait(10)
        valkey.stop()
        valkey.start()
        back.set()
        rest = list(lines)

    assert any(" after" in line for line in rest)
    assert rest[-2] == "data: [DONE]"


def test_requests_that_redis_has_lost_end_with_a_retryable_error(
    start_front_end: StartFrontEnd, start_worker: StartWorker, own_valkey: Valkey, gate: Gate
) -> None:
    front_end = start_front_end(own_valkey.url)
    start_worker(gate, redis_url=own_valkey.url)

    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        own_valkey.stop()
        own_valkey.start()
        rest = "\n".join(lines)
    gate.go_on.set()

    assert json.loads(events(rest)[-1][1])["error"]["code"] == "request_lost"


def test_an_abandoned_subscription_never_stays(front_end: FrontEnd, start_worker: StartWorker, client: Any) -> None:
    start_worker(say_words("ok"))
    original = httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM)

    httpx.head(front_end.url + original.headers["X-Resume-Url"])

    wait_until(lambda: client.pubsub_channels("tokenmill:events:*") == [], what="the end of all subscriptions")
