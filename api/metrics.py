"""A front end's metrics: every name, help text, label and bucket, in one place; and the scrape.

The processes of one front end write what they count into files in a folder of their own (prometheus_client's
multiprocess mode), and whichever is scraped adds all of them up. What Redis knows is read at the scrape.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import redis
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from shared.census import Census, take_census
from shared.domain import Priority
from shared.errors import ErrorCode
from shared.fleet import WorkerState

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960)

NO_MODEL = ""
"""The label of a request whose model is not one that is served: no label comes from what a client sends."""


class ApiMetrics:
    """What one process of a front end counts."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """`registry` is for a front end of a single process; files need none."""
        self._responses = Counter(
            "tokenmill_http_responses_total",
            "Answers by the URL pattern they are of, `other` for none, and HTTP status.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._first_token = Histogram(
            "tokenmill_time_to_first_token_seconds",
            "From a request's arrival until the first piece of a streamed answer with text is written.",
            ["model"],
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._latency = Histogram(
            "tokenmill_e2e_request_latency_seconds",
            "From a request's arrival until its whole answer is written, streamed or not.",
            ["model"],
            buckets=LATENCY_S,
            registry=registry,
        )
        self._rejected = Counter(
            "tokenmill_requests_rejected_total",
            "Requests that were answered with an HTTP error, by its code; the model is empty if it is not known.",
            ["model", "code"],
            registry=registry,
        )
        self._failed = Counter(
            "tokenmill_streams_failed_total",
            "Streams that ended in an error after they had begun, by its code.",
            ["model", "code"],
            registry=registry,
        )
        self._cancelled = Counter(
            "tokenmill_requests_cancelled_total",
            "Requests that were cancelled because their client left.",
            ["model"],
            registry=registry,
        )
        self._resumed = Counter(
            "tokenmill_streams_resumed_total", "Streams that were taken up again.", ["model"], registry=registry
        )
        self._open = Gauge(
            "tokenmill_streams_open",
            "Streams that are being written.",
            ["model"],
            multiprocess_mode="livesum",
            registry=registry,
        )

    def responded(self, endpoint: str, status: int) -> None:
        """An answer of any kind has left."""
        self._responses.labels(endpoint, str(status)).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """A streamed answer has its first text."""
        self._first_token.labels(model).observe(seconds)

    def done(self, model: str, seconds: float) -> None:
        """An answer is complete."""
        self._latency.labels(model).observe(seconds)

    def rejected(self, model: str, code: ErrorCode) -> None:
        """A request was answered with an HTTP error."""
        self._rejected.labels(model, code.value).inc()

    def failed(self, model: str, code: ErrorCode) -> None:
        """A stream ended in an error."""
        self._failed.labels(model, code.value).inc()

    def cancelled(self, model: str) -> None:
        """A client left, and its request with it."""
        self._cancelled.labels(model).inc()

    def resumed(self, model: str) -> None:
        """A stream was taken up again."""
        self._resumed.labels(model).inc()

    def opened(self, model: str) -> None:
        """A stream begins."""
        self._open.labels(model).inc()

    def closed(self, model: str) -> None:
        """A stream has ended, in whatever way."""
        self._open.labels(model).dec()


class FleetCollector(Collector):
    """What Redis knows of workers and queues, the same at every front end."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client

    def describe(self) -> Iterable[Metric]:
        """The families without samples, so that registering them asks nothing of Redis."""
        return _families(Census([], [], {}, {}), is_up=True)

    def collect(self) -> Iterable[Metric]:
        """The families as they are now; of a Redis that is away only that it is."""
        try:
            return _families(take_census(self._client), is_up=True)
        except redis.RedisError:
            return _families(Census([], [], {}, {}), is_up=False)


def scrape(directory: Path, fleet: FleetCollector) -> bytes:
    """Everything in Prometheus's text format."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))  # type: ignore[no-untyped-call]
    registry.register(fleet)
    return generate_latest(registry)


def _families(census: Census, *, is_up: bool) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "tokenmill_num_requests_waiting", "Requests that no worker has taken yet.", labels=["model", "priority"]
    )
    running = GaugeMetricFamily(
        "tokenmill_num_requests_running", "Requests that live workers have taken.", labels=["model"]
    )
    workers = GaugeMetricFamily("tokenmill_workers", "Live workers.", labels=["model", "state"])
    slots = GaugeMetricFamily("tokenmill_slots", "Sequences that all live workers run at once.", labels=["model"])
    for model in census.models:
        own = [worker for worker in census.workers if worker.model.name == model]
        for priority in Priority:
            waiting.add_metric([model, priority.value], census.waiting.get((model, priority), 0))
        running.add_metric([model], census.running.get(model, 0))
        for state in WorkerState:
            workers.add_metric([model, state.value], sum(worker.state is state for worker in own))
        slots.add_metric([model], sum(worker.slots for worker in own))
    yield from (waiting, running, workers, slots)
    yield GaugeMetricFamily("tokenmill_redis_up", "Whether Redis answers this front end.", value=float(is_up))
