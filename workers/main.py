"""The composition root: builds a worker out of its parts, runs it, and takes it down in order.

Threads, and what each may do:

| thread | owns | may block on |
| --- | --- | --- |
| main (intake) | RQ's loop and signals, prompts | Redis, a free slot |
| engine | the backend's slots, the scheduler, the answers | the model |
| publisher | the event logs | Redis |
| finisher | RQ's records of ended jobs | Redis |
| lease | the worker's lease, reaping | Redis |
| watchdog | nothing; ends the process when the engine hangs | Redis, at the end |
| endpoint | nothing; answers probes and scrapes | their clients |
| RQ commands | nothing; forwards cancellations | Redis |
"""

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable

import redis
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from shared.domain import Failed
from shared.fleet import RENEWALS_PER_LEASE, Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.log import LogReader, LogWriter
from shared.queue import Handover, RequestQueue
from shared.reaper import Reaper
from shared.settings import WorkerSettings
from shared.store import CONNECTION_ERRORS, check, connect
from shared.tracing import Tracing, check_tracing
from workers.attempt import Attempt
from workers.backends.protocol import Backend
from workers.endpoint import Endpoint
from workers.engine import Engine
from workers.finisher import Finisher
from workers.intake import Intake
from workers.lease import LeaseKeeper
from workers.metrics import WorkerMetrics
from workers.models import load_backend, parse_model
from workers.observer import Observer
from workers.prompt import PromptEncoder
from workers.publisher import Outcome, Publisher
from workers.scheduler.scheduler import Scheduler
from workers.traces import AttemptTraces
from workers.watchdog import Watchdog

STEP_TOKENS = 512
"""Most tokens in one step, when no answer is waiting for its next token."""

CPU_PREFILL_CHUNK = 128
GPU_PREFILL_CHUNK = 512
"""How much of a prompt is computed at a time beside running answers: a step must stay short on a CPU, where
each token of it costs about as much as another, and can be large on a GPU, where few tokens cost like many."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while the engine, back from a step, waits for it."""

JOIN_S = 5.0
LEASE_TIMEOUT_AT_LEAST_S = 1.0

EXIT_BROKEN = 70
"""The exit status of a worker that found itself unable to go on (sysexits.h calls it EX_SOFTWARE)."""

logger = logging.getLogger("tokenmill.worker")


