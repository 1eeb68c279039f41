"""Which errors an operation may answer with, status by status, from the tables of `api.errors`."""

from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from api.errors import HTTP_ERRORS, REFUSALS, refusal_body, unknown_method_body, unknown_url_body
from api.openapi import examples
from api.openapi.headers import ALLOW, RATE_LIMITS, REQUEST_ID, RETRY_AFTER, WWW_AUTHENTICATE
from api.schemas.description import REF
from api.schemas.error import error_body
from shared.errors import ErrorCode

STREAM_CODES = frozenset(
    {ErrorCode.STREAM_NOT_FOUND, ErrorCode.STREAM_EXPIRED, ErrorCode.STREAM_DAMAGED, ErrorCode.EVENT_NOT_FOUND}
)
KEY_CODES = frozenset({ErrorCode.MISSING_API_KEY, ErrorCode.INVALID_API_KEY})
GENERATION_CODES = frozenset(ErrorCode) - STREAM_CODES - KEY_CODES
RESUMING_CODES = STREAM_CODES | {
    ErrorCode.REQUEST_LOST,
    ErrorCode.STORE_UNAVAILABLE,
    ErrorCode.SERVER_STOPPING,
    ErrorCode.DEADLINE_EXCEEDED,
}

CLIENT_LEFT = HTTP_ERRORS[ErrorCode.CANCELLED].status

Errors = dict[str, Any]
"""The errors that a status comes with, by code."""


def error_responses(
    codes: Iterable[ErrorCode] = (), *, takes_body: bool = False, is_named: bool = False
) -> dict[str, Any]:
    """The answers of an operation that may fail with these codes, and with what any request may be refused for.

    `is_named`: a part of its path is what the client calls something, so that the path may turn out to be none.
    """
    errors: dict[int, Errors] = defaultdict(dict)
    for code in sorted(codes):
        errors[HTTP_ERRORS[code].status][code.value] = examples.error(code)
    if is_named:
        errors[HTTPStatus.NOT_FOUND.value]["null"] = examples.plain(unknown_url_body("GET", "/v1/streams/a/b"))
    common = _common_errors()
    if not takes_body:
        del common[HTTPStatus.REQUEST_ENTITY_TOO_LARGE]
    responses = {str(status): _response(status, common.get(status, {}) | errors[status]) for status in errors}
    responses |= {str(status): _reference(status) for status in common if status not in errors}
    return responses


def key_responses() -> dict[str, Any]:
    """The answers to who has no key, where one is needed."""
    errors = {code.value: examples.error(code) for code in sorted(KEY_CODES)}
    status = HTTPStatus.UNAUTHORIZED
    return {str(status.value): _response(status, errors)}


def common_responses() -> dict[str, Any]:
    """What `error_responses` refers to, and the answers to what is no operation: an unknown URL, an unknown method."""
    unknown_url = examples.plain(unknown_url_body("GET", "/v1/x"))
    unknown_method = examples.plain(unknown_method_body("DELETE", "/v1/models", "GET, HEAD, OPTIONS"))
    common = {_name(status): _response(status, errors) for status, errors in _common_errors().items()}
    return common | {
        _name(HTTPStatus.NOT_FOUND): _response(404, {"null": unknown_url}),
        _name(HTTPStatus.METHOD_NOT_ALLOWED): _response(405, {unknown_method["error"]["code"]: unknown_method}),
    }


def _common_errors() -> dict[int, Errors]:
    """What any request may be refused for."""
    broken = error_body("The server had an error while processing your request.", "server_error", code="internal_error")
    common: dict[int, Errors] = {HTTPStatus.INTERNAL_SERVER_ERROR: {"internal_error": examples.plain(broken)}}
    for status in REFUSALS:
        body = examples.plain(refusal_body(status))
        common[status] = {body["error"]["code"]: body}
    return common


def _reference(status: int) -> dict[str, str]:
    return {"$ref": f"#/components/responses/{_name(status)}"}


def _name(status: int) -> str:
    return HTTPStatus(status).name.title().replace("_", "")


def _response(status: int, errors: Errors) -> dict[str, Any]:
    codes = [body["error"]["code"] for body in errors.values()]
    schema = {
        "allOf": [{"$ref": REF + "ErrorBody"}],
        "properties": {"error": {"properties": {"code": {"enum": codes}}}},
    }
    # What is refused before the app sees it has no id.
    headers = {"x-request-id": REQUEST_ID | {"required": status not in (*REFUSALS, 500)}}
    if any(HTTP_ERRORS[code].retry_after_s is not None for code in ErrorCode if code.value in codes):
        headers["Retry-After"] = RETRY_AFTER
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        headers |= RATE_LIMITS
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ALLOW
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = WWW_AUTHENTICATE
    return {
        "description": f"{_phrase(status)}: {', '.join(f'`{code}`' for code in errors)}",
        "headers": headers,
        "content": {
            "application/json": {
                "schema": schema,
                "examples": {code: {"value": body} for code, body in errors.items()},
            }
        },
    }


def _phrase(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_LEFT else HTTPStatus(status).phrase
