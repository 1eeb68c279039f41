"""Following a request: every entry once, in order, and one end, whatever happens on the way."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from servers import Valkey, wait_until

from api.disconnect import ClientConnection
from api.drain import Drain
from api.relay import ClientGone, Following, Relay
from api.subscriber import MAILBOX_LIMIT, Mailbox, Subscriber
from shared.codec import encode_event
from shared.domain import (
    Accepted,
    ChatMessage,
    ChatPrompt,
    Chunk,
    Done,
    Event,
    Failed,
    GenerationRequest,
    Priority,
    SamplingParams,
    Usage,
)
from shared.errors import ErrorCode, RequestError
from shared.keys import events, log, request, worker
from shared.log import Append, Entry, EntryId, LogReader, LogWriter
from shared.queue import RequestQueue, Submitted

pytestmark = pytest.mark.usefixtures("no_key_without_ttl")


class Client(ClientConnection):
    """A client that leaves when the test says so."""

    def __init__(self) -> None:
        super().__init__({})
        self.left = threading.Event()

    def is_gone(self) -> bool:
        return self.left.is_set()


class Bench:
    """A relay, and the worker's side of one request."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.queue = RequestQueue(client)
        self.subscriber = Subscriber(client)
        self.subscriber.start()
        self.drain = Drain(0.0)
        self.relay = Relay(
            queue=self.queue, reader=LogReader(client), subscriber=self.subscriber, drain=self.drain, silence_s=0.3
        )
        self.connection = Client()
        self._writer = LogWriter(client, "w")

    def submit(self, *, timeout_s: float = 20, priority: Priority = Priority.INTERACTIVE) -> Following:
        prompt = ChatPrompt((ChatMessage(role="user", content="x"),))
        generation = GenerationRequest(
            id="r", model="m", prompts=(prompt,), sampling=SamplingParams(seed=1), priority=priority
        )
        return self.relay.submit(generation, self.connection, limit=9, timeout_s=timeout_s, attributes={})

    def claim(self, name: str = "w") -> int:
        claim = self.queue.claim("r", model="m", worker=name, token=name)
        assert claim.outcome == "claimed"
        return claim.attempt

    def append(self, attempt: int, first_seq: int, *written: Event) -> None:
        assert self._writer.append([Append("r", attempt, first_seq, written)]) == [True]


class AwayReader(LogReader):
    """A log's reader while Redis is away."""

    def after(self, request_id: str, position: EntryId) -> list[Entry]:  # noqa: ARG002
        raise redis.ConnectionError


@pytest.fixture
def bench(client: Any) -> Iterator[Bench]:
    bench = Bench(client)
    yield bench
    bench.subscriber.stop()


def say(text: str) -> Chunk:
    return Chunk(0, text, (1,))


def gathered(following: Following) -> list[Entry]:
    return [entry for entries in following for entry in entries]


DONE = Done(Usage())


def test_entries_come_once_and_in_order_and_end_with_the_terminal_one(bench: Bench) -> None:
    following = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3), say("a"))
    bench.append(attempt, 3, say("b"), DONE)

    entries = gathered(following)

    assert [str(entry.id) for entry in entries] == ["1-1", "1-2", "1-3", "1-4"]
    assert [entry.event for entry in entries] == [Accepted(3), say("a"), say("b"), DONE]
    assert bench.subscriber.channels() == 0


def test_an_end_that_is_heard_just_after_a_gap_is_the_end(bench: Bench) -> None:
    mailbox = Mailbox(lambda _: None)
    following = Following(
        bench.relay, "r", mailbox, bench.connection, deadline=float("inf"), cancels=False, attributes={}
    )
    mailbox.mark_gap()
    reader, bench.relay.reader = bench.relay.reader, AwayReader(bench.client)
    assert next(following) == []
    bench.relay.reader = reader
    mailbox.put(b"1-1 " + encode_event(DONE))

    assert [entry.event for entry in next(following)] == [DONE]
    assert next(following, None) is None


def test_messages_that_come_twice_are_dropped(bench: Bench) -> None:
    following = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3))
    for _ in range(3):
        bench.client.publish(events("r"), b'1-1 {"type":"accepted","prompt_tokens":3}')
    bench.append(attempt, 2, DONE)

    assert [str(entry.id) for entry in gathered(following)] == ["1-1", "1-2"]


def test_what_was_never_published_is_read_from_the_log(bench: Bench) -> None:
    following = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3))
    bench.client.hset(request("r"), "seq", 2)
    bench.client.xadd(log("r"), {"e": b'{"type":"chunk","choice":0,"text":"lost","tokens":[1]}'}, id="1-2")
    bench.append(attempt, 3, DONE)

    assert [str(entry.id) for entry in gathered(following)] == ["1-1", "1-2", "1-3"]


def test_a_long_silence_is_no_reason_to_miss_the_end(bench: Bench) -> None:
    following = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3))
    assert next(following)
    bench.client.xadd(log("r"), {"e": b'{"type":"done","usage":{"prompt":0,"completion":0,"cached":0}}'}, id="1-2")

    assert gathered(following)[-1].event == DONE


