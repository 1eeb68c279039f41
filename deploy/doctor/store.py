"""Whether Redis is there and fit to keep requests. Only looks: nothing is written."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError

from deploy.doctor.finding import Finding, examine, ok, problem, size, warning
from deploy.doctor.permissions import Role, check_permissions
from shared.errors import StoreError
from shared.store import (
    CONNECTION_ERRORS,
    OLDEST_VERSION,
    SAFE_POLICY,
    as_text,
    check_takes_writes,
    connect,
    without_password,
)

ANSWER_LIMIT_S = 3.0
PINGS = 20
SLOW_MS = 5.0
"""Each chunk of tokens, each renewal of a lease and several steps of taking a request wait for one answer."""

FULL = 0.8
PUBSUB_HARD = 32 * 2**20
PUBSUB_SOFT = 8 * 2**20

Facts = Mapping[str, Any]


def check_store(url: str, roles: tuple[Role, ...]) -> Iterator[Finding]:
    """All findings about the Redis at this URL; one alone if it does not answer."""
    shown = without_password(url)
    try:
        client = connect(url, socket_timeout_s=ANSWER_LIMIT_S)
        client.ping()
    except StoreError as error:
        yield problem("redis", str(error), "mend --redis (TOKENMILL_REDIS)")
    except AuthenticationError as error:
        yield problem("redis", f"{shown} does not let us in: {error}", "mend user and password in --redis")
    except NoPermissionError as error:
        yield problem("redis", f"this user may not even PING at {shown}: {error}", "give it +@connection")
    except CONNECTION_ERRORS as error:
        yield problem("redis", f"cannot reach {shown}: {error}", "start it, or mend --redis (TOKENMILL_REDIS)")
    else:
        with client:
            yield from _check(client, shown, roles)


def _check(client: "redis.Redis", shown: str, roles: tuple[Role, ...]) -> Iterator[Finding]:
    yield from examine("redis", lambda: check_latency(client, shown))
    try:
        facts: Facts = client.info()
    except NoPermissionError:
        yield warning("redis info", "this user may not INFO, so little can be looked at", "give it +info")
    else:
        settings = _settings(client)
        yield from examine("redis version", lambda: check_version(facts))
        yield from examine("redis persistence", lambda: check_persistence(facts, settings))
        yield from examine("redis eviction", lambda: check_eviction(facts))
        yield from examine("redis memory", lambda: check_memory(facts))
        yield from examine("redis clients", lambda: check_clients(facts))
        yield from examine("redis replicas", lambda: check_replicas(facts))
        yield from examine("redis output buffer", lambda: check_output_buffer(settings))
    yield from examine("redis writes", lambda: check_writes(client))
    yield from examine("redis permissions", lambda: check_permissions(client, roles))


def _settings(client: "redis.Redis") -> Facts | None:
    """Some of Redis's settings; None where CONFIG is forbidden, as it is to users who may do little."""
    try:
        return {as_text(name): as_text(value) for name, value in client.config_get("*").items()}
    except redis.ResponseError:
        return None


def check_latency(client: "redis.Redis", shown: str) -> Iterator[Finding]:
    """How long an answer takes."""
    took = []
    for _ in range(PINGS):
        begun = time.perf_counter()
        client.ping()
        took.append((time.perf_counter() - begun) * 1000)
    median = statistics.median(took)
    said = f"{shown} answers in {median:.1f} ms ({max(took):.1f} at most)"
    if median > SLOW_MS:
        yield warning("redis", said, "put Redis nearer: each chunk of tokens waits for an answer")
    else:
        yield ok("redis", said)


def check_version(facts: Facts) -> Iterator[Finding]:
    """Old versions lack commands; a cluster spreads the keys of a script over several servers."""
    name = str(facts.get("server_name", "redis")).capitalize()
    version = str(facts["redis_version"])
    said = f"{name} {facts.get('valkey_version', version)}"
    needed = ".".join(map(str, OLDEST_VERSION))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        yield problem("redis version", said, f"update it to {needed} or newer")
    elif facts.get("cluster_enabled"):
        yield problem("redis version", f"{said} in cluster mode", "run it without: one server, or Sentinel")
    else:
        yield ok("redis version", said)


