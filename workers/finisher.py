"""The finisher: tells RQ how jobs ended, on a thread of its own, after their last event is out.

Clients do not wait for any of this; it keeps RQ's records true for `rq info` and dashboards.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass, field

from rq import Queue
from rq.executions import Execution
from rq.job import JobStatus
from rq.worker.base import BaseWorker

from shared.domain import Failed
from shared.jobs import DataJob, for_show, mark_cancelled
from shared.logs import about
from shared.store import CONNECTION_ERRORS
from workers.attempt import Attempt
from workers.publisher import Outcome

RETRY_S = 0.5
HEARTBEAT_S = 15.0

logger = logging.getLogger("tokenmill.worker")


@dataclass(eq=False, slots=True)
class RunningJob:
    """A job in progress. `registered` is set once RQ's records say that it runs."""

    job: DataJob
    queue: Queue
    execution: Execution | None = None
    registered: threading.Event = field(default_factory=threading.Event)


class Finisher:
    """Finishes jobs through the RQ worker that took them; `worker` is set once that exists."""

    worker: BaseWorker

    def __init__(self) -> None:
        self._jobs: dict[Attempt, RunningJob] = {}
        self._ended: queue.SimpleQueue[tuple[RunningJob, Outcome, Failed | None] | None] = queue.SimpleQueue()

    def expect(self, attempt: Attempt, running: RunningJob) -> None:
        """Remember whose job an attempt is."""
        self._jobs[attempt] = running

    def ended(self, attempt: Attempt, outcome: Outcome, failure: Failed | None) -> None:
        """An attempt left the worker; its job is finished soon. Never blocks."""
        running = self._jobs.pop(attempt, None)
        if running is not None:
            self._ended.put((running, outcome, failure))

    def reject(self, running: RunningJob, failure: Failed) -> None:
        """A job that never became an attempt is finished soon."""
        self._ended.put((running, Outcome.FAILED, failure))

    def discard(self, running: RunningJob, *, is_running: bool) -> None:
        """Drop a job that is not to be run here from RQ's intermediate queue.

        Its request runs elsewhere or has ended. If RQ says that it never started, it was ended by
        someone who could not take it off the queue; else whoever runs or ran it keeps RQ's record.
        """
        job, connection = running.job, self.worker.connection
        connection.lrem(running.queue.intermediate_queue_key, 1, job.id)
        with for_show(f"record job {job.id} as cancelled"):
            if not is_running and connection.hget(job.key, "status") == JobStatus.QUEUED.encode():
                mark_cancelled(job)

    def stop(self) -> None:
        """Let `run` return once everything that has ended is finished."""
        self._ended.put(None)

    def run(self) -> None:
        """The finisher's thread; also keeps the RQ records of running jobs alive."""
        heartbeat_at = time.monotonic() + HEARTBEAT_S
        while True:
            try:
                item = self._ended.get(timeout=max(0.0, heartbeat_at - time.monotonic()))
            except queue.Empty:
                self._heartbeat()
                heartbeat_at = time.monotonic() + HEARTBEAT_S
                continue
            if item is None:
                return
            self._finish_with_patience(*item)

    def _heartbeat(self) -> None:
        for running in list(self._jobs.values()):
            if running.execution is not None:
                try:
                    with for_show(f"renew the record of job {running.job.id}"):
                        self.worker.maintain_heartbeats(running.job, running.execution)
                except CONNECTION_ERRORS as error:
                    logger.warning(
                        "cannot renew RQ's record of job %s: %s", running.job.id, error, extra=about(running.job.id)
                    )
                    return

    def _finish_with_patience(self, running: RunningJob, outcome: Outcome, failure: Failed | None) -> None:
        running.registered.wait()
        while True:
            try:
                with for_show(f"record the end of job {running.job.id}"):
                    self._finish(running, outcome, failure)
                return
            except CONNECTION_ERRORS as error:
                logger.warning("cannot finish job %s yet: %s", running.job.id, error, extra=about(running.job.id))
                time.sleep(RETRY_S)

    def _finish(self, running: RunningJob, outcome: Outcome, failure: Failed | None) -> None:
        job, rq_queue, execution, worker = running.job, running.queue, running.execution, self.worker
        if execution is None:
            return  # RQ's record could not be begun, and the log has said so
        if outcome is Outcome.FENCED:
            self._release(running)
            return
        # Of a job that Redis has lost it would leave a record for ever; whoever ended one is not fenced.
        worker.handle_execution_ended(job, rq_queue, heartbeat_ttl=60)
        if outcome is Outcome.DONE:
            worker.handle_job_success(job, rq_queue, rq_queue.started_job_registry, execution)
        else:
            assert failure is not None
            # Not the message, which is for the client: a chat template may repeat in it what it refuses.
            worker.handle_job_failure(job, rq_queue, exc_string=failure.code, execution=execution)

    def _release(self, running: RunningJob) -> None:
        """Drop our hold on a job whose request was ended or taken over elsewhere."""
        job, worker = running.job, self.worker
        with worker.connection.pipeline() as pipeline:
            worker.cleanup_execution(job, pipeline, running.execution)
            pipeline.execute()
        status, owner = worker.connection.hmget(job.key, "status", "worker_name")
        if status == JobStatus.STARTED.encode() and owner == worker.name.encode():
            mark_cancelled(job)
