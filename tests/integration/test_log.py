"""The event log in a real Valkey: in order, without repeats, fenced, and gone in time."""

from collections.abc import Iterator

import pytest
import redis
from asking import request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import keys
from shared.codec import encode_event
from shared.domain import Accepted, Chunk, Done, Event, Failed, Priority, Usage
from shared.errors import ErrorCode, RequestError
from shared.log import START, Append, Entry, EntryId, LogReader, LogWriter, Written, entry_from_message, parse_entry_id
from shared.queue import RequestQueue

pytestmark = pytest.mark.usefixtures("no_key_without_ttl")

WORKER = "worker-1"
LOST = Failed(ErrorCode.WORKER_LOST.value, "lost")
DONE = Done(Usage(prompt=1, completion=2))


@pytest.fixture
def queue(client: "redis.Redis") -> RequestQueue:
    return RequestQueue(client)


@pytest.fixture
def writer(client: "redis.Redis", queue: RequestQueue) -> LogWriter:
    """The log of a request `r` that `worker-1` has claimed as attempt 1."""
    claimed(queue, "r")
    return LogWriter(client, WORKER)


def claimed(queue: RequestQueue, name: str, *, priority: Priority = Priority.INTERACTIVE) -> None:
    queue.submit(request(name, priority=priority), limit=10, timeout_s=60)
    assert queue.claim(name, model="fake", worker=WORKER, token=name).attempt == 1


def chunk(*tokens: int) -> Chunk:
    return Chunk(0, "".join(f" {token}" for token in tokens), tokens)


def written(client: "redis.Redis", name: str = "r") -> list[Event]:
    return [entry.event for entry in LogReader(client).after(name, START)]


def test_entries_come_back_in_order_with_their_ids(client: "redis.Redis", writer: LogWriter) -> None:
    assert writer.append([Append("r", 1, 1, [Accepted(3), chunk(1)])]) == [Written.UNHEARD]
    assert writer.append([Append("r", 1, 3, [chunk(2)])]) == [Written.UNHEARD]

    reader = LogReader(client)
    assert reader.after("r", START) == [
        Entry(EntryId(1, 1), Accepted(3)),
        Entry(EntryId(1, 2), chunk(1)),
        Entry(EntryId(1, 3), chunk(2)),
    ]
    assert reader.after("r", EntryId(1, 2)) == [Entry(EntryId(1, 3), chunk(2))]
    assert reader.after("r", EntryId(1, 3)) == []
    assert reader.around("r", EntryId(1, 2)) == ((1, 1), (1, 2), (1, 3))
    assert reader.around("r", EntryId(1, 4)) == ((1, 1), None, (1, 3))
    assert reader.around("nobody", EntryId(1, 1)) == (None, None, None)


def test_a_long_log_is_read_page_by_page(client: "redis.Redis", writer: LogWriter) -> None:
    events = [chunk(token) for token in range(LogReader.PAGE + 10)]
    writer.append([Append("r", 1, 1, events)])

    reader, position, read = LogReader(client), START, []
    while page := reader.after("r", position):
        read += [entry.event for entry in page]
        position = page[-1].id

    assert read == events


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 9), max_size=5), size=st.integers(1, 12))
def test_pages_of_any_size_join_to_the_log(client: "redis.Redis", lengths: list[int], size: int) -> None:
    client.flushall()
    wanted = [EntryId(attempt, seq) for attempt, length in enumerate(lengths, 1) for seq in range(1, length + 1)]
    for entry_id in wanted:
        client.xadd(keys.log("r"), {"e": encode_event(chunk(entry_id.seq))}, id=str(entry_id))
    client.expire(keys.log("r"), 60)
    reader, position, read = LogReader(client), START, []
    reader.PAGE = size

    while page := reader.after("r", position):
        assert len(page) <= size
        read += [entry.id for entry in page]
        position = page[-1].id

    assert read == wanted


