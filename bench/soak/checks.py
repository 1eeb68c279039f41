"""What is looked at from outside: each request's end, what stays in Redis, what the processes have grown by."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil
import redis
from rq.intermediate_queue import IntermediateQueue
from rq.registry import StartedJobRegistry

from bench.soak.asks import MODEL
from bench.soak.clients import Sent
from bench.soak.processes import Servers
from shared import keys
from shared.domain import Priority
from shared.errors import ErrorCode
from shared.jobs import rq_queue
from shared.log import START, LogReader
from shared.store import as_text

FOR_GOOD = ("rq:queues", "rq:workers", "rq:finished:", "rq:failed:", "rq:canceled:")
"""RQ's indexes. They have no expiry; what they list has."""

MARGIN = 10
"""By how many descriptors or threads a process may differ: connections of pools come and go."""

VALKEY = "Valkey"
RSS_GROWTH, RSS_MARGIN_BYTES = 1.2, 20e6


@dataclass(slots=True)
class Ledger:
    """Looks up how each request ended, by what Redis says of it."""

    client: "redis.Redis"
    carried_on: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    poisonous: int = 0
    complaints: list[str] = field(default_factory=list)
    _open: list[Sent] = field(default_factory=list)

    def settle(self, sent: Iterable[Sent]) -> list[Sent]:
        """Look these up, and those that had not ended the last time. Returns those that still have not."""
        looked_up = [*self._open, *sent]
        with self.client.pipeline(transaction=False) as pipeline:
            for request_id, _ in looked_up:
                pipeline.hmget(keys.request(request_id), "state", "deaths", "attempt")
            replies = pipeline.execute()
        self._open = []
        for item, (state, deaths, attempt) in zip(looked_up, replies, strict=True):
            if state in (b"queued", b"running"):
                self._open.append(item)
            else:
                self._enter(item, as_text(state or b"gone"), int(deaths or 0), int(attempt or 0))
        return self._open

    def _enter(self, sent: Sent, state: str, deaths: int, attempt: int) -> None:
        if deaths:
            self.deaths[deaths] += 1
        self.carried_on += state == "done" and attempt > 1
        if state == "done" or (state == "cancelled" and not sent.must_end_done):
            return
        self.complaints.append(f"{sent.request_id} is {state} after {deaths} deaths: {self._last_event(sent)}")

    def _last_event(self, sent: Sent) -> str:
        events = LogReader(self.client).after(sent.request_id, START)
        text = str(events[-1].event) if events else "its log is empty"
        self.poisonous += ErrorCode.POISONOUS.value in text
        return text


def leftovers(client: "redis.Redis") -> list[str]:
    """What is still waiting, taken, running, listened to or to stay for ever; nothing when all is quiet."""
    left = [f"channel {as_text(name)}" for name in client.pubsub_channels(keys.events("*"))]
    left += [f"{as_text(key)} is not empty" for key in client.scan_iter(keys.running("*"))]
    if waiting := client.zcard(keys.waiting(MODEL)):
        left.append(f"{waiting} ids in {keys.waiting(MODEL)}")
    for priority in Priority:
        queue = rq_queue(client, MODEL, priority)
        started = StartedJobRegistry(queue=queue).get_job_ids(cleanup=False)
        between: int = client.llen(IntermediateQueue.get_intermediate_queue_key(queue.key))
        for count, where in (
            (len(queue), "queue"),
            (between, "intermediate queue"),
            (len(started), "started registry"),
        ):
            if count:
                left.append(f"{count} jobs in RQ's {where} of {queue.name}")
    # A worker that was taken for dead has a record without an expiry until its next heartbeat.
    return left or [f"{name} has no expiry" for name in stored(client).without_expiry]


@dataclass(frozen=True, slots=True)
class Stored:
    """What Redis holds: keys by kind, those that would stay for ever, and its memory."""

    kinds: Counter[str]
    without_expiry: list[str]
    used_bytes: int


def stored(client: "redis.Redis") -> Stored:
    """Count all keys."""
    kinds: Counter[str] = Counter()
    without_expiry = []
    names = [as_text(name) for name in client.scan_iter(count=1000)]
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.pttl(name)
        expiries = pipeline.execute()
    for name, expiry in zip(names, expiries, strict=True):
        kinds[":".join(name.split(":")[:2])] += 1
        if expiry == -1 and not name.startswith(FOR_GOOD):
            without_expiry.append(name)
    return Stored(kinds, without_expiry, int(client.info("memory")["used_memory"]))


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds."""

    pid: int
    rss: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A process at the start and at the end; `is_same` if it is not its successor."""

    name: str
    before: Footprint
    after: Footprint

    @property
    def is_same(self) -> bool:
        return self.before.pid == self.after.pid

    @property
    def rss_ratio(self) -> float:
        return self.after.rss / self.before.rss

    def complaints(self) -> list[str]:
        """In what it has grown. Valkey's memory is what is stored; a young process has not had the time to grow."""
        grown = []
        for what in ("descriptors", "threads"):
            before, after = getattr(self.before, what), getattr(self.after, what)
            if abs(after - before) > MARGIN:
                grown.append(f"{self.name} had {before} {what} at the start and has {after} at the end")
        may_not_grow = self.is_same and self.name != VALKEY
        if may_not_grow and self.after.rss > self.before.rss * RSS_GROWTH + RSS_MARGIN_BYTES:
            grown.append(f"{self.name} has {self.rss_ratio:.2f} times its memory of the start")
        return grown


def footprints(servers: Servers) -> dict[str, Footprint]:
    """Every process by a name of its role."""
    found = {}
    for number, front_end in enumerate(servers.front_ends, 1):
        master = psutil.Process(front_end.pid)
        for role, process in zip(("master", "front end"), (master, *master.children()), strict=True):
            found[f"{role} {number}"] = _footprint(process)
    for number, pid in enumerate(servers.workers.pids(), 1):
        found[f"worker {number}"] = _footprint(psutil.Process(pid))
    found[VALKEY] = _footprint(psutil.Process(servers.client.info("server")["process_id"]))
    return found


def _footprint(process: psutil.Process) -> Footprint:
    with process.oneshot():
        return Footprint(process.pid, process.memory_info().rss, process.num_fds(), process.num_threads())
