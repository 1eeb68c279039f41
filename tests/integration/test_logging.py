"""What processes log: one line for each request, as text or as JSON, and never a prompt or an answer."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from asking import text_of
from collector import collecting
from scraping import scrape, wait_for_value
from servers import FrontEnd, free_port, wait_until
from streaming import post
from worker_processes import ENDLESS, SLOW, Office, Start

from shared.domain import Failed
from shared.errors import ErrorCode

StartFrontEnd = Callable[..., FrontEnd]

STEADY = "fake=fake:end_every=0"
JSON = ("--log-format", "json", "--log-level", "debug")
COMMON = {"time", "level", "logger", "pid", "message"}
CANARY = "xylophone quarantine"


def ask(
    front_end: FrontEnd, tokens: int = 4, *, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": "fake", "prompt": "hello", "max_tokens": tokens, **fields}
    return httpx.post(f"{front_end.url}/v1/completions", json=body, headers=headers, timeout=60)


def lines(output: str) -> list[dict[str, Any]]:
    """Each line of JSON; there is nothing else."""
    found = [json.loads(line) for line in output.splitlines()]
    for line in found:
        assert line.keys() >= COMMON, line
    return found


def accesses(output: str) -> list[dict[str, Any]]:
    return [line for line in lines(output) if line["logger"] == "tokenmill.access"]


def test_each_request_is_one_line_of_json_with_what_became_of_it(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=STEADY))
    front_end = start_front_end(log_level="info", log_format="json")
    whole = ask(front_end, headers={"x-request-id": "mine"})
    streamed = ask(front_end, stream=True)
    refused = ask(front_end, temperature=-1)
    assert httpx.get(f"{front_end.url}/ready").status_code == 200

    first, second, third = accesses(front_end.stop())

    assert first["request_id"] == whole.json()["id"].removeprefix("cmpl-")
    assert (first["method"], first["endpoint"], first["status"]) == ("POST", "/v1/completions", 200)
    assert (first["model"], first["outcome"], first["stream"]) == ("fake", "done", False)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (5, 4)
    assert first["level"] == "INFO"
    assert 0 < first["accepted_s"] <= first["first_token_s"] <= first["seconds"]
    assert second["request_id"] == streamed.headers["x-resume-url"].rpartition("/")[2]
    assert (second["outcome"], second["stream"], second["completion_tokens"]) == ("done", True, 4)
    assert refused.status_code == third["status"] == 400
    assert (third["outcome"], third["code"]) == ("rejected", "invalid_request")
    assert third["request_id"] == refused.headers["x-request-id"]


def test_a_client_that_leaves_is_a_line_with_what_it_had(
    start_front_end: StartFrontEnd, start: Start, office: Office
) -> None:
    office.ready(start(model=ENDLESS))
    front_end = start_front_end(log_level="info", log_format="json")
    connection = post(front_end, {"model": "fake", "prompt": "hello", "stream": True}, path="/v1/completions")
    wait_for_value(front_end.url, 1, "tokenmill_streams_open")
    assert connection.recv(100)
    connection.close()
    wait_for_value(front_end.url, 1, "tokenmill_requests_cancelled_total")

    (line,) = accesses(front_end.stop())

    assert (line["outcome"], line["status"], line["model"]) == ("cancelled", 200, "fake")


def test_text_lines_say_the_same(start_front_end: StartFrontEnd, start: Start, office: Office) -> None:
    office.ready(start(model=STEADY))
    front_end = start_front_end(log_level="info")
    answer = ask(front_end)

    (line,) = (line for line in front_end.stop().splitlines() if "tokenmill.access" in line)

    assert f"request_id={answer.json()['id'].removeprefix('cmpl-')}" in line
    assert "POST /v1/completions" in line
    assert "outcome=done" in line
    assert "completion_tokens=4" in line


def test_a_worker_s_lines_name_the_request(start: Start, office: Office) -> None:
    worker = start("--drain-timeout", "0", *JSON, model=SLOW)
    office.ready(worker)
    office.submit("quick", max_tokens=2)
    office.result("quick")
    office.submit("long", max_tokens=None)
    office.wait_for_text("long")

    worker.terminate()
    assert worker.end() == 0

    ends = [line for line in lines(worker.output) if "outcome" in line]
    quick, long = ends
    assert (quick["request_id"], quick["outcome"], quick["level"], quick["tokens"]) == ("quick", "done", "DEBUG", 2)
    assert (long["request_id"], long["outcome"], long["level"]) == ("long", "handed_over", "INFO")
    assert (long["attempt"], long["model"]) == (1, "fake")


@pytest.mark.parametrize("format", ["text", "json"])
def test_no_prompt_and_no_answer_is_seen_anywhere(
    start_front_end: StartFrontEnd, start: Start, office: Office, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    port = free_port()
    with collecting() as collector:
        traced = ("--otlp-endpoint", collector.url, "--metrics-port", str(port))
        worker = start(*traced, "--log-level", "debug", "--log-format", format, model="fake=fake:context=256")
        office.ready(worker)
        front_end = start_front_end(log_level="debug", log_format=format, otlp_endpoint=collector.url)
        chat = [{"role": "user", "content": CANARY, "name": "xylophone"}]
        answers = [
            ask(front_end, prompt=CANARY, stop=[CANARY], user=CANARY),
            ask(front_end, prompt=CANARY, stream=True),
            ask(front_end, prompt=CANARY * 50),
            ask(front_end, prompt=CANARY, model=CANARY),
            ask(front_end, prompt=f"{CANARY} <|poison|>"),
            ask(front_end, prompt=CANARY, suffix=CANARY),
            httpx.post(f"{front_end.url}/v1/chat/completions", json={"model": "fake", "messages": chat}, timeout=60),
            httpx.post(f"{front_end.url}/v1/chat/completions", content=f"{{{CANARY}", timeout=60),
            httpx.get(f"{front_end.url}/{CANARY}"),
            httpx.get(f"{front_end.url}/v1/streams/xylophone"),
        ]
        collector.wait_for(8)
        told = [scrape(front_end.url).text, scrape(f"http://127.0.0.1:{port}").text]
        worker.terminate()
        assert worker.end() == 0
        told += [front_end.stop(), worker.output, collector.raw.decode(errors="replace")]

    assert {answer.status_code for answer in answers} >= {200, 400, 404}
    said = answers[0].json()["choices"][0]["text"]
    for where in told:
        assert "xylophone" not in where
        assert "quarantine" not in where
        assert not said or said not in where


def test_what_is_logged_of_a_cancelled_request_is_its_id(start: Start, office: Office) -> None:
    worker = start(*JSON, model=ENDLESS)
    office.ready(worker)
    office.submit("endless", max_tokens=None)
    office.wait_for_text("endless")
    office.queue.conclude("endless", Failed(ErrorCode.CANCELLED.value, "The client left."))

    wait_until(lambda: "fenced" in worker.output, what="the end of the attempt")

    assert text_of(office.events("endless"))
    assert any(
        line.get("request_id") == "endless" and line["outcome"] == "fenced"
        for line in lines(worker.output)
        if "outcome" in line
    )
