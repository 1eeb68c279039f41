"""RQ's worker, made to outlast a Redis that is away and clocks that are wrong; what it does with jobs is not here.

The only importer of RQ's worker. The reaper, by leases on Redis's clock, knows who is dead; so all that RQ would
conclude from the clock of whichever host looks is switched off.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from rq import Queue
from rq.command import send_command
from rq.executions import Execution
from rq.job import Job
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty
from rq.utils import now
from rq.worker.base import BaseWorker
from rq.worker_registration import clean_worker_registry

from shared.jobs import DataJob
from shared.store import CONNECTION_ERRORS

RQ_HEARTBEAT_S = 5.0
RQ_SILENCE_S = 24 * 3600
"""After so long without a heartbeat RQ calls a running job abandoned, by the clock of whichever host looks. Who is
dead the reaper knows, by leases; so this only has to be more than clocks can be wrong by."""

HELLO_COMMAND = "tokenmill-hello"
"""Sent by a worker to itself."""

DEAF_AFTER_S = 3 * RQ_HEARTBEAT_S
RECONNECT_S = 0.5

logger = logging.getLogger("tokenmill.worker")


class NoDeathPenalty(BaseDeathPenalty):
    """RQ limits jobs by signals in the main thread; ours run elsewhere, and the engine knows deadlines."""

    def setup_death_penalty(self) -> None:
        pass

    def cancel_death_penalty(self) -> None:
        pass


class LastingWorker(BaseWorker):
    """Keeps RQ's loop, registration and records going, whatever Redis does."""

    death_penalty_class = NoDeathPenalty

    def __init__(
        self, queues: Sequence[Queue], *, name: str, client: "redis.Redis", monotonic: Callable[[], float]
    ) -> None:
        super().__init__(
            list(queues),
            name=name,
            connection=client,
            job_class=DataJob,
            serializer=JSONSerializer,
            log_job_description=False,
        )
        self._monotonic = monotonic
        self._last_rq_heartbeat = float("-inf")
        # Since when a command to itself has not come back; None while none is under way.
        self._asked_at: float | None = None

    @contextlib.contextmanager
    def _patience(self, what: str) -> Iterator[None]:
        """Outlast a Redis that is away: the loop around this tries again."""
        try:
            yield
        except CONNECTION_ERRORS as error:
            logger.warning("cannot %s, Redis is away: %s", what, error)
            time.sleep(RECONNECT_S)

    def _with_patience(self, act: Callable[[], Any]) -> Any:
        """Repeat something that must happen until Redis is there for it."""
        while True:
            try:
                return act()
            except CONNECTION_ERRORS as error:
                logger.warning("Redis is away: %s", error)
                time.sleep(RECONNECT_S)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """RQ's own heartbeat, for its dashboards; ours is the lease."""
        now = self._monotonic()
        if pipeline is None and now - self._last_rq_heartbeat < RQ_HEARTBEAT_S:
            return
        self._last_rq_heartbeat = now
        with self._patience("tell RQ of this worker"):
            if pipeline is None:
                self._be_known()
                self._hear_itself()
            super().heartbeat(timeout, pipeline)

    def _be_known(self) -> None:
        """Register once more if Redis came back without this worker."""
        if not self.connection.hexists(self.key, "birth"):
            self.connection.delete(self.key)
            # RQ refuses a name that has a record. The finisher may just have written to it: then the next time.
            with contextlib.suppress(ValueError):
                self.register_birth()  # type: ignore[no-untyped-call]

    def _hear_itself(self) -> None:
        """Send itself a command, and replace the connection on which it has heard none for too long.

        redis-py sends pings there, and waits for no answer.
        """
        now = self._monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > DEAF_AFTER_S:
            self._asked_at = now
            self._wake_listener()
        send_command(self.connection, self.name, HELLO_COMMAND)

    def _wake_listener(self) -> None:
        """End the connection under RQ's listening thread. It alone may close it: it may be reading right now."""
        connection: Any = self.pubsub.connection if self.pubsub is not None else None
        if connection is not None and connection._sock is not None:
            with contextlib.suppress(OSError):
                connection._sock.shutdown(socket.SHUT_RDWR)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:  # noqa: ARG002
        return RQ_SILENCE_S

    def clean_registries(self) -> None:
        """RQ's tidying, without its own search for jobs that were taken and never begun: it goes by clocks as well."""
        for queue in self.queues:
            if queue.acquire_maintenance_lock():
                clean_registries(queue)
                clean_worker_registry(queue)
                queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ says None, and means until the first time

    def run_maintenance_tasks(self) -> None:
        with self._patience("tidy RQ's registries"):
            super().run_maintenance_tasks()  # type: ignore[no-untyped-call]

    def check_for_suspension(self, burst: bool) -> None:
        with self._patience("ask whether workers are suspended"):
            super().check_for_suspension(burst)

    def procline(self, message: str) -> None:
        """Keep the process title that the command line gave."""

    def prepare_execution(self, job: Job) -> Execution:
        """RQ's record of a run, but not in its index of what a worker runs.

        rq-dashboard shows the first job of that index by unpickling it, whatever serializer it was told
        of, and answers 500 for the whole list of workers. The started registry lists the same jobs.
        """
        with self.connection.pipeline() as pipeline:
            execution = Execution.create(job, self.get_heartbeat_ttl(job), pipeline)
            self.executions[execution.id] = execution
            pipeline.execute()
        return execution

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        """Keep listening, whatever happens: RQ's own version ends the thread on a timeout."""
        logger.warning("RQ's commands cannot be heard: %s", exc, exc_info=not isinstance(exc, CONNECTION_ERRORS))
        self._asked_at = None
        time.sleep(RECONNECT_S)

    def handle_payload(self, message: Any) -> None:  # noqa: ARG002
        """Any command that comes shows that commands are heard; what it means is for others to say."""
        self._asked_at = None
