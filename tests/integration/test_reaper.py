"""The reaper: what a dead worker left behind ends or goes back, once, whoever reaps."""

from collections.abc import Callable

import pytest
import redis
from asking import request
from rq import Queue
from rq.executions import Execution
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from shared import keys
from shared.domain import Accepted, Failed, Priority
from shared.errors import ErrorCode
from shared.fleet import Fleet, ModelInfo, StateKind, WorkerInfo, WorkerState
from shared.jobs import DataJob
from shared.log import START, Append, LogReader, LogWriter, Written
from shared.queue import MOST_DEATHS, Handover, RequestQueue
from shared.reaper import UNCLAIMED_AFTER_S, UNFINISHED_AFTER_S, Reaper

pytestmark = pytest.mark.usefixtures("no_key_without_ttl")

INTERACTIVE = keys.queue_name("fake", Priority.INTERACTIVE)
CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client left.")


@pytest.fixture
def queue(client: "redis.Redis") -> RequestQueue:
    return RequestQueue(client)


@pytest.fixture
def fleet(client: "redis.Redis") -> Fleet:
    return Fleet(client)


class Turns:
    """Reaping whenever a test wants it, on a clock that the test sets."""

    def __init__(self, client: "redis.Redis", queue: RequestQueue) -> None:
        self.now = 0.0
        self._client = client
        self._reaper = Reaper(client, queue, name="reaper", clock=lambda: self.now)

    def reap(self) -> None:
        self._client.delete(keys.REAPER_LOCK)
        self._reaper.run_once()


@pytest.fixture
def turns(client: "redis.Redis", queue: RequestQueue) -> Turns:
    return Turns(client, queue)


@pytest.fixture
def live(fleet: Fleet) -> Callable[[str], None]:
    """Gives workers a lease."""

    def renew(name: str) -> None:
        model = ModelInfo(
            name="fake",
            backend="fake",
            device="cpu",
            context=1,
            vocabulary=1,
            state_kind=StateKind.RECURRENT,
            created=0,
        )
        fleet.renew(
            WorkerInfo(name=name, model=model, state=WorkerState.READY, pid=1, host="here", slots=1, running=0),
            lease_s=60,
        )

    return renew


def submit(queue: RequestQueue, name: str) -> None:
    queue.submit(request(name), limit=10, timeout_s=60)


def take(client: "redis.Redis", name: str) -> None:
    """Move a job to where a worker that takes it puts it first."""
    assert client.lmove(Queue(INTERACTIVE, connection=client).key, between(client), "LEFT", "RIGHT") == name.encode()


def between(client: "redis.Redis") -> str:
    return IntermediateQueue.get_intermediate_queue_key(Queue(INTERACTIVE, connection=client).key)


def run_by(queue: RequestQueue, client: "redis.Redis", worker: str, name: str) -> None:
    submit(queue, name)
    take(client, name)
    assert queue.claim(name, model="fake", worker=worker, token=worker).outcome == "claimed"
    client.lrem(between(client), 1, name)


def start_in_rq(client: "redis.Redis", worker: str, name: str) -> None:
    """Tell RQ that a job runs, as a worker does."""
    job = DataJob.fetch(name, connection=client, serializer=JSONSerializer)
    with client.pipeline() as pipeline:
        Execution.create(job, 60, pipeline)
        job.prepare_for_execution(worker, pipeline=pipeline)
        pipeline.persist(job.key)
        pipeline.execute()


def last_event(client: "redis.Redis", name: str) -> object:
    entries = LogReader(client).after(name, START)
    return entries[-1].event if entries else None


def status(client: "redis.Redis", name: str) -> JobStatus:
    return Job.fetch(name, connection=client, serializer=JSONSerializer).get_status()


