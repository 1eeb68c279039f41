"""The launcher behind `tokenmill up`: starts Redis, workers and the front end, keeps them up, ends them in order.

One thread. Signals set flags and wake the loop; the loop looks at each service and does what is due.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from deploy.children import Child
from deploy.instance import Instance, InstanceFile, sweep
from deploy.models import check_models
from deploy.options import as_environment
from deploy.probes import choose_port, front_end_is_ready, local_url, worker_is_ready
from deploy.service import Change, Service, Startable
from deploy.signals import Signals
from deploy.valkey import START_LIMIT_S, EmbeddedValkey
from shared.errors import StartupError, StoreError
from shared.fleet import Fleet, FleetView
from shared.settings import ENV_PREFIX, ApiSettings, WorkerSettings
from shared.store import check, connect, without_password
from workers.models import ModelSpec

STARTING_POLL_S = 0.1
"""Between looks at what sends no signal: a worker that becomes ready, a front end that answers."""

SERVING_POLL_S = 5.0
STILL_LOADING_S = 30.0

STOP_MARGIN_S = 5.0
"""What a stopping child gets beyond its `drain_timeout`, to close its connections and exit."""

STORE_STOP_S = 10.0
KILL_LIMIT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to run. Each worker has `worker`'s settings, but its own model."""

    api: ApiSettings
    worker: WorkerSettings
    models: tuple[ModelSpec, ...]
    workers_per_model: int


def launch(plan: Plan, say: Callable[[str], None]) -> None:
    """Start everything, serve until SIGINT, SIGTERM or SIGHUP, stop everything.

    Raises:
        StartupError: something cannot be started, or not be kept running. Nothing runs any more then.
    """
    check_models(plan.models, plan.worker)
    port = choose_port(plan.api.host, plan.api.port)
    if plan.api.redis:
        with connect(plan.api.redis) as client:
            check(client, plan.api.redis)
    sweep()
    plan = dataclasses.replace(plan, api=dataclasses.replace(plan.api, port=port))
    with Signals() as signals:
        launcher = Launcher(plan, signals, say)
        try:
            launcher.serve()
        finally:
            launcher.stop()


