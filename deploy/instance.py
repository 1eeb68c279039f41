"""What a running launcher tells the other commands of the same user: one small file for each port.

The launcher holds a lock on its file for as long as it lives. The kernel gives the lock up however
the launcher ends, so a file without one was left behind.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deploy.valkey import DIRECTORY_PREFIX
from shared.errors import StartupError
from shared.settings import source


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a launcher serves, and where its Redis is."""

    url: str
    redis: str
    pid: int
    directory: str
    """The embedded Redis's directory, or empty."""


class InstanceFile:
    """A launcher's own file, from the start of the launcher to its end."""

    def __init__(self, port: int, instance: Instance) -> None:
        """Write the file, readable by the user alone: the Redis URL may hold a password."""
        directory = instances_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory / f"{port}.json"
        self._path.unlink(missing_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, msgspec.json.encode(instance))

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def instances_directory() -> Path:
    """Where the files are: the user's runtime directory, or else the cache."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "tokenmill"
    home = os.environ.get("HOME") or tempfile.gettempdir()
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "tokenmill"


def running_instances() -> dict[int, Instance]:
    """The launchers of this user that run now, by port."""
    return {int(path.stem): instance for path, instance, is_running in _read_all() if is_running}


def find_instance(port: int | None) -> Instance:
    """The launcher that runs on this port, or the only one that runs.

    Raises:
        StartupError: there is none, or there are several and no port was given.
    """
    running = running_instances()
    if port is not None:
        running = {port: running[port]} if port in running else {}
    if not running:
        where = f" on port {port}" if port is not None else ""
        raise StartupError(f"no `tokenmill up` of yours runs here{where}; name a Redis with {source('redis')}")
    if len(running) > 1:
        ports = ", ".join(map(str, sorted(running)))
        raise StartupError(f"several `tokenmill up` run here, on the ports {ports}; choose one with --port")
    return next(iter(running.values()))


def sweep() -> None:
    """Remove what launchers left behind that were killed before they could clean up."""
    for path, instance, is_running in _read_all():
        if is_running:
            continue
        if Path(instance.directory).name.startswith(DIRECTORY_PREFIX):
            shutil.rmtree(instance.directory, ignore_errors=True)
        path.unlink(missing_ok=True)


def _read_all() -> Iterator[tuple[Path, Instance, bool]]:
    for path in sorted(instances_directory().glob("[0-9]*.json")):
        try:
            with path.open("rb") as file:
                instance = msgspec.json.decode(file.read(), type=Instance)
                is_running = _is_locked(file.fileno())
        except (msgspec.MsgspecError, OSError):
            continue  # being written or removed at this moment
        yield path, instance, is_running


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
