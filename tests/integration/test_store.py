"""What a Redis must be like, and how its URL is read; over a real Valkey."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from launched import Up
from redis.exceptions import ExecAbortError
from servers import FrontEnd, Valkey, free_port, wait_until
from worker_processes import WorkerProcess

from shared.errors import StoreAwayError, StoreError
from shared.store import CONNECTION_ERRORS, WritesRefusedError, check, connect, without_password


@pytest.fixture
def evicting_valkey(tmp_path: Path) -> Iterator[Valkey]:
    folder = tmp_path / "valkey"
    folder.mkdir()
    server = Valkey(folder, options=("--save", "", "--maxmemory-policy", "allkeys-lru"))
    server.start()
    yield server
    server.stop()


# -- a Redis that is not fit --


def test_a_worker_refuses_a_redis_that_evicts(evicting_valkey: Valkey, tmp_path: Path) -> None:
    worker = WorkerProcess(evicting_valkey.url, tmp_path)

    assert worker.end() == 1
    assert "maxmemory-policy allkeys-lru" in worker.output
    assert "set it to noeviction" in worker.output
    assert len(worker.output.splitlines()) == 1


def test_a_front_end_refuses_a_redis_that_evicts(evicting_valkey: Valkey) -> None:
    status, errors = FrontEnd(evicting_valkey.url).start().wait()

    assert status != 0
    assert "maxmemory-policy allkeys-lru" in errors
    assert len(errors.splitlines()) == 1


def test_up_refuses_a_redis_that_evicts(evicting_valkey: Valkey, tmp_path: Path) -> None:
    up = Up(tmp_path, "--redis", evicting_valkey.url, "--model", "fake:")
    try:
        assert up.end() == 1
        assert "maxmemory-policy allkeys-lru" in up.output()
        assert len(up.output().splitlines()) == 1
    finally:
        up.clean()


def test_nobody_starts_with_a_wrong_password(
    valkey: Valkey, connect_to: "Callable[[str], redis.Redis]", tmp_path: Path
) -> None:
    url = limited(connect_to(valkey.url), valkey, "+ping").replace("hidden", "guessed")

    worker = WorkerProcess(url, tmp_path)
    status, errors = FrontEnd(url).start().wait()

    assert worker.end() == 1
    assert status != 0
    for said in (worker.output, errors):
        assert "does not let us in" in said
        assert "guessed" not in said
        assert len(said.splitlines()) == 1


def test_a_front_end_starts_without_redis_and_says_so() -> None:
    front_end = FrontEnd(f"redis://:secret@127.0.0.1:{free_port()}/0").start().ready()

    said = front_end.stop()

    assert "cannot reach Redis at redis://:***@127.0.0.1:" in said
    assert "secret" not in said


def test_an_old_redis_is_refused(client: Any, valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = client.info() | {"redis_version": "6.2.14"}
    monkeypatch.setattr(client, "info", lambda: facts)

    with pytest.raises(StoreError, match=r"version 6\.2\.14, and at least 7\.0 is needed"):
        check(client, valkey.url)


def test_a_redis_that_may_not_be_configured_is_checked_all_the_same(
    evicting_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    url = limited(connect_to(evicting_valkey.url), evicting_valkey, "-config")

    with pytest.raises(StoreError, match="allkeys-lru"):
        check(connect_to(url), url)


def test_a_redis_that_may_not_be_asked_is_taken_with_a_warning(
    evicting_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]", caplog: pytest.LogCaptureFixture
) -> None:
    url = limited(connect_to(evicting_valkey.url), evicting_valkey, "-info")

    with caplog.at_level(logging.WARNING):
        check(connect_to(url), url)

    assert "cannot be checked" in caplog.text
    assert "hidden" not in caplog.text


def limited(client: "redis.Redis", server: Valkey, rule: str) -> str:
    """A URL for a user of this server who may do everything but one thing."""
    client.execute_command("ACL", "SETUSER", "limited", "on", ">hidden", "~*", "&*", "+@all", rule)
    return server.url.replace("unix://", "unix://limited:hidden@")


def test_nobody_there_is_told_apart_from_somebody_unfit(connect_to: "Callable[[str], redis.Redis]") -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"

    with pytest.raises(StoreAwayError, match=r"cannot reach Redis at redis://127\.0\.0\.1:"):
        check(connect_to(url), url)


# -- a Redis that takes nothing now --


def test_being_out_of_memory_is_like_being_away_however_redis_says_it(
    own_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    client = connect_to(own_valkey.url)
    write = client.register_script("redis.call('SET', KEYS[1], 'x')")
    connection = client.connection_pool.get_connection()
    for command in (("MULTI",), ("SET", "key", "x")):
        connection.send_command(*command)
        connection.read_response()
    client.config_set("maxmemory", 1)
    connection.send_command("EXEC")
    with pytest.raises(ExecAbortError):
        connection.read_response()
    client.connection_pool.release(connection)
    assert issubclass(ExecAbortError, CONNECTION_ERRORS)

    with pytest.raises(CONNECTION_ERRORS):
        client.set("key", "x")
    with pytest.raises(CONNECTION_ERRORS):
        write(keys=["key"])
    with client.pipeline() as pipeline, pytest.raises(CONNECTION_ERRORS):
        pipeline.set("key", "x").execute()
    client.config_set("maxmemory", 0)
    assert not client.exists("key")


def lose_its_disk(client: "redis.Redis", folder: Path) -> None:
    client.config_set("save", "900 1")
    shutil.rmtree(folder)
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", what="a save that fails")


def lose_its_replicas(client: "redis.Redis", _: Path) -> None:
    client.config_set("min-replicas-to-write", 1)


@pytest.mark.parametrize("what_happens", [lose_its_disk, lose_its_replicas])
def test_refusing_writes_is_like_being_away(
    what_happens: "Callable[[redis.Redis, Path], None]", tmp_path: Path, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    server = Valkey(folder)
    server.start()
    try:
        client = connect_to(server.url)
        write = client.register_script("redis.call('SET', KEYS[1], 'x')")
        client.script_load(write.script)
        what_happens(client, folder)

        with pytest.raises(WritesRefusedError):
            client.set("key", "x")
        with pytest.raises(WritesRefusedError):
            write(keys=["key"])
        with client.pipeline() as pipeline, pytest.raises(WritesRefusedError):
            pipeline.set("key", "x").execute()
    finally:
        # It would not stop before it has saved.
        server.kill()


# -- URLs --


def test_the_parts_of_a_sentinel_url(connect_to: "Callable[[str], redis.Redis]") -> None:
    url = "redis+sentinel://me:p%40ss@one:1,[::1]:2,three/mill/4?sentinel_password=other"

    pool: Any = connect_to(url).connection_pool

    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(kwargs["host"], kwargs["port"]) for kwargs in asked] == [("one", 1), ("::1", 2), ("three", 26379)]
    assert {kwargs["password"] for kwargs in asked} == {"other"}
    assert pool.service_name == "mill"
    kept = pool.connection_kwargs
    assert (kept["username"], kept["password"], kept["db"]) == ("me", "p@ss", 4)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://somewhere", "Redis URL must specify one of the following schemes"),
        ("redis://[::1", "Invalid IPv6 URL"),
        ("redis://:se/cret@somewhere", "is the password percent-encoded?"),
        ("redis+sentinel://:secret@somewhere", "it must look like redis+sentinel://"),
        ("redis+sentinel://somewhere:port/mill", "it must look like redis+sentinel://"),
        ("redis+sentinel://:secret@somewhere/mill?ssl=true", "its only options are"),
    ],
)
def test_a_url_that_makes_no_sense_is_one_line_without_its_password(url: str, said: str) -> None:
    with pytest.raises(StoreError) as caught:
        connect(url)

    assert said in str(caught.value)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://somewhere:6379/0", "redis://somewhere:6379/0"),
        ("redis://me:secret@somewhere/0", "redis://me:***@somewhere/0"),
        ("redis://:se/c@ret@somewhere", "redis://:***@somewhere"),
        ("redis://somewhere/0?password=secret&db=1", "redis://somewhere/0?password=***&db=1"),
        ("redis+sentinel://a:1,b:2/mill?sentinel_password=x", "redis+sentinel://a:1,b:2/mill?sentinel_password=***"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
