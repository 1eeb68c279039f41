"""The intake: takes RQ jobs while there is room and hands them to the engine.

The main thread keeps RQ's `work()` loop, its registration and its signals (`workers.lasting_worker`); a
job is prepared here, run by the engine, and finished by `workers.finisher` on another thread, so one
worker has as many jobs in progress as it has room for.
"""

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import redis
from rq import Queue
from rq.command import handle_command, parse_payload
from rq.exceptions import DequeueTimeout
from rq.job import Job
from rq.worker.base import WorkerStatus

from shared.codec import request_from_payload
from shared.domain import Failed, GenerationRequest, Priority
from shared.errors import ErrorCode, RequestError
from shared.jobs import DataJob, for_show, rq_queue
from shared.log import LogReader
from shared.logs import about
from shared.queue import CANCEL_COMMAND, RequestQueue
from shared.store import CONNECTION_ERRORS
from workers.attempt import Attempt
from workers.engine import Engine
from workers.finisher import Finisher, RunningJob
from workers.lasting_worker import LastingWorker
from workers.observer import Observer
from workers.prepare import carry_on, prepare
from workers.prompt import PromptEncoder
from workers.publisher import Publisher

IDLE_WAIT_S = 1
BACKGROUND_POLL_S = 0.2
"""How long an idle worker may wait for an interactive job before it looks for a background one."""

JOB_ID = re.compile(rb"[A-Za-z0-9_-]+")
"""What RQ accepts as one."""

logger = logging.getLogger("tokenmill.worker")


