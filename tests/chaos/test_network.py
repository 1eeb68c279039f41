"""Two hosts whose link is cut and healed: no connection is closed, packets are just gone."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from hosts import NEAR_ADDRESS, Network, require_namespaces
from open_streams import MODEL, OpenStream, answers, ask, undisturbed
from rq.command import send_shutdown_command
from servers import FrontEnd, Valkey, free_port, wait_until
from worker_processes import Office, Start, WorkerProcess

from shared import keys

LEASE = ("--lease", "4")
RECOVERY_S = 30.0
LONG = 300
"""Tokens of an answer that takes longer than a lease."""

StartFrontEnd = Callable[..., FrontEnd]


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts; the test itself, and what it starts unless it says otherwise, is on the near one."""
    require_namespaces()
    with Network() as network, network.on(network.near):
        yield network


@pytest.fixture
def valkey(network: Network, tmp_path: Path) -> Iterator[Valkey]:  # noqa: ARG001
    """A Valkey on the near host, which both hosts reach."""
    folder = tmp_path / "valkey"
    folder.mkdir()
    options = ("--bind", "127.0.0.1", NEAR_ADDRESS, "--protected-mode", "no", "--save", "")
    server = Valkey(folder, port=free_port(), options=options)
    server.start()
    yield server
    server.stop()


def only_log(client: "redis.Redis") -> bytes:
    """The log of the only request so far."""
    logs: Any = client.keys(f"{keys.LOG_PREFIX}*")
    (log,) = logs
    return bytes(log)


def attempts(client: "redis.Redis", log: bytes) -> list[int]:
    """The attempts that wrote to a log, in order."""
    entries: Any = client.xrange(log)
    return [int(attempt) for attempt, _ in itertools.groupby(id.partition(b"-")[0] for id, _ in entries)]


def name_of(office: Office, worker: WorkerProcess) -> str:
    return next(info.name for info in office.workers() if info.pid == worker.pid)


def left_of_lease(client: "redis.Redis", name: str) -> float:
    """Seconds; negative if it has run out."""
    return client.pttl(keys.worker(name)) / 1000


def far_url(valkey: Valkey) -> str:
    return f"redis://{NEAR_ADDRESS}:{valkey.port}/0"


def test_a_short_cut_is_a_pause_in_the_stream(
    network: Network, valkey: Valkey, start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    front_end = start_front_end()
    with network.on(network.far):
        worker = start("--lease", "8", redis_url=far_url(valkey), model=MODEL)
    office.ready(worker)
    name = name_of(office, worker)
    stream = OpenStream(front_end, LONG).has_begun()

    network.cut("down")
    wait_until(lambda: left_of_lease(office.client, name) < 5.5, what="a lease that is not renewed")
    held = len(stream.text)
    wait_until(lambda: left_of_lease(office.client, name) < 5, what="less of it")
    assert len(stream.text) == held
    network.heal()

    assert stream.end(RECOVERY_S).is_complete, stream.failure
    assert stream.text == undisturbed(LONG)
    assert attempts(office.client, only_log(office.client)) == [1]
    assert worker.is_running
    assert "Traceback" not in worker.output


def test_a_long_cut_moves_the_stream_to_a_worker_that_can_be_reached(
    network: Network, valkey: Valkey, start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    front_end = start_front_end()
    with network.on(network.far):
        far = start(*LEASE, redis_url=far_url(valkey), model=MODEL)
    office.ready(far)
    stream = OpenStream(front_end, LONG).has_begun()
    log = only_log(office.client)
    near = start(*LEASE, model=MODEL)
    office.ready(near)
    name = name_of(office, far)

    network.cut("dropped")
    # Redis still waits for the far worker to take a job, and gives it the next one.
    meanwhile = [OpenStream(front_end, 20) for _ in range(4)]
    wait_until(lambda: not office.client.exists(keys.worker(name)), limit_s=RECOVERY_S, what="the end of the lease")
    for other in meanwhile:
        assert other.end(RECOVERY_S).text == undisturbed(20)
    wait_until(lambda: attempts(office.client, log) == [1, 2], limit_s=RECOVERY_S, what="the second attempt")
    network.heal()

    assert stream.end(RECOVERY_S).is_complete, stream.failure
    assert stream.text == undisturbed(LONG)
    assert attempts(office.client, log) == [1, 2]
    office.ready(far)
    wait_until(lambda: all(info.running == 0 for info in office.workers()), limit_s=RECOVERY_S, what="free slots")

    near.terminate()
    assert near.end() == 0
    wait_until(lambda: answers(front_end), limit_s=RECOVERY_S, what="an answer by the far worker")
    assert ask(front_end, 40).json()["choices"][0]["text"] == undisturbed(40)
    assert "Traceback" not in far.output + near.output
    send_shutdown_command(office.client, name)
    assert far.end() == 0


def test_a_front_end_that_was_cut_off_goes_on_with_its_streams(
    network: Network, valkey: Valkey, start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(*LEASE, model=MODEL))
    with network.on(network.far):
        front_end = start_front_end(far_url(valkey))
        stream = OpenStream(front_end, LONG).has_begun()

        network.cut("dropped")
        wait_until(lambda: not is_ready(front_end), limit_s=RECOVERY_S, what="/ready to say 503")
        network.heal()

        assert stream.end(RECOVERY_S).is_complete, stream.failure
        assert stream.text == undisturbed(LONG)
        wait_until(lambda: is_ready(front_end), limit_s=RECOVERY_S, what="readiness")
        assert ask(front_end, 40).json()["choices"][0]["text"] == undisturbed(40)


def is_ready(front_end: FrontEnd) -> bool:
    return httpx.get(f"{front_end.url}/ready", timeout=20).status_code == 200
