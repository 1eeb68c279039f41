"""Submitting, claiming and concluding requests in a real Valkey, with RQ's records beside ours."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
from asking import request
from rq import Queue
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry
from rq.serializers import JSONSerializer

from shared import keys
from shared.codec import request_from_payload
from shared.domain import Done, Failed, Priority, Usage
from shared.errors import ErrorCode, RequestError
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.jobs import DataJob, rq_queue
from shared.log import START, Append, LogReader, LogWriter
from shared.queue import CANCEL_COMMAND, Idempotency, RequestQueue
from shared.store import connect

pytestmark = pytest.mark.usefixtures("no_key_without_ttl")

CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client left.")
LOST = Failed(ErrorCode.WORKER_LOST.value, "lost")
INTERACTIVE = keys.queue_name("fake", Priority.INTERACTIVE)


@pytest.fixture
def queue(client: "redis.Redis") -> RequestQueue:
    return RequestQueue(client)


def submit(
    queue: RequestQueue,
    name: str = "r",
    *,
    limit: int = 10,
    timeout_s: float = 60,
    idempotency: Idempotency | None = None,
    **fields: Any,
) -> str:
    return queue.submit(request(name, **fields), limit=limit, timeout_s=timeout_s, idempotency=idempotency)


def claim(queue: RequestQueue, name: str = "r", worker: str = "w", token: str = "") -> Any:
    return queue.claim(name, model="fake", worker=worker, token=token or f"{worker} {name}")


def live(client: "redis.Redis", name: str) -> None:
    model = ModelInfo(
        name="fake", backend="fake", device="cpu", context=1, vocabulary=1, state_kind=StateKind.RECURRENT, created=0
    )
    info = WorkerInfo(name=name, model=model, state=WorkerState.READY, pid=1, host="here", slots=1, running=0)
    Fleet(client).renew(info, lease_s=60)


def stock_job(client: "redis.Redis", name: str = "r") -> Job:
    """The job as RQ's own tools see it."""
    return Job.fetch(name, connection=client, serializer=JSONSerializer)


def events(client: "redis.Redis", name: str = "r") -> list[object]:
    return [entry.event for entry in LogReader(client).after(name, START)]


def test_a_submitted_request_is_a_job_of_plain_data_on_its_model_s_queue(
    client: "redis.Redis", queue: RequestQueue
) -> None:
    submit(queue)

    assert Queue(INTERACTIVE, connection=client).job_ids == ["r"]
    job = stock_job(client)
    assert job.get_status() is JobStatus.QUEUED
    assert job.func_name == "tokenmill.generate"
    assert request_from_payload(msgspec.json.encode(job.args[0])) == request("r")
    assert job.description == "fake: 1 choice(s)"
    assert 0 < client.ttl(job.key) <= 60 + keys.LOG_TTL_S
    assert queue.depth("fake") == 1
    assert LogReader(client).state("r") == "queued"


def test_each_priority_has_a_queue_of_its_own(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue, "now")
    submit(queue, "later", priority=Priority.BACKGROUND)

    assert {priority: rq_queue(client, "fake", priority).job_ids for priority in Priority} == {
        Priority.INTERACTIVE: ["now"],
        Priority.BACKGROUND: ["later"],
    }
    assert queue.depth("fake") == 2


def test_a_full_queue_refuses_and_leaves_nothing_behind(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue, "one", limit=2)
    submit(queue, "two", limit=2)

    with pytest.raises(RequestError) as caught:
        submit(queue, "three", limit=2)

    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert LogReader(client).state("three") is None
    assert not Job.exists("three", connection=client)


@pytest.mark.parametrize("end", ["claim", "cancel"])
def test_room_in_the_queue_comes_back(client: "redis.Redis", queue: RequestQueue, end: str) -> None:
    submit(queue, "one", limit=1)
    if end == "claim":
        claim(queue, "one")
    else:
        queue.conclude("one", CANCELLED)

    assert client.zrange(keys.waiting("fake"), 0, -1) == []
    submit(queue, "two", limit=1)


def test_a_request_that_waited_past_its_deadline_takes_no_room(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue, "one", limit=1)
    client.zadd(keys.waiting("fake"), {"one": 1}, xx=True)

    submit(queue, "two", limit=1)

    assert queue.depth("fake") == 1


def test_an_id_is_used_once(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)
    with pytest.raises(RequestError) as caught:
        submit(queue, max_tokens=99)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert Queue(INTERACTIVE, connection=client).job_ids == ["r"]
    assert request_from_payload(msgspec.json.encode(stock_job(client).args[0])) == request("r")
    assert queue.depth("fake") == 1