@pytest.mark.parametrize("lost", ["1-1", "1-2", "2-1"])
def test_a_log_that_lost_an_entry_is_not_read_past_it(client: "redis.Redis", lost: str) -> None:
    for entry_id in ("1-1", "1-2", "1-3", "2-1", "2-2"):
        client.xadd(keys.log("r"), {"e": encode_event(DONE)}, id=entry_id)
    client.expire(keys.log("r"), 60)
    client.xdel(keys.log("r"), lost)

    for position in (START, parse_entry_id(lost)):
        with pytest.raises(RequestError) as caught:
            LogReader(client).after("r", position)
        assert caught.value.code is ErrorCode.REQUEST_LOST


@pytest.fixture
def listener(client: "redis.Redis") -> "Iterator[redis.client.PubSub]":
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(keys.events("r"))
    pubsub.get_message(timeout=5)
    yield pubsub
    pubsub.close()


def heard(listener: "redis.client.PubSub") -> list[Entry]:
    entries = []
    while (message := listener.get_message(timeout=0.2)) is not None:
        entries.append(entry_from_message(message["data"]))
    return entries


def test_what_is_written_is_published_as_it_is(
    client: "redis.Redis", listener: "redis.client.PubSub", writer: LogWriter
) -> None:
    writer.append([Append("r", 1, 1, [Accepted(3), chunk(1)])])
    writer.append([Append("r", 1, 3, [DONE])])

    assert heard(listener) == LogReader(client).after("r", START)


def test_a_batch_sent_twice_is_written_and_published_once(
    client: "redis.Redis", listener: "redis.client.PubSub", writer: LogWriter
) -> None:
    batch = [Append("r", 1, 1, [Accepted(3), chunk(1)])]
    last = [Append("r", 1, 3, [DONE])]

    assert all(writer.append(batch) + writer.append(batch))
    assert all(writer.append(last) + writer.append(last))

    assert [entry.event for entry in heard(listener)] == written(client) == [Accepted(3), chunk(1), DONE]


def test_an_attempt_that_was_fenced_off_writes_and_publishes_nothing(
    client: "redis.Redis", queue: RequestQueue, listener: "redis.client.PubSub", writer: LogWriter
) -> None:
    writer.append([Append("r", 1, 1, [Accepted(3)])])
    queue.conclude("r", LOST)

    assert writer.append([Append("r", 1, 2, [chunk(1)])]) == [Written.FENCED]
    assert written(client) == [Accepted(3), LOST]
    assert [entry.event for entry in heard(listener)] == [Accepted(3), LOST]


def test_a_second_attempt_follows_the_first_and_shuts_it_out(
    client: "redis.Redis", queue: RequestQueue, writer: LogWriter
) -> None:
    writer.append([Append("r", 1, 1, [Accepted(3), chunk(1)])])
    # No lease was ever taken for worker-1, so it counts as dead.
    assert queue.claim("r", model="fake", worker="worker-2", token="b").attempt == 2
    second = LogWriter(client, "worker-2")

    assert second.append([Append("r", 2, 1, [chunk(2)])]) == [Written.UNHEARD]
    assert writer.append([Append("r", 1, 3, [chunk(9)])]) == [Written.FENCED]
    assert second.append([Append("r", 2, 2, [DONE])]) == [Written.UNHEARD]

    entries = LogReader(client).after("r", START)
    assert [entry.id for entry in entries] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [entry.event for entry in entries] == [Accepted(3), chunk(1), chunk(2), DONE]


def test_one_fenced_request_does_not_disturb_the_others_of_a_batch(
    client: "redis.Redis", queue: RequestQueue, writer: LogWriter
) -> None:
    claimed(queue, "s")
    queue.conclude("r", LOST)

    assert writer.append([Append("r", 1, 1, [Accepted(1)]), Append("s", 1, 1, [Accepted(1)])]) == [
        Written.FENCED,
        Written.UNHEARD,
    ]
    assert written(client, "s") == [Accepted(1)]


