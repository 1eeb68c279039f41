"""Redis connections, and the scripts that run inside Redis."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, ClassVar

import redis
from redis.backoff import ExponentialBackoff
from redis.connection import DefaultParser
from redis.exceptions import (
    AuthenticationError,
    ExecAbortError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
)
from redis.retry import Retry

from shared import sentinel
from shared.errors import ErrorCode, RequestError, StoreAwayError, StoreError

CONNECT_TIMEOUT_S = 5.0
SOCKET_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 64
POOL_WAIT_S = 20.0

OLDEST_VERSION = (7, 0)
SAFE_POLICY = "noeviction"

WRITE_PROBE = "#!lua\nreturn 1"
"""A script that does nothing and does not say so: Redis runs it only when it would let it write."""

NO_PRIMARY_ERRORS = (ReadOnlyError, MasterDownError)
"""What a replica says. A connection that hears it was made before a failover; the next one finds the primary."""


class WritesRefusedError(redis.ResponseError):
    """Redis takes no writes for now: its disk fails (MISCONF), or too few replicas follow it (NOREPLICAS)."""


class MisplacedError(redis.ResponseError):
    """Under a key of ours somebody has put something of another type (WRONGTYPE)."""


CONNECTION_ERRORS = (
    redis.ConnectionError,
    redis.TimeoutError,
    *NO_PRIMARY_ERRORS,
    WritesRefusedError,
    OutOfMemoryError,
    ExecAbortError,
    MisplacedError,
)
"""What redis-py raises when Redis is away or does not take anything now, as opposed to when it refuses.

Whatever met one of them may be done again. An ExecAbortError that gets out of redis-py is of this kind:
for a command that is wrong in itself it raises that command's error instead. A MisplacedError is of it where the key
is one that all share: the reaper removes what does not belong there. Where it is the key of one request, whoever reads
it says what that means.
"""


class _Parser(DefaultParser):  # type: ignore[valid-type, misc]  # chosen by whether hiredis is there
    """redis-py's own, which also knows by their codes the errors that it has no class for."""

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {
        **DefaultParser.EXCEPTION_CLASSES,
        "MISCONF": WritesRefusedError,
        "NOREPLICAS": WritesRefusedError,
        "WRONGTYPE": MisplacedError,
    }


_PASSWORDS = ((re.compile(r"(://[^:/?@]*:).*@"), r"\1***@"), (re.compile(r"(password=)[^&]*"), r"\1***"))

logger = logging.getLogger("tokenmill.store")


def connect(
    url: str, *, max_connections: int = MAX_CONNECTIONS, socket_timeout_s: float = SOCKET_TIMEOUT_S
) -> "redis.Redis":
    """A client whose pool waits for a free connection instead of failing.

    The URL is one of redis-py's (`redis:`, `rediss:`, `unix:`) or `redis+sentinel:`. Nothing is sent yet;
    `check` does. Values come back as bytes.

    Raises:
        StoreError: the URL cannot be understood.
    """
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": POOL_WAIT_S,
        "socket_connect_timeout": min(CONNECT_TIMEOUT_S, socket_timeout_s),
        "socket_timeout": socket_timeout_s,
        # A Unix socket has no such thing, and redis-py refuses the argument there.
        **({} if url.startswith("unix:") else {"socket_keepalive": True}),
        "health_check_interval": 15,
        "parser_class": _Parser,
        # One quick second try covers a connection that was idle while Redis restarted or became a replica;
        # longer outages are each caller's own business.
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.05), 1),
        "retry_on_error": list(NO_PRIMARY_ERRORS),
    }
    try:
        if url.startswith(sentinel.SCHEME):
            pool = sentinel.sentinel_pool(url, **options)
        else:
            pool = redis.BlockingConnectionPool.from_url(url, **options)
    except (ValueError, TypeError) as error:
        # A password with a slash in it is taken for a port, and redis-py would quote it.
        reason = error if "@" not in url or url.startswith(sentinel.SCHEME) else "is the password percent-encoded?"
        raise StoreError(f"redis URL {without_password(url)!r} cannot be used: {reason}") from error
    return redis.Redis(connection_pool=pool)


def check(client: "redis.Redis", url: str) -> None:
    """See whether Redis answers and is fit to keep requests.

    Raises:
        StoreAwayError: it does not answer; in one line.
        StoreError: it lets nobody in with this password, evicts keys, or is too old; in one line.
    """
    shown = without_password(url)
    try:
        client.ping()
        facts: Any = client.info()
    except NoPermissionError as error:
        logger.warning("whether Redis at %s evicts keys and is new enough cannot be checked: %s", shown, error)
        return
    except AuthenticationError as error:
        raise StoreError(f"Redis at {shown} does not let us in, mend user and password: {error}") from error
    except redis.RedisError as error:
        raise StoreAwayError(f"cannot reach Redis at {shown}: {error}") from error
    version = str(facts["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        raise StoreError(
            f"Redis at {shown} is version {version}, and at least {'.'.join(map(str, OLDEST_VERSION))} is needed: "
            "LMOVE and BLMOVE came with 6.2, and with 7.0 the errors of scripts say what they are"
        )
    policy = facts["maxmemory_policy"]
    if policy != SAFE_POLICY:
        raise StoreError(
            f"Redis at {shown} has the maxmemory-policy {policy}, which drops queued requests and their answers "
            f"when memory runs short: set it to {SAFE_POLICY}"
        )


def check_takes_writes(client: "redis.Redis") -> None:
    """Raise what Redis would answer to a write now (`CONNECTION_ERRORS`); nothing is written."""
    client.register_script(WRITE_PROBE)()


def as_text(raw: object, errors: str = "strict") -> str:
    """A reply of Redis as text; our connections answer in bytes, which redis-py's types do not say."""
    return raw.decode(errors=errors) if isinstance(raw, bytes) else str(raw)


def readable(raws: Iterable[Any]) -> list[str]:
    """Those of Redis's replies that are text. We write no others."""
    texts = []
    for raw in raws:
        try:
            texts.append(as_text(raw))
        except UnicodeDecodeError:
            continue
    return texts


def replies(pipeline: "redis.client.Pipeline") -> list[Any]:
    """Execute, and give None for each command that met something of another type."""
    found = pipeline.execute(raise_on_error=False)
    for reply in found:
        if isinstance(reply, Exception) and not isinstance(reply, MisplacedError):
            raise reply
    return [None if isinstance(reply, MisplacedError) else reply for reply in found]


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    for pattern, replacement in _PASSWORDS:
        url = pattern.sub(replacement, url)
    return url


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