def test_a_registration_that_is_sent_twice_is_one(queue: RequestQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    # As redis-py does when the first answer got lost.
    monkeypatch.setattr("shared.queue.secrets.token_hex", lambda _: "the same call")
    submit(queue)
    submit(queue)

    assert queue.depth("fake") == 1
    assert claim(queue).attempt == 1


KEY = Idempotency("key", "digest")


def test_what_was_registered_under_a_key_and_never_queued_is_queued_by_whoever_joins_it(
    client: "redis.Redis", queue: RequestQueue
) -> None:
    assert submit(queue, "r", idempotency=KEY) == "r"
    client.delete(DataJob.key_for("r"), f"rq:queue:{INTERACTIVE}")

    assert submit(queue, "s", idempotency=KEY) == "r"
    assert submit(queue, "t", idempotency=KEY) == "r"

    assert Queue(INTERACTIVE, connection=client).job_ids == ["r"]
    assert request_from_payload(msgspec.json.encode(stock_job(client).args[0])) == request("r")


def test_a_full_queue_does_not_use_up_a_key_and_lets_others_join(queue: RequestQueue) -> None:
    submit(queue, "r", limit=1, idempotency=KEY)
    another = Idempotency("another", "digest")

    assert submit(queue, "s", limit=1, idempotency=KEY) == "r"
    with pytest.raises(RequestError) as caught:
        submit(queue, "s", limit=1, idempotency=another)
    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert queue.earlier(request("s"), another) is None
    assert queue.earlier(request("s"), KEY) == "r"
    assert submit(queue, "s", limit=2, idempotency=another) == "s"


def test_what_the_front_end_keeps_beside_a_request_comes_back(queue: RequestQueue) -> None:
    attributes = {"state": "not ours", "shape": "chat", "empty": ""}
    queue.submit(request("r"), limit=1, timeout_s=60, attributes=attributes)

    submitted = queue.submitted("r")

    assert submitted is not None
    assert submitted.attributes == attributes
    assert 50 < submitted.remaining_s <= 60
    assert queue.submitted("nobody") is None


def test_a_claim_says_the_attempt_and_the_time_left(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)

    taken = claim(queue)

    assert (taken.outcome, taken.attempt) == ("claimed", 1)
    assert 50 < taken.remaining_s <= 60
    assert client.smembers(keys.running("w")) == {b"r"}


def test_the_same_claim_sent_twice_is_one_claim(queue: RequestQueue) -> None:
    submit(queue)

    assert claim(queue, token="t").attempt == claim(queue, token="t").attempt == 1


def test_a_claim_says_how_long_the_request_waited_and_who_died_of_it(
    client: "redis.Redis", queue: RequestQueue
) -> None:
    submit(queue)
    client.hincrby(keys.request("r"), "submitted_at", -5000)
    client.hincrby(keys.request("r"), "queued_at", -5000)
    first = claim(queue, worker="first")
    client.hincrby(keys.request("r"), "claimed_at", -3000)
    queue.hand_over("r", worker="first", died=True)
    second = claim(queue, worker="second")
    queue.hand_over("r", worker="second", died=False)
    third = claim(queue, worker="third")

    assert first.age_s == pytest.approx(5, abs=1)
    assert first.waited_s == pytest.approx(5, abs=1)
    assert first.died == ""
    assert second.age_s >= first.age_s
    assert second.waited_s < 1
    assert second.died == "first"
    assert second.ran_s == pytest.approx(3, abs=1)
    again = claim(queue, worker="third")
    assert (again.attempt, again.waited_s) == (third.attempt, third.waited_s)
    assert third.died == ""


def test_a_claim_from_a_dead_worker_that_nobody_has_buried_names_it(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)
    live(client, "first")
    claim(queue, worker="first")
    client.delete(keys.worker("first"))

    assert claim(queue, worker="second").died == "first"


def test_what_a_live_worker_runs_cannot_be_claimed(client: "redis.Redis", queue: RequestQueue) -> None:
    live(client, "w")
    submit(queue)
    claim(queue)

    assert claim(queue, worker="other").outcome == "running"
    assert claim(queue, worker="w", token="again").outcome == "running"


def test_what_a_dead_worker_ran_is_claimed_as_the_next_attempt(queue: RequestQueue) -> None:
    submit(queue)
    claim(queue)

    assert claim(queue, worker="other").attempt == 2


def test_what_has_ended_or_never_was_cannot_be_claimed(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue, "cancelled")
    queue.conclude("cancelled", CANCELLED)
    submit(queue, "done")
    claim(queue, "done")
    LogWriter(client, "w").append([Append("done", 1, 1, [Done(Usage())])])

    assert claim(queue, "cancelled").outcome == "ended"
    assert claim(queue, "done").outcome == "ended"
    assert claim(queue, "nobody").outcome == "gone"


def test_what_is_past_its_deadline_cannot_be_claimed(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)
    client.hset(keys.request("r"), "deadline", 1)

    assert claim(queue).outcome == "expired"


def test_cancelling_a_queued_request_ends_it_everywhere(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)

    assert queue.conclude("r", CANCELLED)

    assert events(client) == [CANCELLED]
    assert LogReader(client).state("r") == "cancelled"
    assert Queue(INTERACTIVE, connection=client).job_ids == []
    assert stock_job(client).get_status() is JobStatus.CANCELED
    assert CanceledJobRegistry(INTERACTIVE, connection=client).get_job_ids(cleanup=False) == ["r"]
    assert client.ttl(stock_job(client).key) > 0


@pytest.fixture
def commands(client: "redis.Redis") -> "Iterator[redis.client.PubSub]":
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(PUBSUB_CHANNEL_TEMPLATE % "w")
    pubsub.get_message(timeout=5)
    yield pubsub
    pubsub.close()


def test_concluding_a_running_request_tells_its_worker(
    client: "redis.Redis", queue: RequestQueue, commands: "redis.client.PubSub"
) -> None:
    submit(queue)
    claim(queue)

    assert queue.conclude("r", CANCELLED)

    message = commands.get_message(timeout=5)
    assert message is not None
    assert message["data"] == f'{{"command":"{CANCEL_COMMAND}","request_id":"r"}}'.encode()
    assert client.smembers(keys.running("w")) == set()


def test_a_request_ends_once(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)

    assert queue.conclude("r", CANCELLED)
    assert not queue.conclude("r", LOST)
    assert not queue.conclude("nobody", LOST)
    assert events(client) == [CANCELLED]


def test_only_the_worker_that_is_meant_loses_its_request(client: "redis.Redis", queue: RequestQueue) -> None:
    submit(queue)
    assert not queue.conclude("r", LOST, only_from="w")
    claim(queue)

    assert not queue.conclude("r", LOST, only_from="other")
    assert queue.conclude("r", LOST, only_from="w")
    assert LogReader(client).state("r") == "failed"


def test_a_request_cancelled_before_its_job_is_on_the_queue_is_refused_to_workers(
    client: "redis.Redis", queue: RequestQueue
) -> None:
    submit(queue)
    stock_job(client).delete()

    assert queue.conclude("r", CANCELLED)
    assert claim(queue).outcome == "ended"


def test_an_unreachable_store_is_an_error_of_the_request() -> None:
    away = connect("redis://127.0.0.1:1/0")

    for act in (lambda: submit(RequestQueue(away)), lambda: RequestQueue(away).submitted("r")):
        with pytest.raises(RequestError) as caught:
            act()
        assert caught.value.code is ErrorCode.STORE_UNAVAILABLE


@pytest.mark.parametrize(
    "fields",
    [
        {
            "success_callback_name": "os.system",
            "failure_callback_name": "os.system",
            "stopped_callback_name": "os._exit",
        },
        {"webhooks": '[{"url": "http://127.0.0.1:1/", "events": ["finished"]}]'},
        {"retries_left": 5, "repeats_left": 5, "repeat_intervals": "[0]", "dependency_ids": '["x"]'},
        {"meta": b"\x80\x04.", "result": b"\x80\x04.", "exc_info": b"\x80\x04.", "group_id": b"\xff"},
        {"timeout": "soon", "ttl": "long", "result_ttl": "-1", "failure_ttl": "-1"},
    ],
)
def test_whatever_a_job_carries_to_be_called_or_fetched_is_not_read(
    client: "redis.Redis", queue: RequestQueue, fields: dict[str, Any]
) -> None:
    submit(queue)
    client.hset(DataJob.key_for("r"), mapping=fields)

    job = DataJob.fetch("r", connection=client, serializer=JSONSerializer)

    assert (job.success_callback, job.failure_callback, job.stopped_callback) == (None, None, None)
    assert job.webhooks == []
    assert not job.should_retry
    assert job.repeats_left is None
    assert job.dependency_ids == []
    assert request_from_payload(job.payload()) == request("r")


@pytest.mark.parametrize(
    "fields",
    [
        {"created_at": "yesterday"},
        {"status": "dancing"},
        {"worker_name": b"\xff"},
        {"description": b"\xff"},
    ],
)
def test_a_job_whose_fields_make_no_sense_has_no_payload(
    client: "redis.Redis", queue: RequestQueue, fields: dict[str, Any]
) -> None:
    submit(queue)
    client.hset(DataJob.key_for("r"), mapping=fields)

    job = DataJob.fetch("r", connection=client, serializer=JSONSerializer)

    assert job.origin == INTERACTIVE
    with pytest.raises(msgspec.DecodeError):
        job.payload()
