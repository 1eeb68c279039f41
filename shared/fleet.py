"""The fleet: which workers live, what they serve, and how busy they are.

A worker is alive as long as its lease: a key with an expiry on Redis's clock, which the worker
renews. No process compares its own clock with another's.
"""

import time
from collections.abc import Callable
from enum import StrEnum

import msgspec
import redis

from shared import keys
from shared.errors import ErrorCode, RequestError
from shared.store import readable, replies, store_errors

RENEWALS_PER_LEASE = 4


class StateKind(StrEnum):
    """What may be done to the state that a model keeps of a sequence.

    TRIMMABLE is a cache with one entry per token: it can be cut back to any length and copied, so
    a prompt that begins like an earlier one can reuse that part. RECURRENT state is one summary
    of all tokens so far: it cannot be cut back, so every prompt starts from nothing.
    """

    TRIMMABLE = "trimmable"
    RECURRENT = "recurrent"


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    READY = "ready"
    DRAINING = "draining"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A served model. `context` is the most tokens that a prompt and its answer may have together."""

    name: str
    backend: str
    device: str
    context: int
    vocabulary: int
    state_kind: StateKind
    created: int


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a live worker says of itself with each renewal of its lease, which lasts `lease_s`.

    The last three are measured over the last minute and 0 when there was nothing to measure: tokens drawn per
    second, and in seconds the median time from a request's submission to its first token, and between two tokens
    of an answer.
    """

    name: str
    model: ModelInfo
    state: WorkerState
    pid: int
    host: str
    slots: int
    running: int
    lease_s: float = 0.0
    tokens_per_s: float = 0.0
    first_token_p50_s: float = 0.0
    token_gap_p50_s: float = 0.0


def worker_info(raw: bytes | None) -> WorkerInfo | None:
    """What a worker says of itself; None of one that says nothing, or nothing that can be read."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=WorkerInfo)
    except (msgspec.DecodeError, RecursionError):
        return None


class Fleet:
    """The workers' side and the readers' side of the registry."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    def renew(self, worker: WorkerInfo, *, lease_s: float) -> None:
        """Announce the worker and keep it alive for another `lease_s`.

        The latter also while Redis is out of memory: then it takes no news, and lets any lease be extended.
        """
        lease_ms = int(lease_s * 1000)
        self._client.pexpire(keys.worker(worker.name), lease_ms)
        with self._client.pipeline() as pipeline:
            pipeline.hset(keys.worker(worker.name), "info", msgspec.json.encode(worker))
            pipeline.pexpire(keys.worker(worker.name), lease_ms)
            pipeline.sadd(keys.WORKERS, worker.name)
            pipeline.expire(keys.WORKERS, keys.RUNNING_TTL_S)
            pipeline.expire(keys.running(worker.name), keys.RUNNING_TTL_S)
            pipeline.set(keys.model(worker.model.name), msgspec.json.encode(worker.model), ex=keys.MODEL_TTL_S)
            pipeline.execute()

    def leave(self, name: str) -> None:
        """Take the worker out of the registry at once; if it still holds something, it is left to the reaper."""
        with self._client.pipeline() as pipeline:
            pipeline.delete(keys.worker(name))
            pipeline.scard(keys.running(name))
            _, held = pipeline.execute()
        if not held:
            self._client.srem(keys.WORKERS, name)

    def workers(self) -> list[WorkerInfo]:
        """The workers that are alive now, by name."""
        names = sorted(readable(self._client.smembers(keys.WORKERS)))
        if not names:
            return []
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hget(keys.worker(name), "info")
            infos = replies(pipeline)
        return [worker for info in infos if (worker := worker_info(info)) is not None]

    def is_known(self, model: str) -> bool:
        """Whether the model was served within the last day."""
        return bool(self._client.exists(keys.model(model)))


class FleetView:
    """The fleet as a front-end process sees it: at most `max_age_s` old.

    A model that the view does not know is looked up afresh, so a new worker is found at once.
    """

    def __init__(
        self, fleet: Fleet, *, max_age_s: float = 1.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._max_age_s = max_age_s
        self._monotonic = monotonic
        self._workers: list[WorkerInfo] = []
        self._seen_at = float("-inf")

    def workers(self, *, fresh: bool = False) -> list[WorkerInfo]:
        """The live workers.

        Raises:
            RequestError: `store_unavailable`.
        """
        now = self._monotonic()
        if fresh or now - self._seen_at > self._max_age_s:
            with store_errors():
                self._workers = self._fleet.workers()
            self._seen_at = now
        return self._workers

    def models(self) -> dict[str, ModelInfo]:
        """The models that at least one worker which takes new requests serves, by name."""
        return _models(self.workers())

    def require(self, name: str) -> ModelInfo:
        """The served model of this name.

        Raises:
            RequestError: `model_not_found` if nobody serves or has lately served it,
                `model_unavailable` if it is known and no live worker serves it now.
        """
        model = self.models().get(name) or _models(self.workers(fresh=True)).get(name)
        if model is not None:
            return model
        with store_errors():
            known = self._fleet.is_known(name)
        if known:
            raise RequestError(
                ErrorCode.MODEL_UNAVAILABLE,
                f"No worker takes requests for the model '{name}' now. Retry shortly.",
                param="model",
            )
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, f"The model '{name}' does not exist.", param="model")


def _models(workers: list[WorkerInfo]) -> dict[str, ModelInfo]:
    return {worker.model.name: worker.model for worker in workers if worker.state is WorkerState.READY}
