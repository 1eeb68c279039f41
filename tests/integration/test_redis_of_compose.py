"""The users of the Redis in docker-compose.yml may do what front ends and workers do, and nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from asking import request
from open_streams import body
from scripted_worker import ScriptedWorker, say_words
from servers import FrontEnd, Valkey, free_port
from test_redis_access import (
    NEWER_THAN_7,
    cancel_while_queued,
    keeps_transactions,
    redis_of_debian,
    use_everything,
    users_with_one_password,
)
from worker_processes import Office, Start

from api.access.keys import Allowance, ApiKey, new_key
from api.access.rates import RateCounter
from deploy.doctor.finding import Level
from deploy.doctor.permissions import Role, check_permissions
from shared.queue import Owner, RequestQueue


def guarded_server(tmp_path: Path, *options: str, binary: str = "") -> Valkey:
    """A server with those users, not started."""
    port = free_port()
    users = users_with_one_password(tmp_path)
    options = ("--save", "", "--bind", "127.0.0.1", "--protected-mode", "no", "--aclfile", str(users), *options)
    url = f"redis://operator:secret@127.0.0.1:{port}/0"
    return Valkey(tmp_path, port=port, options=options, url=url, binary=binary)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Valkey]:
    server = guarded_server(tmp_path, binary=redis_of_debian())
    server.start()
    yield server
    server.stop()


def test_front_ends_and_workers_are_refused_nothing_that_they_need(
    guarded: Valkey,
    start_front_end: Callable[..., FrontEnd],
    start: Start,
    connect_to: "Callable[[str], redis.Redis]",
) -> None:
    api, worker = (guarded.url.replace("operator", user) for user in ("api", "worker"))
    front_end = start_front_end(api)

    use_everything(front_end, start, Office(connect_to(guarded.url)), worker)
    cancel_while_queued(connect_to(api))
    use_keys(start_front_end, api, guarded.url, connect_to(api))
    assert httpx.get(f"{front_end.url}/metrics").status_code == 200
    asked = [*check_permissions(connect_to(api), (Role.API,)), *check_permissions(connect_to(worker), (Role.WORKER,))]
    assert [finding for finding in asked if finding.level is not Level.OK] == []

    refused: Any = connect_to(guarded.url).acl_log()
    assert {(entry["username"], entry["object"]) for entry in refused if entry["object"] not in NEWER_THAN_7} == set()


def use_keys(start_front_end: Callable[..., FrontEnd], url: str, operator: str, client: "redis.Redis") -> None:
    """Counts what keys ask for, and gives them turns."""
    key, hashed = new_key()
    front_end = start_front_end(
        url, api_keys=f"alice={hashed}", key_requests=9, key_tokens=99, key_concurrent=1, request_timeout=1
    )
    RateCounter(client).took(ApiKey(name="alice", digest=b"", allowance=Allowance(tokens=99)), 10)
    worker = ScriptedWorker(operator, say_words("ok"))
    worker.announce()
    asked = body(4) | {"model": "scripted"}
    waited = httpx.post(f"{front_end.url}/v1/completions", json=asked, headers={"X-API-Key": key}, timeout=20)
    worker.stop()
    assert waited.json()["error"]["code"] == "deadline_exceeded"
    assert waited.headers["x-ratelimit-remaining-requests"] == "8"
    assert waited.headers["x-ratelimit-remaining-tokens"] == "89"
    queue = RequestQueue(client)
    for number, owner in enumerate(("alice", "alice", "bob")):
        queue.submit(request(f"turn-{number}"), limit=4, timeout_s=60, owner=Owner(owner, 5))


def test_transactions_are_there_again_after_a_restart(
    tmp_path: Path, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    server = guarded_server(tmp_path, "--appendonly", "yes", binary=redis_of_debian())
    server.start()
    try:
        keeps_transactions(server, connect_to(server.url))
    finally:
        server.stop()


def test_who_gives_no_password_may_do_nothing(guarded: Valkey, connect_to: "Callable[[str], redis.Redis]") -> None:
    for stranger in ("", "default:@", "default:secret@"):
        with pytest.raises(redis.exceptions.AuthenticationError):
            connect_to(guarded.url.replace("operator:secret@", stranger)).get("key")


@pytest.mark.parametrize("user", ["api", "worker"])
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "CONFIG GET dir", "KEYS *", "HGETALL other", "PUBLISH other x", "ACL LIST", "SHUTDOWN", "MONITOR"],
)
def test_nothing_else_may_be_done(
    guarded: Valkey, connect_to: "Callable[[str], redis.Redis]", user: str, command: str
) -> None:
    client = connect_to(guarded.url.replace("operator", user))
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())
