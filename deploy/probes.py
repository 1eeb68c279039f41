"""Looking at ports, front ends and workers from outside."""

import errno
import http.client
import os
import socket

from shared.errors import RequestError, StartupError
from shared.fleet import FleetView, WorkerState
from shared.settings import source

PROBE_TIMEOUT_S = 2.0


def choose_port(host: str, port: int) -> int:
    """The port to listen on: this one if it is free, any free one for 0.

    Raises:
        StartupError: the port is taken, or the address cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is taken; choose another with {source('port')}") from error
        reason = error.strerror or os.strerror(error.errno or 0)
        raise StartupError(f"cannot listen on {host}, port {port}: {reason}") from error


def local_url(host: str, port: int) -> str:
    """The URL under which a front end that listens there answers on this machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def front_end_is_ready(url: str) -> bool:
    """Whether `/ready` answers 200. No proxy is asked, whatever the environment says."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def worker_is_ready(fleet: FleetView, pid: int) -> bool:
    """Whether the worker that is this process of this machine takes requests."""
    try:
        workers = fleet.workers()
    except RequestError:
        return False
    here = socket.gethostname()
    return any(worker.pid == pid and worker.host == here and worker.state is WorkerState.READY for worker in workers)
