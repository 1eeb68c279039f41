"""The document itself: every operation with what it takes and all that it may answer."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from api.access.gate import API_PREFIX, METRICS
from api.openapi import examples
from api.openapi.errors import (
    GENERATION_CODES,
    RESUMING_CODES,
    common_responses,
    error_responses,
    key_responses,
)
from api.openapi.headers import ANSWERED, PARAMETERS, RATE_LIMITS, RESUME_URL
from api.request_ids import REQUEST_ID_PATTERN
from api.schemas import chat, completions
from api.schemas.description import REF, answer_schemas, request_schemas
from api.schemas.error import ErrorBody
from api.schemas.examples import CHATS, COMPLETIONS, MODEL
from api.schemas.health import Health, Readiness
from api.schemas.models import Model, ModelList
from api.sse import END_MARK
from shared.errors import ErrorCode
from shared.log import ENTRY_ID_PATTERN
from shared.settings import ApiSettings, Limits

OPENAPI_VERSION = "3.1.1"

DESCRIPTION = """\
OpenAI's API for chat and text completions, and what goes beyond it: streams that can be resumed, requests that run
once.

Every error has the shape of `ErrorBody`, also those of a URL that is none (404, code `null`) and of a method that a URL
does not have (405, `method_not_allowed`). What can be had with `GET` can be asked for with `HEAD`, and
`OPTIONS` says which methods a URL has.

