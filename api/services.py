"""The collaborators that the routes share, put together once for each process."""

from dataclasses import dataclass

import redis

from api.drain import Drain
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


def services(settings: ApiSettings, client: "redis.Redis", subscriber: Subscriber, drain: Drain) -> Services:
    """The collaborators over one client and one subscriber."""
    queue = RequestQueue(client)
    reader = LogReader(client)
    relay = Relay(queue=queue, reader=reader, subscriber=subscriber, drain=drain)
    return Services(settings, client, queue, reader, FleetView(Fleet(client)), relay, drain)
