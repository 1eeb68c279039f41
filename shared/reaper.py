"""The reaper: gives back what a dead worker left behind. Any process may run it.

A worker is dead when its lease has expired. What it had claimed goes back to the head of its queue, to
be carried on by another, unless it has ended too many; what it had taken off the queue and not yet
claimed goes back as well; and of what had ended without RQ being told, RQ's record is put right. One process
at a time reaps, under a lock that expires by itself.

Whatever somebody else has written under these keys keeps nobody's request from that: what is of another type is
removed, what is no text is passed over.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import redis
from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.executions import WORKER_EXECUTIONS_KEY_TEMPLATE, ExecutionRegistry
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker.base import BaseWorker
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

from shared import keys
from shared.domain import Failed, Priority
from shared.errors import ErrorCode
from shared.fleet import worker_info
from shared.jobs import EXECUTION_PREFIX, FAILURE_TTL_S, RESULT_TTL_S, DataJob, for_show, mark_cancelled
from shared.logs import about
from shared.queue import MOST_DEATHS, Handover, RequestQueue
from shared.store import as_text, readable, replies

INTERVAL_S = 2.0
UNCLAIMED_AFTER_S = 10.0
"""A job that lies this long between queue and claim was taken by a worker that died right then."""

UNFINISHED_AFTER_S = 10.0
"""A request that has ended and for so long is started to RQ was run by a worker that died before it told RQ."""

NO_END = -1
"""What Redis says of a key that never expires."""

POISONOUS = Failed(
    ErrorCode.POISONOUS.value,
    f"{MOST_DEATHS} workers died while they ran this request. It is not tried again.",
)
LOST = Failed(ErrorCode.WORKER_LOST.value, "The worker that ran this request died. The request can be retried.")

logger = logging.getLogger("tokenmill.reaper")


class Reaper:
    """Reaps when called. What it has to remember until the next turn is in Redis: that may be another's.

    `clock` gives seconds; by default it is Redis's, which is the same for all that reap.
    """

    def __init__(
        self,
        client: "redis.Redis",
        queue: RequestQueue,
        *,
        name: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._client = client
        self._queue = queue
        self._name = name
        self._clock = clock or self._redis_time

    def run_once(self) -> None:
        """Reap, unless another process did so within the interval."""
        interval_ms = int(INTERVAL_S * 1000)
        if not self._client.set(keys.REAPER_LOCK, self._name, nx=True, px=interval_ms):
            left_ms = self._client.pttl(keys.REAPER_LOCK)
            if left_ms == NO_END or left_ms > interval_ms:
                # No lock of ours; with it nobody would ever reap.
                self._client.delete(keys.REAPER_LOCK)
            return
        self._clear_away([(keys.WORKERS, "set"), (Queue.redis_queues_keys, "set")])
        workers = readable(self._client.smembers(keys.WORKERS))
        queues = self._queue_names(workers)
        self._clear_away(_shared_keys(workers, queues))
        for worker in workers:
            if not self._client.exists(keys.worker(worker)):
                self._bury(worker, queues)
        for queue in queues:
            self._rescue_unclaimed(queue)
            self._finish_ended(queue)

    def _clear_away(self, expected: list[tuple[str, str]]) -> None:
        """Remove what is of another type than expected, since nothing that belongs there could be written any more."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key, _ in expected:
                pipeline.type(key)
            found = [as_text(raw) for raw in pipeline.execute()]
        for (key, kind), present in zip(expected, found, strict=True):
            if present not in (kind, "none"):
                self._client.delete(key)
                logger.warning("under %s was no %s but a %s: removed", key, kind, present)

    def _bury(self, worker: str, queues: Iterable[str]) -> None:
        """Give back everything that a dead worker had claimed, then forget the worker."""
        claimed = list(self._client.smembers(keys.running(worker)))
        for request_id in readable(claimed):
            self._give_back(request_id, worker)
        with for_show(f"forget worker {worker}"), self._client.pipeline() as pipeline:
            # Not the whole set: a worker that is back from the dead may have claimed something by now.
            if claimed:
                pipeline.srem(keys.running(worker), *claimed)
            pipeline.srem(keys.WORKERS, worker)
            pipeline.delete(WORKER_EXECUTIONS_KEY_TEMPLATE.format(worker))
            # RQ would show it for another eight minutes.
            rq_key = BaseWorker.redis_worker_namespace_prefix + worker
            pipeline.srem(REDIS_WORKER_KEYS, rq_key)
            for name in queues:
                pipeline.srem(WORKERS_BY_QUEUE_KEY % name, rq_key)
            pipeline.delete(rq_key)
            pipeline.execute()
        if self._client.exists(keys.running(worker)):
            # It has claimed since we looked, and a claim may have come before the worker was struck off.
            self._client.sadd(keys.WORKERS, worker)
        logger.warning("worker %s is dead: %d requests of it go on elsewhere", worker, len(claimed))

    def _give_back(self, request_id: str, worker: str) -> None:
        """Let another attempt carry a request on, or end it where that cannot be."""
        match self._queue.hand_over(request_id, worker=worker, died=True):
            case Handover.POISON:
                logger.error(
                    "request %s has ended %d workers: it is not tried again",
                    request_id,
                    MOST_DEATHS,
                    extra=about(request_id),
                )
                failure = POISONOUS
            case Handover.JOBLESS:
                failure = LOST
            case _:
                return
        if self._queue.conclude(request_id, failure, only_from=worker):
            self._fail_job(request_id, f"{failure.code}: {failure.message}")

    def _fail_job(self, request_id: str, reason: str) -> None:
        """Make RQ's records say what happened to the job."""
        job = self._job(request_id)
        if job is None:
            return
        started = StartedJobRegistry(job.origin, connection=self._client, job_class=DataJob)
        with for_show(f"record job {request_id} as failed"), self._client.pipeline() as pipeline:
            for member in readable(self._client.zrange(started.key, 0, -1)):
                if member.partition(":")[0] == request_id:
                    self._forget_run(started.key, member, pipeline)
            job.set_status(JobStatus.FAILED, pipeline=pipeline)
            FailedJobRegistry(job.origin, connection=self._client, job_class=DataJob).add(
                job, ttl=FAILURE_TTL_S, exc_string=reason, pipeline=pipeline
            )
            pipeline.execute()

    def _forget_run(self, started: str, member: str, pipeline: "redis.client.Pipeline") -> None:
        """Take one run of a job out of all that RQ keeps of it."""
        request_id, _, run = member.partition(":")
        pipeline.zrem(started, member)
        pipeline.delete(EXECUTION_PREFIX + member)
        pipeline.zrem(ExecutionRegistry(request_id, connection=self._client).key, run)

    def _job(self, request_id: str) -> DataJob | None:
        try:
            job = DataJob(request_id, connection=self._client, serializer=JSONSerializer)
            job.refresh()
        except (NoSuchJobError, ValueError):
            return None
        return job

    def _finish_ended(self, queue: str) -> None:
        """Put RQ's records right of requests that ended too long ago to be started still."""
        started = StartedJobRegistry(queue, connection=self._client, job_class=DataJob).key
        runs: Any = self._client.zrange(started, 0, -1)
        members = readable(runs)
        if len(members) < len(runs):
            self._client.zrem(started, *(run for run in runs if not readable([run])))
        with self._client.pipeline(transaction=False) as pipeline:
            for member in members:
                pipeline.hget(keys.request(member.partition(":")[0]), "state")
            states = dict(zip(members, replies(pipeline), strict=True))
        ended = [member.encode() for member, state in states.items() if state not in (b"queued", b"running")]
        for raw in self._overdue(keys.unfinished(queue), ended, UNFINISHED_AFTER_S):
            member = as_text(raw)
            with for_show(f"end run {member}"), self._client.pipeline() as pipeline:
                self._forget_run(started, member, pipeline)
                pipeline.execute()
            request_id = member.partition(":")[0]
            with for_show(f"record the end of job {request_id}"):
                self._finish_job(request_id, as_text(states[member] or b"gone", errors="replace"))

    def _finish_job(self, request_id: str, state: str) -> None:
        """Make RQ's record of a started job say that it has ended, unless it does."""
        job = self._job(request_id)
        if job is None or job.get_status(refresh=False) is not JobStatus.STARTED:
            return
        if state == "cancelled":
            mark_cancelled(job)
        elif state == "done":
            with self._client.pipeline() as pipeline:
                job.set_status(JobStatus.FINISHED, pipeline=pipeline)
                FinishedJobRegistry(job.origin, connection=self._client, job_class=DataJob).add(
                    job, RESULT_TTL_S, pipeline=pipeline
                )
                pipeline.expire(job.key, RESULT_TTL_S)
                pipeline.execute()
        else:
            self._fail_job(request_id, f"the request is {state}")
        logger.warning("RQ was not told of the end of request %s: it is %s", request_id, state, extra=about(request_id))

    def _rescue_unclaimed(self, name: str) -> None:
        """Put back jobs that lie in RQ's intermediate queue for too long."""
        queue = Queue(name, connection=self._client, job_class=DataJob, serializer=JSONSerializer)
        job_ids: Any = self._client.lrange(queue.intermediate_queue_key, 0, -1)
        for job_id in self._overdue(keys.unclaimed(name), job_ids, UNCLAIMED_AFTER_S):
            if self._queue.put_back(queue, job_id):
                request_id = job_id.decode(errors="replace")
                logger.warning(
                    "request %s was taken and never claimed: queued again", request_id, extra=about(request_id)
                )

    def _overdue(self, record: str, names: Iterable[bytes], after_s: float) -> list[bytes]:
        """Those names that were given at every turn for so long; `record` is where it is kept since when."""
        known: Any = self._client.hgetall(record)
        names = set(names)
        if not known and not names:
            return []
        now = self._clock()
        since: dict[Any, Any] = {name: _seconds(known.get(name), now) for name in names}
        with self._client.pipeline() as pipeline:
            pipeline.delete(record)
            if since:
                pipeline.hset(record, mapping=since)
                pipeline.expire(record, keys.REAPER_RECORD_TTL_S)
            pipeline.execute()
        return [name for name, first in since.items() if now - first >= after_s]

    def _redis_time(self) -> float:
        seconds, microseconds = self._client.time()
        return seconds + microseconds / 1e6

    def _queue_names(self, workers: Iterable[str]) -> list[str]:
        """The names of every RQ queue that a request was ever put on, or that these workers take from."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.smembers(Queue.redis_queues_keys)
            for worker in workers:
                pipeline.hget(keys.worker(worker), "info")
            used, *infos = replies(pipeline)
        prefix = Queue.redis_queue_namespace_prefix
        names = {key.removeprefix(prefix) for key in readable(used or ())}
        served = {info.model.name for info in map(worker_info, infos) if info is not None}
        return sorted(names | {keys.queue_name(model, priority) for model in served for priority in Priority})


def _shared_keys(workers: Iterable[str], queues: Iterable[str]) -> list[tuple[str, str]]:
    """The keys that more than one request depends on, with their types."""
    expected = []
    for worker in workers:
        expected += [(keys.worker(worker), "hash"), (keys.running(worker), "set")]
        expected += [(BaseWorker.redis_worker_namespace_prefix + worker, "hash")]
    for queue in queues:
        waiting = Queue.redis_queue_namespace_prefix + queue
        expected += [(waiting, "list"), (IntermediateQueue.get_intermediate_queue_key(waiting), "list")]
        expected += [(keys.waiting(queue.rpartition(".")[0]), "zset")]
        expected += [(keys.unclaimed(queue), "hash"), (keys.unfinished(queue), "hash")]
        expected += [(keys.turns(queue), "zset"), (keys.rounds(queue), "hash")]
        registries = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
        expected += [(registry.key_template.format(queue), "zset") for registry in registries]
        expected += [(WORKERS_BY_QUEUE_KEY % queue, "set")]
    return expected


def _seconds(raw: bytes | None, now: float) -> float:
    """A time that was kept; `now` for what is none, or is still to come."""
    try:
        kept = now if raw is None else float(raw)
    except ValueError:
        return now
    return kept if kept <= now else now
