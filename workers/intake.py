"""The intake: takes RQ jobs while there is room and hands them to the engine.

The only importer of RQ's worker. The main thread keeps RQ's `work()` loop, its registration and its
signals; a job is prepared here, run by the engine, and finished by `workers.finisher` on another
thread, so one worker has as many jobs in progress as it has room for.
"""

import contextlib
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import redis
from rq import Queue
from rq.command import handle_command, parse_payload, send_command
from rq.exceptions import DequeueTimeout
from rq.executions import Execution
from rq.job import Job
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.timeouts import BaseDeathPenalty
from rq.utils import now
from rq.worker.base import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry

from shared.codec import request_from_payload
from shared.domain import Failed, GenerationRequest, Priority
from shared.errors import ErrorCode, RequestError
from shared.log import LogReader
from shared.queue import CANCEL_COMMAND, DataJob, RequestQueue, rq_queue
from shared.store import CONNECTION_ERRORS
from workers.attempt import Attempt
from workers.engine import Engine
from workers.finisher import Finisher, RunningJob
from workers.prepare import carry_on, prepare
from workers.prompt import PromptEncoder
from workers.publisher import Publisher

IDLE_WAIT_S = 1
BACKGROUND_POLL_S = 0.2
"""How long an idle worker may wait for an interactive job before it looks for a background one."""

RQ_HEARTBEAT_S = 5.0
RQ_SILENCE_S = 24 * 3600
"""After so long without a heartbeat RQ calls a running job abandoned, by the clock of whichever host looks. Who is
dead the reaper knows, by leases; so this only has to be more than clocks can be wrong by."""

HELLO_COMMAND = "tokenmill-hello"
"""Sent by a worker to itself."""

DEAF_AFTER_S = 3 * RQ_HEARTBEAT_S
RECONNECT_S = 0.5
JOB_ID = re.compile(rb"[A-Za-z0-9_-]+")
"""What RQ accepts as one."""

logger = logging.getLogger("tokenmill.worker")


class NoDeathPenalty(BaseDeathPenalty):
    """RQ limits jobs by signals in the main thread; ours run elsewhere, and the engine knows deadlines."""

    def setup_death_penalty(self) -> None:
        pass

    def cancel_death_penalty(self) -> None:
        pass


class Intake(BaseWorker):
    """An RQ worker that runs several jobs at once and keeps its model loaded."""

    death_penalty_class = NoDeathPenalty

    def __init__(
        self,
        client: "redis.Redis",
        *,
        name: str,
        model: str,
        engine: Engine,
        publisher: Publisher,
        finisher: Finisher,
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
            connection=client,
            job_class=DataJob,
            serializer=JSONSerializer,
            log_job_description=False,
        )
        self._model = model
        self._engine = engine
        self._publisher = publisher
        self._finisher = finisher
        self._encoder = encoder
        self._requests = queue
        self._reader = reader
        self._on_ready = on_ready
        self._is_ready = False
        self._on_drain = on_drain
        self._monotonic = monotonic
        self._last_rq_heartbeat = float("-inf")
        # Since when a command to itself has not come back; None while none is under way.
        self._asked_at: float | None = None

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

    @contextlib.contextmanager
    def _patience(self, what: str) -> Iterator[None]:
        """Outlast a Redis that is away: the loop around this tries again."""
        try:
            yield
        except CONNECTION_ERRORS as error:
            logger.warning("cannot %s, Redis is away: %s", what, error)
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

    # --- one job ---

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Claim a job and start it; its end is the finisher's."""
        assert isinstance(job, DataJob)
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
        self._publisher.open(attempt)
        self._begin(attempt)
        self._with_patience(lambda: self._register(running))

    def _read(self, job: DataJob) -> GenerationRequest:
        try:
            payload = job.payload()
        except Exception as error:
            # Whatever is in a job's data, it must not take the worker down.
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

    def _begin(self, attempt: Attempt) -> None:
        """Prepare the prompts and start the engine on them, or reject the request."""
        try:
            prepare(attempt, self._encoder, self._engine.backend)
            # What earlier attempts have written; nobody can add to it any more.
            past = self._with_patience(lambda: self._reader.whole(attempt.request.id)) if attempt.number > 1 else []
            events = carry_on(attempt, [entry.event for entry in past])
        except RequestError as error:
            self._publisher.put([(attempt, [Failed(error.code.value, error.message, error.param)])])
            return
        self._publisher.put([(attempt, events)])
        if not attempt.is_finished:
            self._engine.submit(attempt)

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

    def _register(self, running: RunningJob) -> None:
        """Tell RQ that the job runs, and take it out of the intermediate queue."""
        running.execution = self.prepare_execution(running.job)
        self.prepare_job_execution(running.job, remove_from_intermediate_queue=True)
        running.registered.set()

    def _refuse(self, running: RunningJob, outcome: str) -> None:
        """Deal with a job that is not to be run: it has ended, or someone else runs it."""
        logger.info("job %s is not run: %s", running.job.id, outcome)
        if outcome == "expired":
            failure = Failed(ErrorCode.DEADLINE_EXCEEDED.value, "The request waited past its deadline.")
            self._with_patience(lambda: self._requests.conclude(running.job.id, failure))
        self._with_patience(lambda: self._finisher.discard(running, is_running=outcome == "running"))

    def _with_patience(self, act: Callable[[], Any]) -> Any:
        """Repeat something that must happen until Redis is there for it."""
        while True:
            try:
                return act()
            except CONNECTION_ERRORS as error:
                logger.warning("Redis is away: %s", error)
                time.sleep(RECONNECT_S)

    # --- commands and the end ---

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        """Keep listening, whatever happens: RQ's own version ends the thread on a timeout."""
        logger.warning("RQ's commands cannot be heard: %s", exc, exc_info=not isinstance(exc, CONNECTION_ERRORS))
        self._asked_at = None
        time.sleep(RECONNECT_S)

    def handle_payload(self, message: Any) -> None:
        """Commands on RQ's channel: ours to let a request go, RQ's to stop a job or the worker."""
        try:
            command = parse_payload(message)
        except ValueError:
            command = None
        self._asked_at = None
        if not isinstance(command, dict):
            logger.warning("a command on RQ's channel cannot be read")
        elif command.get("command") == CANCEL_COMMAND:
            self.let_go(str(command.get("request_id")))
        elif command.get("command") == "stop-job":
            cancelled = Failed(ErrorCode.CANCELLED.value, "The request was stopped by an operator.")
            self._requests.conclude(str(command.get("job_id")), cancelled)
        elif command.get("command") == "shutdown":
            handle_command(self, command)

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

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether a signal or command, and nothing unforeseen, ended the loop."""
        return self._stop_requested

    def teardown(self) -> None:
        self._on_drain()
        with contextlib.suppress(*CONNECTION_ERRORS):
            super().teardown()  # type: ignore[no-untyped-call]
