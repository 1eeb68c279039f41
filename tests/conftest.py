"""Fixtures for every test: a real Valkey, emptied between tests, and a look for keys that would stay for ever."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

sys.path.insert(0, os.path.dirname(__file__))

from scripted_worker import Script, ScriptedWorker
from servers import FrontEnd, Valkey
from streaming import Gate
from traps import Traps
from worker_processes import Office, Start, WorkerProcess

from shared.keys import PREFIX
from shared.store import connect


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(valkey: Valkey) -> "Iterator[redis.Redis]":
    """A client of an empty Valkey."""
    client = connect(valkey.url)
    client.flushall()
    yield client
    client.connection_pool.disconnect()


@pytest.fixture
def connect_to() -> "Iterator[Callable[[str], redis.Redis]]":
    """Makes clients that are closed when the test ends."""
    clients: list[redis.Redis] = []

    def make(url: str) -> "redis.Redis":
        clients.append(connect(url))
        return clients[-1]

    yield make
    for client in clients:
        client.connection_pool.disconnect()


@pytest.fixture
def no_key_without_ttl(client: "redis.Redis") -> Iterator[None]:
    """Fails a test that leaves a key of ours which never expires."""
    yield
    kept = [key for key in client.scan_iter(f"{PREFIX}*") if client.pttl(key) == -1]
    assert not kept, f"keys without a TTL: {kept}"


@pytest.fixture(scope="session")
def shared_front_end(valkey: Valkey) -> Iterator[FrontEnd]:
    front_end = FrontEnd(valkey.url, keep_alive=0.3, accept_wait=1.0, request_timeout=30.0).start().ready()
    yield front_end
    front_end.stop()


@pytest.fixture
def front_end(shared_front_end: FrontEnd, client: "redis.Redis", no_key_without_ttl: None) -> FrontEnd:  # noqa: ARG001
    """A running front end over an empty Valkey."""
    return shared_front_end


@pytest.fixture
def start_front_end(client: "redis.Redis", valkey: Valkey) -> Iterator[Callable[..., FrontEnd]]:  # noqa: ARG001
    """Starts front ends with settings of the test's own."""
    started: list[FrontEnd] = []

    def start(redis_url: str = "", **settings: Any) -> FrontEnd:
        started.append(FrontEnd(redis_url or valkey.url, **settings).start())
        return started[-1].ready()

    yield start
    for front_end in started:
        front_end.stop()


@pytest.fixture
def start_worker(client: "redis.Redis", valkey: Valkey) -> Iterator[Callable[..., ScriptedWorker]]:  # noqa: ARG001
    """Starts workers that answer as a script says."""
    started: list[ScriptedWorker] = []

    def start(script: Script, *, redis_url: str = "", **options: Any) -> ScriptedWorker:
        started.append(ScriptedWorker(redis_url or valkey.url, script, **options).start())
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A script that waits for the test, and in the end for nobody."""
    gate = Gate()
    yield gate
    gate.accept.set()
    gate.go_on.set()


@pytest.fixture
def start(valkey: Valkey, tmp_path: Path) -> Iterator[Start]:
    """Starts worker processes; whatever is left of them is killed at the end."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, redis_url: str = "", **options: Any) -> WorkerProcess:
        started.append(WorkerProcess(redis_url or valkey.url, tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def office(client: "redis.Redis", no_key_without_ttl: None) -> Office:  # noqa: ARG001
    return Office(client)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Valkey that the test may freeze or stop."""
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_durable_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """The same with an append-only file, which brings everything back after a restart."""
    server = Valkey(tmp_path, options=("--save", "", "--appendonly", "yes"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traps]:
    """Laid for every process that the test starts; whatever was sprung in the end fails it."""
    folder = tmp_path / "traps"
    folder.mkdir()
    traps = Traps(tmp_path).set(folder, monkeypatch)
    yield traps
    traps.remove()
    assert traps.sprung() == []
