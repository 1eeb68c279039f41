"""RQ's side of a request: its job, which is data, and the queue that the job waits in.

A job's function name is a label that nobody imports, its argument is the request's payload as JSON, and
whatever else an RQ job could carry to be executed is dropped on reading.
"""

from typing import Any, NoReturn

import redis
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.registry import CanceledJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import decode_redis_hash

from shared import keys
from shared.domain import Priority

JOB_LABEL = "tokenmill.generate"
"""What dashboards show as the job's function."""

JOB_FIELDS = frozenset(
    {"data", "origin", "description", "status", "timeout", "ttl", "result_ttl", "failure_ttl"}
    | {"created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat", "worker_name"}
)
"""What is read of an RQ job."""

EXECUTION_PREFIX = "rq:execution:"
"""Before the `<job>:<execution>` of RQ's started registry it makes the key of the execution."""

RESULT_TTL_S = 600
FAILURE_TTL_S = 24 * 3600


class DataJob(Job):
    """An RQ job of which nothing is ever called, imported or fetched.

    A hostile writer to Redis can put callbacks, webhooks and whatnot beside the payload; only the
    fields that we write ourselves are read. A job whose fields make no sense has no payload.
    """

    def restore(self, raw_data: Any) -> None:
        fields = {name: value for name, value in decode_redis_hash(raw_data).items() if name in JOB_FIELDS}
        try:
            super().restore(fields)
        except NoSuchJobError:
            raise
        except Exception:
            # Each field has its own way of being wrong.
            super().restore({"data": b"", "origin": fields.get("origin")})
        # RQ asks for the name to log it; what the job says is left alone.
        self._func_name = JOB_LABEL

    def perform(self) -> NoReturn:
        raise InvalidJobOperation("a Tokenmill job is data and cannot be performed")

    def payload(self) -> object:
        """The single argument, whatever it is."""
        args = self.args
        return args[0] if args else None


def rq_queue(client: "redis.Redis", model: str, priority: Priority) -> Queue:
    """The RQ queue in which a model's requests of this priority wait."""
    return Queue(
        keys.queue_name(model, priority),
        connection=client,
        job_class=DataJob,
        serializer=JSONSerializer,
    )


def mark_cancelled(job: Job) -> None:
    """Take a job off its queue and record it as cancelled, for as long as a failed one is kept."""
    try:
        job.cancel()
    except InvalidJobOperation:
        return
    registry = CanceledJobRegistry(job.origin, connection=job.connection, job_class=DataJob)
    with job.connection.pipeline() as pipeline:
        # RQ would keep it for ever.
        registry.add(job, FAILURE_TTL_S, pipeline=pipeline)
        pipeline.expire(job.key, FAILURE_TTL_S)
        pipeline.execute()
