"""Redis behind Sentinel: who was connected to the primary finds the next one."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from open_streams import MODEL, OpenStream, answers, ask, undisturbed
from proxies import Proxy
from redis_sets import OPTIONS, RedisSet
from servers import FrontEnd, Valkey, free_port, wait_until
from worker_processes import Office, WorkerProcess

from api.subscriber import Subscriber
from shared.errors import RETRYABLE
from shared.keys import events
from shared.store import check, connect

RECOVERY_S = 30.0


@pytest.fixture
def redis_set(tmp_path: Path) -> Iterator[RedisSet]:
    with RedisSet(tmp_path) as running:
        yield running


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_stream_survives_the_end_of_the_primary_and_new_requests_work(
    how: str, redis_set: RedisSet, start_front_end: Callable[..., FrontEnd], tmp_path: Path
) -> None:
    front_end = start_front_end(redis_set.url)
    worker = WorkerProcess(redis_set.url, tmp_path, "--lease", "8", model=MODEL)
    client = connect(redis_set.url)
    try:
        office = Office(client)
        office.ready(worker)
        stream = OpenStream(front_end, 400).has_begun()

        getattr(redis_set.primary, how)()

        stream.end(RECOVERY_S)
        if stream.is_complete:
            assert stream.text == undisturbed(400)
        else:
            # What the primary had not handed on when it died is lost, and is said to be.
            assert stream.failure in RETRYABLE
        wait_until(lambda: answers(front_end), limit_s=RECOVERY_S, what="an answer after the failover")
        assert ask(front_end, 40).json()["choices"][0]["text"] == undisturbed(40)
        assert worker.is_running
        assert [info.pid for info in office.workers()] == [worker.pid]
    finally:
        worker.kill()
        client.connection_pool.disconnect()


def test_clients_follow_a_failover_in_which_nothing_dies(redis_set: RedisSet, connect_to: Any) -> None:
    client = connect_to(redis_set.url)
    subscriber = Subscriber(client)
    subscriber.start()
    try:
        check(client, redis_set.url)
        client.set("before", 1)
        client.wait(1, 5000)
        first = client.info("server")["tcp_port"]
        with subscriber.subscribe("a") as mailbox, redis.Redis(port=redis_set.sentinel_port) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", redis_set.service)

            wait_until(lambda: tells(client, first), limit_s=RECOVERY_S, what="another primary")
            client.set("after", 1)
            assert client.get("before") == b"1"
            wait_until(lambda: client.publish(events("a"), "heard") == 1, what="the subscription at the new primary")
            wait_until(lambda: b"heard" in mailbox.take(0.1).messages, what="a message")
    finally:
        subscriber.stop()


def tells(client: "redis.Redis", former_port: int) -> bool:
    """Whether the client talks to another primary than that."""
    try:
        facts: Any = client.info()
    except redis.ConnectionError:
        return False
    return bool(facts["role"] == "master" and facts["tcp_port"] != former_port)


def test_a_sentinel_that_is_gone_is_not_forgotten(redis_set: RedisSet, connect_to: Any) -> None:
    redis_set.kill_sentinel(0)
    clients = [connect_to(redis_set.url) for _ in range(2)]
    together = threading.Barrier(16)

    def use(client: "redis.Redis") -> None:
        together.wait()
        client.ping()

    for client in clients:
        threads = [threading.Thread(target=use, args=(client,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        known = client.connection_pool.sentinel_manager.sentinels
        ports = {sentinel.connection_pool.connection_kwargs["port"] for sentinel in known}
        assert len(ports) == len(known) == 3


def test_no_primary_is_like_a_redis_that_is_away(connect_to: Any) -> None:
    client = connect_to(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/nobody")

    for _ in range(3):
        with pytest.raises(redis.ConnectionError):
            client.ping()

    assert len(client.connection_pool._connections) == 1


@pytest.mark.parametrize("serves_stale_data", [True, False])
def test_without_sentinels_a_connection_to_a_former_primary_is_replaced(
    tmp_path: Path, connect_to: Any, serves_stale_data: bool
) -> None:
    """Where the same address leads to another server after a failover."""
    folders = [tmp_path / name for name in ("former", "next")]
    servers = []
    for folder in folders:
        folder.mkdir()
        servers.append(Valkey(folder, port=free_port(), options=OPTIONS))
    former, following = servers
    try:
        former.start()
        following.start()
        with Proxy(former.port) as proxy:
            client = connect_to(proxy.url)
            client.set("key", "former")
            proxy.target = following.port
            direct = connect_to(former.url)
            direct.config_set("replica-serve-stale-data", "yes" if serves_stale_data else "no")
            direct.replicaof("127.0.0.1", free_port())

            client.set("key", "next")

            assert connect_to(following.url).get("key") == b"next"
    finally:
        for server in servers:
            server.stop()


def test_a_set_without_its_service_name_is_refused_in_one_line(tmp_path: Path) -> None:
    worker = WorkerProcess("redis+sentinel://:secret@127.0.0.1:1", tmp_path)

    assert worker.end() == 1
    assert "redis+sentinel://:***@127.0.0.1:1" in worker.output
    assert "redis+sentinel://[user:password@]host:port[,host:port...]/service[/db]" in worker.output
    assert len(worker.output.splitlines()) == 1
