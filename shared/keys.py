"""Every Redis key, channel and lifetime of this project. RQ's own keys are RQ's.

| key | type | what it holds | lifetime |
| --- | --- | --- | --- |
| tokenmill:request:<id> | hash | state, attempt, worker, model, priority, times, attributes | deadline + log TTL |
| tokenmill:log:<id> | stream | the request's events, ids `<attempt>-<seq>` | as the request |
| tokenmill:idempotency:<sha256 of key> | hash | the request of a key, digest of its body | deadline + log TTL |
| tokenmill:open:<owner> | sorted set | ids of an owner's that may not have ended, by deadline | the latest deadline |
| tokenmill:turns:<queue> | sorted set | waiting jobs of owners, by the round that each is in | the latest deadline |
| tokenmill:rounds:<queue> | hash | the last round of each owner, and of the queue | the latest deadline |
| tokenmill:rates… | several | what API keys have asked for lately (the library `limits`) | two minutes |
| tokenmill:events:<id> | channel | `<attempt>-<seq> <event>`, published with each entry | none |
| tokenmill:waiting:<model> | sorted set | ids not yet claimed, by deadline | the latest deadline |
| tokenmill:worker:<name> | hash | what a live worker says of itself; its lease | the lease |
| tokenmill:running:<name> | set | ids that a worker has claimed | renewed with the lease |
| tokenmill:workers | set | names of workers that may be alive | renewed with each lease |
| tokenmill:model:<name> | string | what is known of a model that was served | a day |
| tokenmill:reaper | string | who reaps now | the reaping interval |
| tokenmill:unclaimed:<queue> | hash | jobs taken and not claimed, since when | a minute after the last look |
| tokenmill:unfinished:<queue> | hash | runs of ended requests that RQ takes for started, since when | the same |
"""

import hashlib

from shared.domain import Priority

PREFIX = "tokenmill:"

WORKERS = PREFIX + "workers"
REAPER_LOCK = PREFIX + "reaper"
REQUEST_PREFIX = PREFIX + "request:"
LOG_PREFIX = PREFIX + "log:"
WORKER_PREFIX = PREFIX + "worker:"
RUNNING_PREFIX = PREFIX + "running:"
RATES_PREFIX = PREFIX + "rates"

LOG_TTL_S = 300
"""How long the log of an interactive request can be read after its end."""

BACKGROUND_LOG_TTL_S = 24 * 3600
"""The same for a background request."""

RUNNING_TTL_S = 24 * 3600
"""How long a dead worker's claims are remembered, so that someone can end them."""

REAPER_RECORD_TTL_S = 60
"""How long what one reaper saw counts for the next."""

MODEL_TTL_S = 24 * 3600
"""How long a model that nobody serves any more is known by name."""


def request(request_id: str) -> str:
    """The hash with a request's state."""
    return REQUEST_PREFIX + request_id


def log(request_id: str) -> str:
    """The stream with a request's events."""
    return LOG_PREFIX + request_id


def idempotency(key: str, owner: str = "") -> str:
    """The hash that says which request an owner's `Idempotency-Key` stands for."""
    # No key and no name of an owner has a line break.
    digest = hashlib.sha256("\n".join((owner, key)).encode()).hexdigest()
    return f"{PREFIX}idempotency:{digest}"


def open_requests(owner: str) -> str:
    """The sorted set of an owner's requests that may not have ended."""
    return f"{PREFIX}open:{owner}"


def turns(queue: str) -> str:
    """The sorted set of a queue's jobs by the round that each is in."""
    return f"{PREFIX}turns:{queue}"


def rounds(queue: str) -> str:
    """The hash with the last round of each owner in a queue."""
    return f"{PREFIX}rounds:{queue}"


def events(request_id: str) -> str:
    """The channel on which a request's events are published."""
    return f"{PREFIX}events:{request_id}"


def waiting(model: str) -> str:
    """The sorted set of a model's requests that no worker has claimed."""
    return f"{PREFIX}waiting:{model}"


def worker(name: str) -> str:
    """The hash that a live worker keeps alive."""
    return WORKER_PREFIX + name


def running(name: str) -> str:
    """The set of requests that a worker has claimed."""
    return RUNNING_PREFIX + name


def model(name: str) -> str:
    """The string with a model's last known description."""
    return f"{PREFIX}model:{name}"


def unclaimed(queue: str) -> str:
    """The hash of jobs that lie between a queue and a claim, with the time since when."""
    return f"{PREFIX}unclaimed:{queue}"


def unfinished(queue: str) -> str:
    """The hash of runs that have ended and that RQ has not been told of, with the time since when."""
    return f"{PREFIX}unfinished:{queue}"


def queue_name(model_name: str, priority: Priority) -> str:
    """The RQ queue of a model and priority."""
    return f"{model_name}.{priority.value}"


def log_ttl_s(priority: Priority) -> int:
    """Seconds for which a finished request of this priority can be read."""
    return BACKGROUND_LOG_TTL_S if priority is Priority.BACKGROUND else LOG_TTL_S
