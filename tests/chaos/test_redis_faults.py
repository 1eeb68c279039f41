"""Redis that goes away, comes back with or without what it knew, runs full, or falls silent."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from open_streams import MODEL, OpenStream, answers, ask, undisturbed
from proxies import Proxy
from rq import Queue
from rq.command import PUBSUB_CHANNEL_TEMPLATE, send_shutdown_command
from rq.worker import BaseWorker
from servers import FrontEnd, Valkey, free_port, wait_until
from worker_processes import Office, WorkerProcess

from shared import keys
from shared.domain import Priority
from shared.errors import RETRYABLE

LEASE_S = 8
LEASE = ("--lease", str(LEASE_S))
RECOVERY_S = 30.0
LOST_AFTER_S = 10.0

StartFrontEnd = Callable[..., FrontEnd]
StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers on the fake engine, with the lease that they have by default."""
    started: list[WorkerProcess] = []

    def start(redis_url: str, *arguments: str, **options: Any) -> WorkerProcess:
        started.append(WorkerProcess(redis_url, tmp_path, *LEASE, *arguments, **{"model": MODEL, **options}))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def is_ready(front_end: FrontEnd) -> bool:
    return httpx.get(f"{front_end.url}/ready", timeout=20).status_code == 200


def keys_for_ever(client: "redis.Redis") -> list[bytes]:
    """Every key without a TTL, but for the names that RQ keeps of queues and workers, and its registries."""
    kept = (b"rq:queues", b"rq:workers", b"rq:finished:", b"rq:failed:", b"rq:wip:", b"rq:canceled:")
    found: Any = client.scan_iter()
    return [key for key in found if client.pttl(key) == -1 and not key.startswith(kept)]


# -- Redis is restarted with its append-only file --


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_of_redis_is_a_pause_in_the_stream(
    how: str,
    own_durable_valkey: Valkey,
    start_front_end: StartFrontEnd,
    start: StartWorker,
    connect_to: "Callable[[str], redis.Redis]",
) -> None:
    valkey = own_durable_valkey
    front_end = start_front_end(valkey.url)
    worker = start(valkey.url)
    Office(connect_to(valkey.url)).ready(worker)
    wait_until(lambda: is_ready(front_end), what="readiness")
    stream = OpenStream(front_end, 300).has_begun()

    getattr(valkey, how)()
    wait_until(lambda: not is_ready(front_end), limit_s=20, what="/ready to say 503")
    refused = ask(front_end)
    valkey.start()

    stream.end(RECOVERY_S)
    assert stream.is_complete, stream.failure
    assert stream.text == undisturbed(300)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(refused.headers["Retry-After"]) > 0
    wait_until(lambda: is_ready(front_end), what="readiness after the restart")
    assert answers(front_end)
    assert worker.is_running


# -- Redis comes back empty --


def test_what_an_empty_redis_has_lost_is_said_and_workers_are_there_again(
    own_valkey: Valkey,
    start_front_end: StartFrontEnd,
    start: StartWorker,
    connect_to: "Callable[[str], redis.Redis]",
) -> None:
    front_end = start_front_end(own_valkey.url)
    workers = [start(own_valkey.url) for _ in range(2)]
    client = connect_to(own_valkey.url)
    office = Office(client)
    office.ready(*workers)
    streams = [OpenStream(front_end, 2000).has_begun() for _ in range(2)]
    whole = OpenStream(front_end, 2000, stream=False)
    wait_until(lambda: sum(info.running for info in office.workers()) == 3, what="three running requests")

    own_valkey.kill()
    own_valkey.start()

    for stream in streams:
        assert stream.end(LOST_AFTER_S).failure in RETRYABLE
    assert whole.end(LOST_AFTER_S).failure in RETRYABLE
    assert whole.status == 503
    wait_until(lambda: answers(front_end), limit_s=LOST_AFTER_S, what="an answer")
    office.ready(*workers)
    wait_until(lambda: pids_in_rq(client) == {worker.pid for worker in workers}, what="RQ's list of workers")
    wait_until(lambda: not any(info.running for info in office.workers()), what="free slots")
    wait_until(lambda: not keys_for_ever(client), what=f"a TTL on {keys_for_ever(client)}")