def test_nothing_follows_a_terminal_entry(client: "redis.Redis", writer: LogWriter) -> None:
    writer.append([Append("r", 1, 1, [Accepted(3), DONE])])

    assert writer.append([Append("r", 1, 3, [chunk(1)])]) == [Written.FENCED]
    assert written(client) == [Accepted(3), DONE]


def test_a_request_that_is_gone_takes_no_entries(client: "redis.Redis", writer: LogWriter) -> None:
    client.flushall()

    assert writer.append([Append("r", 1, 1, [Accepted(3)])]) == [Written.FENCED]
    assert client.keys() == []


@pytest.mark.parametrize(("event", "state"), [(DONE, "done"), (LOST, "failed")])
def test_the_state_is_that_of_the_last_entry(
    client: "redis.Redis", writer: LogWriter, event: Event, state: str
) -> None:
    reader = LogReader(client)
    assert reader.state("r") == "running"

    writer.append([Append("r", 1, 1, [event])])

    assert reader.state("r") == state
    assert reader.state("nobody") is None
    assert not client.sismember(keys.running(WORKER), "r")


@pytest.mark.parametrize(
    ("priority", "ttl_s"),
    [(Priority.INTERACTIVE, keys.LOG_TTL_S), (Priority.BACKGROUND, keys.BACKGROUND_LOG_TTL_S)],
)
def test_a_log_outlives_its_end_by_its_priority_s_time(
    client: "redis.Redis", queue: RequestQueue, priority: Priority, ttl_s: int
) -> None:
    claimed(queue, "r", priority=priority)
    writer = LogWriter(client, WORKER)
    writer.append([Append("r", 1, 1, [Accepted(3)])])
    assert ttl_s < client.ttl(keys.log("r")) <= ttl_s + 60

    writer.append([Append("r", 1, 2, [DONE])])

    for key in (keys.log("r"), keys.request("r")):
        assert ttl_s - 10 < client.ttl(key) <= ttl_s


def test_an_entry_that_cannot_be_read_loses_the_request(client: "redis.Redis", writer: LogWriter) -> None:
    writer.append([Append("r", 1, 1, [Accepted(3)])])
    client.xadd(keys.log("r"), {"e": b"{"}, id="1-2")

    with pytest.raises(RequestError) as caught:
        LogReader(client).after("r", START)
    assert caught.value.code is ErrorCode.REQUEST_LOST


@pytest.mark.parametrize(
    ("text", "entry_id"),
    [("1-2", EntryId(1, 2)), ("0-0", START), ("1", None), ("1-", None), ("-1-2", None), ("1-2 ", None), ("a-b", None)],
)
def test_only_an_entry_id_is_read_as_one(text: str, entry_id: EntryId | None) -> None:
    assert parse_entry_id(text) == entry_id
    if entry_id is not None:
        assert str(entry_id) == text


def test_a_gap_is_known_by_the_ids() -> None:
    assert START.is_followed_by(EntryId(1, 1))
    assert EntryId(1, 1).is_followed_by(EntryId(1, 2))
    assert not EntryId(1, 1).is_followed_by(EntryId(1, 3))
    assert not EntryId(1, 1).is_followed_by(EntryId(2, 1))
    assert not START.is_followed_by(EntryId(2, 1))


@pytest.mark.parametrize(
    ("before", "after", "may"),
    [
        (START, EntryId(1, 1), True),
        (START, EntryId(3, 1), True),
        (START, EntryId(1, 2), False),
        (EntryId(1, 4), EntryId(1, 5), True),
        (EntryId(1, 4), EntryId(1, 6), False),
        (EntryId(1, 4), EntryId(3, 1), True),
        (EntryId(1, 4), EntryId(2, 2), False),
        (EntryId(2, 4), EntryId(1, 1), False),
    ],
)
def test_what_may_come_next_is_the_next_of_an_attempt_or_a_later_one_s_first(
    before: EntryId, after: EntryId, may: bool
) -> None:
    assert before.may_be_followed_by(after) is may
