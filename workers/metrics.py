"""A worker's metrics: every name, help text, label and bucket, in one place."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.domain import FinishReason

WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
"""Buckets for what takes anything from milliseconds to minutes: waiting for a slot, computing a prompt."""

GAPS_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
"""Buckets for a step, and for the time from one token to the next."""


class WorkerMetrics:
    """The metrics of one worker, which serves one model; the model is a label of each."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, ["model"], registry=registry).labels(model)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, help, ["model"], buckets=buckets, registry=registry).labels(model)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, ["model"], registry=registry).labels(model)

        self.queue_time = histogram(
            "tokenmill_request_queue_time_seconds",
            "From submission, or from the end of the attempt before, until this worker took the request.",
            WAITS_S,
        )
        self.prefill_time = histogram(
            "tokenmill_request_prefill_time_seconds",
            "From the first step that computed something of an attempt until its first token.",
            WAITS_S,
        )
        self.token_gap = histogram(
            "tokenmill_inter_token_latency_seconds",
            "From one token of an answer to its next, each token counted, however they are sent.",
            GAPS_S,
        )
        self.step_time = histogram("tokenmill_engine_step_seconds", "One step of the engine.", GAPS_S)
        self.prompt_tokens = counter(
            "tokenmill_prompt_tokens_total", "Prompt tokens of requests that had a first token, each request once."
        )
        self.cached_tokens = counter(
            "tokenmill_prompt_tokens_cached_total", "Those of them that were not computed: a slot held them already."
        )
        self.generation_tokens = counter(
            "tokenmill_generation_tokens_total", "Tokens of answers, as in the usage that clients see."
        )
        self._success = Counter(
            "tokenmill_request_success_total",
            "Requests that ended well; length: at least one of their choices was cut off.",
            ["model", "finished_reason"],
            registry=registry,
        )
        self._failure = Counter(
            "tokenmill_request_failure_total",
            "Requests that this worker ended with an error, by its code.",
            ["model", "code"],
            registry=registry,
        )
        self.attempts = counter("tokenmill_attempts_total", "Requests that this worker took.")
        self.carried_on = counter(
            "tokenmill_requests_carried_on_total", "Those of them that an earlier attempt had left unfinished."
        )
        self.handed_over = counter(
            "tokenmill_requests_handed_over_total", "Requests that this worker gave back unfinished while it stopped."
        )
        self._slots = gauge("tokenmill_worker_slots", "Sequences that run at once.")
        self._busy = gauge("tokenmill_worker_slots_busy", "Slots in which a sequence runs.")
        self._cache = gauge(
            "tokenmill_cache_usage_ratio",
            "Tokens of running sequences that are in the model's state, of those that it has room for.",
        )
        self._model = model
        for reason in FinishReason:
            # A series that begins with its first event would hide that event from rate().
            self._success.labels(model, reason.value)

    def succeeded(self, reason: FinishReason) -> None:
        """A request ended well."""
        self._success.labels(self._model, reason.value).inc()

    def failed(self, code: str) -> None:
        """A request ended with an error."""
        self._failure.labels(self._model, code).inc()

    def watch(self, *, slots: int, busy: Callable[[], int], cache_usage: Callable[[], float]) -> None:
        """Read the gauges from here whenever somebody looks."""
        self._slots.set(slots)
        self._busy.set_function(busy)
        self._cache.set_function(cache_usage)