def run(settings: WorkerSettings) -> int:
    """Serve one model until SIGTERM or SIGINT; returns the exit status.

    Raises:
        StartupError: Redis cannot be reached or the model cannot be served.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    spec = parse_model(settings.model)
    check_tracing(settings.otlp_endpoint)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    endpoint = Endpoint(settings.metrics_host, settings.metrics_port, registry) if settings.metrics_port else None
    if endpoint is not None:
        endpoint.start()
    client = connect(settings.redis)
    check(client, settings.redis)
    backend_name, backend = load_backend(spec.location, settings)
    encoder = PromptEncoder(backend.tokenizer)
    encoder.check()
    worker = Worker(settings, spec.name, backend_name, backend, encoder, client, registry)
    if endpoint is not None:
        endpoint.watch(unhealthy=worker.unhealthy, missing=worker.missing)
    return worker.run()


class Worker:
    """One worker process, wired."""

    def __init__(
        self,
        settings: WorkerSettings,
        model: str,
        backend_name: str,
        backend: Backend,
        encoder: PromptEncoder,
        client: "redis.Redis",
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._state = WorkerState.READY
        self._name = f"{model.replace('/', '-')}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        description = backend.description
        self._model = ModelInfo(
            name=model,
            backend=backend_name,
            device=description.device,
            context=description.context,
            vocabulary=description.vocabulary,
            state_kind=description.state_kind,
            created=int(time.time()),
        )
        self._slots = description.slots
        metrics = WorkerMetrics(model, registry)
        self._tracing = _tracing(settings.otlp_endpoint, self._name)
        traces = AttemptTraces(self._tracing, self._name) if self._tracing else None
        self._observer = Observer(metrics, traces=traces)
        # A connection that has gone silent must be given up in less time than the lease has left.
        lease_client = connect(
            settings.redis, socket_timeout_s=max(settings.lease / RENEWALS_PER_LEASE, LEASE_TIMEOUT_AT_LEAST_S)
        )
        self._fleet = Fleet(lease_client)
        requests = self._requests = RequestQueue(client)
        self._finisher = Finisher()
        self._publisher = Publisher(
            LogWriter(client, self._name),
            self._ended,
            chunk_tokens=settings.chunk_tokens,
            chunk_delay_s=settings.chunk_delay,
            abandon_s=settings.abandon,
        )
        scheduler = Scheduler(
            slots=description.slots,
            prefill_chunk=settings.prefill_chunk
            or (CPU_PREFILL_CHUNK if description.device == "cpu" else GPU_PREFILL_CHUNK),
            step_tokens=STEP_TOKENS,
            reuse=description.state_kind is StateKind.TRIMMABLE,
            exact_prefill=description.exact_prefill,
        )
        self._engine = Engine(backend, scheduler, self._publisher.put, observer=self._observer, slots=description.slots)
        room = description.slots * description.context
        metrics.watch(
            slots=description.slots, busy=lambda: scheduler.running, cache_usage=lambda: scheduler.computed / room
        )
        self._watchdog = Watchdog(self._engine, self._give_up, limit_s=settings.hang_timeout)
        self._lease = LeaseKeeper(
            lease_client,
            self._fleet,
            Reaper(lease_client, RequestQueue(lease_client), name=self._name),
            self._publisher,
            self._describe,
            lease_s=settings.lease,
        )
        self._intake = Intake(
            client,
            name=self._name,
            model=model,
            engine=self._engine,
            publisher=self._publisher,
            finisher=self._finisher,
            observer=self._observer,
            encoder=encoder,
            queue=requests,
            reader=LogReader(client),
            on_ready=self._announce,
            on_drain=self._drain,
        )
        self._finisher.worker = self._intake
        self._threads = {
            "engine": _thread("engine", self._engine.run),
            "publisher": _thread("publisher", self._publisher.run),
            "finisher": _thread("finisher", self._finisher.run),
            "lease": _thread("lease", self._lease.run),
            "watchdog": _thread("watchdog", self._watchdog.run),
        }

    def run(self) -> int:
        """Serve until asked to stop; 0 then, 1 if RQ's loop ended by itself."""
        for name in ("engine", "publisher", "finisher", "watchdog"):
            self._threads[name].start()
        self._intake.work(logging_level="WARNING")
        if self._tracing is not None:
            self._tracing.stop()
        return 0 if self._intake.was_asked_to_stop else 1

    def unhealthy(self) -> list[str]:
        """What speaks for ending this process: an engine that has something to compute and does not get on."""
        stuck_s = self._watchdog.stuck_s
        return [f"the engine has completed no step for {stuck_s:.0f} s"] if stuck_s else []

    def missing(self) -> list[str]:
        """Why this worker takes no requests now."""
        missing = self.unhealthy()
        if self._state is WorkerState.DRAINING:
            missing.append("the worker is stopping")
        if not self._lease.is_held:
            missing.append("the worker is not in the fleet, or Redis is away")
        return missing

    def _announce(self) -> None:
        """Join the fleet: from here on jobs are taken and signals are heard."""
        self._lease.renew()
        self._threads["lease"].start()
        logger.info("worker %s serves %s", self._name, self._model.name)

    def _describe(self) -> WorkerInfo:
        beat = self._observer.pulse.read()
        return WorkerInfo(
            name=self._name,
            model=self._model,
            state=self._state,
            pid=os.getpid(),
            host=socket.gethostname(),
            slots=self._slots,
            running=self._engine.in_flight,
            lease_s=self._settings.lease,
            tokens_per_s=beat.tokens_per_s,
            first_token_p50_s=beat.first_token_p50_s,
            token_gap_p50_s=beat.token_gap_p50_s,
        )

    def _ended(self, attempt: Attempt, outcome: Outcome, failure: Failed | None) -> None:
        # The engine is done with an attempt that it has ended itself; it may know nothing of another end.
        if outcome is not Outcome.DONE:
            self._engine.cancel(attempt)
        self._finisher.ended(attempt, outcome, failure)
        self._observer.ended(attempt, outcome, failure)

    def _drain(self) -> None:
        """Finish what runs, within the drain timeout; hand the rest over with what it has."""
        self._state = WorkerState.DRAINING
        with contextlib.suppress(*CONNECTION_ERRORS):
            self._lease.renew()
        if not self._engine.wait_until_idle(self._settings.drain_timeout):
            self._stop("watchdog", self._watchdog.stop)
            self._stop("engine", self._engine.stop)
        self._stop("publisher", self._publisher.stop)
        self._hand_over(died=False)
        self._stop("finisher", self._finisher.stop)
        self._stop("engine", self._engine.stop)
        self._stop("lease", self._lease.stop)
        with contextlib.suppress(*CONNECTION_ERRORS):
            self._fleet.leave(self._name)

    def _hand_over(self, *, died: bool) -> None:
        """Give what is not finished back to the queue. What fails here the reaper does once the lease is over."""
        for attempt in self._publisher.attempts():
            with contextlib.suppress(redis.RedisError):
                if self._requests.hand_over(attempt.request.id, worker=self._name, died=died) is Handover.QUEUED:
                    self._observer.handed_over(attempt)
            self._publisher.drop(attempt)

    def _give_up(self, stuck_s: float) -> None:
        """End a process whose engine hangs; what it ran is carried on at once, and a supervisor starts another."""
        logger.critical("the engine has made no progress for %.0f s: the worker exits", stuck_s)
        # Or it would take back what is handed over.
        self._intake.stop_taking(JOIN_S)
        self._stop("publisher", self._publisher.stop)
        self._hand_over(died=True)
        os._exit(EXIT_BROKEN)

    def _stop(self, name: str, ask: Callable[[], None]) -> None:
        ask()
        if self._threads[name].is_alive():
            self._threads[name].join(JOIN_S)


def _tracing(endpoint: str, worker: str) -> Tracing | None:
    return Tracing(endpoint, service="tokenmill-worker", instance=worker) if endpoint else None


def _thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """A thread without which the worker is of no use: if it dies, so does the process.

    A supervisor starts a new worker, and what this one ran is ended through its lease.
    """

    def guarded() -> None:
        try:
            target()
        except BaseException:
            logger.critical("the %s thread died; the worker exits", name, exc_info=True)
            os._exit(EXIT_BROKEN)

    return threading.Thread(target=guarded, name=name, daemon=True)
