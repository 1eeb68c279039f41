"""`/v1/streams/{id}`: exactly the rest of a stream from any process, or an error that says why not."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from scripted_worker import ScriptedWorker, Turn, say_words
from servers import FrontEnd, wait_until
from streaming import STREAM, events

from api.request_ids import new_request_id
from shared.errors import ErrorCode

StartWorker = Callable[..., ScriptedWorker]
StartFrontEnd = Callable[..., FrontEnd]

DAY_MS = 24 * 3600 * 1000


def at(milliseconds: int) -> str:
    """A request id of that time."""
    return f"{milliseconds:012x}{new_request_id()[12:]}"


def resume(front_end: FrontEnd, request_id: str, after: str = "", *, header: bool = False) -> httpx.Response:
    given: Any = {"headers": {"Last-Event-ID": after}} if header else {"params": {"after": after}}
    return httpx.get(f"{front_end.url}/v1/streams/{request_id}", **(given if after else {}), timeout=20)


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


def break_in_two(client: Any, log: str, entry_id: str) -> None:
    client.xdel(log, entry_id)


def make_unreadable(client: Any, log: str, entry_id: str) -> None:
    entries = dict(client.xrange(log)) | {entry_id.encode(): {b"e": b"{"}}
    client.delete(log)
    for each, fields in entries.items():
        client.xadd(log, fields, id=each)
    client.expire(log, 60)


def ended_stream(front_end: FrontEnd, start_worker: StartWorker) -> str:
    """The id of a request whose log is 1-1 to 1-5."""
    worker = start_worker(say_words("one", " two"))
    assert httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM).status_code == 200
    return worker.turns[0].request.id


@pytest.mark.parametrize(
    "request_id",
    [
        "not-an-id",
        "0" * 32,
        "c0ffee" * 5 + "42",
        at(int(time.time() * 1000) + DAY_MS),
        at(1_000_000_000_000),
        new_request_id().upper().replace("0", "A"),
        new_request_id()[:12] + "4" + new_request_id()[13:],
        new_request_id()[:16] + "c" + new_request_id()[17:],
        new_request_id() + "0",
    ],
    ids=["word", "zeros", "random", "future", "past", "upper case", "version", "variant", "too long"],
)
def test_what_is_no_id_of_ours_is_not_found(front_end: FrontEnd, request_id: str) -> None:
    assert refusal(resume(front_end, request_id)) == (404, "stream_not_found", "id")


def test_an_id_that_may_have_been_given_and_is_not_known_is_gone(front_end: FrontEnd) -> None:
    for request_id in (new_request_id(), at(int(time.time() * 1000) - 30 * DAY_MS)):
        assert refusal(resume(front_end, request_id)) == (410, "stream_expired", "id")


def test_the_id_of_an_answer_tells_when_it_was_asked_for(front_end: FrontEnd, start_worker: StartWorker) -> None:
    before = int(time.time() * 1000)
    request_id = ended_stream(front_end, start_worker)

    assert before <= int(request_id[:12], 16) <= int(time.time() * 1000)


@pytest.mark.parametrize("header", [True, False], ids=["Last-Event-ID", "after"])
@pytest.mark.parametrize(
    ("after", "status", "code"),
    [
        ("nonsense", 404, "event_not_found"),
        ("-1-1", 404, "event_not_found"),
        ("1-1-1", 404, "event_not_found"),
        ("1-0", 404, "event_not_found"),
        ("0-3", 404, "event_not_found"),
        ("1-6", 409, "stream_damaged"),
        ("9-1", 409, "stream_damaged"),
    ],
)
def test_a_position_that_the_stream_does_not_have_is_refused_by_its_name(
    front_end: FrontEnd, start_worker: StartWorker, header: bool, after: str, status: int, code: str
) -> None:
    request_id = ended_stream(front_end, start_worker)

    answer = resume(front_end, request_id, after, header=header)

    assert refusal(answer) == (status, code, "Last-Event-ID" if header else "after")


def test_an_event_that_an_attempt_never_wrote_is_not_found_and_all_others_are(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    request_id = ended_stream(front_end, start_worker)
    log = f"tokenmill:log:{request_id}"
    (_, done) = client.xrange(log)[-1]
    client.xdel(log, "1-5")
    client.xadd(log, {"e": '{"type":"chunk","choice":0,"text":" three","tokens":[9]}'}, id="3-1")
    client.xadd(log, done, id="3-2")

    whole = events(resume(front_end, request_id).text)

    for after in ("1-5", "1-99", "2-1"):
        assert refusal(resume(front_end, request_id, after)) == (404, "event_not_found", "after")
    assert refusal(resume(front_end, request_id, "3-3")) == (409, "stream_damaged", "after")
    for place, (after, _) in enumerate(whole):
        if after:
            assert events(resume(front_end, request_id, after).text) == whole[place + 1 :]


def test_a_log_whose_beginning_was_trimmed_away_is_gone(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    request_id = ended_stream(front_end, start_worker)
    client.xtrim(f"tokenmill:log:{request_id}", maxlen=3, approximate=False)

    assert refusal(resume(front_end, request_id)) == (410, "stream_expired", None)
    for after in ("1-1", "1-2", "1-4"):
        assert refusal(resume(front_end, request_id, after)) == (410, "stream_expired", "after")


def test_a_log_that_is_lost_as_a_whole_is_gone(front_end: FrontEnd, start_worker: StartWorker, client: Any) -> None:
    request_id = ended_stream(front_end, start_worker)
    client.delete(f"tokenmill:log:{request_id}")

    assert refusal(resume(front_end, request_id)) == (410, "stream_expired", None)
    assert refusal(resume(front_end, request_id, "1-2")) == (410, "stream_expired", "after")


def test_a_log_with_a_hole_is_refused(front_end: FrontEnd, start_worker: StartWorker, client: Any) -> None:
    request_id = ended_stream(front_end, start_worker)
    client.xdel(f"tokenmill:log:{request_id}", "1-3")

    assert refusal(resume(front_end, request_id)) == (409, "stream_damaged", None)
    assert refusal(resume(front_end, request_id, "1-3")) == (409, "stream_damaged", "after")


def test_an_entry_that_cannot_be_read_is_refused(front_end: FrontEnd, start_worker: StartWorker, client: Any) -> None:
    request_id = ended_stream(front_end, start_worker)
    make_unreadable(client, f"tokenmill:log:{request_id}", "1-4")

    assert refusal(resume(front_end, request_id)) == (409, "stream_damaged", None)
    assert refusal(resume(front_end, request_id, "1-2")) == (409, "stream_damaged", None)


@pytest.fixture
def long_log(front_end: FrontEnd, start_worker: StartWorker) -> str:
    """The id of a request whose log is longer than a page, 1-1 to 1-603."""

    def script(turn: Turn) -> None:
        turn.accept()
        for number in range(600):
            turn.say(f"{number} ")
        turn.finish()
        turn.done()

    worker = start_worker(script)
    assert httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM).status_code == 200
    return worker.turns[0].request.id


@pytest.mark.parametrize("damage", [break_in_two, make_unreadable])
def test_damage_that_is_found_later_ends_the_stream_with_one_error(
    front_end: FrontEnd, client: Any, long_log: str, damage: Callable[[Any, str, str], None]
) -> None:
    whole = events(resume(front_end, long_log).text)
    damage(client, f"tokenmill:log:{long_log}", "1-500")

    answer = resume(front_end, long_log)
    found = events(answer.text)

    assert answer.status_code == 200
    assert found[:-1] == whole[: len(found) - 1]
    assert 256 <= len(found) <= 500
    assert found[-1][0] is None
    assert json.loads(found[-1][1])["error"]["code"] == "request_lost"


def test_a_log_that_is_cut_under_the_feet_of_its_reader_ends_in_an_error(
    front_end: FrontEnd, start_worker: StartWorker, client: Any
) -> None:
    go_on = threading.Event()

    def script(turn: Turn) -> None:
        turn.accept()
        turn.say("one")
        assert go_on.wait(20)
        turn.fail(ErrorCode.ENGINE_ERROR, "x")

    worker = start_worker(script)
    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, timeout=20) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if "one" in line)
        client.delete(f"tokenmill:log:{worker.turns[0].request.id}")
        # Nothing is published: in silence the log is asked.
        rest = "\n".join(lines)
    go_on.set()

    assert json.loads(events(rest)[-1][1])["error"]["code"] == "request_lost"


def kill(front_end: FrontEnd) -> None:
    front_end.kill()


def drain(front_end: FrontEnd) -> None:
    front_end.terminate()


@pytest.mark.parametrize("end", [kill, drain])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_whose_front_end_ends_is_resumed_from_another_to_the_byte(
    front_end: FrontEnd,
    start_front_end: StartFrontEnd,
    start_worker: StartWorker,
    end: Callable[[FrontEnd], None],
    path: str,
) -> None:
    leaving = start_front_end(drain_timeout=0.5)
    ended = threading.Event()

    def script(turn: Turn) -> None:
        turn.accept()
        for number in range(40):
            turn.say(f"é{number} ")
            if number == 10:
                assert ended.wait(20)
        turn.finish()
        turn.done(cached=3)

    worker = start_worker(script)
    body = {**STREAM, "stream_options": {"include_usage": True}}
    if path == "/v1/completions":
        body = {key: value for key, value in body.items() if key != "messages"} | {"prompt": "x"}
    received, has_ended = b"", False
    with (
        httpx.stream("POST", leaving.url + path, json=body, timeout=20) as answer,
        suppress(httpx.RemoteProtocolError),
    ):
        for piece in answer.iter_raw():
            received += piece
            if not has_ended and "é10 ".encode() in received:
                has_ended = True
                end(leaving)
    ended.set()
    resume_url = answer.headers["X-Resume-Url"]
    whole = httpx.get(front_end.url + resume_url, timeout=20)
    # An event is the client's once its empty line is there; the last may be an error, which is in no log.
    seen = received[: received.rindex(b"\n\n") + 2].partition(b'data: {"error"')[0]
    last_id = events(seen.decode())[-1][0]
    assert last_id is not None
    rest = httpx.get(front_end.url + resume_url, headers={"Last-Event-ID": last_id}, timeout=20)

    pings = b": ping\n"
    assert (seen + rest.content).replace(pings, b"") == whole.content.replace(pings, b"")
    assert whole.content.endswith(b"data: [DONE]\n\n")
    assert len(seen) < len(whole.content)
    assert len(worker.turns) == 1


@pytest.mark.parametrize("end", [kill, drain])
def test_a_request_with_a_key_whose_front_end_ends_is_answered_by_another(
    front_end: FrontEnd, start_front_end: StartFrontEnd, start_worker: StartWorker, end: Callable[[FrontEnd], None]
) -> None:
    leaving = start_front_end(drain_timeout=0.5)
    ended = threading.Event()

    worker = start_worker(lambda turn: (ended.wait(20), say_words("found")(turn)))
    body = {key: value for key, value in STREAM.items() if key != "stream"}
    asked: Any = {"json": body, "headers": {"Idempotency-Key": "k"}, "timeout": 20}
    outcome: list[Any] = []

    def ask() -> None:
        try:
            outcome.append(httpx.post(f"{leaving.url}/v1/chat/completions", **asked).status_code)
        except httpx.HTTPError as error:
            outcome.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: worker.turns, what="the worker's turn")
    end(leaving)
    asking.join(20)
    ended.set()
    answer = httpx.post(f"{front_end.url}/v1/chat/completions", **asked)

    assert outcome[0] == 503 or isinstance(outcome[0], httpx.HTTPError)
    assert answer.json()["choices"][0]["message"]["content"] == "found"
    assert answer.json()["id"].endswith(worker.turns[0].request.id)
    assert len(worker.turns) == 1
