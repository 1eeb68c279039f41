"""A real worker process over a real Valkey: what clients and operators see of it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
from asking import failure_of, reasons_of, text_of, tokens_of, usage_of
from rq import Queue
from rq import Worker as RqWorker
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker
from servers import ROOT, Valkey, wait_until
from worker_processes import ENDLESS, SLOW, Office, Start

from shared import keys
from shared.domain import Accepted, Failed, FinishReason, Priority, TextPrompt
from shared.errors import ErrorCode
from shared.jobs import DataJob, rq_queue
from shared.reaper import Reaper

CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client left.")
INTERACTIVE = keys.queue_name("fake", Priority.INTERACTIVE)

# -- jobs that end well --


def test_several_jobs_run_at_once_and_end_finished(start: Start, office: Office) -> None:
    worker = start("--slots", "4", model=ENDLESS)
    office.ready(worker)
    names = [f"job-{index}" for index in range(12)]
    office.submit(*names, max_tokens=60)

    started = StartedJobRegistry(INTERACTIVE, connection=office.client)
    wait_until(lambda: len(started.get_job_ids(cleanup=False)) == 4, what="four jobs at once")
    results = [office.result(name) for name in names]

    assert all(events[0] == Accepted(5) for events in results)
    assert {len(tokens_of(events)) for events in results} == {60}
    assert len({text_of(events) for events in results}) == 1
    office.wait_for_status(JobStatus.FINISHED, names)
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert worker.output == ""


def test_choices_and_prompts_of_one_request_end_under_their_own_index(start: Start, office: Office) -> None:
    office.ready(start("--slots", "2", model=ENDLESS))
    office.submit("job", prompts=(TextPrompt("one"), TextPrompt("two")), n=3, max_tokens=5)

    events = office.result("job")

    assert reasons_of(events) == dict.fromkeys(range(6), FinishReason.LENGTH)
    assert usage_of(events).completion == 30
    assert usage_of(events).prompt == 6
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_prompt_that_is_too_long_is_refused_before_anything_else(start: Start, office: Office) -> None:
    office.ready(start(model="fake=fake:context=16"))
    office.submit("job", prompt="x" * 16)

    events = office.result("job")

    assert len(events) == 1
    assert failure_of(events).code == ErrorCode.CONTEXT_LENGTH_EXCEEDED.value
    assert failure_of(events).param == "prompt"
    office.wait_for_status(JobStatus.FAILED, ["job"])
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_background_requests_come_after_interactive_ones(start: Start, office: Office) -> None:
    office.submit("background-0", "background-1", priority=Priority.BACKGROUND)
    office.submit("interactive-0", "interactive-1")
    office.ready(start("--slots", "1"))

    for name in ("background-0", "background-1", "interactive-0", "interactive-1"):
        office.result(name)
    started = {
        name: DataJob.fetch(name, office.client, JSONSerializer).started_at
        for name in ("interactive-0", "interactive-1", "background-0", "background-1")
    }

    assert list(started) == sorted(started, key=lambda name: str(started[name]))


def test_a_burst_of_background_requests_does_not_starve(start: Start, office: Office) -> None:
    office.ready(start("--slots", "1"))
    office.submit("later", priority=Priority.BACKGROUND, max_tokens=3)

    assert usage_of(office.result("later")).completion == 3


def test_rq_s_own_tool_shows_workers_and_queues(start: Start, office: Office, valkey: Valkey) -> None:
    office.ready(start("--slots", "2", model=ENDLESS))
    office.submit("running-0", "running-1", max_tokens=None)
    office.wait_for_text("running-0")
    office.wait_for_text("running-1")
    office.submit("waits", priority=Priority.BACKGROUND)
    wait_until(lambda: [worker.get_state() for worker in stock_workers(office)] == ["busy"], what="a busy worker")

    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "rq.cli", "info", "--url", valkey.url],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip

    assert "2 queues, 1 jobs total" in shown
    assert "1 workers, 2 queues" in shown
    assert "busy" in shown
    assert "fake.interactive | 0, 2 executing" in shown
    for name in ("running-0", "running-1"):
        office.queue.conclude(name, CANCELLED)
    office.result("waits")
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    wait_until(lambda: [worker.get_state() for worker in stock_workers(office)] == ["idle"], what="an idle worker")


def stock_workers(office: Office) -> list[Any]:
    return list(BaseWorker.all(connection=office.client))


# -- cancelling and deadlines --


def test_a_request_cancelled_while_queued_never_runs(start: Start, office: Office) -> None:
    office.submit("cancelled", "next")
    office.queue.conclude("cancelled", CANCELLED)
    office.ready(start())

    office.result("next")

    assert office.events("cancelled") == [CANCELLED]
    assert office.status("cancelled") is JobStatus.CANCELED
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_request_cancelled_while_running_frees_its_slot(start: Start, office: Office) -> None:
    office.ready(start("--slots", "1", model=ENDLESS))
    office.submit("endless", n=2, max_tokens=None)
    office.wait_for_text("endless")

    office.queue.conclude("endless", CANCELLED)
    office.submit("next")
    office.result("next")

    assert office.events("endless")[-1] == CANCELLED
    office.wait_for_status(JobStatus.CANCELED, ["endless"])
    assert CanceledJobRegistry(INTERACTIVE, connection=office.client).get_job_ids(cleanup=False) == ["endless"]
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_cancellation_whose_message_is_lost_still_frees_the_slot(start: Start, office: Office) -> None:
    office.ready(start("--slots", "1", "--lease", "1", "--chunk-tokens", "1024", "--chunk-delay", "5", model=ENDLESS))
    office.submit("endless", max_tokens=None)
    office.wait_for_text("endless")
    # What `conclude` does in Redis, without the message that follows it.
    original, office.client.publish = office.client.publish, lambda *_: 0  # type: ignore[method-assign]
    try:
        office.queue.conclude("endless", CANCELLED)
    finally:
        office.client.publish = original  # type: ignore[method-assign]

    wait_until(lambda: office.workers()[0].running == 0, limit_s=4, what="a free slot")


def test_an_operator_can_stop_a_job_with_rq_s_own_command(start: Start, office: Office) -> None:
    office.ready(start(model=ENDLESS))
    office.submit("endless", max_tokens=None)
    office.wait_for_text("endless")
    wait_until(lambda: office.status("endless") is JobStatus.STARTED, what="RQ's record")

    send_stop_job_command(office.client, "endless", serializer=JSONSerializer)

    assert failure_of(office.result("endless")).code == ErrorCode.CANCELLED.value
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_request_past_its_deadline_ends_while_running_and_while_waiting(start: Start, office: Office) -> None:
    office.ready(start("--slots", "1", model=ENDLESS))
    office.submit("running", "waiting", max_tokens=None, timeout_s=1.5)

    for name in ("running", "waiting"):
        assert failure_of(office.result(name)).code == ErrorCode.DEADLINE_EXCEEDED.value
    assert office.client.zcard(keys.waiting("fake")) == 0
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_the_same_job_delivered_twice_runs_once(start: Start, office: Office) -> None:
    office.ready(start("--slots", "1", model=ENDLESS))
    office.submit("job", max_tokens=30)
    office.wait_for_text("job")
    office.client.rpush(Queue(INTERACTIVE, connection=office.client).key, "job")
    office.result("job")
    office.wait_for_status(JobStatus.FINISHED, ["job"])
    office.client.rpush(Queue(INTERACTIVE, connection=office.client).key, "job")
    office.submit("next")
    events = office.result("next")

    assert usage_of(events).completion == 8
    assert len(tokens_of(office.events("job"))) == 30
    wait_until(office.is_clean, what="RQ to hold nothing of it")
    assert office.status("job") is JobStatus.FINISHED


# -- workers that die --


def test_what_a_killed_worker_ran_is_queued_again_within_its_lease(start: Start, office: Office) -> None:
    worker = start("--lease", "1", model=ENDLESS)
    office.ready(worker)
    office.submit("endless", max_tokens=None)
    office.wait_for_text("endless")
    wait_until(lambda: office.status("endless") is JobStatus.STARTED, what="RQ's record")
    worker.kill()
    reaper = Reaper(office.client, office.queue, name="another process")

    def reaped() -> bool:
        reaper.run_once()
        return office.status("endless") is JobStatus.QUEUED

    wait_until(reaped, limit_s=5, what="the reaper")

    assert office.left_in_rq() == ["endless"]
    # A front end that is up may have been the one to reap: the worker leaves RQ's lists after that.
    wait_until(lambda: RqWorker.all_keys(office.client) == [], what="the worker to leave RQ's lists")
    assert office.workers() == []


def test_another_worker_reaps_a_killed_one_and_goes_on_with_the_queue(start: Start, office: Office) -> None:
    doomed = start("--lease", "1", "--slots", "1", model=ENDLESS)
    office.ready(doomed)
    office.submit("long", max_tokens=200)
    office.wait_for_text("long")
    office.submit("waits")
    doomed.kill()
    office.ready(start("--lease", "1", "--slots", "1", model=ENDLESS))

    assert usage_of(office.result("long")).completion == 200
    assert usage_of(office.result("waits")).completion == 8
    wait_until(office.is_clean, what="RQ to hold nothing of it")


def test_a_job_that_a_worker_took_and_never_claimed_runs_after_all(start: Start, office: Office) -> None:
    office.submit("taken")
    queue = rq_queue(office.client, "fake", Priority.INTERACTIVE)
    office.client.lmove(queue.key, queue.intermediate_queue_key, "LEFT", "RIGHT")
    office.ready(start("--lease", "1"))

    assert usage_of(office.result("taken", limit_s=30)).completion == 8
    wait_until(office.is_clean, what="RQ to hold nothing of it")


# -- workers that are asked to stop --


@pytest.mark.parametrize("how", ["SIGTERM", "rq"])
def test_a_worker_that_is_asked_to_stop_finishes_what_it_runs(start: Start, office: Office, how: str) -> None:
    worker = start("--slots", "2", model=SLOW)
    office.ready(worker)
    office.submit("running-0", "running-1", max_tokens=30)
    office.wait_for_text("running-0")
    office.wait_for_text("running-1")
    office.submit("waits")

    if how == "SIGTERM":
        worker.terminate()
    else:
        send_shutdown_command(office.client, office.workers()[0].name)

    assert worker.end() == 0
    for name in ("running-0", "running-1"):
        assert len(tokens_of(office.result(name))) == 30
    assert [office.status(name) for name in ("running-0", "running-1")] == [JobStatus.FINISHED] * 2
    assert office.events("waits") == []
    assert office.left_in_rq() == ["waits"]
    assert office.workers() == []
    assert stock_workers(office) == []


def test_a_worker_that_may_not_finish_hands_over_what_it_runs(start: Start, office: Office) -> None:
    worker = start("--drain-timeout", "0", "--slots", "2", model=SLOW)
    office.ready(worker)
    office.submit("one", "two", max_tokens=None)
    office.wait_for_text("one")
    office.wait_for_text("two")

    worker.terminate()

    assert worker.end() == 0
    for name in ("one", "two"):
        assert office.status(name) is JobStatus.QUEUED
    assert sorted(office.left_in_rq()) == ["one", "two"]
    assert office.workers() == []


def test_an_idle_worker_stops_soon(start: Start, office: Office) -> None:
    worker = start()
    office.ready(worker)

    worker.terminate()

    assert worker.end() == 0
    assert worker.output == ""


# -- Redis that goes away --


@pytest.fixture
def own_office(own_durable_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]") -> Office:
    return Office(connect_to(own_durable_valkey.url))


def test_a_worker_outlives_a_restart_of_redis(start: Start, own_office: Office, own_durable_valkey: Valkey) -> None:
    worker = start(model=SLOW, redis_url=own_durable_valkey.url)
    own_office.ready(worker)
    own_office.submit("running", max_tokens=60)
    own_office.wait_for_text("running")
    # A second's worth of appends may be lost with the server, but not what was there before.
    own_office.client.bgrewriteaof()
    wait_until(lambda: not own_office.client.info("persistence")["aof_rewrite_in_progress"], what="the rewrite")

    own_durable_valkey.stop()
    own_durable_valkey.start()

    assert len(tokens_of(own_office.result("running"))) == 60
    own_office.submit("next")
    assert usage_of(own_office.result("next")).completion == 8
    own_office.wait_for_status(JobStatus.FINISHED, ["running", "next"])
    assert own_office.is_clean()
    assert worker.is_running


def test_an_idle_worker_outlives_a_restart_of_redis(
    start: Start, own_office: Office, own_durable_valkey: Valkey
) -> None:
    worker = start(redis_url=own_durable_valkey.url)
    own_office.ready(worker)

    own_durable_valkey.stop()
    wait_until(lambda: "Redis is away" in worker.output, what="the worker's complaint")
    own_durable_valkey.start()
    own_office.submit("next")

    assert usage_of(own_office.result("next")).completion == 8
    assert own_office.is_clean()


def test_a_worker_outlives_a_redis_that_comes_back_empty(
    start: Start, own_office: Office, own_durable_valkey: Valkey
) -> None:
    worker = start("--slots", "1", model=SLOW, redis_url=own_durable_valkey.url)
    own_office.ready(worker)
    own_office.submit("lost", max_tokens=None)
    own_office.wait_for_text("lost")

    own_office.client.flushall()
    own_office.submit("next")

    assert usage_of(own_office.result("next")).completion == 8
    assert own_office.events("lost") == []
    assert worker.is_running


def test_a_worker_stops_in_order_while_redis_is_away(
    start: Start, own_office: Office, own_durable_valkey: Valkey
) -> None:
    worker = start(redis_url=own_durable_valkey.url)
    own_office.ready(worker)
    own_durable_valkey.stop()
    wait_until(lambda: "Redis is away" in worker.output, what="the worker's complaint")

    worker.terminate()

    assert worker.end() == 0
    assert "Traceback" not in worker.output


# -- workers that cannot start --


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "fake=fake:speed=1"}, "no option 'speed'"),
        ({"model": "lost=/nowhere/lost.gguf"}, "/nowhere/lost.gguf does not exist"),
        ({"model": f"tests={ROOT / 'tests'}"}, "tests has no config.json"),
        ({"redis_url": "redis://127.0.0.1:1/0"}, "cannot reach Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_a_worker_that_cannot_serve_says_why_in_one_line(
    start: Start, office: Office, arguments: dict[str, str], said: str
) -> None:
    worker = start(**arguments)

    assert worker.end() == 1
    assert said in worker.output
    assert len(worker.output.splitlines()) == 1
    assert office.workers() == []
