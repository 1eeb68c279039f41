"""What front ends and workers count, scraped as Prometheus does it, after requests that are known."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from asking import failure_of, usage_of
from launched import Up
from raw_http import connection, is_closed
from scraping import Scrape, becomes, scrape, status_of, wait_for_value
from servers import FrontEnd, Valkey, free_port, wait_until
from streaming import post
from worker_processes import ENDLESS, SLOW, Office, Start, WorkerProcess

from shared.domain import Failed, Priority, TextPrompt, TokenPrompt
from shared.errors import ErrorCode
from shared.jobs import DataJob
from workers.backends.fake import POISON

StartFrontEnd = Callable[..., FrontEnd]

STEADY = "fake=fake:end_every=0&context=2000"
"""Answers that only their length ends."""

CANCELLED = Failed(ErrorCode.CANCELLED.value, "The client left.")


def ask(front_end: FrontEnd, tokens: int = 5, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "prompt": "hello", "max_tokens": tokens, **fields}
    return httpx.post(f"{front_end.url}/v1/completions", json=body, timeout=40)


@pytest.fixture
def start_measured(start: Start) -> Iterator[Callable[..., tuple[WorkerProcess, str]]]:
    """Starts workers with a port for metrics; gives its URL beside the worker."""

    def begin(*arguments: str, **options: Any) -> tuple[WorkerProcess, str]:
        port = free_port()
        worker = start("--metrics-port", str(port), *arguments, **options)
        return worker, f"http://127.0.0.1:{port}"

    return begin


StartMeasured = Callable[..., tuple[WorkerProcess, str]]


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


# -- front ends --


def test_all_processes_of_a_front_end_are_counted_together(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=STEADY))
    front_end = start_front_end(api_processes=2)
    one, other = wait_until(
        lambda: len(children := psutil.Process(front_end.pid).children()) == 2 and children, what="two processes"
    )

    for idle in (one, other):
        with stopped(idle):
            assert ask(front_end).status_code == 200
            assert "[DONE]" in ask(front_end, stream=True).text
    scrapes = [wait_for_value(front_end.url, 4, "tokenmill_e2e_request_latency_seconds_count")]
    for idle in (one, other):
        with stopped(idle):
            scrapes.append(scrape(front_end.url))

    for seen in scrapes:
        assert seen.value("tokenmill_http_responses_total", endpoint="/v1/completions", status="200") == 4
        assert seen.value("tokenmill_e2e_request_latency_seconds_count", model="fake") == 4
        assert seen.value("tokenmill_time_to_first_token_seconds_count", model="fake") == 2
        assert seen.value("tokenmill_streams_open") == 0
        assert seen.value("tokenmill_redis_up") == 1


def test_rejections_are_counted_by_code_and_name_no_model_that_a_client_made_up(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model="fake=fake:context=64"))
    front_end = start_front_end()

    assert ask(front_end, model="my secret name").status_code == 404
    assert ask(front_end, temperature=-1).status_code == 400
    assert ask(front_end, prompt="x" * 100).status_code == 400
    assert ask(front_end, prompt="x" * 100, stream=True).status_code == 400
    assert httpx.get(f"{front_end.url}/my/secret/path").status_code == 404
    seen = wait_for_value(front_end.url, 4, "tokenmill_requests_rejected_total")

    assert seen.value("tokenmill_requests_rejected_total", model="", code="model_not_found") == 1
    assert seen.value("tokenmill_requests_rejected_total", model="", code="invalid_request") == 1
    assert seen.value("tokenmill_requests_rejected_total", model="fake", code="context_length_exceeded") == 2
    assert seen.value("tokenmill_http_responses_total", endpoint="/v1/completions", status="400") == 3
    assert seen.value("tokenmill_http_responses_total", endpoint="other", status="404") == 1
    assert "secret" not in seen.text


def test_what_is_not_even_http_is_counted(start_front_end: StartFrontEnd) -> None:
    front_end = start_front_end()

    connection = post(front_end, {}, path="/ \x01")
    assert connection.recv(100)
    connection.close()

    assert scrape(front_end.url).value("tokenmill_http_responses_total", endpoint="other", status="400") == 1


def test_a_client_that_leaves_is_counted_and_its_stream_is_not_open_any_more(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=ENDLESS))
    front_end = start_front_end()
    connection = post(front_end, {"model": "fake", "prompt": "hello", "stream": True}, path="/v1/completions")
    wait_for_value(front_end.url, 1, "tokenmill_streams_open", model="fake")

    connection.close()

    seen = wait_for_value(front_end.url, 1, "tokenmill_requests_cancelled_total", model="fake")
    assert seen.value("tokenmill_streams_open") == 0
    assert seen.value("tokenmill_e2e_request_latency_seconds_count") == 0


def test_a_resumed_stream_is_counted_as_such_and_as_no_other_request(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=STEADY))
    front_end = start_front_end()
    first = ask(front_end, stream=True)

    again = httpx.get(front_end.url + first.headers["x-resume-url"])

    assert "[DONE]" in again.text
    seen = wait_for_value(front_end.url, 1, "tokenmill_streams_resumed_total", model="fake")
    assert seen.value("tokenmill_e2e_request_latency_seconds_count") == 1
    assert seen.value("tokenmill_time_to_first_token_seconds_count") == 1
    assert seen.value("tokenmill_streams_failed_total") == 0


def test_a_stream_that_ends_in_an_error_is_counted_by_its_code(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=ENDLESS))
    front_end = start_front_end(request_timeout=1.0)

    assert "deadline_exceeded" in ask(front_end, 10_000, stream=True).text

    seen = wait_for_value(front_end.url, 1, "tokenmill_streams_failed_total", model="fake", code="deadline_exceeded")
    assert seen.value("tokenmill_requests_rejected_total") == 0


def test_what_waits_and_runs_is_read_from_redis(start_front_end: StartFrontEnd, start: Start, office: Office) -> None:
    office.ready(start("--slots", "1", model=ENDLESS))
    front_end, other = start_front_end(), start_front_end()
    office.submit("runs", max_tokens=None)
    office.wait_for_text("runs")
    office.submit("waits", "waits-too")
    office.submit("has-time", priority=Priority.BACKGROUND)

    for seen in (scrape(front_end.url), scrape(other.url)):
        assert seen.value("tokenmill_num_requests_running", model="fake") == 1
        assert seen.value("tokenmill_num_requests_waiting", model="fake", priority="interactive") == 2
        assert seen.value("tokenmill_num_requests_waiting", model="fake", priority="background") == 1
        assert seen.value("tokenmill_workers", model="fake", state="ready") == 1
        assert seen.value("tokenmill_workers", model="fake", state="draining") == 0
        assert seen.value("tokenmill_slots", model="fake") == 1
    for name in ("waits", "waits-too", "has-time", "runs"):
        office.queue.conclude(name, CANCELLED)


def test_a_model_that_has_lost_its_workers_still_shows_what_waits(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    worker = start(model=STEADY)
    office.ready(worker)
    office.submit("first")
    office.result("first")
    worker.terminate()
    assert worker.end() == 0
    office.submit("waits")

    seen = scrape(start_front_end().url)

    assert seen.value("tokenmill_num_requests_waiting", model="fake", priority="interactive") == 1
    assert {sample.value for sample in seen.families["tokenmill_workers"].samples} == {0}


def test_without_redis_the_rest_is_still_answered(
    start_front_end: StartFrontEnd, own_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]", start: Start
) -> None:
    office = Office(connect_to(own_valkey.url))
    office.ready(start(model=STEADY, redis_url=own_valkey.url))
    front_end = start_front_end(own_valkey.url)
    assert ask(front_end).status_code == 200

    own_valkey.stop()

    seen = wait_for_value(front_end.url, 0, "tokenmill_redis_up")
    assert seen.value("tokenmill_http_responses_total", endpoint="/v1/completions", status="200") == 1
    assert seen.families["tokenmill_workers"].samples == []


def test_what_a_dead_process_had_open_vanishes_and_what_it_had_counted_stays(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=ENDLESS))
    front_end = start_front_end()
    assert ask(front_end).status_code == 200
    connection = post(front_end, {"model": "fake", "prompt": "hello", "stream": True}, path="/v1/completions")
    wait_for_value(front_end.url, 1, "tokenmill_streams_open")

    (process,) = psutil.Process(front_end.pid).children()
    process.kill()
    becomes(f"{front_end.url}/health", 200)

    seen = wait_for_value(front_end.url, 0, "tokenmill_streams_open")
    assert seen.value("tokenmill_http_responses_total", endpoint="/v1/completions", status="200") == 1
    connection.close()
    for raw in office.client.scan_iter("tokenmill:request:*"):
        office.queue.conclude(raw.decode().rpartition(":")[2], CANCELLED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_counters_folder_is_gone_with_the_front_end(
    start_front_end: StartFrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    front_end = start_front_end(api_processes=2)
    assert scrape(front_end.url).families
    assert len(list(tmp_path.glob("tokenmill-metrics-*"))) == 1

    psutil.Process(front_end.pid).send_signal(number)
    front_end.wait()

    assert list(tmp_path.glob("tokenmill-metrics-*")) == []


# -- workers --


def test_a_worker_counts_requests_tokens_and_times_exactly(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured("--slots", "3", model=STEADY)
    office.ready(worker)
    names = [f"job-{index}" for index in range(7)]
    office.submit(*names, max_tokens=5)
    for name in names:
        office.result(name)

    seen = wait_for_value(url, 7, "tokenmill_request_success_total", model="fake", finished_reason="length")

    assert seen.value("tokenmill_attempts_total", model="fake") == 7
    assert seen.value("tokenmill_generation_tokens_total") == 35
    assert seen.value("tokenmill_prompt_tokens_total") == 35
    cached = sum(usage_of(office.events(name)).cached for name in names)
    assert seen.value("tokenmill_prompt_tokens_cached_total") == cached > 0
    assert seen.value("tokenmill_request_queue_time_seconds_count") == 7
    assert seen.value("tokenmill_request_prefill_time_seconds_count") == 7
    assert seen.value("tokenmill_inter_token_latency_seconds_count") == 28
    assert seen.value("tokenmill_engine_step_seconds_count") >= 15
    assert seen.value("tokenmill_request_success_total", finished_reason="stop") == 0
    assert seen.value("tokenmill_request_failure_total") == 0
    assert seen.value("tokenmill_requests_carried_on_total") == 0
    assert seen.value("tokenmill_worker_slots") == 3
    assert seen.value("tokenmill_worker_slots_busy") == 0
    assert seen.value("tokenmill_cache_usage_ratio") == 0
    assert seen.value("process_resident_memory_bytes") > 0


def test_prompts_that_choices_share_count_once(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured("--slots", "2", model=STEADY)
    office.ready(worker)
    office.submit("job", prompts=(TextPrompt("one"), TextPrompt("three")), n=3, max_tokens=4)
    office.result("job")

    seen = wait_for_value(url, 1, "tokenmill_request_success_total")

    assert seen.value("tokenmill_prompt_tokens_total") == 8
    assert seen.value("tokenmill_generation_tokens_total") == 24
    assert seen.value("tokenmill_inter_token_latency_seconds_count") == 18
    assert seen.value("tokenmill_request_prefill_time_seconds_count") == 1


def test_a_worker_counts_failures_by_code(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured(model="fake=fake:context=16")
    office.ready(worker)
    office.submit("too-long", prompt="x" * 16)
    office.submit("poison", prompts=(TokenPrompt((POISON,)),))
    assert failure_of(office.result("too-long")).code == "context_length_exceeded"
    assert failure_of(office.result("poison")).code == "engine_error"
    office.submit("fine", max_tokens=2)
    office.result("fine")

    seen = wait_for_value(url, 1, "tokenmill_request_success_total")

    assert seen.value("tokenmill_request_failure_total", model="fake", code="context_length_exceeded") == 1
    assert seen.value("tokenmill_request_failure_total", model="fake", code="engine_error") == 1
    assert seen.value("tokenmill_request_failure_total") == 2
    assert seen.value("tokenmill_attempts_total") == 3
    assert seen.value("tokenmill_prompt_tokens_total") == 5


def test_a_job_that_is_no_request_is_a_failure_and_no_attempt(start_measured: StartMeasured, office: Office) -> None:
    office.submit("hostile")
    office.client.hset(DataJob.key_for("hostile"), "data", b"[]")
    worker, url = start_measured(model=STEADY)
    office.ready(worker)

    seen = wait_for_value(url, 1, "tokenmill_request_failure_total", model="fake", code="invalid_request")

    assert seen.value("tokenmill_attempts_total") == 0


def test_running_requests_are_seen_while_they_run(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured("--slots", "4", model=ENDLESS)
    office.ready(worker)
    office.submit("one", "two", max_tokens=None)
    office.wait_for_text("one")
    office.wait_for_text("two")

    seen = wait_for_value(url, 2, "tokenmill_worker_slots_busy", model="fake")

    assert 0 < seen.value("tokenmill_cache_usage_ratio") < 1
    assert seen.value("tokenmill_generation_tokens_total") > 0
    wait_until(lambda: office.workers()[0].tokens_per_s > 0, what="a pace in the worker's record")
    info = office.workers()[0]
    assert info.first_token_p50_s > 0
    assert info.token_gap_p50_s > 0
    for name in ("one", "two"):
        office.queue.conclude(name, CANCELLED)
    wait_for_value(url, 0, "tokenmill_worker_slots_busy")


def test_a_request_that_outlives_its_worker_is_two_attempts_and_one_that_was_carried_on(
    start_measured: StartMeasured, office: Office
) -> None:
    doomed, doomed_url = start_measured("--lease", "1", model=SLOW)
    office.ready(doomed)
    office.submit("job", max_tokens=40)
    office.wait_for_text("job")
    before = scrape(doomed_url)
    doomed.kill()
    heir, heir_url = start_measured("--lease", "1", model=SLOW)
    office.ready(heir)
    assert usage_of(office.result("job")).completion == 40

    after = wait_for_value(heir_url, 1, "tokenmill_request_success_total")

    assert before.value("tokenmill_attempts_total") + after.value("tokenmill_attempts_total") == 2
    assert before.value("tokenmill_requests_carried_on_total") == 0
    assert after.value("tokenmill_requests_carried_on_total") == 1
    assert 0 < after.value("tokenmill_generation_tokens_total") < 40
    assert before.value("tokenmill_prompt_tokens_total") == 5
    assert after.value("tokenmill_prompt_tokens_total") == 0


# -- /health and /ready of a worker --


def test_a_worker_is_ready_until_it_is_told_to_stop_and_healthy_until_it_ends(
    start_measured: StartMeasured, office: Office
) -> None:
    worker, url = start_measured("--slots", "1", model=SLOW)
    office.ready(worker)
    becomes(f"{url}/ready", 200)
    office.submit("long", max_tokens=None, timeout_s=60)
    office.wait_for_text("long")

    worker.terminate()

    becomes(f"{url}/ready", 503)
    assert "stopping" in httpx.get(f"{url}/ready").text
    assert status_of(f"{url}/health") == 200
    office.queue.conclude("long", CANCELLED)
    assert worker.end() == 0


def test_a_worker_whose_engine_hangs_is_not_healthy(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured("--hang-timeout", "6", model="fake=fake:end_every=0&pace=0.01&hang_after=8")
    office.ready(worker)
    assert status_of(f"{url}/health") == 200
    office.submit("job", max_tokens=100)

    becomes(f"{url}/health", 503)

    assert "no step" in httpx.get(f"{url}/health").text
    assert status_of(f"{url}/ready") == 503
    assert worker.end() == 70
    office.queue.conclude("job", CANCELLED)


def test_a_worker_without_redis_is_healthy_and_not_ready(
    start_measured: StartMeasured, own_valkey: Valkey, connect_to: "Callable[[str], redis.Redis]"
) -> None:
    worker, url = start_measured(model=STEADY, redis_url=own_valkey.url)
    Office(connect_to(own_valkey.url)).ready(worker)
    becomes(f"{url}/ready", 200)

    own_valkey.stop()
    becomes(f"{url}/ready", 503)
    assert status_of(f"{url}/health") == 200

    own_valkey.start()
    becomes(f"{url}/ready", 200)


def test_a_worker_without_a_port_listens_on_none(start: Start, office: Office) -> None:
    worker = start(model=STEADY)
    office.ready(worker)

    assert [c for c in psutil.Process(worker.pid).net_connections() if c.status == psutil.CONN_LISTEN] == []


def test_a_taken_metrics_port_is_one_line(start_measured: StartMeasured, start: Start, office: Office) -> None:
    worker, url = start_measured(model=STEADY)
    office.ready(worker)

    second = start("--metrics-port", url.rpartition(":")[2], model=STEADY)

    assert second.end() == 1
    assert second.output.count("\n") == 1
    assert "--metrics-port (TOKENMILL_METRICS_PORT)" in second.output


def test_a_worker_s_port_names_nothing_that_it_runs_on(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured(model=STEADY)
    office.ready(worker)

    assert httpx.get(f"{url}/health").headers["Server"] == "tokenmill"


def test_who_asks_a_worker_slowly_is_let_go(start_measured: StartMeasured, office: Office) -> None:
    worker, url = start_measured(model=STEADY)
    office.ready(worker)
    with connection(int(url.rpartition(":")[2])) as slow:

        def is_let_go() -> bool:
            slow.sendall(b"x")
            return is_closed(slow)

        wait_until(is_let_go, limit_s=30, pause_s=0.5, what="the end of the connection")


# -- up --


def test_the_workers_of_up_have_ports_one_after_the_other(tmp_path: Path) -> None:
    port = free_port()
    up = Up(tmp_path, "--model", "tiny=fake:", "--workers", "2", "--metrics-port", str(port))
    try:
        up.ready()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        for _ in range(4):
            assert httpx.post(f"{up.url}/v1/completions", json=body, timeout=20).status_code == 200
        urls = [f"http://127.0.0.1:{port + index}" for index in range(2)]
        wait_until(
            lambda: sum(scrape(url).value("tokenmill_request_success_total") for url in urls) == 4,
            what="four requests on two workers",
        )
        front_end: Scrape = scrape(up.url)
        assert front_end.value("tokenmill_workers", model="tiny", state="ready") == 2
        shown = json.loads(httpx.get(f"{urls[0]}/ready").text)
        assert shown == {"ready": True, "missing": []}
    finally:
        up.clean()


def test_what_a_killed_front_end_kept_is_removed_by_the_next_and_no_other(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed = FrontEnd(valkey.url).start().ready()
    (left_behind,) = tmp_path.glob("tokenmill-metrics-*")
    running = FrontEnd(valkey.url).start().ready()
    (in_use,) = set(tmp_path.glob("tokenmill-metrics-*")) - {left_behind}
    killed.kill()
    killed.wait()
    for folder in (left_behind, in_use):
        os.utime(folder, (0, 0))

    next_one = FrontEnd(valkey.url).start().ready()

    assert not left_behind.exists()
    assert in_use.exists()
    running.stop()
    next_one.stop()
    assert not list(tmp_path.glob("tokenmill-metrics-*"))
