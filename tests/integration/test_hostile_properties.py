"""Whatever bytes lie where our own should: each reader of them says what that means, and none breaks."""

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import redis
from asking import request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rq.exceptions import NoSuchJobError
from rq.serializers import JSONSerializer

from shared import domain, keys
from shared.census import take_census
from shared.codec import decode_event, request_from_payload, request_to_payload
from shared.domain import Accepted, Failed, Priority
from shared.errors import RequestError
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.jobs import JOB_FIELDS, DataJob
from shared.log import START, Append, LogReader, LogWriter, entry_from_message
from shared.queue import Owner, RequestQueue
from shared.reaper import Reaper
from shared.store import MisplacedError

RAW = st.binary(max_size=40) | st.sampled_from([b"", b"0", b"-1", b"1e9", b"nan", b"inf", b"9" * 20, b"running", b"w"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)

REQUEST_FIELDS = ["state", "worker", "deadline", "claim", "attempt", "deaths", "submitted_at", "queued_at"]
REQUEST_FIELDS += ["claimed_at", "died", "ran", "log_ttl", "seq", "model", "priority", "token", "attribute:answer"]

SHARED = {
    keys.WORKERS: "set",
    keys.worker("w"): "hash",
    keys.running("w"): "set",
    keys.waiting("fake"): "zset",
    "rq:queues": "set",
    "rq:queue:fake.interactive": "list",
    "rq:queue:fake.interactive:intermediate": "list",
    "rq:queue:fake.background": "list",
    "rq:wip:fake.interactive": "zset",
    keys.unfinished("fake.interactive"): "hash",
    keys.unclaimed("fake.interactive"): "hash",
    keys.turns("fake.interactive"): "zset",
    keys.rounds("fake.interactive"): "hash",
    keys.open_requests("owner"): "zset",
}

MODEL = ModelInfo(
    name="fake", backend="fake", device="cpu", context=1, vocabulary=1, state_kind=StateKind.TRIMMABLE, created=0
)
WORKER = WorkerInfo(name="w", model=MODEL, state=WorkerState.READY, pid=1, host="h", slots=1, running=0)

over_one_redis = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_payload_no_event_and_no_message_is_an_error_of_the_request(raw: bytes) -> None:
    readers: tuple[Callable[[bytes], Any], ...] = (request_from_payload, decode_event, entry_from_message)
    for read in readers:
        with suppress(RequestError):
            read(raw)


@given(st.data())
def test_a_changed_request_is_refused_or_within_its_ranges(data: st.DataObject) -> None:
    payload: Any = msgspec.json.decode(msgspec.json.encode(request_to_payload(request(n=2, max_tokens=3))))
    part = payload["request"] if data.draw(st.booleans()) else payload["request"]["sampling"]
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
    try:
        taken = request_from_payload(json.dumps(payload).encode())
    except RequestError:
        return
    assert 1 <= taken.choices <= domain.MOST_CHOICES_IN_ALL
    assert 0 <= taken.sampling.temperature <= 2
    assert taken.max_tokens is None or taken.max_tokens >= 1


@given(st.dictionaries(st.sampled_from(sorted(JOB_FIELDS)).map(str.encode) | st.binary(max_size=8), RAW))
def test_whatever_a_job_s_hash_holds_there_is_a_job_or_none(fields: Mapping[bytes, bytes]) -> None:
    job = DataJob("job", connection=redis.Redis(), serializer=JSONSerializer)
    try:
        job.restore(fields)
    except NoSuchJobError:
        assert b"data" not in fields
        return
    assert job.func_name == "tokenmill.generate"
    assert isinstance(job.to_dict(), dict)
    with suppress(ValueError, RecursionError):
        job.payload()


@over_one_redis
@given(
    changed=st.dictionaries(st.sampled_from(REQUEST_FIELDS), RAW, max_size=6),
    displaced=st.sets(st.sampled_from(["request", "log", "job"])),
    is_running=st.booleans(),
)
def test_whatever_a_request_s_hash_holds_no_script_breaks(
    client: "redis.Redis", changed: Mapping[str, bytes], displaced: set[str], is_running: bool
) -> None:
    client.flushall()
    queue, reader, writer = RequestQueue(client), LogReader(client), LogWriter(client, "w")
    queue.submit(request("r"), limit=10, timeout_s=60)
    if is_running:
        queue.claim("r", model="fake", worker="w", token="token")
    if changed:
        client.hset(keys.request("r"), mapping=dict(changed))
    places = {"request": keys.request("r"), "log": keys.log("r"), "job": DataJob.key_for("r")}
    for name in displaced:
        client.set(places[name], b"\x80\x04.")

    acts: list[Callable[[], Any]] = [
        lambda: queue.claim("r", model="fake", worker="w", token="other"),
        lambda: writer.append([Append("r", 1, 1, [Accepted(1)]), Append("r", 1, 2, [Failed("x", "y")])]),
        lambda: queue.hand_over("r", worker="w", died=True),
        lambda: queue.conclude("r", Failed("worker_lost", "x"), only_from="w"),
        lambda: queue.submitted("r"),
        lambda: reader.state("r"),
        lambda: reader.whole("r"),
        lambda: reader.around("r", START),
        lambda: queue.conclude("r", Failed("cancelled", "x")),
    ]
    for act in acts:
        with suppress(RequestError):
            act()


@over_one_redis
@given(
    displaced=st.sets(st.sampled_from(sorted(SHARED))),
    members=st.lists(RAW, max_size=4, unique=True),
    info=RAW,
)
def test_whatever_lies_under_the_shared_keys_a_reaping_later_requests_pass(
    client: "redis.Redis", displaced: set[str], members: list[bytes], info: bytes
) -> None:
    client.flushall()
    queue = RequestQueue(client)
    queue.submit(request("before"), limit=10, timeout_s=60)
    for key, kind in SHARED.items():
        if key in displaced:
            client.delete(key)
            client.set(key, b"\x80\x04.")
        elif members and kind == "set":
            client.sadd(key, *members)
        elif members and kind == "list":
            client.rpush(key, *members)
        elif members and kind == "zset":
            client.zadd(key, dict.fromkeys(members, 1.0))
        elif kind == "hash":
            client.hset(key, mapping={"info": info, "owner": info, "": info})

    clock = itertools.count(step=100.0)
    for _ in range(6):
        with suppress(MisplacedError):
            Fleet(client).renew(WORKER, lease_s=60)
        client.delete(keys.REAPER_LOCK)
        Reaper(client, queue, name="test", clock=lambda: float(next(clock))).run_once()
    queue.submit(request("after"), limit=100, timeout_s=60, owner=Owner("owner", 50))
    claim = queue.claim("after", model="fake", worker="w", token="token")
    Fleet(client).workers()
    take_census(client)

    assert claim.outcome == "claimed"
    assert queue.conclude("after", Failed("cancelled", "x"))
    assert client.lrange("rq:queue:fake.interactive:intermediate", 0, -1) == []


@pytest.mark.parametrize("priority", list(Priority))
def test_a_lock_that_would_keep_everybody_from_reaping_is_removed(client: "redis.Redis", priority: Priority) -> None:
    queue = RequestQueue(client)
    reaper = Reaper(client, queue, name="test")
    queue.submit(request("r", priority=priority), limit=1, timeout_s=60)
    queue.claim("r", model="fake", worker="dead", token="token")
    client.set(keys.REAPER_LOCK, "for ever")

    reaper.run_once()
    reaper.run_once()

    assert LogReader(client).state("r") == "queued"
