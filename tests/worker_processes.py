"""Real worker processes, and what a front end would hear of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from asking import request
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from servers import ROOT, wait_until

from shared.domain import Chunk, Event, Priority, is_terminal
from shared.fleet import Fleet, WorkerInfo
from shared.jobs import rq_queue
from shared.log import Entry, LogReader
from shared.queue import RequestQueue

END_LIMIT_S = 30.0

ENDLESS = "fake=fake:pace=0.01&end_every=0&context=100000"
SLOW = "fake=fake:pace=0.05&end_every=0&context=100000"
SHORT_LEASE = ("--lease", "2")
"""Renewed twice a second, so what a worker says of itself is soon true."""


class WorkerProcess:
    """`tokenmill worker` in a process of its own, with its output in a file."""

    def __init__(self, redis_url: str, folder: Path, *arguments: str, model: str = "fake=fake:pace=0.01") -> None:
        self._output = folder / f"worker-{len(list(folder.glob('worker-*')))}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        with self._output.open("wb") as output:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "deploy.cli",
                    "worker",
                    "--model",
                    model,
                    "--redis",
                    redis_url,
                    *SHORT_LEASE,
                    *arguments,
                ],
                cwd=ROOT,
                env=environment | {"TOKENMILL_LOG_LEVEL": "warning"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        """What was printed so far: nothing, as long as all is well."""
        return self._output.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(END_LIMIT_S)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Wait for its end; the exit status."""
        return self.popen.wait(END_LIMIT_S)


Start = Callable[..., WorkerProcess]
"""Starts workers for a test; see the fixture `start`."""


class Office:
    """Sends requests to workers and reads what becomes of them, as a front end and an operator do."""

    def __init__(self, client: "redis.Redis", *, model: str = "fake") -> None:
        self.client = client
        self.queue = RequestQueue(client)
        self.model = model
        self._reader = LogReader(client)

    def submit(self, *names: str, timeout_s: float = 60, **fields: Any) -> None:
        for name in names:
            self.queue.submit(request(name, model=self.model, **fields), limit=1000, timeout_s=timeout_s)

    def entries(self, name: str) -> list[Entry]:
        """All entries of a request's log so far."""
        return self._reader.whole(name)

    def events(self, name: str) -> list[Event]:
        return [entry.event for entry in self.entries(name)]

    def has_ended(self, name: str) -> bool:
        events = self.events(name)
        return bool(events) and is_terminal(events[-1])

    def result(self, name: str, *, limit_s: float = 30) -> list[Event]:
        """All events of a request, once it has ended; it ends once."""

        def ended() -> list[Event]:
            events = self.events(name)
            return events if events and is_terminal(events[-1]) else []

        events: list[Event] = wait_until(ended, limit_s=limit_s, what=f"the end of {name}")
        assert sum(map(is_terminal, events)) == 1
        return events

    def wait_for_text(self, name: str) -> None:
        wait_until(lambda: any(isinstance(event, Chunk) for event in self.events(name)), what=f"text of {name}")

    def workers(self) -> list[WorkerInfo]:
        return Fleet(self.client).workers()

    def ready(self, *workers: WorkerProcess) -> None:
        """Wait until these workers have announced themselves."""

        def are_there() -> bool:
            for worker in workers:
                assert worker.is_running, worker.output
            return {worker.pid for worker in workers} <= {info.pid for info in self.workers()}

        wait_until(are_there, limit_s=60, what="the worker's announcement")

    def status(self, name: str) -> JobStatus:
        """What RQ's record says, whatever else is in it."""
        return Job(name, connection=self.client, serializer=JSONSerializer).get_status()

    def wait_for_status(self, status: JobStatus, names: Sequence[str]) -> None:
        """Wait until RQ's record of each job says this."""
        wait_until(
            lambda: all(self.status(name) is status for name in names),
            what=f"{status} of {list(names)} ({[self.status(name) for name in names]})",
        )

    def left_in_rq(self) -> list[str]:
        """What RQ still counts as waiting, taken or running, in both of the model's queues."""
        left: list[str] = []
        for priority in Priority:
            queue = rq_queue(self.client, self.model, priority)
            between = IntermediateQueue.get_intermediate_queue_key(queue.key)
            left += queue.job_ids
            left += [raw.decode(errors="replace") for raw in self.client.lrange(between, 0, -1)]
            left += StartedJobRegistry(queue=queue).get_job_ids(cleanup=False)
        return left

    def is_clean(self) -> bool:
        """Wait until nothing is left in RQ and no slot is in use by the workers' own account."""
        wait_until(lambda: not self.left_in_rq(), what="empty queues and registries")
        wait_until(lambda: all(info.running == 0 for info in self.workers()), what="free slots")
        return True
