"""The processes of a soak: Valkey, two front ends, three workers, and what happens to the workers.

The first worker is only ever stopped and woken, so that one lives as long as the run. A supervisor starts
the others again when they are gone, as `tokenmill up` does.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

import redis

from bench.soak.asks import END_EVERY, MODEL
from shared import keys
from shared.fleet import Fleet, WorkerState
from shared.queue import MOST_DEATHS
from shared.store import as_text, connect
from tests.servers import ROOT, FrontEnd, Valkey, wait_until

WORKERS = 3
LEASE_S = 2
DRAIN_S = 0.2
SLOTS = 8
PACE_S = 0.008
"""Of a step: long enough that whoever is hit has several answers in the making."""

LOOK_S = 0.1
START_LIMIT_S = 60.0
END_LIMIT_S = 20.0
STOPPED_FOR_S = (1.2 * LEASE_S, 3.0 * LEASE_S)
"""How long a stopped worker sleeps: always past its lease."""

REQUEST_TIMEOUT_S = 120.0
PRINTED_LIMIT = 4000


class Blow(StrEnum):
    """What is done to a worker."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP past its lease, then SIGCONT"
    TERMINATE = "SIGTERM"


SHARES = {Blow.KILL: 0.6, Blow.STOP: 0.1, Blow.TERMINATE: 0.3}
"""Of the blows to all workers but the first."""

EXIT_STATUS = {Blow.KILL: -signal.SIGKILL, Blow.TERMINATE: 0}


@dataclass(slots=True)
class _Worker:
    """A worker process and what was done to it last."""

    popen: subprocess.Popen[bytes]
    hit_by: Blow | None = None
    wakes_at: float | None = None


@dataclass(slots=True)
class Workers:
    """The workers under their supervisor. Its thread alone starts, hits and wakes them."""

    redis_url: str
    folder: Path
    client: "redis.Redis"
    random: Random
    blows: Counter[Blow] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    _workers: list[_Worker] = field(default_factory=list)
    _hit_every_s: float | None = None
    _next_hit_at: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start all, and wait until they serve."""
        self._workers = [_Worker(self._spawn()) for _ in range(WORKERS)]
        self._thread = threading.Thread(target=self._supervise, name="supervisor")
        self._thread.start()
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until nobody is stopped and every worker serves."""
        wait_until(lambda: len(self._serving()) == WORKERS, limit_s=START_LIMIT_S, what="that all workers serve")

    def hit(self, every_s: float | None) -> None:
        """From now on hit a worker about so often; None: not any more."""
        self._next_hit_at = time.monotonic() + (every_s or 0.0) / 2
        self._hit_every_s = every_s

    def end(self) -> None:
        """End them all."""
        self._over.set()
        if self._thread:
            self._thread.join()
        for worker in self._workers:
            worker.popen.send_signal(signal.SIGCONT)
            worker.popen.terminate()
        for worker in self._workers:
            try:
                worker.popen.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.complaints.append(f"a worker did not end within {END_LIMIT_S:.0f} s of SIGTERM")
                worker.popen.kill()
                worker.popen.wait(END_LIMIT_S)
        printed = "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("worker-*")))
        if printed:
            self.complaints.append(f"workers printed: {printed[:PRINTED_LIMIT]}")

    def pids(self) -> list[int]:
        """The running workers; the first is the one that lives as long as the run."""
        return [worker.popen.pid for worker in self._workers]

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "deploy.cli", "worker", "--redis", self.redis_url]
        command += ["--model", f"{MODEL}=fake:pace={PACE_S}&end_every={END_EVERY}", "--slots", str(SLOTS)]
        command += ["--lease", str(LEASE_S), "--drain-timeout", str(DRAIN_S), "--log-level", "error"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")}
        with (self.folder / f"worker-{len(list(self.folder.glob('worker-*'))):04}").open("wb") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _supervise(self) -> None:
        while not self._over.wait(LOOK_S):
            for worker in self._workers:
                self._look_after(worker)
            if self._hit_every_s is not None and time.monotonic() >= self._next_hit_at:
                self._next_hit_at = time.monotonic() + self._hit_every_s * self.random.uniform(0.5, 1.5)
                self._hit_one()

    def _look_after(self, worker: _Worker) -> None:
        """Wake a worker whose time has come, and start one anew that is gone."""
        if worker.wakes_at is not None and time.monotonic() >= worker.wakes_at:
            worker.popen.send_signal(signal.SIGCONT)
            worker.wakes_at = None
        status = worker.popen.poll()
        if status is None:
            return
        expected = EXIT_STATUS.get(worker.hit_by) if worker.hit_by else None
        if status != expected:
            self.complaints.append(f"a worker ended with status {status} after {worker.hit_by}")
        worker.popen, worker.hit_by = self._spawn(), None

    def _serving(self) -> dict[int, str]:
        """The names of the workers that serve now and are not about to go, by process id."""
        unharmed = {
            worker.popen.pid
            for worker in self._workers
            if worker.wakes_at is None and worker.hit_by in (None, Blow.STOP) and worker.popen.poll() is None
        }
        infos = Fleet(self.client).workers()
        return {info.pid: info.name for info in infos if info.state is WorkerState.READY and info.pid in unharmed}

    def _hit_one(self) -> None:
        """Do something to a worker, unless it would leave nobody who serves or end a request for good."""
        serving = self._serving()
        targets = [worker for worker in self._workers if worker.popen.pid in serving]
        if len(targets) < 2:
            return
        target = self.random.choice(targets)
        if self._most_deaths(serving[target.popen.pid]) >= MOST_DEATHS - 1:
            return
        blow = self.random.choices(list(SHARES), list(SHARES.values()))[0]
        if target is self._workers[0]:
            blow = Blow.STOP
        target.hit_by = blow
        self.blows[blow] += 1
        match blow:
            case Blow.KILL:
                target.popen.kill()
            case Blow.TERMINATE:
                target.popen.terminate()
            case Blow.STOP:
                target.wakes_at = time.monotonic() + self.random.uniform(*STOPPED_FOR_S)
                target.popen.send_signal(signal.SIGSTOP)

    def _most_deaths(self, worker: str) -> int:
        """How many workers have died of what this one runs: the most of any of its requests."""
        deaths = [
            self.client.hget(keys.request(as_text(raw)), "deaths") for raw in self.client.smembers(keys.running(worker))
        ]
        return max((int(count) for count in deaths if count), default=0)


@dataclass(frozen=True, slots=True)
class Servers:
    """Everything that runs, and a client of its Valkey."""

    front_ends: list[FrontEnd]
    workers: Workers
    client: "redis.Redis"

    @property
    def ports(self) -> list[int]:
        return [front_end.port for front_end in self.front_ends]


@contextmanager
def running(folder: Path, random: Random) -> Iterator[Servers]:
    """Start everything, and end it afterwards."""
    valkey = Valkey(folder, options=("--save", "", "--appendonly", "yes"))
    valkey.start()
    client = connect(valkey.url)
    workers = Workers(valkey.url, folder, client, random)
    settings = {"log_level": "error", "request_timeout": REQUEST_TIMEOUT_S}
    front_ends = [FrontEnd(valkey.url, **settings).start() for _ in range(2)]
    try:
        for front_end in front_ends:
            front_end.ready()
        workers.start()
        yield Servers(front_ends, workers, client)
    finally:
        workers.end()
        for front_end in front_ends:
            with suppress(subprocess.TimeoutExpired):
                if complaint := front_end.stop():
                    workers.complaints.append(f"a front end printed: {complaint[:PRINTED_LIMIT]}")
        client.connection_pool.disconnect()
        valkey.stop()
