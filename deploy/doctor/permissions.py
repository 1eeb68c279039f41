"""Whether this user of Redis may do what the parts do, found out by trying without doing.

Redis looks at a user's permissions when a command is queued in a transaction, and a transaction whose connection is
closed does nothing. (`ACL DRYRUN` would ask the same, and is forbidden to just those users who may do little.)
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import redis
from redis.exceptions import NoPermissionError
from rq.command import PUBSUB_CHANNEL_TEMPLATE

from deploy.doctor.finding import Finding, ok, problem
from shared.keys import PREFIX, events

RULES = (
    "~tokenmill:* ~rq:* &tokenmill:* &rq:* "
    "+@read +@write +@pubsub +@scripting +@connection +@transaction +@blocking +time -@dangerous +info"
)
"""What to give a user of Redis who runs all parts. Tests run them with it."""

MOST_NAMED = 6

MILL = PREFIX + "doctor"
MILL_CHANNEL = events("doctor")
RQ = "rq:doctor"
RQ_CHANNEL = PUBSUB_CHANNEL_TEMPLATE % "doctor"
SHOWN = {
    MILL: f"{PREFIX}*",
    MILL_CHANNEL: f"on channel {events('*')}",
    RQ: "rq:*",
    RQ_CHANNEL: f"on channel {PUBSUB_CHANNEL_TEMPLATE % '*'}",
}
"""How each key and channel that is tried stands for all of its kind."""


class Role(StrEnum):
    """For which part somebody asks."""

    UP = "up"
    API = "api"
    WORKER = "worker"


BOTH = f"""
EVALSHA {"0" * 40} 1 {MILL}
SCRIPT LOAD return
TIME
DEL {MILL}
EXISTS {MILL}
EXPIRE {MILL} 1
PEXPIRE {MILL} 1
PTTL {MILL}
SET {MILL} doctor
HGET {MILL} doctor
HGETALL {MILL}
HINCRBY {MILL} doctor 1
HMGET {MILL} doctor
HSET {MILL} doctor doctor
SADD {MILL} doctor
SCARD {MILL}
SMEMBERS {MILL}
SREM {MILL} doctor
TYPE {MILL}
XADD {MILL} * doctor doctor
XRANGE {MILL} - +
ZADD {MILL} 1 doctor
ZREM {MILL} doctor
ZREMRANGEBYSCORE {MILL} 0 1
PUBLISH {MILL_CHANNEL} doctor
DEL {RQ}
EXISTS {RQ}
EXPIRE {RQ} 1
HDEL {RQ} doctor
HEXISTS {RQ} doctor
HGETALL {RQ}
HSET {RQ} doctor doctor
LPUSH {RQ} doctor
LRANGE {RQ} 0 1
LREM {RQ} 1 doctor
PUBLISH {RQ_CHANNEL} doctor
SADD {RQ} doctor
SMEMBERS {RQ}
SREM {RQ} doctor
TYPE {RQ}
ZADD {RQ} 1 doctor
ZRANGE {RQ} 0 1
ZREM {RQ} doctor
"""
"""What front ends and workers do, in their scripts and reaping included."""

FRONT_END = f"""
GET {MILL}
INCRBY {MILL} 1
LINDEX {MILL} 0
LTRIM {MILL} 0 1
TTL {MILL}
ZRANGEBYSCORE {MILL} 0 1
ZSCORE {MILL} doctor
LINDEX {RQ} 0
LINSERT {RQ} BEFORE doctor doctor
XREVRANGE {MILL} + -
ZCARD {MILL}
LLEN {RQ}
RPUSH {RQ} doctor
SUBSCRIBE {MILL_CHANNEL}
"""

WORKER = f"""
BLMOVE {RQ} {RQ} LEFT RIGHT 1
HGET {RQ} doctor
HINCRBY {RQ} doctor 1
HINCRBYFLOAT {RQ} doctor 1
HMGET {RQ} doctor
PERSIST {RQ}
SET {RQ} doctor
SUBSCRIBE {RQ_CHANNEL}
XADD {RQ} * doctor doctor
ZREMRANGEBYSCORE {RQ} 0 1
"""

NEEDED = {Role.API: ("front end", BOTH + FRONT_END), Role.WORKER: ("worker", BOTH + WORKER)}


def check_permissions(client: "redis.Redis", roles: tuple[Role, ...]) -> Iterator[Finding]:
    """A finding for each part that is to run."""
    user = _user(client)
    for role in roles:
        part, needed = NEEDED[role]
        check = f"redis {part}"
        forbidden = _forbidden(client, [line.split() for line in needed.split("\n") if line])
        if not forbidden:
            yield ok(check, f"{user} may do what a {part} does")
            continue
        shown = ", ".join(forbidden[:MOST_NAMED])
        more = f" and {len(forbidden) - MOST_NAMED} more" if len(forbidden) > MOST_NAMED else ""
        yield problem(check, f"{user} may not {shown}{more}", f"give it {RULES}")


def _user(client: "redis.Redis") -> str:
    """As the URL has it: `ACL WHOAMI` is one of the things that a user who may do little may not."""
    return f"user {client.connection_pool.connection_kwargs.get('username') or 'default'}"


def _forbidden(client: "redis.Redis", commands: list[list[str]]) -> list[str]:
    """Those of the commands that Redis would refuse this user."""
    refused = []
    connection: Any = client.connection_pool.get_connection()
    try:
        for command in (["MULTI"], *commands):
            connection.send_command(*command)
            try:
                connection.read_response()
            except NoPermissionError:
                refused.append(_shown(command))
            except redis.ResponseError:
                # Refused for another reason (out of memory, a replica), which comes after permissions.
                continue
    finally:
        # This is what ends the transaction, however far it came.
        connection.disconnect()
        client.connection_pool.release(connection)
    return refused


def _shown(command: list[str]) -> str:
    """The command, with the kind of key or channel that it was tried on."""
    name = " ".join(command[:2]) if command[0] == "SCRIPT" else command[0]
    tried_on = next((SHOWN[word] for word in command if word in SHOWN), "")
    return f"{name} {tried_on}".rstrip()
