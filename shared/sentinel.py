"""Redis behind Sentinel: connections that ask the sentinels, each time they connect, who the primary is."""

import copy
import re
from typing import Any
from urllib.parse import parse_qs, unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

SCHEME = "redis+sentinel://"
SHAPE = SCHEME + "[user:password@]host:port[,host:port...]/service[/db]"
PORT = 26379
TIMEOUT_S = 1.0
"""How long a sentinel may take before the next one is asked."""

_URL = re.compile(
    re.escape(SCHEME) + r"(?:(?P<user>[^:@]*)(?::(?P<password>.*))?@)?(?P<hosts>[^/@?]+)"
    r"/(?P<service>[^/?]+)(?:/(?P<db>\d+))?/?(?:\?(?P<query>.*))?"
)
_HOST = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>\d+))?")
_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


def sentinel_pool(url: str, **options: Any) -> redis.BlockingConnectionPool:
    """A pool of connections to the primary of a service; `options` are those of every pool.

    User, password and db are Redis's; the sentinels' own are `?sentinel_username=` and `?sentinel_password=`.

    Raises:
        ValueError: the URL is not of this shape.
    """
    parts = _URL.fullmatch(url)
    if parts is None:
        raise ValueError(f"it must look like {SHAPE}")
    asking: dict[str, Any] = {
        "socket_connect_timeout": TIMEOUT_S,
        "socket_timeout": TIMEOUT_S,
        # The next sentinel is asked instead.
        "retry": Retry(NoBackoff(), 0),
    }
    for name, values in parse_qs(parts["query"] or "").items():
        if name not in _OPTIONS:
            raise ValueError(f"its only options are {' and '.join(_OPTIONS)}")
        asking[_OPTIONS[name]] = values[-1]
    hosts = [_address(host) for host in parts["hosts"].split(",")]
    return _Pool(  # type: ignore[no-untyped-call]
        parts["service"],
        _Sentinels(hosts, sentinel_kwargs=asking),  # type: ignore[no-untyped-call]
        db=int(parts["db"] or 0),
        username=unquote(parts["user"] or "") or None,
        password=unquote(parts["password"] or "") or None,
        connection_class=_Connection,
        **options,
    )


def _address(host: str) -> tuple[str, int]:
    found = _HOST.fullmatch(host)
    if found is None:
        raise ValueError(f"it must look like {SHAPE}")
    return found["bracketed"] or found["plain"], int(found["port"] or PORT)


class _Sentinels(Sentinel):
    """Sentinels that several threads may ask at once."""

    def discover_master(self, service_name: str) -> Any:
        """The primary's address. The sentinel that knew it is asked first from now on.

        redis-py swaps two places of the list for that. When two threads do so at the same time, one
        sentinel gets into the list twice and another one out of it for good.
        """
        own = copy.copy(self)
        own.sentinels = list(self.sentinels)
        address = super(_Sentinels, own).discover_master(service_name)  # type: ignore[no-untyped-call]
        self.sentinels = own.sentinels
        return address


class _Connection(SentinelManagedConnection):
    """A connection that asks for the primary whenever it connects.

    redis-py's own does so when it is taken from the pool; when a command is sent again because the connection
    broke, it goes back to where it was, and waits for a primary that is gone.
    """

    def _connect_retry(self) -> None:
        self.connect_check_health(check_health=False, retry_socket_connect=False)

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if self._sock is None:
            self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(check_health=check_health, retry_socket_connect=retry_socket_connect)


class _Pool(SentinelConnectionPool, redis.BlockingConnectionPool):
    """A pool that waits for a free connection, and whose connections survive a failover.

    redis-py gives up a connection to a former primary but keeps it in a list for ever, and does the same
    with each one that cannot connect. Here they stay in the pool: the next use finds the primary anew.
    """

    def owns_connection(self, connection: Any) -> bool:
        return bool(connection.pid == self.pid)

    def release(self, connection: Any) -> None:
        if (connection.host, connection.port) != self.master_address:
            connection.disconnect()
        super().release(connection)  # type: ignore[no-untyped-call]