def check_persistence(facts: Facts, settings: Facts | None) -> Iterator[Finding]:
    """Whether a restart loses what was accepted."""
    check = "redis persistence"
    if not facts["aof_enabled"]:
        yield warning(check, "appendonly is off: a restart loses every request", "set appendonly yes")
        return
    if facts.get("aof_last_write_status", "ok") != "ok":
        yield problem(check, "the append-only file cannot be written", "look at Redis's log and disk")
        return
    fsync = settings.get("appendfsync", "") if settings else ""
    if fsync == "no":
        said = "appendonly is on and appendfsync no: a crash of its machine loses up to half a minute"
        yield warning(check, said, "set appendfsync everysec")
    else:
        yield ok(check, f"appendonly is on{f', appendfsync {fsync}' if fsync else ''}")
    if facts.get("rdb_last_bgsave_status", "ok") != "ok" or facts.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield warning(check, "the last snapshot or rewrite failed", "look at Redis's log, disk and memory")


def check_eviction(facts: Facts) -> Iterator[Finding]:
    """Whether Redis drops keys when memory runs short."""
    policy = str(facts["maxmemory_policy"])
    if policy == SAFE_POLICY:
        yield ok("redis eviction", f"maxmemory-policy {policy}")
    else:
        said = f"maxmemory-policy {policy} drops requests and answers when memory runs short"
        yield problem("redis eviction", said, f"set maxmemory-policy {SAFE_POLICY}")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """How much room is left, of `maxmemory` or else of Redis's machine."""
    check = "redis memory"
    used, limit, whole = (int(facts.get(name, 0)) for name in ("used_memory", "maxmemory", "total_system_memory"))
    if limit:
        said = f"{size(used)} of maxmemory {size(limit)} used"
        advice = "raise maxmemory, or wait: an answer is kept for 5 minutes, a background one for a day"
    else:
        said = f"{size(used)} of its machine's {size(whole)} used, no maxmemory"
        advice = "set maxmemory: without it the kernel ends Redis when memory runs out"
    room = limit or whole
    if room and used > FULL * room:
        yield warning(check, said, advice)
    else:
        yield ok(check, said)


def check_clients(facts: Facts) -> Iterator[Finding]:
    """Whether there is room for more connections: a front-end process has up to 66, a worker up to 10."""
    connected, most = int(facts.get("connected_clients", 0)), int(facts.get("maxclients", 0))
    said = f"{connected} connection{'' if connected == 1 else 's'}" + (f" of maxclients {most}" if most else "")
    if most and connected > FULL * most:
        yield warning("redis clients", said, "raise maxclients")
    else:
        yield ok("redis clients", said)


def check_replicas(facts: Facts) -> Iterator[Finding]:
    """Whether this is the primary, and whether it stops taking requests that only it would have."""
    check = "redis replicas"
    if facts.get("role") != "master":
        yield problem(check, "this is a replica, which takes no requests", "give --redis the primary, or Sentinel")
        return
    replicas = [facts[f"slave{number}"] for number in range(int(facts.get("connected_slaves", 0)))]
    behind = sum(replica.get("state") != "online" for replica in replicas)
    if behind:
        yield warning(check, f"{behind} of {len(replicas)} replicas do not follow yet", "look at the replica's log")
    elif replicas and "min_slaves_good_slaves" not in facts:
        said = f"{len(replicas)} replicas, min-replicas-to-write 0: a primary that is cut off takes requests that a "
        yield warning(check, said + "failover loses", "set min-replicas-to-write 1, min-replicas-max-lag 10")
    elif replicas:
        yield ok(check, f"{len(replicas)} replicas follow, {facts['min_slaves_good_slaves']} of them closely")
    else:
        yield ok(check, "none: a primary of its own")


def check_output_buffer(settings: Facts | None) -> Iterator[Finding]:
    """Whether a front end that is behind for a moment is cut off from all of its streams."""
    check = "redis output buffer"
    if settings is None:
        yield ok(check, "not looked at, and appendfsync neither: this user may not CONFIG GET, and need not")
        return
    words = settings["client-output-buffer-limit"].split()
    hard, soft, seconds = map(int, words[words.index("pubsub") + 1 :][:3])
    said = f"client-output-buffer-limit pubsub {size(hard)}, {size(soft)} for {seconds} s"
    if 0 < hard < PUBSUB_HARD or 0 < soft < PUBSUB_SOFT:
        advice = "set client-output-buffer-limit pubsub 32mb 8mb 60: a front end that is cut off reads every log anew"
        yield warning(check, said, advice)
    else:
        yield ok(check, said)


def check_writes(client: "redis.Redis") -> Iterator[Finding]:
    """Whether Redis would take a request now."""
    try:
        check_takes_writes(client)
    except NoPermissionError:
        return  # the permissions tell
    except redis.RedisError as error:
        yield problem("redis writes", f"Redis takes no writes: {error}", "see memory, persistence and replicas above")
    else:
        yield ok("redis writes", "Redis takes writes")
