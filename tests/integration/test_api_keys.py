"""API keys: who is let in, how much each may ask for, and that nobody touches what is another's."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, Valkey, wait_until
from streaming import CHAT, STREAM, Gate, endless, post

from api.access.keys import new_key
from shared import keys
from shared.codec import request_from_payload
from shared.domain import Priority
from shared.jobs import DataJob, rq_queue

StartFrontEnd = Callable[..., FrontEnd]
StartWorker = Callable[..., ScriptedWorker]

ALICE, ALICE_HASH = new_key()
BOB, BOB_HASH = new_key()


def entry(name: str, hashed: str, **allowance: int) -> str:
    lines = [f'name = "{name}"', f'hash = "{hashed}"', *(f"{key} = {value}" for key, value in allowance.items())]
    return "\n".join(["[[key]]", *lines, ""])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", ALICE_HASH) + entry("bob", BOB_HASH))
    return path


@pytest.fixture
def guarded(start_front_end: StartFrontEnd, key_file: Path, no_key_without_ttl: None) -> FrontEnd:  # noqa: ARG001
    return start_front_end(api_keys=str(key_file), keep_alive=0.3)


def ask(front_end: FrontEnd, key: str, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
    return httpx.post(f"{front_end.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=30, **options)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# -- who is let in --


def test_a_key_is_taken_from_either_header_and_by_the_official_client(
    guarded: FrontEnd, start_worker: StartWorker
) -> None:
    start_worker(say_words("ok"))

    assert ask(guarded, ALICE).status_code == 200
    by_other_header = httpx.post(f"{guarded.url}/v1/chat/completions", json=CHAT, headers={"X-API-Key": BOB})
    assert by_other_header.status_code == 200
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=ALICE, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content == "ok"
        assert client.models.list().data[0].id == "scripted"
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=ALICE + "x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer"}, "missing_api_key"),
        ({"Authorization": f"Basic {ALICE}"}, "missing_api_key"),
        ({"Authorization": "Bearer nobody"}, "invalid_api_key"),
        ({"Authorization": f"Bearer {ALICE_HASH}"}, "invalid_api_key"),
        ({"Authorization": f"Bearer {ALICE}é".encode("latin-1").decode("latin-1")}, "invalid_api_key"),
        ({"Authorization": f"Bearer {ALICE[:-1]}"}, "invalid_api_key"),
        ({"X-API-Key": "alice"}, "invalid_api_key"),
    ],
    ids=["none", "empty", "another scheme", "unknown", "the hash", "not ASCII", "cut short", "the name"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/streams/x")],
)
def test_nobody_else_is_let_in(guarded: FrontEnd, method: str, path: str, headers: dict[str, str], code: str) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.request(method, guarded.url + path, content=b"{", headers=raw)

    assert error_of(answer) == (401, code)
    assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_health_is_open_and_metrics_by_choice(
    guarded: FrontEnd, start_front_end: StartFrontEnd, key_file: Path
) -> None:
    closed = start_front_end(api_keys=str(key_file), metrics_access="key")

    for front_end in (guarded, closed):
        assert httpx.get(f"{front_end.url}/health").status_code == 200
        assert httpx.get(f"{front_end.url}/ready").status_code == 503
    assert httpx.get(f"{guarded.url}/metrics").status_code == 200
    assert httpx.get(f"{closed.url}/metrics").status_code == 401
    assert httpx.get(f"{closed.url}/metrics", headers={"X-API-Key": BOB}).status_code == 200


def test_keys_can_be_given_without_a_file(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end(api_keys=f"alice={ALICE_HASH} bob={BOB_HASH}")

    statuses = [
        httpx.get(f"{front_end.url}/v1/models", headers={"X-API-Key": key}).status_code for key in (ALICE, BOB, "x")
    ]
    assert statuses == [200, 200, 401]


def test_a_file_is_read_again_when_it_has_changed(guarded: FrontEnd, key_file: Path) -> None:
    def is_let_in(key: str) -> bool:
        return httpx.get(f"{guarded.url}/v1/models", headers={"X-API-Key": key}).status_code == 200

    def replace(text: str) -> None:
        new = key_file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, key_file)

    assert is_let_in(ALICE)
    replace(entry("bob", BOB_HASH))
    wait_until(lambda: not is_let_in(ALICE), what="alice to be shut out")
    assert is_let_in(BOB)
    carol, carol_hash = new_key()
    replace(entry("bob", BOB_HASH) + entry("carol", carol_hash))
    wait_until(lambda: is_let_in(carol), what="carol to be let in")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[key]\n", "Expected"),
        (entry("", ALICE_HASH), "is no name of a key"),
        (entry("a b", ALICE_HASH), "is no name of a key"),
        (entry("alice", ALICE), "the hash of 'alice' is not sha256:"),
        (entry("alice", ALICE_HASH) + entry("alice", BOB_HASH), "'alice' is there twice"),
        (entry("alice", ALICE_HASH, requests=-1), "requests of 'alice' is -1"),
        (entry("alice", ALICE_HASH) + "role = 'admin'\n", "unknown field `role`"),
        ("key = 3", "Expected `array`"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_with_one_line(
    valkey: Valkey, tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)

    status, errors = FrontEnd(valkey.url, api_keys=str(path)).start().wait()

    assert status != 0
    assert "--api-keys (TOKENMILL_API_KEYS)" in errors
    assert reason in errors
    assert len(errors.splitlines()) == 1
    assert ALICE not in errors


def test_a_file_that_is_not_there_is_named(valkey: Valkey, tmp_path: Path) -> None:
    status, errors = FrontEnd(valkey.url, api_keys=str(tmp_path / "nowhere")).start().wait()

    assert status != 0
    assert "nowhere: No such file or directory" in errors


# -- how much --


def test_requests_a_minute_are_limited_for_each_key_and_over_all_front_ends(
    start_front_end: StartFrontEnd, start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", ALICE_HASH, requests=3) + entry("bob", BOB_HASH))
    front_ends = [start_front_end(api_keys=str(path)) for _ in range(2)]
    start_worker(say_words("ok"))

    answers = [ask(front_ends[number % 2], ALICE) for number in range(4)]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    refused = answers[-1]
    assert error_of(refused) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    others = ask(front_ends[0], BOB)
    assert others.status_code == 200
    assert not [name for name in others.headers if name.startswith("x-ratelimit")]


def test_tokens_a_minute_are_counted_when_an_answer_ends(
    start_front_end: StartFrontEnd,
    start_worker: StartWorker,
    client: "redis.Redis",
    no_key_without_ttl: None,  # noqa: ARG001
) -> None:
    front_end = start_front_end(api_keys=f"alice={ALICE_HASH}", key_tokens=20)
    start_worker(say_words("a", "b"))  # 7 tokens of prompt and 2 of answer

    def left(answer: httpx.Response) -> str:
        return answer.headers["x-ratelimit-remaining-tokens"]

    def wait_for_count(tokens: int) -> None:
        """An answer has been read before its end is counted."""
        wait_until(
            lambda: [client.get(key) for key in client.scan_iter(f"{keys.RATES_PREFIX}*/tokens/*")] == [b"%d" % tokens],
            what="the tokens to be counted",
        )

    assert left(ask(front_end, ALICE)) == "20"
    wait_for_count(9)
    headers = {"X-API-Key": ALICE}
    with httpx.stream("POST", f"{front_end.url}/v1/chat/completions", json=STREAM, headers=headers) as streamed:
        assert left(streamed) == "11"
        assert b"[DONE]" in streamed.read()
    wait_for_count(18)
    # Two are left, and an answer that takes more is given whole.
    assert left(ask(front_end, ALICE)) == "2"
    wait_for_count(27)
    refused = ask(front_end, ALICE)
    assert error_of(refused) == (429, "rate_limit_exceeded")
    assert "20 tokens a minute" in refused.json()["error"]["message"]
    assert left(refused) == "0"


def test_what_a_client_that_left_has_had_is_counted(
    start_front_end: StartFrontEnd, start_worker: StartWorker, client: "redis.Redis"
) -> None:
    front_end = start_front_end(api_keys=f"alice={ALICE_HASH}", key_tokens=8)
    start_worker(endless)

    connection = post(front_end, STREAM, X_API_Key=ALICE)
    while b'"x"' not in connection.recv(65536):
        pass
    connection.close()

    # 7 of the prompt and at least one of the answer.
    wait_until(
        lambda: any(int(client.get(key) or 0) >= 8 for key in client.scan_iter(f"{keys.RATES_PREFIX}*/tokens/*")),
        what="the tokens to be counted",
    )
    assert error_of(ask(front_end, ALICE)) == (429, "rate_limit_exceeded")


def test_requests_at_once_are_limited_and_free_again_when_one_ends(
    start_front_end: StartFrontEnd,
    start_worker: StartWorker,
    gate: Gate,
    no_key_without_ttl: None,  # noqa: ARG001
) -> None:
    front_end = start_front_end(api_keys=f"alice={ALICE_HASH} bob={BOB_HASH}", key_concurrent=2)
    worker = start_worker(gate)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, front_end, ALICE) for _ in range(2)]
        wait_until(lambda: len(worker.turns) == 2, what="two requests to run")

        assert error_of(ask(front_end, ALICE)) == (429, "rate_limit_exceeded")
        streamed = httpx.post(f"{front_end.url}/v1/chat/completions", json=STREAM, headers={"X-API-Key": ALICE})
        assert error_of(streamed) == (429, "rate_limit_exceeded")
        gate.go_on.set()
        assert [answer.result().status_code for answer in running] == [200, 200]
    assert ask(front_end, ALICE).status_code == 200
    assert ask(front_end, BOB).status_code == 200


# -- fairness --


def test_a_key_with_a_hundred_waiting_holds_up_another_s_first_by_one_at_most(
    guarded: FrontEnd, client: "redis.Redis"
) -> None:
    def ask_as(key: str, seed: int) -> int:
        body = {**CHAT, "seed": seed}
        headers = {"X-API-Key": key}
        return httpx.post(f"{guarded.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

    worker = ScriptedWorker(client_url(client), say_words("ok"))
    worker.announce()
    queue = rq_queue(client, "scripted", Priority.INTERACTIVE)
    with ThreadPoolExecutor(110) as pool:
        crowd = [pool.submit(ask_as, ALICE, 1) for _ in range(100)]
        wait_until(lambda: len(queue) == 100, limit_s=30, what="a hundred to wait")
        few = [pool.submit(ask_as, BOB, 2) for _ in range(3)]
        wait_until(lambda: len(queue) == 103, limit_s=30, what="the others to wait")
        seeds = [request_from_payload(job.payload()).sampling.seed for job in queue.jobs if isinstance(job, DataJob)]
        assert sorted(seeds) == [1] * 100 + [2] * 3
        assert [place for place, seed in enumerate(seeds) if seed == 2] == [1, 3, 5]
        with worker:
            assert {answer.result() for answer in (*crowd, *few)} == {200}


def client_url(client: "redis.Redis") -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}"


def test_one_key_cannot_take_all_places_of_the_queue(
    start_front_end: StartFrontEnd, client: "redis.Redis", key_file: Path
) -> None:
    front_end = start_front_end(api_keys=str(key_file), queue_limit=8)
    worker = ScriptedWorker(client_url(client), say_words("ok"))
    worker.announce()
    with ThreadPoolExecutor(10) as pool:
        mine = []
        for waiting in range(1, 5):
            mine.append(pool.submit(ask, front_end, ALICE))
            wait_until(lambda: client.zcard(keys.waiting("scripted")) == waiting, what="it to wait")  # noqa: B023
        assert error_of(ask(front_end, ALICE)) == (429, "queue_full")
        theirs = pool.submit(ask, front_end, BOB)
        wait_until(lambda: client.zcard(keys.waiting("scripted")) == 5, what="another's to wait")
        with worker:
            assert {answer.result().status_code for answer in (*mine, theirs)} == {200}


# -- what is another's --


def test_a_stream_can_be_resumed_with_the_key_that_began_it_and_no_other(
    guarded: FrontEnd, start_worker: StartWorker
) -> None:
    start_worker(say_words("a", "b"))
    with httpx.stream(
        "POST", f"{guarded.url}/v1/chat/completions", json=STREAM, headers={"X-API-Key": ALICE}
    ) as streamed:
        url = guarded.url + streamed.headers["X-Resume-Url"]
        streamed.read()

    def resume(key: str) -> httpx.Response:
        return httpx.get(url, headers={"X-API-Key": key})

    assert "[DONE]" in resume(ALICE).text
    assert error_of(resume(BOB)) == (410, "stream_expired")
    assert httpx.get(url).status_code == 401


def test_the_same_idempotency_key_of_two_holders_stands_for_two_requests(
    guarded: FrontEnd, start_worker: StartWorker
) -> None:
    worker = start_worker(say_words("ok"))

    def ask_again(key: str) -> Any:
        return ask(guarded, key, headers={"Idempotency-Key": "same"}).json()["id"]

    assert ask_again(ALICE) == ask_again(ALICE)
    assert ask_again(BOB) != ask_again(ALICE)
    assert len(worker.turns) == 2


def test_the_log_names_the_holder_and_never_shows_a_key(
    start_front_end: StartFrontEnd, start_worker: StartWorker, key_file: Path
) -> None:
    front_end = start_front_end(api_keys=str(key_file), log_level="debug", log_format="json")
    start_worker(say_words("ok"))

    ask(front_end, ALICE)
    ask(front_end, "tm-guessed")

    said = front_end.stop()
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [line["key"] for line in told if "key" in line] == ["alice"]
    for secret in (ALICE, "tm-guessed", ALICE_HASH):
        assert secret not in said
