"""One look at everything: the live workers and what waits for them, in two round trips to Redis."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import redis
from rq import Queue

from shared import keys
from shared.domain import Priority
from shared.fleet import WorkerInfo, worker_info
from shared.store import readable, replies


class Census(NamedTuple):
    """What there is.

    `running` counts the requests that live workers have claimed, and `waiting` those on the queues, both by
    model. Models are those with a live worker, or a request that waits, or a worker within the last day.
    """

    models: list[str]
    workers: list[WorkerInfo]
    running: Mapping[str, int]
    waiting: Mapping[tuple[str, Priority], int]


def take_census(client: "redis.Redis") -> Census:
    """Count now.

    Raises:
        redis.RedisError: Redis is away.
    """
    with client.pipeline(transaction=False) as pipeline:
        pipeline.smembers(keys.WORKERS)
        pipeline.smembers(Queue.redis_queues_keys)
        names, queue_keys = replies(pipeline)
    workers = sorted(readable(names or ()))
    queues = list(_queues(readable(queue_keys or ())))
    models = sorted({model for model, _ in queues})
    with client.pipeline(transaction=False) as pipeline:
        for worker in workers:
            pipeline.hget(keys.worker(worker), "info")
            pipeline.scard(keys.running(worker))
        for model, priority in queues:
            pipeline.llen(Queue.redis_queue_namespace_prefix + keys.queue_name(model, priority))
        for model in models:
            pipeline.exists(keys.model(model))
        answers = iter(replies(pipeline))
    seen = [(worker_info(next(answers)), next(answers) or 0) for _ in workers]
    waiting = {queue: next(answers) or 0 for queue in queues}
    is_known = {model: bool(next(answers)) for model in models}
    live = [(info, claimed) for info, claimed in seen if info is not None]
    running: dict[str, int] = {}
    for info, claimed in live:
        running[info.model.name] = running.get(info.model.name, 0) + claimed
    named = set(running) | {model for (model, _), count in waiting.items() if count or is_known[model]}
    return Census(sorted(named), [info for info, _ in live], running, waiting)


def _queues(rq_keys: Iterable[str]) -> Iterator[tuple[str, Priority]]:
    """Model and priority of each of these RQ queues that is ours."""
    for key in sorted(rq_keys):
        model, _, priority = key.removeprefix(Queue.redis_queue_namespace_prefix).rpartition(".")
        if model and priority in set(Priority):
            yield model, Priority(priority)
