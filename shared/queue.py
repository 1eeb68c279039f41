"""The queue over RQ: one RQ queue per model and priority, one job per request."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import redis
from rq import Queue
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.executions import ExecutionRegistry
from rq.job import Job
from rq.serializers import JSONSerializer

from shared import keys
from shared.codec import encode_event, request_to_payload
from shared.domain import Failed, GenerationRequest, Priority
from shared.errors import RETRYABLE, ErrorCode, RequestError
from shared.jobs import (
    EXECUTION_PREFIX,
    FAILURE_TTL_S,
    JOB_LABEL,
    RESULT_TTL_S,
    DataJob,
    for_show,
    mark_cancelled,
    rq_queue,
)
from shared.store import MisplacedError, as_text, replies, script, store_errors

ATTRIBUTE_PREFIX = "attribute:"
"""Sets the front end's own fields in a request's hash apart; as in `submit.lua`."""

IDEMPOTENCY_HEADER = "Idempotency-Key"
"""How clients give the key, and errors name it."""

MOST_DEATHS = 3
"""A request that was running on so many workers when they died is not tried again."""

ALONE_AFTER_DEATHS = MOST_DEATHS - 1
"""After so many, it runs only where nothing else does: the last death must have been its own."""

JOB_KEY_PREFIX = Job.redis_job_namespace_prefix.encode()

CANCEL_COMMAND = "tokenmill-cancel"
"""Sent to a worker's RQ command channel when a request it runs has been concluded elsewhere."""


class Claim(NamedTuple):
    """What came of trying to take a request.

    `outcome` is `claimed`, `gone`, `ended`, `running`, `expired`, or `alone` for a request that may
    run only where nothing else does. The rest is set only with `claimed`: the attempt's number, the
    seconds until the request's deadline, and whether nothing else may run beside it; the seconds since its
    submission, and those that it waited since then or since the attempt before; and if the worker of the
    attempt before died, its name and how long it had run the request.
    """

    outcome: str
    attempt: int = 0
    remaining_s: float = 0.0
    is_alone: bool = False
    age_s: float = 0.0
    waited_s: float = 0.0
    died: str = ""
    ran_s: float = 0.0


class Handover(StrEnum):
    """What came of giving a request back to the queue."""

    QUEUED = "queued"
    POISON = "poison"
    """It has ended too many workers."""
    JOBLESS = "jobless"
    """RQ has no job of it any more."""
    LOST = "lost"
    """It is not, or no longer, that worker's."""


class Idempotency(NamedTuple):
    """What makes one request of several: the client's key, and a digest of what it asks, which must agree."""

    key: str
    digest: str


class Owner(NamedTuple):
    """Whom a request belongs to, and how many of theirs may be queued or running at once; 0: any number."""

    name: str
    most_open: int = 0


class Submitted(NamedTuple):
    """What is still known of a submitted request, running or ended."""

    state: str
    remaining_s: float
    attributes: dict[str, str]


