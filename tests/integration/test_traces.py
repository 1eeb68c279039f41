"""One trace of a request, from the front end through the queue to each attempt, as a collector gets it."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from asking import usage_of
from collector import Collector, Span, collecting
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from servers import FrontEnd, free_port, wait_until
from streaming import post
from worker_processes import SLOW, Office, Start, WorkerProcess

StartFrontEnd = Callable[..., FrontEnd]

STEADY = "fake=fake:end_every=0"
PATH = "/v1/completions"
CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent at once: OpenTelemetry's own variable for its batches."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


@pytest.fixture
def front_end(start_front_end: StartFrontEnd, collector: Collector) -> FrontEnd:
    return start_front_end(otlp_endpoint=collector.url)


@pytest.fixture
def start_traced(start: Start, collector: Collector, office: Office) -> Callable[..., WorkerProcess]:
    def begin(*arguments: str, **options: Any) -> WorkerProcess:
        worker = start("--otlp-endpoint", collector.url, *arguments, **options)
        office.ready(worker)
        return worker

    return begin


StartTraced = Callable[..., WorkerProcess]


def ask(
    front_end: FrontEnd, tokens: int = 4, *, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": "fake", "prompt": "hello", "max_tokens": tokens, **fields}
    return httpx.post(front_end.url + PATH, json=body, headers=headers, timeout=60)


def of_service(spans: list[Span], service: str) -> list[Span]:
    """The spans of one kind of process, as they began."""
    return sorted((span for span in spans if span.service == service), key=lambda span: span.began_at)


def test_a_request_is_one_trace_that_continues_the_client_s(
    front_end: FrontEnd, start_traced: StartTraced, collector: Collector
) -> None:
    start_traced(model=STEADY)

    answer = ask(front_end, headers={"traceparent": TRACEPARENT}, stream=True, stream_options={"include_usage": True})

    spans = collector.wait_for(2)
    (request,) = of_service(spans, "tokenmill-api")
    (attempt,) = of_service(spans, "tokenmill-worker")
    request_id = answer.headers["x-resume-url"].rpartition("/")[2]
    assert (request.trace, request.parent, request.kind) == (CLIENT_TRACE, CLIENT_SPAN, ProtoSpan.SPAN_KIND_SERVER)
    assert request.name == "POST /v1/completions"
    assert request.attributes["gen_ai.request.model"] == "fake"
    assert request.attributes["gen_ai.usage.input_tokens"] == 5
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["gen_ai.response.id"] == request_id
    assert request.attributes["http.response.status_code"] == 200
    assert request.status == Status.STATUS_CODE_UNSET
    assert (attempt.trace, attempt.parent) == (CLIENT_TRACE, request.id)
    assert attempt.events == ["queue", "claim", "prefill", "first token", "end"]
    assert attempt.attributes["gen_ai.request.model"] == "fake"
    assert attempt.attributes["gen_ai.usage.input_tokens"] == 5
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 4
    assert attempt.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attempt.attributes["gen_ai.response.id"] == request_id
    assert attempt.attributes["tokenmill.outcome"] == "done"
    assert attempt.ended_at >= attempt.began_at


def test_without_a_trace_of_the_client_s_a_request_begins_one(
    front_end: FrontEnd, start_traced: StartTraced, collector: Collector
) -> None:
    start_traced(model=STEADY)

    assert ask(front_end).status_code == 200
    assert ask(front_end, headers={"traceparent": "nonsense"}).status_code == 200

    spans = collector.wait_for(4)
    requests = of_service(spans, "tokenmill-api")
    assert [span.parent for span in requests] == ["", ""]
    assert len({span.trace for span in spans}) == 2
    assert {span.parent for span in of_service(spans, "tokenmill-worker")} == {span.id for span in requests}


def test_a_request_that_outlives_its_worker_has_two_attempts_in_its_trace(
    front_end: FrontEnd, start_traced: StartTraced, collector: Collector, office: Office
) -> None:
    doomed = start_traced("--lease", "1", model=SLOW)
    connection = post(front_end, {"model": "fake", "prompt": "hello", "max_tokens": 40}, path=PATH)
    (name,) = wait_until(lambda: request_ids(office), what="the request")
    office.wait_for_text(name)
    doomed.kill()
    start_traced("--lease", "1", model=SLOW)
    assert usage_of(office.result(name)).completion == 40

    spans = collector.wait_for(3)
    connection.close()

    (request,) = of_service(spans, "tokenmill-api")
    first, second = of_service(spans, "tokenmill-worker")
    assert {span.trace for span in spans} == {request.trace}
    assert (first.parent, second.parent) == (request.id, request.id)
    assert (first.name, second.name) == ("attempt 1", "attempt 2")
    assert (first.attributes["tokenmill.outcome"], second.attributes["tokenmill.outcome"]) == ("worker_died", "done")
    assert first.attributes["tokenmill.worker"] != second.attributes["tokenmill.worker"]
    assert first.status == Status.STATUS_CODE_ERROR
    assert first.ended_at <= second.began_at + 5_000_000
    assert second.attributes["gen_ai.usage.output_tokens"] == 40


def test_a_request_that_a_stopping_worker_hands_over_has_a_span_of_each(
    front_end: FrontEnd, start_traced: StartTraced, collector: Collector, office: Office
) -> None:
    leaving = start_traced("--drain-timeout", "0", model=SLOW)
    connection = post(front_end, {"model": "fake", "prompt": "hello", "max_tokens": 40}, path=PATH)
    (name,) = wait_until(lambda: request_ids(office), what="the request")
    office.wait_for_text(name)
    leaving.terminate()
    assert leaving.end() == 0
    start_traced(model=SLOW)
    office.result(name)

    spans = collector.wait_for(3)
    connection.close()

    first, second = of_service(spans, "tokenmill-worker")
    assert (first.attributes["tokenmill.outcome"], second.attributes["tokenmill.outcome"]) == ("handed_over", "done")
    assert [span.name for span in (first, second)] == ["attempt 1", "attempt 2"]


def test_what_fails_says_so_in_its_spans(front_end: FrontEnd, start_traced: StartTraced, collector: Collector) -> None:
    start_traced(model="fake=fake:context=16")

    assert ask(front_end, prompt="x" * 20).status_code == 400
    assert ask(front_end, model="another").status_code == 404

    spans = collector.wait_for(3)
    too_long, unknown = of_service(spans, "tokenmill-api")
    (attempt,) = of_service(spans, "tokenmill-worker")
    assert too_long.attributes["error.type"] == attempt.attributes["error.type"] == "context_length_exceeded"
    assert attempt.status == Status.STATUS_CODE_ERROR
    assert too_long.status == Status.STATUS_CODE_UNSET, "a client's mistake is no error of the server"
    assert unknown.attributes["error.type"] == "model_not_found"
    assert "gen_ai.request.model" not in unknown.attributes


def test_processes_that_stop_send_what_they_have(
    monkeypatch: pytest.MonkeyPatch, start_front_end: StartFrontEnd, start_traced: StartTraced, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    front_end = start_front_end(otlp_endpoint=collector.url)
    worker = start_traced(model=STEADY)
    assert ask(front_end).status_code == 200

    worker.terminate()
    assert worker.end() == 0
    front_end.stop()

    assert {span.service for span in collector.wait_for(2)} == {"tokenmill-api", "tokenmill-worker"}


def test_a_collector_that_is_away_holds_nothing_up(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    worker = start("--otlp-endpoint", nowhere, model=STEADY)
    office.ready(worker)
    front_end = start_front_end(otlp_endpoint=nowhere)

    assert all(ask(front_end).status_code == 200 for _ in range(10))

    worker.terminate()
    assert worker.end() == 0
    front_end.terminate()
    assert front_end.wait(10)[0] == 0


def test_without_an_endpoint_no_request_has_a_trace(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start("--slots", "1", model=SLOW))
    front_end = start_front_end()
    connection = post(front_end, {"model": "fake", "prompt": "hello", "max_tokens": 1000}, path=PATH)
    (name,) = wait_until(lambda: request_ids(office), what="the request")

    assert b'"trace"' not in (office.client.hget(f"rq:job:{name}", "data") or b"")
    connection.close()


def request_ids(office: Office) -> list[str]:
    return [raw.decode().rpartition(":")[2] for raw in office.client.scan_iter("tokenmill:request:*")]
