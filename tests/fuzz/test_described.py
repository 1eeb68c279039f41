"""Schemathesis asks a real server what its description allows, and what it does not: every answer is as described."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
import requests
import schemathesis
from described import Description
from fuzzing import is_long, tries
from schemathesis.config import SchemathesisConfig
from servers import FrontEnd, Valkey
from worker_processes import Office, WorkerProcess

from api.openapi.document import document
from api.request_ids import REQUEST_ID_PATTERN
from api.schemas.examples import CHATS, MODEL
from shared.settings import ApiSettings

MOST_MODEL_NAME = 256
KILLING_TOKENS = {255, 258}
"""At these the fake engine dies, or fails a step. That has tests of its own."""

LIMITS: dict[str, Any] = {"max_n": 3, "max_choices": 4, "max_prompt": 1000, "max_messages": 8, "max_body": 65536}
DOCUMENT = document(ApiSettings(**LIMITS))
DESCRIPTION = Description(DOCUMENT)

NOT_TOLD = {"messages", "prompt", "n", "best_of", "max_tokens", "top_logprobs", "stream_options", "logit_bias"}
"""What no schema says: which fields go together, the model's context and vocabulary, all texts counted together."""

CONFIG = SchemathesisConfig.from_dict(
    ({} if is_long() else {"seed": 1})
    | {
        "request-timeout": 20,
        # What is learnt from answers would make each run another.
        "phases": {"fuzzing": {"extra-data-sources": {"responses": is_long()}}},
        # Whether it may be refused is looked at below, since the schema does not know all reasons.
        "checks": {"positive_data_acceptance": {"enabled": False}},
    }
)
schema = schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG)


@pytest.fixture(scope="module")
def served(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    """A front end with a real worker. In the end the worker still lives, and neither has said a word."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
        worker = WorkerProcess(
            valkey.url, tmp_path_factory.mktemp("worker"), model=f"{MODEL}=fake:context=300&end_every=8"
        )
        front_end = FrontEnd(valkey.url, **LIMITS).start().ready()
        Office(client).ready(worker)
        yield front_end
        said, is_running = worker.output, worker.is_running
        worker.kill()
    assert front_end.stop() == ""
    assert (is_running, said) == (True, "")


@pytest.fixture(scope="module")
def stream_id(served: FrontEnd) -> str:
    """A stream that can be had again."""
    streamed = httpx.post(f"{served.url}/v1/chat/completions", json=CHATS["streamed"])
    return streamed.headers["X-Resume-Url"].rpartition("/")[2]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Keeps its connections."""
    with requests.Session() as session:
        yield session


def aimed(case: Any, stream_id: str) -> Any:
    """The case, for the model that is served and the stream that is there, where any would do."""
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) <= MOST_MODEL_NAME:
        body["model"] = MODEL
    if "streams" in case.path and re.fullmatch(REQUEST_ID_PATTERN, str((case.path_parameters or {}).get("id"))):
        case.path_parameters["id"] = stream_id
    return case


def kills(body: Any) -> bool:
    """Whether a body has a token that the worker would not survive."""
    match body:
        case dict():
            return kills(body.get("prompt"))
        case list():
            return any(kills(item) for item in body)
    return isinstance(body, int) and body in KILLING_TOKENS


def has_whole_decimals(body: Any) -> bool:
    """Whether a body has a number such as 1.0, which JSON Schema takes for an integer."""
    match body:
        case dict():
            return any(map(has_whole_decimals, body.values()))
        case list():
            return any(map(has_whole_decimals, body))
    return isinstance(body, float) and body.is_integer()


@schema.parametrize()
@tries(60, shared_fixtures=True)
def test_every_answer_is_as_described(case: Any, served: FrontEnd, stream_id: str, session: requests.Session) -> None:
    if kills(case.body):
        return

    answer = aimed(case, stream_id).call(base_url=served.url, session=session)

    case.validate_response(answer)
    headers = {name: values[0] for name, values in answer.headers.items()}
    DESCRIPTION.check(case.method, case.formatted_path, answer.status_code, headers, answer.content)
    is_meant_to_pass = case.meta is None or case.meta.generation.mode.is_positive
    if is_meant_to_pass and answer.status_code == 400 and not has_whole_decimals(case.body):
        assert answer.json()["error"]["param"] in NOT_TOLD, answer.text


def test_it_is_the_description_that_the_server_gives(served: FrontEnd) -> None:
    assert httpx.get(f"{served.url}/openapi.json").json() == DOCUMENT
