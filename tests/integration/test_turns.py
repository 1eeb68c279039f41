"""Owners take turns in a queue, on a real Valkey."""

from collections import deque

import pytest
import redis
from asking import request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import keys
from shared.domain import Priority
from shared.errors import ErrorCode, RequestError
from shared.queue import Idempotency, Owner, RequestQueue

QUEUE = f"rq:queue:{keys.queue_name('fake', Priority.INTERACTIVE)}"


class Line:
    """Requests named after their owners, and the queue that they wait in."""

    def __init__(self, client: "redis.Redis") -> None:
        client.flushall()
        self._client = client
        self._queue = RequestQueue(client)
        self._made = 0

    def join(self, owner: str, **options: int) -> str:
        self._made += 1
        name = f"{owner}{self._made:03}"
        self._queue.submit(request(name, model="fake"), limit=1000, timeout_s=60, owner=Owner(owner, **options))
        return name

    def serve(self) -> str:
        return str(self._client.lpop(QUEUE).decode())  # type: ignore[union-attr]

    def owners(self) -> str:
        return "".join(name.decode()[0] for name in self._client.lrange(QUEUE, 0, -1))  # type: ignore[union-attr]


@pytest.fixture
def line(client: "redis.Redis", no_key_without_ttl: None) -> Line:  # noqa: ARG001
    return Line(client)


def test_owners_take_turns_and_each_is_served_in_its_own_order(line: Line) -> None:
    for owner in "aaaaabbc":
        line.join(owner)

    assert line.owners() == "abcabaaa"
    served = [line.serve() for _ in range(8)]
    assert [name for name in served if name[0] == "a"] == sorted(name for name in served if name[0] == "a")


def test_whoever_comes_late_is_next_and_has_saved_nothing_up(line: Line) -> None:
    for _ in range(6):
        line.join("a")
    for _ in range(3):
        line.serve()
    for _ in range(3):
        line.join("b")

    assert line.owners() == "ababab"


def test_what_was_cancelled_is_no_place_to_stand_before(line: Line, client: "redis.Redis") -> None:
    names = [line.join("a") for _ in range(4)]
    client.lrem(QUEUE, 0, names[1])

    line.join("b")

    assert line.owners() == "abaa"


def test_a_queue_that_was_empty_remembers_nobody(line: Line) -> None:
    for _ in range(3):
        line.join("a")
    for _ in range(3):
        line.serve()

    line.join("a")
    line.join("b")
    line.join("a")

    assert line.owners() == "aba"


def test_whoever_joins_a_waiting_request_by_its_key_does_not_move_it(client: "redis.Redis") -> None:
    client.flushall()
    queue = RequestQueue(client)
    for name, key in (("a1", "one"), ("a2", "two"), ("a3", "one")):
        idempotency = Idempotency(key, "digest")
        queue.submit(request(name, model="fake"), limit=9, timeout_s=60, idempotency=idempotency, owner=Owner("a"))

    assert client.lrange(QUEUE, 0, -1) == [b"a1", b"a2"]


def test_an_owner_has_as_many_open_as_it_may(line: Line) -> None:
    for _ in range(2):
        line.join("a", most_open=2)

    with pytest.raises(RequestError) as refused:
        line.join("a", most_open=2)
    assert refused.value.code is ErrorCode.RATE_LIMIT_EXCEEDED
    line.join("b", most_open=2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from("abcd"), st.just("-")), max_size=40))
def test_nobody_waits_for_more_of_another_owner_than_has_been_and_is_to_be_served_of_its_own(
    client: "redis.Redis", moves: list[str]
) -> None:
    line = Line(client)
    waiting: deque[str] = deque()
    served: set[str] = set()
    for move in moves:
        if move != "-":
            name = line.join(move)
            before = line.owners()
            # One's own that wait already, one more of every other, and another one if one's own turn of this round is
            # over.
            own = before.count(move) - 1 + (move in served)
            ahead = before[: _place(client, name)]
            assert all(ahead.count(other) <= own + 1 for other in "abcd" if other != move)
            waiting.append(name)
        elif waiting:
            name = line.serve()
            waiting.remove(name)
            served.add(name[0])
        if not waiting:
            served.clear()
    assert sorted(waiting) == sorted(name.decode() for name in client.lrange(QUEUE, 0, -1))  # type: ignore[union-attr]


def _place(client: "redis.Redis", name: str) -> int:
    return [one.decode() for one in client.lrange(QUEUE, 0, -1)].index(name)  # type: ignore[union-attr]