class RequestQueue:
    """Submits, claims and concludes requests, from any process."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client
        self._submit = script(client, "submit")
        self._claim = script(client, "claim")
        self._conclude = script(client, "conclude")
        self._hand_over = script(client, "handover")
        self._rescue = script(client, "rescue")
        self._take_turn = script(client, "turn")
        self._queues: dict[tuple[str, Priority], Queue] = {}

    def submit(
        self,
        request: GenerationRequest,
        *,
        limit: int,
        timeout_s: float,
        attributes: Mapping[str, str] | None = None,
        idempotency: Idempotency | None = None,
        owner: Owner | None = None,
    ) -> str:
        """Queue the request, to be ended by a worker within `timeout_s`. Returns its id.

        `attributes` mean nothing to a worker; `submitted` gives them back for as long as the log lives.
        With `idempotency`, and if its key stands for an earlier request, nothing is queued, and the id is
        that one's; unless that ended in a failure that is worth another try (`RETRYABLE`).
        Owners take turns: one who has many waiting holds up another by one of them at most.

        Raises:
            RequestError: `queue_full` when `limit` requests of the model wait already, or the owner has as many
                waiting as there are places left; `rate_limit_exceeded` when the owner has as many open as may
                be; `store_unavailable`; `invalid_request` when the id was used before;
                `idempotency_key_reused` when the key stands for something else.
        """
        ttl_s = keys.log_ttl_s(request.priority)
        with store_errors():
            outcome, *rest = self._register(
                request,
                limit=limit,
                timeout_s=timeout_s,
                attributes=attributes or {},
                idempotency=idempotency,
                owner=owner,
            )
            if outcome == b"full":
                raise RequestError(
                    ErrorCode.QUEUE_FULL,
                    f"The queue of model '{request.model}' is full ({rest[0]} requests wait). Retry shortly.",
                )
            if outcome == b"share":
                raise RequestError(
                    ErrorCode.QUEUE_FULL,
                    f"The queue of model '{request.model}' is nearly full, and {rest[0]} of this key's requests wait "
                    "in it. Retry shortly.",
                )
            if outcome == b"open":
                raise RequestError(
                    ErrorCode.RATE_LIMIT_EXCEEDED,
                    f"This key may have {owner.most_open if owner else 0} requests at once, and has them. "
                    "Retry when one has ended.",
                )
            if outcome == b"exists":
                raise RequestError(ErrorCode.INVALID_REQUEST, f"A request with the id '{request.id}' exists.")
            if outcome == b"joined":
                earlier, state = as_text(rest[0]), rest[1]
                if state != b"queued":
                    return earlier
                # Whoever registered it may have died before it was on RQ's queue.
                request = msgspec.structs.replace(request, id=earlier)
            self._enqueue(request, ttl_s=int(timeout_s) + ttl_s, unique=idempotency is not None)
            if owner is not None and outcome == b"ok":
                self._give_turn(request, owner, ttl_s=int(timeout_s) + ttl_s)
        return request.id

    def _give_turn(self, request: GenerationRequest, owner: Owner, *, ttl_s: int) -> None:
        """Move a job from the end of its queue to where its owner's turn is, if it still waits."""
        queue = self._queue(request.model, request.priority)
        self._take_turn(
            keys=[queue.key, keys.turns(queue.name), keys.rounds(queue.name)],
            args=[request.id, owner.name, ttl_s * 1000],
        )

    def earlier(self, request: GenerationRequest, idempotency: Idempotency, owner: Owner | None = None) -> str | None:
        """The id of the request that `submit` would return instead of queueing this one; None if it would queue.

        Raises:
            RequestError: `store_unavailable`, `idempotency_key_reused`.
        """
        with store_errors():
            # Where nothing may wait, nothing new is registered.
            outcome, *rest = self._register(
                request, limit=0, timeout_s=0, attributes={}, idempotency=idempotency, owner=owner
            )
        return as_text(rest[0]) if outcome == b"joined" else None

    def _register(
        self,
        request: GenerationRequest,
        *,
        limit: int,
        timeout_s: float,
        attributes: Mapping[str, str],
        idempotency: Idempotency | None,
        owner: Owner | None,
    ) -> Any:
        """What `submit.lua` returns, but for a key that was used for something else, which is raised."""
        name = owner.name if owner else ""
        reserved = [keys.idempotency(idempotency.key, name)] if idempotency else []
        reply: Any = self._submit(
            keys=[keys.request(request.id), keys.waiting(request.model), keys.open_requests(name), *reserved],
            args=[
                request.id,
                secrets.token_hex(8),
                limit,
                int(timeout_s * 1000),
                keys.log_ttl_s(request.priority) * 1000,
                request.model,
                request.priority.value,
                idempotency.digest if idempotency else "",
                keys.REQUEST_PREFIX,
                keys.LOG_PREFIX,
                f",{','.join(sorted(RETRYABLE))},",
                int(owner is not None),
                owner.most_open if owner else 0,
                *(text for pair in attributes.items() for text in pair),
            ],
        )
        if reply[0] == b"reused":
            raise RequestError(
                ErrorCode.IDEMPOTENCY_KEY_REUSED,
                f"The {IDEMPOTENCY_HEADER} was used before for a request with another body or path.",
                param=IDEMPOTENCY_HEADER,
            )
        return reply

    def _enqueue(self, request: GenerationRequest, *, ttl_s: int, unique: bool) -> None:
        queue = self._queue(request.model, request.priority)
        job = DataJob.create(
            JOB_LABEL,
            args=(request_to_payload(request),),
            id=request.id,
            connection=self._client,
            serializer=JSONSerializer,
            description=f"{request.model}: {request.choices} choice(s)",
            timeout=-1,
            ttl=ttl_s,
            result_ttl=RESULT_TTL_S,
            failure_ttl=FAILURE_TTL_S,
        )
        if unique:
            # Another process may find the request queued and do the same at this moment.
            with suppress(DuplicateJobError):
                queue.enqueue_job(job, unique=True)
            return
        with self._client.pipeline() as pipeline:
            queue.enqueue_job(job, pipeline=pipeline)
            pipeline.execute()

    def claim(self, request_id: str, *, model: str, worker: str, token: str, is_idle: bool = True) -> Claim:
        """Try to take a request for a worker, under a new attempt number.

        A request whose workers died more than once runs only on an idle one, so that it can harm
        nothing else. `token` is new for each try and the same when one try is repeated after a broken connection.
        """
        outcome, *rest = self._claim(
            keys=[keys.request(request_id), keys.waiting(model), keys.running(worker), keys.WORKERS],
            args=[
                request_id,
                worker,
                keys.WORKER_PREFIX,
                keys.RUNNING_TTL_S * 1000,
                token,
                ALONE_AFTER_DEATHS,
                int(is_idle),
            ],
        )
        if outcome != b"claimed":
            return Claim(as_text(outcome))
        attempt, remaining_ms, deaths, age_ms, waited_ms, died, ran_ms = rest
        return Claim(
            "claimed",
            attempt,
            remaining_ms / 1000,
            deaths >= ALONE_AFTER_DEATHS,
            age_ms / 1000,
            waited_ms / 1000,
            as_text(died, errors="replace"),
            ran_ms / 1000,
        )

    def put_back(self, queue: Queue, job_id: bytes) -> bool:
        """Put a job that was taken and never claimed back at the head of its queue, unless somebody has."""
        places = [queue.intermediate_queue_key, queue.key, JOB_KEY_PREFIX + job_id]
        return bool(self._rescue(keys=places, args=[job_id]))

    def hand_over(self, request_id: str, *, worker: str, died: bool) -> Handover:
        """Put a request that this worker runs back at the head of its queue, to be carried on.

        With `died` it counts among the workers that it may have ended; one that has ended
        `MOST_DEATHS` is not queued again.
        """
        place = self._place(request_id)
        if place is None:
            return Handover.LOST
        queue = self._queue(*place)
        outcome = self._hand_over(
            keys=[
                keys.request(request_id),
                keys.waiting(place[0]),
                keys.running(worker),
                queue.key,
                queue.intermediate_queue_key,
                queue.started_job_registry.key,
                DataJob.key_for(request_id),
                ExecutionRegistry(request_id, connection=self._client).key,
            ],
            args=[request_id, worker, int(died), MOST_DEATHS, EXECUTION_PREFIX],
        )
        return Handover(as_text(outcome))

    def conclude(self, request_id: str, failure: Failed, *, only_from: str = "") -> bool:
        """End a request that has not ended, whoever holds it, and tell its worker to let go.

        With `only_from`, only if that worker runs it. Returns whether this call ended it. A job
        that was still queued never runs.
        """
        place = self._place(request_id)
        if place is None:
            return False
        concluded, owner = self._conclude(
            keys=[keys.request(request_id), keys.log(request_id), keys.waiting(place[0])],
            args=[
                request_id,
                keys.events(request_id),
                encode_event(failure),
                "cancelled" if failure.code == ErrorCode.CANCELLED else "failed",
                only_from,
                keys.RUNNING_PREFIX,
            ],
        )
        if not concluded:
            return False
        if owner:
            command = {"command": CANCEL_COMMAND, "request_id": request_id}
            channel = PUBSUB_CHANNEL_TEMPLATE % as_text(owner, errors="replace")
            self._client.publish(channel, msgspec.json.encode(command))
        else:
            self._withdraw(request_id)
        return True

    def _withdraw(self, request_id: str) -> None:
        """Take a job that no worker claimed out of RQ's queue, as cancelled."""
        with for_show(f"record job {request_id} as cancelled"), suppress(NoSuchJobError):
            mark_cancelled(DataJob.fetch(request_id, connection=self._client, serializer=JSONSerializer))

    def submitted(self, request_id: str) -> Submitted | None:
        """What is known of the request; None when it never existed, has expired, or cannot be read.

        Raises:
            RequestError: `store_unavailable`.
        """
        with store_errors(), self._client.pipeline() as pipeline:
            pipeline.hgetall(keys.request(request_id))
            pipeline.time()
            found, (seconds, microseconds) = replies(pipeline)
        try:
            fields = {as_text(name): as_text(value) for name, value in (found or {}).items()}
            remaining_s = int(fields["deadline"]) / 1000 - seconds - microseconds / 1e6
            state = fields["state"]
        except (KeyError, ValueError):
            return None
        attributes = {
            name.removeprefix(ATTRIBUTE_PREFIX): value
            for name, value in fields.items()
            if name.startswith(ATTRIBUTE_PREFIX)
        }
        return Submitted(state, remaining_s, attributes)

    def depth(self, model: str) -> int:
        """How many of the model's requests no worker has claimed."""
        return int(self._client.zcard(keys.waiting(model)))

    def _place(self, request_id: str) -> tuple[str, Priority] | None:
        """A request's model and priority; None when it is gone, or is none of ours to read."""
        try:
            model, priority = self._client.hmget(keys.request(request_id), "model", "priority")
        except MisplacedError:
            return None
        if model is None or priority is None:
            return None
        try:
            return as_text(model), Priority(as_text(priority))
        except ValueError:
            return None

    def _queue(self, model: str, priority: Priority) -> Queue:
        queue = self._queues.get((model, priority))
        if queue is None:
            queue = self._queues[(model, priority)] = rq_queue(self._client, model, priority)
        return queue
