"""The publisher over a real Valkey: everything in order, one terminal event, one report of the end."""

import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from asking import request
from servers import Valkey, wait_until

from shared.domain import Accepted, Chunk, Done, Event, Failed, Finished, FinishReason, Usage
from shared.errors import ErrorCode
from shared.log import START, LogReader, LogWriter
from shared.queue import RequestQueue
from workers.attempt import Attempt
from workers.publisher import Outcome, Publisher

WORKER = "w"
DONE = Done(Usage(prompt=5, completion=1))
FINISHED = Finished(0, FinishReason.STOP)
LOST = Failed(ErrorCode.WORKER_LOST.value, "stopped")


class Desk:
    """A publisher on its thread, the requests it writes for, and how they ended."""

    def __init__(self, client: "redis.Redis") -> None:
        self.client = client
        self.queue = RequestQueue(client)
        self.ends: list[tuple[Attempt, Outcome, Failed | None]] = []
        self.publisher = Publisher(
            LogWriter(client, WORKER), lambda *end: self.ends.append(end), chunk_tokens=4, chunk_delay_s=0.01
        )
        self._thread = threading.Thread(target=self.publisher.run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.publisher.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def open(self, name: str) -> Attempt:
        asked = request(name)
        self.queue.submit(asked, limit=100, timeout_s=60)
        claim = self.queue.claim(name, model="fake", worker=WORKER, token=name)
        attempt = Attempt(asked, claim.attempt, float("inf"), 0, [])
        self.publisher.open(attempt)
        return attempt

    def log(self, attempt: Attempt) -> list[Event]:
        return [entry.event for entry in LogReader(self.client).after(attempt.request.id, START)]

    def end_of(self, attempt: Attempt) -> tuple[Outcome, Failed | None]:
        def find() -> tuple[Outcome, Failed | None] | None:
            return next(((outcome, failure) for one, outcome, failure in self.ends if one is attempt), None)

        found: tuple[Outcome, Failed | None] = wait_until(find, what="the end of the attempt")
        return found


@pytest.fixture
def desk(client: "redis.Redis") -> Iterator[Desk]:
    desk = Desk(client)
    desk.start()
    yield desk
    desk.stop()


def chunk(token: int) -> Chunk:
    return Chunk(0, f" {token}", (token,))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Chunk) for token in event.tokens]


def test_events_arrive_in_order_and_the_end_is_reported_once(desk: Desk) -> None:
    attempt = desk.open("r")
    desk.publisher.put([(attempt, [Accepted(5)])])
    for token in range(50):
        desk.publisher.put([(attempt, [chunk(token)])])
    desk.publisher.put([(attempt, [FINISHED, DONE])])

    assert desk.end_of(attempt) == (Outcome.DONE, None)
    log = desk.log(attempt)
    assert (log[0], log[-2:]) == (Accepted(5), [FINISHED, DONE])
    assert tokens(log) == list(range(50))
    assert desk.publisher.attempts() == []


def test_a_failure_is_reported_as_one(desk: Desk) -> None:
    attempt = desk.open("r")
    desk.publisher.put([(attempt, [LOST])])

    assert desk.end_of(attempt) == (Outcome.FAILED, LOST)


@pytest.mark.parametrize("first", [DONE, LOST])
def test_of_two_terminal_events_only_the_first_is_written(client: "redis.Redis", first: Event) -> None:
    desk = Desk(client)
    attempt = desk.open("r")
    desk.publisher.put([(attempt, [first])])
    desk.publisher.put([(attempt, [chunk(1)])])
    desk.publisher.put([(attempt, [LOST if first is DONE else DONE])])
    desk.start()
    desk.end_of(attempt)
    desk.stop()

    assert desk.log(attempt) == [first]
    assert len(desk.ends) == 1


def test_an_attempt_that_was_fenced_off_is_dropped_and_the_others_go_on(desk: Desk) -> None:
    fenced, other = desk.open("fenced"), desk.open("other")
    desk.queue.conclude("fenced", LOST)

    desk.publisher.put([(fenced, [Accepted(5)]), (other, [Accepted(5)])])
    desk.publisher.put([(other, [DONE])])

    assert desk.end_of(fenced) == (Outcome.FENCED, None)
    assert desk.end_of(other) == (Outcome.DONE, None)
    assert desk.log(fenced) == [LOST]


def test_dropping_is_reported_once_and_what_comes_later_goes_nowhere(desk: Desk) -> None:
    attempt = desk.open("r")
    desk.publisher.drop(attempt)
    desk.publisher.drop(attempt)
    desk.publisher.put([(attempt, [DONE])])

    other = desk.open("other")
    desk.publisher.put([(other, [DONE])])
    desk.end_of(other)
    assert [(one, outcome) for one, outcome, _ in desk.ends] == [(attempt, Outcome.FENCED), (other, Outcome.DONE)]
    assert desk.log(attempt) == []


def test_stopping_sends_what_was_put_before(client: "redis.Redis") -> None:
    desk = Desk(client)
    desk.start()
    attempts = [desk.open(f"request-{index}") for index in range(20)]
    for attempt in attempts:
        desk.publisher.put([(attempt, [Accepted(5), chunk(1), DONE])])
    desk.stop()

    assert all(desk.log(attempt) == [Accepted(5), chunk(1), DONE] for attempt in attempts)


def test_while_redis_is_away_everything_is_kept_and_sent_once(
    own_durable_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    desk = Desk(connect_to(own_durable_valkey.url))
    desk.start()
    attempt = desk.open("r")
    desk.publisher.put([(attempt, [Accepted(5)])])
    wait_until(lambda: desk.log(attempt), what="the first entry")
    own_durable_valkey.stop()
    for token in range(20):
        desk.publisher.put([(attempt, [chunk(token)])])
    own_durable_valkey.start()
    desk.publisher.put([(attempt, [DONE])])

    assert desk.end_of(attempt) == (Outcome.DONE, None)
    desk.stop()
    log = desk.log(attempt)
    assert (log[0], tokens(log), log[-1]) == (Accepted(5), list(range(20)), DONE)