A stream consists of server-sent events; comments (`: ping`) keep it open while there is none. What goes wrong once it
has begun comes as an event with an `ErrorBody`, which is then the last; else the last is `[DONE]`.
"""

SECURITY_SCHEMES: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key by itself."},
}
"""The ways to say who one is, of which each is enough. Where there are no API keys, nobody is asked."""

ANSWERS = (
    chat.ChatCompletion,
    chat.ChatCompletionChunk,
    completions.Completion,
    ModelList,
    Model,
    Health,
    Readiness,
    ErrorBody,
)

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"

ACCEPTING = ({"$ref": "#/components/parameters/RequestId"}, {"$ref": "#/components/parameters/Traceparent"})


def document(settings: ApiSettings) -> dict[str, Any]:
    """The API of a front end with these settings, as OpenAPI has it."""
    paths = _paths()
    components: dict[str, Any] = {
        "schemas": _schemas(settings),
        "parameters": PARAMETERS,
        "responses": common_responses(),
    }
    if settings.api_keys:
        components["securitySchemes"] = SECURITY_SCHEMES
        _ask_for_keys(paths, also_for_metrics=settings.metrics_access != "open")
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "Tokenmill",
            "version": version("tokenmill"),
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "generation", "description": "Requests for text."},
            {"name": "models", "description": "What live workers serve."},
            {"name": "operating", "description": "For those who run the server."},
        ],
        "paths": paths,
        "components": components,
    }


def _schemas(limits: Limits) -> dict[str, Any]:
    return {
        **request_schemas(chat.ChatCompletionRequest, no_op=chat.NO_OP, limits=limits),
        **request_schemas(completions.CompletionRequest, no_op=completions.NO_OP, limits=limits),
        **answer_schemas(ANSWERS),
        "ChatCompletionEvent": _event("ChatCompletionChunk"),
        "CompletionEvent": _event("Completion"),
    }


def _event(chunk: str) -> dict[str, Any]:
    """One event of a stream, whose data is JSON in a string."""
    carried = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [{"$ref": REF + chunk}, {"$ref": REF + "ErrorBody"}]},
    }
    return {
        "description": f"An event of a stream: a `{chunk}`, or an `ErrorBody` or `{END_MARK}`, which are the last.",
        "type": "object",
        "properties": {
            "id": {
                "description": "Where the stream can be resumed. Of events that belong together only the last has one.",
                "type": "string",
                "pattern": f"^{ENTRY_ID_PATTERN}$",
            },
            "data": {"anyOf": [{"type": "string", "const": END_MARK}, carried]},
        },
        "required": ["data"],
    }


def _ask_for_keys(paths: dict[str, Any], *, also_for_metrics: bool) -> None:
    for path, methods in paths.items():
        if path.startswith(API_PREFIX) or (also_for_metrics and path == METRICS):
            for operation in methods.values():
                operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
                operation["responses"] = dict(sorted((operation["responses"] | key_responses()).items()))


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": {
            "post": _generation(
                "createChatCompletion",
                "Continue a conversation, in one piece or as a stream",
                request=(chat.ChatCompletionRequest.__name__, CHATS),
                whole=(
                    chat.ChatCompletion.__name__,
                    {"whole": examples.chat_whole(), "with logprobs": examples.chat_with_logprobs()},
                ),
                stream=("ChatCompletionEvent", examples.chat_stream()),
            )
        },
        "/v1/completions": {
            "post": _generation(
                "createCompletion",
                "Continue texts or tokens, in one piece or as a stream",
                request=(completions.CompletionRequest.__name__, COMPLETIONS),
                whole=(
                    completions.Completion.__name__,
                    {"whole": examples.text_whole(), "with logprobs": examples.text_with_logprobs()},
                ),
                stream=("CompletionEvent", examples.text_stream()),
            )
        },
        "/v1/streams/{id}": {"get": _resuming()},
        "/v1/models": {
            "get": _operation(
                "listModels",
                "All models",
                "models",
                {"200": _json("ModelList", "The models.", examples.model_list())}
                | error_responses({ErrorCode.STORE_UNAVAILABLE}),
            )
        },
        "/v1/models/{id}": {
            "get": _operation(
                "retrieveModel",
                "One model",
                "models",
                {"200": _json("Model", "The model.", examples.model())}
                | error_responses({ErrorCode.MODEL_NOT_FOUND, ErrorCode.STORE_UNAVAILABLE}, is_named=True),
                _in_path("Its name, which may hold slashes.", {"type": "string", "minLength": 1}, MODEL),
            )
        },
        "/health": {
            "get": _operation(
                "health",
                "Whether the process lives",
                "operating",
                {"200": _json("Health", "It does.", examples.health())} | error_responses(),
            )
        },
        "/ready": {
            "get": _operation(
                "ready",
                "Whether requests would be answered",
                "operating",
                {"200": _json("Readiness", "They would.", examples.ready())}
                | error_responses()
                | {"503": _json("Readiness", "They would not.", examples.not_ready())},
            )
        },
        METRICS: {
            "get": _operation(
                "metrics",
                "What Prometheus scrapes",
                "operating",
                {"200": _answer("All metrics of this front end.", {TEXT: {"schema": {"type": "string"}}})}
                | error_responses(),
            )
        },
        "/openapi.json": {
            "get": _operation(
                "describe",
                "This description",
                "operating",
                {
                    "200": _answer(
                        "An OpenAPI document.",
                        {JSON: {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}}},
                    )
                }
                | error_responses(),
            )
        },
    }


def _generation(
    id: str,
    summary: str,
    *,
    request: tuple[str, Mapping[str, Any]],
    whole: tuple[str, Mapping[str, Any]],
    stream: tuple[str, str],
) -> dict[str, Any]:
    content = {
        JSON: {"schema": {"$ref": REF + whole[0]}, "examples": _values(whole[1])},
        EVENTS: {
            "schema": {"$ref": REF + stream[0]},
            "examples": _values({"stream": stream[1], "that breaks off": examples.broken_stream()}),
        },
    }
    answer = _answer("The answer: events if `stream` is true.", content) | {
        "headers": ANSWERED | RATE_LIMITS | {"X-Resume-Url": RESUME_URL}
    }
    described = _operation(
        id,
        summary,
        "generation",
        {"200": answer} | error_responses(GENERATION_CODES, takes_body=True),
        {"$ref": "#/components/parameters/IdempotencyKey"},
    )
    described["requestBody"] = {
        "required": True,
        "content": {JSON: {"schema": {"$ref": REF + request[0]}, "examples": _values(request[1])}},
    }
    return described


def _resuming() -> dict[str, Any]:
    events = {"anyOf": [{"$ref": REF + "ChatCompletionEvent"}, {"$ref": REF + "CompletionEvent"}]}
    content = {EVENTS: {"schema": events, "examples": _values({"all of it": examples.chat_stream()})}}
    answer = _answer("The rest of the stream, to the byte.", content) | {
        "headers": ANSWERED | {"X-Resume-Url": RESUME_URL | {"required": True}}
    }
    return _operation(
        "resumeStream",
        "The rest of a stream, while it runs and after",
        "generation",
        {"200": answer} | error_responses(RESUMING_CODES, is_named=True),
        _in_path(
            "The id of the answer without its `chatcmpl-` or `cmpl-`: the end of `X-Resume-Url`.",
            {"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"},
            examples.REQUEST_ID,
        ),
        {"$ref": "#/components/parameters/LastEventId"},
        {"$ref": "#/components/parameters/After"},
    )


def _operation(id: str, summary: str, tag: str, responses: dict[str, Any], *parameters: Any) -> dict[str, Any]:
    return {
        "operationId": id,
        "summary": summary,
        "tags": [tag],
        "parameters": [*parameters, *ACCEPTING],
        "responses": dict(sorted(responses.items())),
    }


def _in_path(description: str, schema: dict[str, Any], example: str) -> dict[str, Any]:
    return {
        "name": "id",
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
        "example": example,
    }


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "headers": ANSWERED, "content": content}


def _json(schema: str, description: str, example: Any) -> dict[str, Any]:
    return _answer(description, {JSON: {"schema": {"$ref": REF + schema}, "example": example}})


def _values(examples: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in examples.items()}