class Launcher:
    """The services of one plan."""

    def __init__(self, plan: Plan, signals: Signals, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._signals = signals
        self._say = say
        self._redis_url = plan.api.redis
        self._url = local_url(plan.api.host, plan.api.port)
        self._valkey: EmbeddedValkey | None = None
        self._store: Service | None = None
        self._workers: list[Service] = []
        self._front_end: Service | None = None
        self._instance: InstanceFile | None = None
        self._announced = False

    # -- up --

    def serve(self) -> None:
        """Start the services and look after them until a signal comes."""
        if self._redis_url:
            self._say(f"using Redis at {without_password(self._redis_url)}")
        else:
            self._start_store()
        self._register()
        self._add_services()
        loading_since = time.monotonic()
        while not self._signals.stop:
            for service in self._services():
                self._look(service)
            if not self._announced and all(service.ready for service in self._services()):
                self._announced = True
                self._announce()
            if not self._announced and time.monotonic() - loading_since > STILL_LOADING_S:
                loading_since = time.monotonic()
                self._say_what_is_missing()
            self._signals.wait(self._pause())

    def _start_store(self) -> None:
        """Start the embedded Redis and wait for it: everything else needs it from its first step on."""
        valkey = self._valkey = EmbeddedValkey()
        self._redis_url = valkey.url
        self._say(f"starting Redis (embedded, in {valkey.directory})")
        self._store = Service("Redis", lambda: Child(valkey.command(), _environment()), lambda _: valkey.answers())
        give_up_at = time.monotonic() + START_LIMIT_S
        while not (self._store.ready or self._signals.stop):
            try:
                self._store.look()
            except StartupError as error:
                raise StoreError(f"{error}: {valkey.last_words()}") from error
            if time.monotonic() > give_up_at:
                raise StoreError(f"Redis did not answer within {START_LIMIT_S:g} s: {valkey.last_words()}")
            self._signals.wait(STARTING_POLL_S)

    def _register(self) -> None:
        """Let `tokenmill status` find this launcher."""
        directory = str(self._valkey.directory) if self._valkey else ""
        instance = Instance(url=self._url, redis=self._redis_url, pid=os.getpid(), directory=directory)
        try:
            self._instance = InstanceFile(self._plan.api.port, instance)
        except OSError as error:
            self._say(f"`tokenmill status` will need --redis {without_password(self._redis_url)}: {error}")

    def _add_services(self) -> None:
        fleet = FleetView(Fleet(connect(self._redis_url)), max_age_s=STARTING_POLL_S / 2)
        count = self._plan.workers_per_model
        for model in self._plan.models:
            value = f"{model.name}={model.location}"
            settings = dataclasses.replace(
                self._plan.worker, redis=self._redis_url, model=value, threads=self._threads_each()
            )
            self._say(f"loading model {model.name} ({model.location})")
            for number in range(1, count + 1):
                title = f"worker {model.name}" + (f" ({number} of {count})" if count > 1 else "")
                self._say(f"starting {title}")
                settings = dataclasses.replace(settings, metrics_port=self._next_metrics_port())
                self._workers.append(
                    Service(title, _starter("worker", settings), lambda pid: worker_is_ready(fleet, pid))
                )
        self._say(f"starting the front end on {self._url}")
        self._front_end = Service(
            "front end",
            _starter("api", dataclasses.replace(self._plan.api, redis=self._redis_url)),
            lambda _: all(worker.ready for worker in self._workers) and front_end_is_ready(self._url),
        )

    def _next_metrics_port(self) -> int:
        """Each worker has a port of its own, one after the other; 0 stays none."""
        first = self._plan.worker.metrics_port
        return first + len(self._workers) if first else 0

    def _threads_each(self) -> int:
        """What was asked for, or an equal share of the cores: threads beyond those only wait for each other."""
        workers = len(self._plan.models) * self._plan.workers_per_model
        return self._plan.worker.threads or max(1, (os.cpu_count() or 1) // workers)

    def _services(self) -> list[Service]:
        return [service for service in (self._store, *self._workers, self._front_end) if service is not None]

    def _look(self, service: Service) -> None:
        match service.look():
            case Change.DIED:
                self._say(f"{service.title} {service.last_end}; starting it again in {service.backoff_s:g} s")
            case Change.BACK:
                self._say(f"{service.title} is back")

    def _pause(self) -> float:
        """Seconds until the next look, if no signal comes before."""
        waits = [service.wait_s() or STARTING_POLL_S for service in self._services() if not service.ready]
        return min(waits, default=SERVING_POLL_S)

    def _announce(self) -> None:
        names = [model.name for model in self._plan.models]
        body = {
            "model": names[0],
            "messages": [{"role": "user", "content": "Write one sentence about rivers."}],
            "stream": True,
        }
        self._say(f"ready {self._url}  (models: {', '.join(names)})")
        headers = ["Content-Type: application/json"]
        if self._plan.api.api_keys:
            headers.append("Authorization: Bearer YOUR_KEY")
        given = " ".join(f"-H '{header}'" for header in headers)
        self._say(f"curl -N {self._url}/v1/chat/completions {given} -d '{json.dumps(body)}'")

    def _say_what_is_missing(self) -> None:
        missing = [service.title for service in self._services() if not service.ready]
        self._say(f"still starting: {', '.join(missing)}")

    # -- down --

    def stop(self) -> None:
        """End everything: front end and workers first, in their drain time, Redis last."""
        self._signals.stopping = True
        drain_timeout = self._plan.api.drain_timeout
        grace = f"; running requests have {drain_timeout:g} s to finish (Ctrl-C: stop at once)"
        self._say(f"stopping{grace if self._announced else ''}")
        others = [service for service in self._services() if service is not self._store]
        self._end(_children(others), drain_timeout + STOP_MARGIN_S)
        if self._store is not None:
            self._end(_children([self._store]), STORE_STOP_S)
        if self._valkey is not None:
            self._valkey.remove()
        if self._instance is not None:
            self._instance.remove()
        self._say("stopped")

    def _end(self, children: list[Startable], grace: float) -> None:
        for child in children:
            child.terminate()
        self._wait_for(children, grace, lambda: self._signals.hurry)
        left = [child for child in children if not child.is_dead()]
        for child in left:
            child.kill()
        self._wait_for(left, KILL_LIMIT_S, lambda: False)

    def _wait_for(self, children: Iterable[Startable], limit: float, give_up: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + limit
        while not all(child.is_dead() for child in children):
            if give_up() or time.monotonic() > give_up_at:
                return
            self._signals.wait(STARTING_POLL_S)


def _children(services: list[Service]) -> list[Startable]:
    return [service.child for service in services if service.child is not None]


def _starter(command: str, settings: Any) -> Callable[[], Startable]:
    """Starts `tokenmill api` or `tokenmill worker` with these settings, in this interpreter."""
    values = as_environment({item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)})
    return lambda: Child([sys.executable, "-P", "-m", "deploy.cli", command], _environment() | values)


def _environment() -> dict[str, str]:
    """This process's environment without our variables: children get their settings in full."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
