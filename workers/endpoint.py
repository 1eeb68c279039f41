"""What a worker says of itself over HTTP, on a port of its own: /metrics, /health and /ready.

Threads: one that listens, from before the model is loaded until the process ends, and one for each connection. They
read what others keep and wait for none of them.
"""

import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.errors import StartupError
from shared.settings import source

logger = logging.getLogger("tokenmill.worker")

CLIENT_TIMEOUT_S = 10.0

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
            timeout = CLIENT_TIMEOUT_S

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
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without asking for the host's name, which can take as long as a name server does not answer."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A scraper that hangs up is no news."""
        logger.debug("an answer on the metrics port was not taken", exc_info=True)


def _verdict(word: str, complaints: list[str]) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if complaints else HTTPStatus.OK
    return status, "application/json", msgspec.json.encode({word: not complaints, "missing": complaints})