def pids_in_rq(client: "redis.Redis") -> set[int | None]:
    """The workers that `rq info` would list, for each of the queues."""
    queues = [Queue(keys.queue_name("fake", priority), connection=client) for priority in Priority]
    first, second = ({worker.pid for worker in BaseWorker.all(queue=queue)} for queue in queues)
    return first & second & {worker.pid for worker in BaseWorker.all(client)}


# -- Redis is out of memory --


def test_a_full_redis_refuses_requests_and_loses_none(
    own_valkey: Valkey,
    start_front_end: StartFrontEnd,
    start: StartWorker,
    connect_to: "Callable[[str], redis.Redis]",
) -> None:
    front_end = start_front_end(own_valkey.url)
    worker = start(own_valkey.url, "--lease", "2", "--slots", "1")
    client = connect_to(own_valkey.url)
    office = Office(client)
    office.ready(worker)
    stream = OpenStream(front_end, 300).has_begun()
    queued = OpenStream(front_end, 40, stream=False)
    wait_until(lambda: office.queue.depth("fake") == 1, what="a request in the queue")
    name = office.workers()[0].name

    client.config_set("maxmemory", "1mb")
    wait_until(lambda: "holding" in worker.output, what="the worker's complaint")
    refused = ask(front_end)
    held = len(stream.text)
    # Long enough for the lease to run out, if it were not renewed.
    left = [client.pttl(keys.worker(name)) for _ in repeated(3 * 2.0)]
    client.config_set("maxmemory", "0")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(refused.headers["Retry-After"]) > 0
    assert min(left) > 0
    assert len(stream.text) >= held
    stream.end(RECOVERY_S)
    assert stream.is_complete, stream.failure
    assert stream.text == undisturbed(300)
    assert queued.end(RECOVERY_S).text == undisturbed(40)
    assert answers(front_end)
    assert worker.is_running
    assert [info.name for info in office.workers()] == [name]
    assert "Traceback" not in worker.output
    assert office.is_clean()


def repeated(for_s: float) -> Iterator[None]:
    """Again and again, for so long."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        yield
        time.sleep(0.05)


# -- connections that fall silent --


def test_half_open_connections_are_replaced_and_the_stream_goes_on(
    tmp_path: Path, start_front_end: StartFrontEnd, start: StartWorker, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    valkey = Valkey(folder, port=free_port(), options=("--bind", "127.0.0.1", "--save", ""))
    valkey.start()
    try:
        with Proxy(valkey.port) as proxy:
            front_end = start_front_end(proxy.url)
            worker = start(proxy.url)
            # Its connections work all the time, and so it would see a lease run out.
            witness = start(valkey.url, model="other=fake:")
            client = connect_to(valkey.url)
            office = Office(client)
            office.ready(worker, witness)
            stream = OpenStream(front_end, 300).has_begun()

            assert proxy.blacken() >= 4

            wait_until(lambda: answers(front_end), limit_s=RECOVERY_S, what="an answer")
            stream.end(RECOVERY_S)
            assert stream.is_complete, stream.failure
            assert stream.text == undisturbed(300)
            assert {info.pid for info in office.workers()} == {worker.pid, witness.pid}
            assert "is dead" not in witness.output
            name = next(info.name for info in office.workers() if info.pid == worker.pid)
            channel = PUBSUB_CHANNEL_TEMPLATE % name
            # Redis still counts the one that nobody hears.
            wait_until(lambda: client.pubsub_numsub(channel)[0][1] == 2, limit_s=RECOVERY_S, what="the command channel")
            send_shutdown_command(client, name)
            assert worker.end() == 0
    finally:
        valkey.stop()
