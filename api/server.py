"""The front end's processes: gunicorn with gevent workers, run in the foreground.

The master only binds the port and forks. Everything that must see gevent's patched sockets and
locks is imported in the worker, after patching. In each worker: one greenlet for each connection,
one that reads the subscription, one that reaps, and with traces one that sends them.

What the workers count is in files of a folder that lives as long as the master, one set for each process.
"""

import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from setproctitle import setproctitle

from api.access.keys import KeyRing
from api.connections import KEEP_ALIVE_S, Connections
from api.drain import Drain
from api.gunicorn_worker import Log, Worker
from shared import logs
from shared.errors import StartupError, StoreAwayError, StoreError
from shared.settings import ApiSettings
from shared.tracing import Tracing, check_tracing

if TYPE_CHECKING:
    from flask import Flask

    from api.exchange import Observer

LINE_END_BYTES = 2

BACKLOG = 2048
LOOK_LIMIT_S = 2.0
"""How long a start waits for a Redis that says nothing."""

STORE_TIMEOUT_S = 2.0
"""How long a command may take: nothing that a front end asks of Redis waits there, and a client waits for it."""

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client, when it is imported, finds the folder for its files."""

LIVE_GAUGES = "gauge_live*_{pid}.db"
"""Its files with what a process has now, as opposed to what it has counted."""

METRICS_PREFIX = "tokenmill-metrics-"
JUST_MADE_S = 60
"""A folder younger than this may not be locked yet."""

END_MARGIN_S = 3
"""Added to the drain time, for streams to write their last event before gunicorn ends them."""

logger = logging.getLogger("tokenmill.api")


def serve(settings: ApiSettings) -> None:
    """Serve until told to stop; does not return while serving.

    Raises:
        StartupError: the API keys cannot be used, the address cannot be listened on, or Redis is not fit for use.
    """
    logs.configure(level=settings.log_level, format=settings.log_format)
    check_tracing(settings.otlp_endpoint)
    # Each process reads the keys for itself; here only whether they can be used.
    KeyRing(settings)
    listener = bind(settings.host, settings.port)
    check_store(settings.redis)
    setproctitle("tokenmill api")
    with metrics_folder() as folder:
        FrontEnd(settings, listener, folder).run()


@contextmanager
def metrics_folder() -> Iterator[Path]:
    """An empty folder that is gone afterwards. The processes that are forked meanwhile leave it alone.

    It is locked for as long as one of them lives, so that one without a lock was left behind by a process that was
    killed, and the next to start removes it.
    """
    _remove_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=METRICS_PREFIX))
    owner = os.getpid()
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove_left_behind() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:
            continue  # another user's, or gone at this moment
        try:
            if time.time() - os.fstat(lock).st_mtime > JUST_MADE_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, made here because gunicorn would retry a taken port for seconds."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


def check_store(url: str) -> None:
    """See whether Redis is fit for use; one that is away may come later.

    In a process of its own: the master must not import what is to see gevent's sockets and locks.

    Raises:
        StoreError: it is not, or the URL cannot be understood; in one line.
    """
    context = multiprocessing.get_context("fork")
    complaint = context.SimpleQueue()
    looking = context.Process(target=_look_at_store, args=(url, complaint))
    looking.start()
    looking.join()
    if not complaint.empty():
        raise StoreError(complaint.get())


def _look_at_store(url: str, complaint: Any) -> None:
    from shared.store import check, connect

    try:
        with connect(url, socket_timeout_s=LOOK_LIMIT_S) as client:
            check(client, url)
    except StoreAwayError as error:
        logger.warning("%s; until it can be, requests are answered with 503", error)
    except StoreError as error:
        complaint.put(str(error))


def _die_when_told(_: Any, __: Any) -> None:
    """Let signals end a worker that still starts.

    Until it has handlers of its own it has those of the master, which note a signal that nobody looks at; it would
    then serve on until the master's patience ends.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class FrontEnd(BaseApplication):  # type: ignore[misc]  # gunicorn has no types
    """What gunicorn runs."""

    def __init__(self, settings: ApiSettings, listener: socket.socket, metrics: Path) -> None:
        self._settings = settings
        self._listener = listener
        self._metrics = metrics
        self._drain = Drain(settings.drain_timeout)
        self._subscriber: Any = None
        self._reaper: Any = None
        self._observer: Observer | None = None
        self._tracing: Tracing | None = None
        super().__init__()

    def load_config(self) -> None:
        """gunicorn's settings; none are read from its own files or environment."""
        settings = self._settings
        options = {
            # Handed over, not shared: a copy that stays open would go on taking connections that nobody
            # serves, once gunicorn has closed its own to drain.
            "bind": [f"fd://{self._listener.detach()}"],
            "workers": settings.api_processes,
            "worker_class": Worker,
            "worker_connections": settings.connections,
            "limit_request_fields": settings.max_headers,
            "limit_request_field_size": settings.max_header_size + LINE_END_BYTES,
            "backlog": BACKLOG,
            # That there is one; how long it lasts the connection knows.
            "keepalive": int(KEEP_ALIVE_S),
            "graceful_timeout": int(settings.drain_timeout) + END_MARGIN_S,
            "timeout": 60,
            "loglevel": settings.log_level,
            "logger_class": Log,
            "proc_name": "tokenmill api",
            "control_socket_disable": True,
            "post_fork": _die_when_told,
            "post_worker_init": self._start_greenlets,
            "worker_exit": self._send_last_spans,
            "child_exit": self._forget_live_gauges,
        }
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> "Flask":
        """The app, made in the worker after patching."""
        setproctitle("tokenmill api")
        os.environ[METRICS_VARIABLE] = str(self._metrics)
        from api.app import create_app
        from api.exchange import Observer
        from api.metrics import ApiMetrics, FleetCollector, scrape
        from api.services import services
        from api.subscriber import Subscriber
        from shared.reaper import Reaper
        from shared.store import connect

        name = f"api-{socket.gethostname()}-{os.getpid()}"
        client = connect(self._settings.redis, socket_timeout_s=STORE_TIMEOUT_S)
        self._subscriber = Subscriber(client)
        endpoint = self._settings.otlp_endpoint
        self._tracing = Tracing(endpoint, service="tokenmill-api", instance=name) if endpoint else None
        self._observer = Observer(ApiMetrics(), tracing=self._tracing)
        fleet = FleetCollector(client)
        collaborators = services(
            self._settings,
            client,
            self._subscriber,
            self._drain,
            self._observer,
            scrape=lambda: scrape(self._metrics, fleet),
        )
        self._reaper = Reaper(client, collaborators.queue, name=name)
        return create_app(collaborators)

    def _start_greenlets(self, worker: Worker) -> None:
        from api.reaping import start_reaping

        worker.drain = self._drain
        worker.observer = self._observer
        worker.connections = Connections(self._settings)
        self._subscriber.start()
        start_reaping(self._reaper)

    def _send_last_spans(self, _: Any, __: Worker) -> None:
        """Runs in the worker, at its end."""
        if self._tracing is not None:
            self._tracing.stop()

    def _forget_live_gauges(self, _: Any, worker: Worker) -> None:
        """Runs in the master, once a worker is dead: streams that it had open are not open any more.

        What prometheus_client has for this cannot be called here, since the master must not import it.
        """
        for path in self._metrics.glob(LIVE_GAUGES.format(pid=worker.pid)):
            path.unlink(missing_ok=True)
