"""Queue, log and reaper together: whatever workers do and suffer, each request is in one place and ends once."""

from collections import Counter
from dataclasses import dataclass, field

import redis
from asking import request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rq import Queue
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from shared import keys
from shared.domain import Accepted, Chunk, Done, Event, Failed, Priority, Usage, is_terminal
from shared.errors import ErrorCode
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.jobs import DataJob
from shared.log import START, Append, LogReader, LogWriter, Written
from shared.queue import RequestQueue
from shared.reaper import UNCLAIMED_AFTER_S, UNFINISHED_AFTER_S, Reaper
from shared.store import as_text, script

QUEUE = keys.queue_name("fake", Priority.INTERACTIVE)
CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client left.")
MODEL = ModelInfo(
    name="fake", backend="fake", device="cpu", context=1, vocabulary=1, state_kind=StateKind.RECURRENT, created=0
)
ENDED = ("done", "failed", "cancelled")


@dataclass
class Attempt:
    """An attempt as its worker knows it; `is_safe` while nothing has happened that may take it away."""

    number: int
    next_seq: int = 1
    is_safe: bool = True


@dataclass
class Worker:
    """A worker process: what it has taken and not claimed, and what it believes to run."""

    name: str
    is_alive: bool = True
    in_hand: list[str] = field(default_factory=list)
    runs: dict[str, Attempt] = field(default_factory=dict)


