"""The shared subscription, with real threads over a real Valkey."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import Valkey, wait_until

from api.subscriber import MAILBOX_LIMIT, Mailbox, Subscriber
from shared.errors import ErrorCode, RequestError
from shared.keys import events
from shared.store import connect


@pytest.fixture
def start_subscriber() -> Iterator[Callable[..., Subscriber]]:
    started: list[tuple[Subscriber, Any]] = []

    def start(url: str, **options: Any) -> Subscriber:
        client = connect(url)
        started.append((Subscriber(client, **options), client))
        started[-1][0].start()
        return started[-1][0]

    yield start
    for subscriber, client in started:
        subscriber.stop()
        client.connection_pool.disconnect()


@pytest.fixture
def subscriber(valkey: Valkey, client: Any, start_subscriber: Callable[..., Subscriber]) -> Subscriber:  # noqa: ARG001
    return start_subscriber(valkey.url)


def taken(mailbox: Mailbox, count: int) -> list[bytes]:
    messages: list[bytes] = []

    def take() -> bool:
        messages.extend(mailbox.take(0.1).messages)
        return len(messages) >= count

    wait_until(take, what=f"{count} messages")
    return messages


def test_what_is_published_after_subscribing_is_heard_in_order(subscriber: Subscriber, client: Any) -> None:
    with subscriber.subscribe("a") as mailbox, subscriber.subscribe("b") as other:
        for number in range(20):
            client.publish(events("a"), number)
        client.publish(events("b"), "other")

        assert taken(mailbox, 20) == [str(number).encode() for number in range(20)]
        assert taken(other, 1) == [b"other"]


def test_several_may_listen_to_one_channel_and_leave_one_by_one(subscriber: Subscriber, client: Any) -> None:
    first, second = subscriber.subscribe("a"), subscriber.subscribe("a")

    first.close()
    first.close()
    client.publish(events("a"), "x")

    assert taken(second, 1) == [b"x"]
    second.close()
    wait_until(lambda: client.pubsub_numsub(events("a"))[0][1] == 0, what="the end of the subscription")
    assert subscriber.channels() == 0


def test_a_channel_that_is_left_and_taken_again_at_once_is_heard(subscriber: Subscriber, client: Any) -> None:
    for number in range(50):
        with subscriber.subscribe("a") as mailbox:
            client.publish(events("a"), number)
            assert taken(mailbox, 1) == [str(number).encode()]


def test_many_threads_may_subscribe_at_once(subscriber: Subscriber, client: Any) -> None:
    heard: list[list[bytes]] = []

    def listen(name: str) -> None:
        with subscriber.subscribe(name) as mailbox:
            client.publish(events(name), name)
            heard.append(taken(mailbox, 1))

    threads = [threading.Thread(target=listen, args=(f"r{number}",)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert sorted(heard) == sorted([f"r{number}".encode()] for number in range(50))
    assert subscriber.channels() == 0


def test_a_mailbox_that_nobody_empties_stays_small_and_says_that_something_is_missing(
    subscriber: Subscriber, client: Any
) -> None:
    with subscriber.subscribe("slow") as slow, subscriber.subscribe("quick") as quick:
        for number in range(MAILBOX_LIMIT + 1):
            client.publish(events("slow"), number)
        client.publish(events("quick"), "x")
        assert taken(quick, 1) == [b"x"]

        delivery = slow.take(0)
        client.publish(events("slow"), "later")

        assert delivery.gap
        assert delivery.messages == []
        assert taken(slow, 1) == [b"later"]


def test_a_broken_connection_is_replaced_and_every_mailbox_told(subscriber: Subscriber, client: Any) -> None:
    with subscriber.subscribe("a") as first, subscriber.subscribe("b") as second:
        client.client_kill_filter(_type="pubsub")

        assert wait_until(lambda: first.take(0.1).gap, what="the gap")
        assert wait_until(lambda: second.take(0.1).gap, what="the gap")
        client.publish(events("b"), "again")
        assert taken(second, 1) == [b"again"]


def test_a_connection_that_went_silent_is_noticed_and_replaced(
    own_valkey: Valkey, start_subscriber: Callable[..., Subscriber]
) -> None:
    subscriber = start_subscriber(own_valkey.url, ping_after_s=0.2)
    with subscriber.subscribe("a") as mailbox:
        own_valkey.freeze()
        wait_until(lambda: not subscriber.is_up(), what="the notice")
        own_valkey.thaw()

        assert wait_until(lambda: mailbox.take(0.1).gap, what="the gap")


def test_an_idle_connection_stays(valkey: Valkey, client: Any, start_subscriber: Callable[..., Subscriber]) -> None:
    subscriber = start_subscriber(valkey.url, ping_after_s=0.05)
    with subscriber.subscribe("a") as mailbox:
        quiet = [mailbox.take(0.05) for _ in range(10)]
        client.publish(events("a"), "x")

        assert not any(delivery.gap for delivery in quiet)
        assert taken(mailbox, 1) == [b"x"]


def test_subscribing_fails_in_time_while_redis_is_away_and_works_again_after(
    own_valkey: Valkey, start_subscriber: Callable[..., Subscriber]
) -> None:
    subscriber = start_subscriber(own_valkey.url)
    subscriber.subscribe("a").close()
    own_valkey.stop()

    with pytest.raises(RequestError) as caught:
        subscriber.subscribe("b", timeout_s=0.3)
    own_valkey.start()

    assert caught.value.code is ErrorCode.STORE_UNAVAILABLE
    assert subscriber.channels() == 0
    subscriber.subscribe("c").close()
