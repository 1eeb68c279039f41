"""Hosts whose clocks disagree by an hour."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from asking import text_of
from clocks import wrong_by
from open_streams import MODEL, undisturbed
from rq.job import JobStatus
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker
from servers import Valkey, wait_until
from worker_processes import Office, WorkerProcess

from shared import keys
from shared.domain import Priority
from shared.jobs import DataJob
from shared.queue import RequestQueue
from shared.reaper import Reaper

HOUR_S = 3600
QUEUE = keys.queue_name("fake", Priority.INTERACTIVE)


@pytest.fixture
def workers(valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["WrongClocks"]:
    clocks = WrongClocks(valkey, tmp_path, monkeypatch)
    yield clocks
    for worker in clocks.started:
        worker.kill()


class WrongClocks:
    """Starts workers with one slot each, whose clocks are wrong."""

    def __init__(self, valkey: Valkey, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._valkey = valkey
        self._folder = folder
        self._monkeypatch = monkeypatch
        self.started: list[WorkerProcess] = []

    def start(self, by_s: float) -> WorkerProcess:
        with self._monkeypatch.context() as patch:
            for name, value in wrong_by(by_s, self._folder / "clock").items():
                patch.setenv(name, value)
            self.started.append(WorkerProcess(self._valkey.url, self._folder, "--slots", "1", model=MODEL))
        return self.started[-1]


@pytest.mark.parametrize("first_by_s", [-HOUR_S, HOUR_S])
def test_nobody_is_called_dead_or_failed_for_a_wrong_clock(
    first_by_s: int,
    workers: WrongClocks,
    client: "redis.Redis",
    no_key_without_ttl: None,  # noqa: ARG001
) -> None:
    office = Office(client)
    first = workers.start(first_by_s)
    office.ready(first)
    office.submit("one", max_tokens=300)
    office.wait_for_text("one")
    # Whoever starts tidies RQ's registries first, by its own clock.
    second = workers.start(-first_by_s)
    office.ready(second)
    office.submit("two", max_tokens=150)
    office.wait_for_text("two")

    # As do rq-dashboard and this host, whose clock is right, whenever they count jobs.
    running = StartedJobRegistry(QUEUE, connection=client, job_class=DataJob, serializer=JSONSerializer)
    assert sorted(running.get_job_ids()) == ["one", "two"]
    Reaper(client, RequestQueue(client), name="test").run_once()
    assert [office.status(name) for name in ("one", "two")] == [JobStatus.STARTED] * 2
    skew = [abs(worker.last_heartbeat.timestamp() - now(client)) for worker in BaseWorker.all(client)]
    assert all(HOUR_S - 60 < seconds < HOUR_S + 60 for seconds in skew)

    assert text_of(office.result("one")) == undisturbed(300)
    assert text_of(office.result("two")) == undisturbed(150)
    office.wait_for_status(JobStatus.FINISHED, ["one", "two"])
    assert FailedJobRegistry(QUEUE, connection=client).get_job_ids(cleanup=False) == []
    assert {info.pid for info in office.workers()} == {first.pid, second.pid}
    assert [worker.output for worker in (first, second)] == ["", ""]
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def now(client: "redis.Redis") -> float:
    """Redis's time."""
    seconds, _ = client.time()
    return float(seconds)
