"""What a worker says of itself over HTTP, on a port of its own: /metrics, /health and /ready.

Threads: one that listens, from before the model is loaded until the process ends, and one for each connection. They
read what others keep and wait for none of them.
"""

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.errors import StartupError
from shared.settings import source

logger = logging.getLogger("tokenmill.worker")

CONNECTION_LIMIT_S = 10.0
"""How long a connection may last: who asks slowly holds a thread."""

LOADING = "the model is loading"

Complaints = Callable[[], list[str]]
"""What is wrong now, each in a few words; nothing if all is well."""


class Endpoint:
    """Listens and answers. Until `watch` is called the worker is healthy and not ready: it loads."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Bind the port.

        Raises:
            StartupError: the address cannot be listened on.
        """
        self._registry = registry
        self._unhealthy: Complaints = list
        self._missing: Complaints = lambda: [LOADING]
        try:
            family, *_, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._server = _Server(family, address, self._handler())
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host}:{port}, which {source('metrics_port')} asks for: {error.strerror or error}"
            ) from error

    def start(self) -> None:
        """Answer from now on, for as long as the process lives."""
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def watch(self, *, unhealthy: Complaints, missing: Complaints) -> None:
        """Ask these from now on."""
        self._unhealthy, self._missing = unhealthy, missing

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a path."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case "/health":
                return _verdict("healthy", self._unhealthy())
            case "/ready":
                return _verdict("ready", self._missing())
        return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /health, /ready\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def version_string(self) -> str:
                """Who asks need not know what this runs on."""
                return "tokenmill"

            def do_GET(self) -> None:
                status, content_type, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds, and who scans the port may send anything."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, address: Any, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = family
        self._began_at: dict[Any, float] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without asking for the host's name, which can take as long as a name server does not answer."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, and note since when."""
        self._began_at[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Runs in that thread."""
        self._began_at.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Runs twice a second: end what has lasted too long."""
        now = time.monotonic()
        for request, began_at in list(self._began_at.items()):
            if now - began_at > CONNECTION_LIMIT_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A scraper that hangs up is no news."""
        logger.debug("an answer on the metrics port was not taken", exc_info=True)


def _verdict(word: str, complaints: list[str]) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if complaints else HTTPStatus.OK
    return status, "application/json", msgspec.json.encode({word: not complaints, "missing": complaints})
