"""RQ's side of a request: its job, which is data, and the queue that the job waits in.

A job's function name is a label that nobody imports, its argument is the request's payload as JSON, and
whatever else an RQ job could carry to be executed is dropped on reading.
"""

import contextlib
import logging
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import redis
from msgspec import Raw
from redis.exceptions import NoPermissionError
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry
from rq.serializers import JSONSerializer

from shared import keys
from shared.domain import Priority
from shared.logs import one_line
from shared.store import CONNECTION_ERRORS, MisplacedError

JOB_LABEL = "tokenmill.generate"
"""What dashboards show as the job's function."""

JOB_FIELDS = frozenset(
    {"data", "origin", "description", "status", "created_at", "enqueued_at", "started_at", "ended_at"}
    | {"last_heartbeat", "worker_name"}
)
"""What is read of an RQ job."""

MOST_DATA_BYTES = 128 * 1024 * 1024
"""A job's data may be so large: as JSON, tens of millions of characters of prompts."""

EXECUTION_PREFIX = "rq:execution:"
"""Before the `<job>:<execution>` of RQ's started registry it makes the key of the execution."""

RESULT_TTL_S = 600
FAILURE_TTL_S = 24 * 3600

logger = logging.getLogger("tokenmill.rq")


class DataJob(Job):
    """An RQ job of which nothing is ever called, imported, unpickled or fetched.

    A hostile writer to Redis can put callbacks, webhooks and whatnot beside the payload; only the
    fields that we write ourselves are read. A job whose fields make no sense has no payload.
    """

    def refresh(self) -> None:
        """Read what Redis has; what is no hash is no job."""
        try:
            super().refresh()  # type: ignore[no-untyped-call]
        except MisplacedError as error:
            raise NoSuchJobError(f"No such job: {self.key}") from error

    def restore(self, raw_data: Any) -> None:
        named = {name.decode(errors="replace"): value for name, value in raw_data.items()}
        fields = {name: value for name, value in named.items() if name in JOB_FIELDS}
        if "data" not in fields:
            raise NoSuchJobError(f"No such job: {self.key}")
        data = _unpacked(fields["data"])
        try:
            super().restore(fields | {"data": b""})
        except Exception:
            # Each field has its own way of being wrong.
            super().restore({"data": b"", "origin": fields.get("origin", b"").decode(errors="replace").encode()})
            data = b""
        self.data = data
        # Never the job's own word.
        self.timeout, self.result_ttl, self.failure_ttl = -1, RESULT_TTL_S, FAILURE_TTL_S
        # RQ asks for the name to log it; what the job says is left alone.
        self._func_name = JOB_LABEL

    def perform(self) -> NoReturn:
        raise InvalidJobOperation("a Tokenmill job is data and cannot be performed")

    def payload(self) -> bytes:
        """The single argument of the call that the job pretends to be, as JSON.

        Raises:
            ValueError, RecursionError: there is none; the data is not such a call, or no JSON at all.
        """
        # Not by RQ's serializer: that makes objects of everything, and knows NaN and halves of characters.
        _, _, (argument,), _ = msgspec.json.decode(self.data, type=tuple[Raw, Raw, tuple[Raw], Raw])
        return bytes(argument)


class DataQueue(Queue):
    """An RQ queue of such jobs. No job depends on another: whoever says so in Redis is not listened to."""

    def move_dependents_to_ready(self, *_: Any, **__: Any) -> dict[str, list[str]]:
        return {}

    def enqueue_dependents(self, *_: Any, **__: Any) -> dict[str, list[str]]:
        return {}


def _unpacked(data: bytes) -> bytes:
    """A job's data as it was before it was compressed; nothing of what is larger than any of ours."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(data, MOST_DATA_BYTES)
    except zlib.error:
        return data if len(data) <= MOST_DATA_BYTES else b""
    return b"" if unpacking.unconsumed_tail else data


def rq_queue(client: "redis.Redis", model: str, priority: Priority) -> Queue:
    """The RQ queue in which a model's requests of this priority wait."""
    return DataQueue(
        keys.queue_name(model, priority),
        connection=client,
        job_class=DataJob,
        serializer=JSONSerializer,
    )


def mark_cancelled(job: Job) -> None:
    """Take a job off its queue and record it as cancelled, for as long as a failed one is kept.

    RQ's own way would keep it for ever, and would look into the registry that the job's status names.
    """
    if job.connection.hget(job.key, "status") in (None, JobStatus.CANCELED.encode()):
        return
    registry = CanceledJobRegistry(job.origin, connection=job.connection, job_class=DataJob)
    with job.connection.pipeline() as pipeline:
        pipeline.lrem(Queue.redis_queue_namespace_prefix + job.origin, 1, job.id)
        job.set_status(JobStatus.CANCELED, pipeline=pipeline)
        registry.add(job, FAILURE_TTL_S, pipeline=pipeline)
        pipeline.expire(job.key, FAILURE_TTL_S)
        pipeline.execute()


@contextlib.contextmanager
def for_show(what: str) -> Iterator[None]:
    """Around what is read and written for RQ's dashboards only, and may hold whatever somebody has put there.

    RQ stumbles over that in as many ways as there are values, and no request depends on it: it is a line in the
    log. An error of the connection gets out.
    """
    try:
        yield
    except MisplacedError as error:
        logger.warning("cannot %s: %s", what, one_line(error))
    except (*CONNECTION_ERRORS, NoPermissionError):
        raise
    except Exception as error:
        logger.warning("cannot %s: %s: %s", what, type(error).__name__, one_line(error))