def test_a_new_attempt_is_followed_over_the_old_one_s_last_entries(bench: Bench) -> None:
    following = bench.submit()
    first = bench.claim()
    bench.append(first, 1, Accepted(3), say("a"))
    bench.client.delete(worker("w"))
    second = bench.claim("v")
    bench.append(second, 1, say("b"), DONE)

    assert [str(entry.id) for entry in gathered(following)] == ["1-1", "1-2", "2-1", "2-2"]


def test_a_reader_that_fell_far_behind_gets_everything(bench: Bench) -> None:
    following = bench.submit()
    attempt = bench.claim()
    count = 3 * MAILBOX_LIMIT
    for number in range(count):
        bench.append(attempt, number + 1, say(str(number)))
    bench.append(attempt, count + 1, DONE)

    entries = gathered(following)

    assert [entry.event.text for entry in entries[:-1]] == [str(number) for number in range(count)]


def test_nothing_to_tell_is_told_often_enough_to_act_on(bench: Bench) -> None:
    following = bench.submit()

    assert next(following) == []
    following.close()


def test_a_request_is_ended_at_its_deadline(bench: Bench) -> None:
    (entry,) = gathered(bench.submit(timeout_s=0.2))

    assert entry.event.code == ErrorCode.DEADLINE_EXCEEDED
    assert bench.relay.reader.state("r") == "failed"
    assert bench.subscriber.channels() == 0


def test_a_request_that_is_gone_from_redis_is_reported_lost(bench: Bench) -> None:
    following = bench.submit()
    bench.client.flushall()

    with pytest.raises(RequestError) as caught:
        gathered(following)

    assert caught.value.code is ErrorCode.REQUEST_LOST
    assert bench.subscriber.channels() == 0


def test_a_client_that_left_cancels_its_request(bench: Bench) -> None:
    following = bench.submit()
    bench.connection.left.set()

    with pytest.raises(ClientGone):
        gathered(following)

    assert bench.relay.reader.state("r") == "cancelled"
    assert bench.subscriber.channels() == 0


def test_a_client_that_left_does_not_cancel_a_background_request(bench: Bench) -> None:
    following = bench.submit(priority=Priority.BACKGROUND)
    bench.connection.left.set()

    with pytest.raises(ClientGone):
        gathered(following)

    assert bench.relay.reader.state("r") == "queued"
    assert bench.subscriber.channels() == 0


@pytest.mark.parametrize(("left", "state"), [(True, "cancelled"), (False, "queued")])
def test_closing_early_cancels_only_if_the_client_has_left(bench: Bench, left: bool, state: str) -> None:
    following = bench.submit()
    if left:
        bench.connection.left.set()

    following.close()

    assert bench.relay.reader.state("r") == state
    assert bench.subscriber.channels() == 0
    assert list(following) == []


def test_a_process_whose_time_is_over_lets_go_and_cancels_nothing(bench: Bench) -> None:
    following = bench.submit()
    bench.drain.begin()

    with pytest.raises(RequestError) as caught:
        gathered(following)

    assert caught.value.code is ErrorCode.SERVER_STOPPING
    assert bench.relay.reader.state("r") == "queued"


def test_a_full_queue_leaves_no_subscription(bench: Bench) -> None:
    generation = GenerationRequest(id="r", model="m", prompts=(), sampling=SamplingParams(seed=1))

    with pytest.raises(RequestError) as caught:
        bench.relay.submit(generation, bench.connection, limit=0, timeout_s=5, attributes={})

    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert bench.subscriber.channels() == 0


def test_whoever_resumes_gets_everything_and_cancels_nothing_by_leaving(bench: Bench) -> None:
    original = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3), say("a"))
    leaver = Client()

    resumed = bench.relay.resume("r", Submitted("running", 10, {}), leaver)
    assert [str(entry.id) for entry in next(resumed)] == ["1-1", "1-2"]
    leaver.left.set()
    with pytest.raises(ClientGone):
        next(resumed)

    assert bench.relay.reader.state("r") == "running"
    bench.append(attempt, 3, Failed("engine_error", "x"))
    assert isinstance(gathered(original)[-1].event, Failed)


def test_a_request_that_has_ended_can_be_read_after_its_deadline(bench: Bench) -> None:
    original = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3), DONE)
    gathered(original)

    resumed = bench.relay.resume("r", Submitted("done", -5, {}), Client())

    assert [str(entry.id) for entry in gathered(resumed)] == ["1-1", "1-2"]


def test_following_goes_on_when_redis_comes_back(own_durable_valkey: Valkey, connect_to: Callable[[str], Any]) -> None:
    bench = Bench(connect_to(own_durable_valkey.url))
    following = bench.submit()
    attempt = bench.claim()
    bench.append(attempt, 1, Accepted(3))
    entries = list(next(following))

    own_durable_valkey.stop()
    while_away = [next(following) for _ in range(2)]
    own_durable_valkey.start()
    wait_until(bench.subscriber.is_up, what="the new connection")
    bench.append(attempt, 2, DONE)
    entries += gathered(following)

    assert while_away == [[], []]
    assert [str(entry.id) for entry in entries] == ["1-1", "1-2"]
    bench.subscriber.stop()