def test_what_a_dead_worker_ran_goes_back_to_the_head_of_its_queue(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    run_by(queue, client, "dead", "two")
    start_in_rq(client, "dead", "two")
    LogWriter(client, "dead").append([Append("two", 1, 1, [Accepted(3)])])
    submit(queue, "waits")
    fleet.leave("dead")

    turns.reap()

    assert LogReader(client).state("one") == LogReader(client).state("two") == "queued"
    assert status(client, "one") is status(client, "two") is JobStatus.QUEUED
    waiting = Queue(INTERACTIVE, connection=client).job_ids
    assert set(waiting[:2]) == {"one", "two"}
    assert waiting[2:] == ["waits"]
    assert queue.depth("fake") == 3
    assert client.smembers(keys.WORKERS) == set()
    assert not client.exists(keys.running("dead"))
    assert not list(client.scan_iter("rq:execution*"))
    assert queue.claim("two", model="fake", worker="alive", token="t").attempt == 2


def test_what_a_worker_claimed_after_it_was_buried_goes_back_when_it_dies_for_good(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("paused")
    submit(queue, "one")
    take(client, "one")
    fleet.leave("paused")
    turns.reap()
    assert queue.claim("one", model="fake", worker="paused", token="t").outcome == "claimed"

    turns.reap()

    assert LogReader(client).state("one") == "queued"
    assert Queue(INTERACTIVE, connection=client).job_ids == ["one"]


def test_what_a_worker_claims_while_it_is_buried_goes_back_when_it_dies_for_good(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("paused")
    run_by(queue, client, "paused", "early")
    submit(queue, "late")
    take(client, "late")
    fleet.leave("paused")

    class ClaimedMeanwhile(RequestQueue):
        def hand_over(self, request_id: str, *, worker: str, died: bool) -> Handover:
            if request_id == "early":
                assert queue.claim("late", model="fake", worker="paused", token="t").outcome == "claimed"
            return super().hand_over(request_id, worker=worker, died=died)

    Reaper(client, ClaimedMeanwhile(client), name="another").run_once()
    assert LogReader(client).state("late") == "running"

    turns.reap()

    assert LogReader(client).state("late") == "queued"


def test_a_dead_worker_cannot_write_to_what_waits_for_another(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    fleet.leave("dead")
    turns.reap()

    assert LogWriter(client, "dead").append([Append("one", 1, 1, [Accepted(3)])]) == [Written.FENCED]
    assert last_event(client, "one") is None


def test_what_has_ended_three_workers_is_ended_and_kept_apart(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    submit(queue, "poison")
    for number in range(1, MOST_DEATHS + 1):
        worker = f"dead-{number}"
        live(worker)
        take(client, "poison")
        assert queue.claim("poison", model="fake", worker=worker, token=worker).attempt == number
        client.lrem(between(client), 1, "poison")
        fleet.leave(worker)
        turns.reap()

    event = last_event(client, "poison")
    assert isinstance(event, Failed)
    assert event.code == ErrorCode.POISONOUS.value
    assert status(client, "poison") is JobStatus.FAILED
    failed = FailedJobRegistry(INTERACTIVE, connection=client)
    assert failed.get_job_ids(cleanup=False) == ["poison"]
    assert Queue(INTERACTIVE, connection=client).job_ids == []


def test_what_has_ended_two_workers_runs_only_alone(
    queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    submit(queue, "suspect")
    for worker in ("dead-1", "dead-2"):
        live(worker)
        claim = queue.claim("suspect", model="fake", worker=worker, token=worker, is_idle=False)
        assert (claim.outcome, claim.is_alone) == ("claimed", False)
        fleet.leave(worker)
        turns.reap()

    assert queue.claim("suspect", model="fake", worker="c", token="c", is_idle=False).outcome == "alone"
    claim = queue.claim("suspect", model="fake", worker="c", token="c", is_idle=True)
    assert (claim.outcome, claim.attempt, claim.is_alone) == ("claimed", 3, True)


def test_what_has_no_job_left_ends_in_a_retryable_error(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    client.delete(DataJob.key_for("one"))
    fleet.leave("dead")

    turns.reap()

    event = last_event(client, "one")
    assert isinstance(event, Failed)
    assert event.code == ErrorCode.WORKER_LOST.value


def test_what_a_live_worker_runs_goes_on(
    client: "redis.Redis", queue: RequestQueue, live: Callable[[str], None], turns: Turns
) -> None:
    live("alive")
    run_by(queue, client, "alive", "one")

    turns.reap()

    assert LogReader(client).state("one") == "running"
    assert client.smembers(keys.running("alive")) == {b"one"}


def test_what_another_worker_has_taken_over_goes_on(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    fleet.leave("dead")
    live("alive")
    assert queue.claim("one", model="fake", worker="alive", token="b").attempt == 2

    turns.reap()

    assert LogReader(client).state("one") == "running"
    assert last_event(client, "one") is None


def test_what_had_ended_before_its_worker_died_stays_as_it_was(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None], turns: Turns
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    queue.conclude("one", CANCELLED)
    client.sadd(keys.running("dead"), "one")
    client.expire(keys.running("dead"), 60)
    fleet.leave("dead")

    turns.reap()

    assert last_event(client, "one") == CANCELLED


@pytest.mark.parametrize(
    ("state", "said"),
    [("done", JobStatus.FINISHED), ("failed", JobStatus.FAILED), ("cancelled", JobStatus.CANCELED)],
)
def test_rq_is_told_of_what_ended_just_before_its_worker_died(
    client: "redis.Redis",
    queue: RequestQueue,
    fleet: Fleet,
    live: Callable[[str], None],
    turns: Turns,
    state: str,
    said: JobStatus,
) -> None:
    live("dead")
    run_by(queue, client, "dead", "one")
    start_in_rq(client, "dead", "one")
    client.hset(keys.request("one"), "state", state)
    client.delete(keys.running("dead"))
    fleet.leave("dead")

    turns.reap()
    turns.now = UNFINISHED_AFTER_S - 0.1
    turns.reap()
    assert status(client, "one") is JobStatus.STARTED
    turns.now = UNFINISHED_AFTER_S
    turns.reap()

    assert status(client, "one") is said
    assert StartedJobRegistry(INTERACTIVE, connection=client).get_job_ids(cleanup=False) == []
    assert client.ttl(DataJob.key_for("one")) > 0
    assert not list(client.scan_iter("rq:execution*"))


def test_rq_is_told_nothing_of_what_still_runs(
    client: "redis.Redis", queue: RequestQueue, live: Callable[[str], None], turns: Turns
) -> None:
    live("alive")
    run_by(queue, client, "alive", "one")
    start_in_rq(client, "alive", "one")

    for turns.now in (0.0, UNFINISHED_AFTER_S):
        turns.reap()

    assert status(client, "one") is JobStatus.STARTED
    assert StartedJobRegistry(INTERACTIVE, connection=client).get_job_ids(cleanup=False) == ["one"]


def test_one_process_reaps_at_a_time(
    client: "redis.Redis", queue: RequestQueue, fleet: Fleet, live: Callable[[str], None]
) -> None:
    Reaper(client, queue, name="first").run_once()
    live("dead")
    run_by(queue, client, "dead", "one")
    fleet.leave("dead")

    Reaper(client, queue, name="second").run_once()

    assert LogReader(client).state("one") == "running"


def test_what_is_never_claimed_goes_back_however_often_the_reapers_change(
    client: "redis.Redis", queue: RequestQueue
) -> None:
    submit(queue, "taken")
    take(client, "taken")

    for now in (0.0, UNCLAIMED_AFTER_S):
        client.delete(keys.REAPER_LOCK)
        Reaper(client, queue, name=f"reaper-{now}", clock=lambda now=now: now).run_once()

    assert Queue(INTERACTIVE, connection=client).job_ids == ["taken"]


def test_a_job_that_was_taken_and_never_claimed_goes_back_to_the_head_of_its_queue(
    client: "redis.Redis", queue: RequestQueue, turns: Turns
) -> None:
    submit(queue, "taken")
    take(client, "taken")
    submit(queue, "behind")
    turns.reap()

    turns.now = UNCLAIMED_AFTER_S - 0.1
    turns.reap()
    assert Queue(INTERACTIVE, connection=client).job_ids == ["behind"]
    turns.now = UNCLAIMED_AFTER_S
    turns.reap()

    assert Queue(INTERACTIVE, connection=client).job_ids == ["taken", "behind"]
    assert client.lrange(between(client), 0, -1) == []
    assert queue.claim("taken", model="fake", worker="w", token="t").outcome == "claimed"


def test_a_job_that_comes_by_again_is_given_its_time_anew(
    client: "redis.Redis", queue: RequestQueue, turns: Turns
) -> None:
    submit(queue, "taken")
    take(client, "taken")
    turns.reap()
    client.lrem(between(client), 1, "taken")
    turns.now = UNCLAIMED_AFTER_S - 1
    turns.reap()
    client.rpush(between(client), "taken")

    turns.now = UNCLAIMED_AFTER_S + 1
    turns.reap()

    assert client.lrange(between(client), 0, -1) == [b"taken"]


def test_a_taken_job_of_which_only_the_id_is_left_is_dropped(
    client: "redis.Redis", queue: RequestQueue, turns: Turns
) -> None:
    submit(queue, "taken")
    take(client, "taken")
    client.delete(DataJob.key_for("taken"))
    turns.reap()

    turns.now = UNCLAIMED_AFTER_S
    turns.reap()

    assert client.lrange(between(client), 0, -1) == []
    assert Queue(INTERACTIVE, connection=client).job_ids == []


def test_reaping_an_empty_store_does_nothing(turns: Turns) -> None:
    turns.reap()
    turns.reap()
