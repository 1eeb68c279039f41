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
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty
from rq.utils import current_timestamp, now
from rq.worker.base import BaseWorker

from shared.jobs import DataJob, DataQueue
from shared.store import CONNECTION_ERRORS, MisplacedError

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
    queue_class = DataQueue

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
        """Register once more if Redis came back without this worker, or with something else in its place."""
        try:
            is_known = self.connection.hexists(self.key, "birth")
        except MisplacedError:
            is_known = False
        if not is_known:
            self.connection.delete(self.key)
            # RQ refuses a name that has a record. The finisher may just have written to it: then the next time.
            with contextlib.suppress(ValueError):
                self.register_birth()

    def register_birth(self) -> None:
        """Where RQ's registers are no sets, this worker is not in them, and works all the same."""
        try:
            super().register_birth()  # type: ignore[no-untyped-call]
        except MisplacedError as error:
            logger.warning("RQ's register of workers is damaged: %s", error)

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

    def run_maintenance_tasks(self) -> None:
        """Forget the jobs that ended long ago.

        RQ's own tidying reads and enqueues whatever jobs its registers name, and goes by clocks. What is abandoned
        the reaper finds; groups, dependents and rate limits there are none.
        """
        with self._patience("tidy RQ's registries"):
            for queue in self.queues:
                for registry in (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry):
                    self.connection.zremrangebyscore(registry.key_template.format(queue.name), 0, current_timestamp())
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ says None, and means until the first time

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

    def handle_job_failure(
        self,
        job: Job,
        queue: Queue,  # noqa: ARG002
        started_job_registry: Any = None,  # noqa: ARG002
        exc_string: str = "",
        execution: Execution | None = None,
    ) -> None:
        """RQ's record of a failure, without what it does besides: retries, dependents, webhooks.

        An error gets out, to be tried again or told; RQ's version logs it and goes on.
        """
        with self.connection.pipeline() as pipeline:
            self.cleanup_execution(job, pipeline, execution)
            job.set_status(JobStatus.FAILED, pipeline=pipeline)
            job._handle_failure(
                exc_string,
                pipeline,
                worker_name=self.name,
                execution_id=execution.id if execution else None,
                execution_started_at=execution.created_at if execution else None,
                execution_ended_at=job.ended_at,
            )
            self.increment_failed_job_count(pipeline)
            if job.started_at and job.ended_at:
                self.increment_total_working_time(job.ended_at - job.started_at, pipeline)
            pipeline.execute()

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        """Keep listening, whatever happens: RQ's own version ends the thread on a timeout."""
        logger.warning("RQ's commands cannot be heard: %s", exc, exc_info=not isinstance(exc, CONNECTION_ERRORS))
        self._asked_at = None
        time.sleep(RECONNECT_S)

    def handle_payload(self, message: Any) -> None:  # noqa: ARG002
        """Any command that comes shows that commands are heard; what it means is for others to say."""
        self._asked_at = None