class Intake(LastingWorker):
    """An RQ worker that runs several jobs at once and keeps its model loaded."""

    def __init__(
        self,
        client: "redis.Redis",
        *,
        name: str,
        model: str,
        engine: Engine,
        publisher: Publisher,
        finisher: Finisher,
        observer: Observer,
        encoder: PromptEncoder,
        queue: RequestQueue,
        reader: LogReader,
        on_ready: Callable[[], None],
        on_drain: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            [rq_queue(client, model, priority) for priority in (Priority.INTERACTIVE, Priority.BACKGROUND)],
            name=name,
            client=client,
            monotonic=monotonic,
        )
        self._model = model
        self._engine = engine
        self._publisher = publisher
        self._finisher = finisher
        self._observer = observer
        self._encoder = encoder
        self._requests = queue
        self._reader = reader
        self._on_ready = on_ready
        self._is_ready = False
        self._has_stopped = threading.Event()
        self._on_drain = on_drain

    # --- RQ's loop: what happens between jobs ---

    @property
    def dequeue_timeout(self) -> int:
        """RQ raises the connections' time limit to what this needs; its own default would be minutes."""
        return IDLE_WAIT_S

    def dequeue_job_and_maintain_ttl(
        self,
        timeout: int | None,  # noqa: ARG002 - the waiting is ours
        max_idle_time: int | None = None,  # noqa: ARG002
    ) -> tuple[Job, Queue] | None:
        """Wait for room, then for a job; None once a stop is requested.

        Each queue is asked by itself: asking RQ for several at once would pop a job without keeping
        it anywhere until it is claimed.
        """
        while not self._stop_requested:
            with self._patience("take a job"):
                if not self._is_ready:
                    self._on_ready()
                    self._is_ready = True
                self.heartbeat()
                self._show_state()
                if self.should_run_maintenance_tasks:
                    self.run_maintenance_tasks()
                if self._engine.wait_for_room(IDLE_WAIT_S) and (taken := self._take()) is not None:
                    return taken
        return None

    def _show_state(self) -> None:
        """Let dashboards tell a worker that runs something from one that does not."""
        state = WorkerStatus.BUSY if self._engine.in_flight else WorkerStatus.IDLE
        if state != self.get_state():
            self.set_state(state)

    def _take(self) -> tuple[Job, Queue] | None:
        interactive, background = self.queues
        for queue, timeout in ((interactive, None), (background, None), (interactive, BACKGROUND_POLL_S)):
            if self._stop_requested:
                break
            try:
                taken = self.queue_class.dequeue_any(
                    [queue],
                    timeout,  # type: ignore[arg-type]  # Redis takes fractions of a second
                    connection=self.connection,
                    job_class=self.job_class,
                    serializer=self.serializer,
                )
            except DequeueTimeout:
                continue
            except ValueError:
                self._drop_strays(queue)
                continue
            if taken is not None:
                return taken
        return None

    def _drop_strays(self, queue: Queue) -> None:
        """Take out of the intermediate queue what somebody put on the queue and is no job's id."""
        between = queue.intermediate_queue_key
        entries: Any = self.connection.lrange(between, 0, -1)
        for raw in entries:
            if not JOB_ID.fullmatch(raw):
                logger.warning("an entry of queue %s is no job's id: dropped", queue.name)
                self.connection.lrem(between, 1, raw)

    # --- one job ---

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Claim a job and start it; its end is the finisher's."""
        assert isinstance(job, DataJob)
        # Whatever the job says: RQ's records of it belong to the queue that it was taken from.
        job.origin = queue.name
        running = RunningJob(job, queue)
        claim = self._with_patience(self._claimer(job.id))
        while claim.outcome == "alone" and not self._stop_requested:
            # Meanwhile the reaper may give it to a worker that has nothing else to do.
            self._engine.wait_until_idle(IDLE_WAIT_S)
            claim = self._with_patience(self._claimer(job.id))
        if claim.outcome == "alone":
            self._with_patience(lambda: self._requests.put_back(queue, job.id.encode()))
            return
        if claim.outcome != "claimed":
            self._refuse(running, claim.outcome)
            return
        deadline = self._monotonic() + claim.remaining_s
        try:
            request = self._read(job)
        except RequestError as error:
            self._reject(running, Failed(error.code.value, error.message, error.param))
            return
        attempt = Attempt(request, claim.attempt, deadline, 0, [], claim.is_alone)
        self._finisher.expect(attempt, running)
        self._observer.claimed(attempt, claim)
        self._publisher.open(attempt)
        self._begin(attempt)
        self._with_patience(lambda: self._register(running))

    def _read(self, job: DataJob) -> GenerationRequest:
        try:
            payload = job.payload()
        except (ValueError, RecursionError) as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, "The queued job cannot be read.") from error
        request = request_from_payload(payload)
        if request.id != job.id or request.model != self._model:
            raise RequestError(ErrorCode.INVALID_REQUEST, "The queued request belongs to another job or model.")
        return request

    def _claimer(self, request_id: str) -> Callable[[], Any]:
        token = uuid.uuid4().hex
        return lambda: self._requests.claim(
            request_id, model=self._model, worker=self.name, token=token, is_idle=self._engine.in_flight == 0
        )

    def _reject(self, running: RunningJob, failure: Failed) -> None:
        """End a claimed job in which there is no request: whoever waits for it must hear of it."""
        self._with_patience(lambda: self._requests.conclude(running.job.id, failure))
        self._with_patience(lambda: self._register(running))
        self._finisher.reject(running, failure)
        self._observer.unreadable(failure.code)

    def _begin(self, attempt: Attempt) -> None:
        """Prepare the prompts and start the engine on them, or reject the request."""
        try:
            prepare(attempt, self._encoder, self._engine.backend)
            # What earlier attempts have written; nobody can add to it any more.
            past = self._with_patience(lambda: self._reader.whole(attempt.request.id)) if attempt.number > 1 else []
            events = carry_on(attempt, [entry.event for entry in past])
            self._observer.prepared(attempt)
        except RequestError as error:
            self._publisher.put([(attempt, [Failed(error.code.value, error.message, error.param)])])
            return
        self._publisher.put([(attempt, events)])
        if not attempt.is_finished:
            self._engine.submit(attempt)

    def _register(self, running: RunningJob) -> None:
        """Tell RQ that the job runs, and take it out of the intermediate queue."""
        with for_show(f"record job {running.job.id} as started"):
            running.execution = self.prepare_execution(running.job)
            self.prepare_job_execution(running.job, remove_from_intermediate_queue=True)
        running.registered.set()

    def _refuse(self, running: RunningJob, outcome: str) -> None:
        """Deal with a job that is not to be run: it has ended, or someone else runs it."""
        logger.info("job %s is not run: %s", running.job.id, outcome, extra=about(running.job.id))
        if outcome == "expired":
            failure = Failed(ErrorCode.DEADLINE_EXCEEDED.value, "The request waited past its deadline.")
            self._with_patience(lambda: self._requests.conclude(running.job.id, failure))
        self._with_patience(lambda: self._finisher.discard(running, is_running=outcome == "running"))

    # --- commands and the end ---

    def handle_payload(self, message: Any) -> None:
        """Commands on RQ's channel: ours to let a request go, RQ's to stop a job or the worker."""
        super().handle_payload(message)
        try:
            command = parse_payload(message)
        except (ValueError, RecursionError):
            command = None
        if not isinstance(command, dict):
            logger.warning("a command on RQ's channel cannot be read")
            return
        name, request_id = command.get("command"), str(command.get("request_id", command.get("job_id")))
        if name == "shutdown":
            handle_command(self, command)
        elif name in (CANCEL_COMMAND, "stop-job") and not JOB_ID.fullmatch(request_id.encode(errors="replace")):
            logger.warning("a command on RQ's channel is about no request")
        elif name == CANCEL_COMMAND:
            self.let_go(request_id)
        elif name == "stop-job":
            cancelled = Failed(ErrorCode.CANCELLED.value, "The request was stopped by an operator.")
            self._requests.conclude(request_id, cancelled)

    def let_go(self, request_id: str) -> None:
        """Drop the attempts at a request that has been ended elsewhere."""
        for attempt in self._publisher.attempts():
            if attempt.request.id == request_id:
                self._publisher.drop(attempt)

    def _shutdown(self) -> None:
        """On the first SIGINT or SIGTERM: take no more jobs; `work` then returns by itself.

        RQ's own version raises from inside the signal handler, which can lose a job in between.
        """
        self._stop_requested = True

    def stop_taking(self, timeout_s: float) -> None:
        """The same from another thread, which waits until no job can be taken any more, or for so long."""
        self._stop_requested = True
        self._has_stopped.wait(timeout_s)

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether a signal or command, and nothing unforeseen, ended the loop."""
        return self._stop_requested

    def teardown(self) -> None:
        self._has_stopped.set()
        self._on_drain()
        with contextlib.suppress(*CONNECTION_ERRORS):
            super().teardown()  # type: ignore[no-untyped-call]
