"""The collaborators that the routes share, put together once for each process."""

from collections.abc import Callable
from dataclasses import dataclass

import redis

from api.access.rates import RateCounter
from api.drain import Drain
from api.exchange import Observer
from api.relay import Relay
from api.subscriber import Subscriber
from shared.fleet import Fleet, FleetView
from shared.log import LogReader
from shared.queue import RequestQueue
from shared.settings import ApiSettings


@dataclass(frozen=True)
class Services:
    """What a route may use."""

    settings: ApiSettings
    client: "redis.Redis"
    queue: RequestQueue
    reader: LogReader
    fleet: FleetView
    relay: Relay
    drain: Drain
    observer: Observer
    rates: RateCounter
    scrape: Callable[[], bytes]
    """All metrics of this front end, in Prometheus's text format."""


def services(
    settings: ApiSettings,
    client: "redis.Redis",
    subscriber: Subscriber,
    drain: Drain,
    observer: Observer,
    scrape: Callable[[], bytes],
) -> Services:
    """The collaborators over one client and one subscriber."""
    queue = RequestQueue(client)
    reader = LogReader(client)
    relay = Relay(queue=queue, reader=reader, subscriber=subscriber, drain=drain)
    return Services(
        settings=settings,
        client=client,
        queue=queue,
        reader=reader,
        fleet=FleetView(Fleet(client)),
        relay=relay,
        drain=drain,
        observer=observer,
        rates=RateCounter(client),
        scrape=scrape,
    )
