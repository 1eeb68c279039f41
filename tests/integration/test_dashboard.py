"""rq-dashboard, unmodified, shows what workers do."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from servers import Valkey, free_port, wait_until
from worker_processes import Office, WorkerProcess


@pytest.fixture
def dashboard(valkey: Valkey) -> Iterator[httpx.Client]:
    """A client of a running dashboard."""
    port = free_port()
    process = subprocess.Popen(
        [
            Path(sys.executable).with_name("rq-dashboard"),
            "-b",
            "127.0.0.1",
            "-p",
            str(port),
            "-u",
            valkey.url,
            "--json",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            wait_until(lambda: _answers(client), limit_s=30, what="the dashboard to answer")
            yield client
    finally:
        process.terminate()
        process.wait(10)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/").status_code == 200
    except httpx.TransportError:
        return False


def test_the_dashboard_shows_workers_queues_and_jobs(
    client: "redis.Redis", valkey: Valkey, dashboard: httpx.Client, tmp_path: Path
) -> None:
    office = Office(client)
    worker = WorkerProcess(valkey.url, tmp_path, "--slots", "2", model="fake=fake:pace=0.05&end_every=0")
    try:
        office.ready(worker)
        office.submit("one", "two", "three", max_tokens=200)

        def working() -> Any:
            found = dashboard.get("/0/data/workers.json").raise_for_status().json()["workers"]
            return found if found and found[0]["state"].lower().endswith("busy") else None

        shown = wait_until(working, limit_s=20, what="a busy worker on the dashboard")
        assert [entry["pid"] for entry in shown] == [worker.pid]
        assert shown[0]["queues"] == ["fake.interactive", "fake.background"]

        queues = {entry["name"]: entry for entry in dashboard.get("/0/data/queues.json").json()["queues"]}
        assert queues["fake.interactive"]["count"] == 1

        job = dashboard.get("/0/data/job/one.json").json()
        assert job["status"] == "started"
        assert job["description"].startswith("fake: 1 choice")
    finally:
        worker.kill()
