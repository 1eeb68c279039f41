"""The description of the API says all there is, and is one."""

import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from described import EVENTS, Description
from prometheus_client import CollectorRegistry
from servers import ROOT

from api.app import create_app
from api.errors import HTTP_ERRORS, REFUSALS
from api.exchange import Observer
from api.metrics import ApiMetrics
from api.openapi import examples
from api.openapi.document import document
from api.services import Services
from shared.errors import ErrorCode
from shared.settings import ApiSettings

KEYED = ApiSettings(api_keys="them=sha256:" + "0" * 64, metrics_access="key")
"""There, everything can be answered that can be."""

DOCUMENT = document(KEYED)
DESCRIPTION = Description(DOCUMENT)
EXAMPLES = list(DESCRIPTION.examples())

IMPLIED = {"HEAD", "OPTIONS"}
"""Methods that every URL has."""

PAGES = {"/docs", "/docs/{name}"}
"""What is for eyes only."""


@pytest.fixture
def app() -> Any:
    parts: dict[str, Any] = {field.name: SimpleNamespace() for field in fields(Services)}
    known = {"settings": ApiSettings(), "observer": Observer(ApiMetrics(CollectorRegistry()))}
    return create_app(Services(**(parts | known)))


def responses() -> list[Any]:
    """All answers that are described."""
    of_operations = [
        response
        for methods in DOCUMENT["paths"].values()
        for operation in methods.values()
        for response in operation["responses"].values()
        if "$ref" not in response
    ]
    return of_operations + list(DOCUMENT["components"]["responses"].values())


def codes() -> set[str | None]:
    """All codes of errors that are described."""
    found: set[str | None] = set()
    for response in responses():
        schema = response["content"].get("application/json", {}).get("schema", {})
        if "allOf" in schema:
            found |= set(schema["properties"]["error"]["properties"]["code"]["enum"])
    return found


@pytest.mark.parametrize("described", [DOCUMENT, document(ApiSettings())], ids=["with keys", "without"])
def test_it_is_an_openapi_document(described: Any) -> None:
    schemathesis.openapi.from_dict(described).validate()


def test_every_url_and_method_of_the_app_is_described_and_no_other(app: Any) -> None:
    described = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    there = set()
    for rule in app.url_map.iter_rules():
        path = re.sub(r"<(?:[^:>]*:)?(\w+)>", r"{\1}", rule.rule)
        path = (
            path.replace("{request_id}", "{id}") if "streams" in path else path.replace("models/{name}", "models/{id}")
        )
        there |= {(path, method) for method in rule.methods - IMPLIED if path not in PAGES}

    assert described == there


def test_every_code_that_an_error_can_have_is_described_and_in_the_docs() -> None:
    page = (ROOT / "docs" / "http.md").read_text().split("## Errors\n")[1].split("\n#")[0]
    told = {code for row in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    may_be = {code.value for code in ErrorCode} | {code for _, code in REFUSALS.values()}

    assert codes() >= may_be
    assert {code or "null" for code in codes()} == told


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_of_each_code_is_shown_under_its_status(code: ErrorCode) -> None:
    shown = [
        methods[method]["responses"][str(HTTP_ERRORS[code].status)]
        for methods in DOCUMENT["paths"].values()
        for method in methods
        if str(HTTP_ERRORS[code].status) in methods[method]["responses"]
    ]
    found = [
        response["content"]["application/json"]["examples"][code.value]["value"]["error"]
        for response in map(resolved, shown)
        if code.value in response["content"]["application/json"].get("examples", {})
    ]

    assert found
    assert {(error["code"], error["type"]) for error in found} == {(code.value, HTTP_ERRORS[code].type)}
    assert examples.ERRORS[code][0] in {error["message"] for error in found}


def resolved(response: Any) -> Any:
    if "$ref" in response:
        return DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return response


@pytest.mark.parametrize(("where", "kind", "schema", "value"), EXAMPLES, ids=[where for where, *_ in EXAMPLES])
def test_each_example_is_what_its_schema_says(where: str, kind: str, schema: Any, value: Any) -> None:
    if kind != EVENTS:
        assert DESCRIPTION.errors(schema, value) == [], where
    elif "breaks off" not in where:
        DESCRIPTION.check_stream(schema, value)


def test_everything_that_can_be_sent_or_answered_has_an_example() -> None:
    without = {where for where, kind, media in contents() if not media.keys() & {"example", "examples"}}

    assert without == {"/metrics", "/openapi.json"}, "these are long"


def contents() -> list[tuple[str, str, Any]]:
    """Where and what each kind of body is."""
    found = []
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            described = [*map(resolved, operation["responses"].values())]
            described += [operation["requestBody"]] if "requestBody" in operation else []
            found += [(path, kind, media) for part in described for kind, media in part["content"].items()]
    return found


def test_every_part_of_the_document_that_is_referred_to_is_there_and_no_part_is_left_over() -> None:
    text = str(DOCUMENT)
    referred = set(re.findall(r"'\$ref': '#/components/(\w+)/([\w.]+)'", text))
    there = {(kind, name) for kind, parts in DOCUMENT["components"].items() for name in parts}

    no_operation = {("responses", "NotFound"), ("responses", "MethodNotAllowed")}
    schemes = {("securitySchemes", name) for name in re.findall(r"\{'(\w+)': \[\]\}", text)}
    assert referred | schemes | no_operation == there


def test_bounds_are_those_of_the_server_that_is_asked() -> None:
    limits = ApiSettings(
        max_n=3,
        max_choices=2,
        max_stop=1,
        max_stop_length=5,
        max_messages=4,
        max_top_logprobs=1,
        max_logit_bias=6,
        max_prompt=7,
    )
    described = Description(document(limits))

    def refused(path: str, **changes: Any) -> bool:
        base = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        return bool(described.request_errors("POST", path, {"model": "m"} | base | changes))

    chat, text = "/v1/chat/completions", "/v1/completions"
    message = {"role": "user", "content": "x"}
    for path, at, past in [
        (chat, {"n": 2}, {"n": 3}),
        (chat, {"stop": ["x" * 5]}, {"stop": ["x" * 6]}),
        (chat, {"stop": ["x"]}, {"stop": ["x", "y"]}),
        (chat, {"messages": [message] * 4}, {"messages": [message] * 5}),
        (chat, {"top_logprobs": 1}, {"top_logprobs": 2}),
        (chat, {"logit_bias": dict.fromkeys("123456", 0)}, {"logit_bias": dict.fromkeys("1234567", 0)}),
        (text, {"logprobs": 1}, {"logprobs": 2}),
        (text, {"prompt": "x" * 7}, {"prompt": "x" * 8}),
        (text, {"prompt": [1] * 7}, {"prompt": [1] * 8}),
        (text, {"prompt": ["x"] * 2}, {"prompt": ["x"] * 3}),
    ]:
        assert not refused(path, **at), at
        assert refused(path, **past), past


def test_a_server_without_keys_asks_nobody_for_one_and_one_with_keys_asks_everybody_who_wants_an_answer() -> None:
    asking = {path for path, methods in DOCUMENT["paths"].items() for asked in methods.values() if "security" in asked}
    without = str(document(ApiSettings()))

    assert asking == {path for path in DOCUMENT["paths"] if path.startswith("/v1/")} | {"/metrics"}
    assert "security" not in without
    assert "401" not in without
    open_metrics = document(ApiSettings(api_keys=KEYED.api_keys))["paths"]["/metrics"]["get"]
    assert "security" not in open_metrics
