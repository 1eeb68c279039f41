"""Redis connections, and the scripts that run inside Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from shared.errors import ErrorCode, RequestError, StoreError

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64
POOL_WAIT_S = 20.0

CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)
"""What redis-py raises when Redis is away, as opposed to when it refuses."""


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS) -> "redis.Redis":
    """A client whose pool waits for a free connection instead of failing.

    Nothing is sent yet; `check` does. Values come back as bytes.

    Raises:
        StoreError: the URL cannot be understood.
    """
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=POOL_WAIT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            # A Unix socket has no such thing, and redis-py refuses the argument there.
            **({} if url.startswith("unix:") else {"socket_keepalive": True}),
            health_check_interval=15,
            # One quick second try covers a connection that was idle while Redis restarted; longer
            # outages are each caller's own business.
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.05), 1),
        )
    except (ValueError, TypeError) as error:
        raise StoreError(f"redis URL {without_password(url)!r} cannot be used: {error}") from error
    return redis.Redis(connection_pool=pool)


def check(client: "redis.Redis", url: str) -> None:
    """Raise StoreError, in one line, unless Redis answers."""
    try:
        client.ping()
    except redis.RedisError as error:
        raise StoreError(f"cannot reach Redis at {without_password(url)}: {error}") from error


def as_text(raw: object) -> str:
    """A reply of Redis as text; our connections answer in bytes, which redis-py's types do not say."""
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn an unreachable or refusing Redis into a `store_unavailable` RequestError."""
    try:
        yield
    except redis.RedisError as error:
        raise RequestError(ErrorCode.STORE_UNAVAILABLE, "The request queue is unavailable. Retry shortly.") from error


def script(client: "redis.Redis", name: str) -> "redis.commands.core.Script":
    """The script `shared/scripts/<name>.lua`, bound to this client and loaded on first use."""
    return client.register_script(files("shared").joinpath(f"scripts/{name}.lua").read_text())