class World:
    """Requests and workers over an empty Redis. Each action is one thing that may happen, if it may now."""

    def __init__(self, client: "redis.Redis") -> None:
        client.flushall()
        self._client = client
        self._queue = RequestQueue(client)
        self._fleet = Fleet(client)
        self._reader = LogReader(client)
        self._rescue = script(client, "rescue")
        self._rq = Queue(QUEUE, connection=client, job_class=DataJob, serializer=JSONSerializer)
        self._between = IntermediateQueue.get_intermediate_queue_key(self._rq.key)
        self._now = 0.0
        self._reaper = Reaper(client, self._queue, name="reaper", clock=lambda: self._now)
        self.requests: list[str] = []
        self._claims: Counter[str] = Counter()
        self._workers_made = 0
        self._workers = [self._new_worker() for _ in range(2)]

    def act(self, action: str, which: int, what: int) -> None:
        index = which % len(self._workers)
        worker = self._workers[index]
        match action:
            case "submit":
                self.requests.append(f"request-{len(self.requests)}")
                self._queue.submit(request(self.requests[-1]), limit=1000, timeout_s=600)
            case "leave" if self.requests:
                name = self.requests[what % len(self.requests)]
                self._queue.conclude(name, CANCELLED)
                self._endanger(name)
            case "reap":
                self.reap(UNCLAIMED_AFTER_S if what % 2 else 0.0)
            case "lose the lease":
                self._lose_lease(worker)
            case "stall":
                self.act("lose the lease", which, what)
                self.act("reap", which, what)
            case "return":
                self._renew(worker)
            case "die":
                self._lose_lease(worker)
                self._workers[index] = self._new_worker()
            case "take" if worker.is_alive:
                job = self._client.lmove(self._rq.key, self._between, "LEFT", "RIGHT")
                worker.in_hand += [as_text(job)] if job else []
            case "run":
                self.act("take", which, what)
                self.act("claim", which, what)
            case "claim" if worker.in_hand:
                self._claim(worker, worker.in_hand.pop(0))
            case "append" if worker.runs:
                name = sorted(worker.runs)[what % len(worker.runs)]
                self._append(worker, name, [self._next_chunk(name)])
            case "finish" if worker.runs:
                name = sorted(worker.runs)[what % len(worker.runs)]
                self._append(worker, name, [self._next_chunk(name), Done(Usage())])
            case "drain" | "hang" if not worker.in_hand:
                for name in list(worker.runs):
                    self._queue.hand_over(name, worker=worker.name, died=action == "hang")
                self._client.delete(keys.worker(worker.name)) if action == "hang" else self._fleet.leave(worker.name)
                self._workers[index] = self._new_worker()

    def reap(self, after_s: float) -> None:
        self._now += after_s
        self._client.delete(keys.REAPER_LOCK)
        self._reaper.run_once()

    def finish_everything(self) -> None:
        """The workers that there are die or were dead, and one that nothing happens to does the rest."""
        for index in range(len(self._workers)):
            self.act("die", index, 0)
        for _ in range(6):
            for _ in self.requests:
                for action in ("run", "finish"):
                    self.act(action, 0, 0)
            self.reap(max(UNCLAIMED_AFTER_S, UNFINISHED_AFTER_S))
            self.check()

    def check(self) -> None:
        """Each request is in exactly one place, and its log has no gap and at most one end."""
        listed = Counter(map(as_text, self._client.lrange(self._rq.key, 0, -1)))
        listed += Counter(map(as_text, self._client.lrange(self._between, 0, -1)))
        waiting = {as_text(raw) for raw in self._client.zrange(keys.waiting("fake"), 0, -1)}
        for name in self.requests:
            state, owner = self._reader.state(name), self._client.hget(keys.request(name), "worker")
            assert listed[name] <= 1
            assert (name in waiting) == (state == "queued")
            if state == "queued":
                assert listed[name] == 1
            elif state == "running":
                assert owner is not None
                assert self._client.sismember(keys.running(as_text(owner)), name)
            else:
                assert state in ENDED
            log = self._log(name)
            assert [event for event in log if is_terminal(event)] == (log[-1:] if state in ENDED else [])
            tokens = [token for event in log if isinstance(event, Chunk) for token in event.tokens]
            assert tokens == list(range(len(tokens)))

    def check_end(self) -> None:
        """Everything has ended, RQ knows, and nothing stays for ever."""
        started = StartedJobRegistry(QUEUE, connection=self._client, job_class=DataJob)
        assert [self._reader.state(name) in ENDED for name in self.requests] == [True] * len(self.requests)
        assert self._client.llen(self._rq.key) == self._client.llen(self._between) == 0
        assert started.get_job_ids(cleanup=False) == []
        for name in self.requests:
            job = DataJob.fetch(name, connection=self._client, serializer=JSONSerializer)
            assert job.get_status() in (JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELED)
        forever = [key for key in self._client.scan_iter(f"{keys.PREFIX}*") if self._client.pttl(key) == -1]
        assert forever == []

    def _new_worker(self) -> Worker:
        self._workers_made += 1
        worker = Worker(f"worker-{self._workers_made}")
        self._renew(worker)
        return worker

    def _renew(self, worker: Worker) -> None:
        worker.is_alive = True
        info = WorkerInfo(
            name=worker.name, model=MODEL, state=WorkerState.READY, pid=1, host="here", slots=1, running=0
        )
        self._fleet.renew(info, lease_s=600)

    def _lose_lease(self, worker: Worker) -> None:
        worker.is_alive = False
        self._client.delete(keys.worker(worker.name))
        for attempt in worker.runs.values():
            attempt.is_safe = False

    def _endanger(self, name: str) -> None:
        for worker in self._workers:
            if name in worker.runs:
                worker.runs[name].is_safe = False

    def _claim(self, worker: Worker, name: str) -> None:
        token = f"{worker.name} {self._claims[name]}"
        claim = self._queue.claim(name, model="fake", worker=worker.name, token=token, is_idle=not worker.runs)
        if claim.outcome == "alone":
            self._rescue(keys=[self._between, self._rq.key, DataJob.key_for(name)], args=[name])
        elif claim.outcome != "claimed":
            self._client.lrem(self._between, 1, name)
        else:
            assert claim.attempt > self._claims[name]
            self._claims[name] = claim.attempt
            worker.runs[name] = Attempt(claim.attempt, is_safe=worker.is_alive)
            self._start_in_rq(worker, name)
            if not self._log(name):
                self._append(worker, name, [Accepted(1)])

    def _start_in_rq(self, worker: Worker, name: str) -> None:
        job = DataJob.fetch(name, connection=self._client, serializer=JSONSerializer)
        with self._client.pipeline() as pipeline:
            Execution.create(job, 600, pipeline)
            job.prepare_for_execution(worker.name, pipeline=pipeline)
            pipeline.persist(job.key)
            pipeline.lrem(self._between, 1, name)
            pipeline.execute()

    def _append(self, worker: Worker, name: str, events: list[Event]) -> None:
        attempt = worker.runs[name]
        ended = self._reader.state(name) in ENDED
        append = Append(name, attempt.number, attempt.next_seq, events)
        (written,) = LogWriter(self._client, worker.name).append([append])
        if written is Written.FENCED:
            assert not attempt.is_safe
            del worker.runs[name]
            return
        assert attempt.number == self._claims[name]
        assert not ended
        attempt.next_seq += len(events)
        if is_terminal(events[-1]):
            del worker.runs[name]

    def _next_chunk(self, name: str) -> Chunk:
        """The token that comes after those in the log, as an attempt that carries on would draw it."""
        token = sum(isinstance(event, Chunk) for event in self._log(name))
        return Chunk(0, str(token), (token,))

    def _log(self, name: str) -> list[Event]:
        return [entry.event for entry in self._reader.after(name, START)]


ACTIONS = [
    *("submit", "leave", "lose the lease", "return", "die", "drain", "hang", "take", "claim", "finish", "reap"),
    *("run", "stall", "append", "append") * 4,
]
TURNS = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1), st.integers(0, 3))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 2), st.lists(TURNS, min_size=20, max_size=50))
def test_whatever_happens_each_request_is_in_one_place_and_ends_once(
    client: "redis.Redis", requests: int, turns: list[tuple[str, int, int]]
) -> None:
    world = World(client)
    for _ in range(requests):
        world.act("submit", 0, 0)
    for turn in turns:
        world.act(*turn)
        world.check()
    world.finish_everything()
    world.check_end()
