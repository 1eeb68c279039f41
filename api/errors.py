"""From an error code to HTTP: the one table with statuses, OpenAI's error types and Retry-After."""

from http import HTTPStatus
from typing import NamedTuple

from api.schemas.error import ErrorBody, ErrorType, error_body
from shared.domain import Failed
from shared.errors import ErrorCode, RequestError


class HttpError(NamedTuple):
    """How a code looks on the wire. `retry_after_s` None: sending the same again does not help."""

    status: int
    type: ErrorType
    retry_after_s: int | None = None


HTTP_ERRORS = {
    ErrorCode.INVALID_REQUEST: HttpError(400, "invalid_request_error"),
    ErrorCode.UNSUPPORTED_PARAMETER: HttpError(400, "invalid_request_error"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: HttpError(400, "invalid_request_error"),
    ErrorCode.MODEL_NOT_FOUND: HttpError(404, "invalid_request_error"),
    ErrorCode.MODEL_UNAVAILABLE: HttpError(503, "server_error", 5),
    ErrorCode.QUEUE_FULL: HttpError(429, "rate_limit_error", 2),
    ErrorCode.DEADLINE_EXCEEDED: HttpError(504, "server_error", 10),
    ErrorCode.CANCELLED: HttpError(499, "server_error"),
    ErrorCode.WORKER_LOST: HttpError(503, "server_error", 1),
    ErrorCode.REQUEST_LOST: HttpError(503, "server_error", 1),
    ErrorCode.STORE_UNAVAILABLE: HttpError(503, "server_error", 5),
    ErrorCode.SERVER_STOPPING: HttpError(503, "server_error", 1),
    ErrorCode.ENGINE_ERROR: HttpError(500, "server_error"),
    ErrorCode.POISONOUS: HttpError(500, "server_error"),
    ErrorCode.PAYLOAD_VERSION: HttpError(500, "server_error"),
    ErrorCode.IDEMPOTENCY_KEY_REUSED: HttpError(422, "invalid_request_error"),
    ErrorCode.STREAM_NOT_FOUND: HttpError(404, "invalid_request_error"),
    ErrorCode.STREAM_EXPIRED: HttpError(410, "invalid_request_error"),
    ErrorCode.STREAM_DAMAGED: HttpError(409, "server_error"),
    ErrorCode.EVENT_NOT_FOUND: HttpError(404, "invalid_request_error"),
    ErrorCode.MISSING_API_KEY: HttpError(401, "invalid_request_error"),
    ErrorCode.INVALID_API_KEY: HttpError(401, "invalid_request_error"),
    ErrorCode.RATE_LIMIT_EXCEEDED: HttpError(429, "rate_limit_error", 2),
}

REFUSALS = {
    HTTPStatus.BAD_REQUEST: ("The request cannot be read.", ErrorCode.INVALID_REQUEST.value),
    HTTPStatus.REQUEST_TIMEOUT: ("The request did not arrive in time.", "request_timeout"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: ("The request's body is too large.", "request_entity_too_large"),
    HTTPStatus.REQUEST_URI_TOO_LONG: ("The request's URL is too long.", "request_uri_too_long"),
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (
        "The request's headers are too many or too long.",
        "request_header_fields_too_large",
    ),
    HTTPStatus.NOT_IMPLEMENTED: ("The request's transfer coding is not known here.", "not_implemented"),
}
"""What is refused before any route sees it: message and code."""

SHOWN_PATH = 200
"""How much of an unknown path its error repeats."""


def request_error(failure: Failed) -> RequestError:
    """The error in a terminal event; a code that only a newer worker knows is an engine error."""
    try:
        code = ErrorCode(failure.code)
    except ValueError:
        code = ErrorCode.ENGINE_ERROR
    return RequestError(code, failure.message, param=failure.param)


def request_error_body(error: RequestError) -> ErrorBody:
    """The error in OpenAI's shape."""
    return error_body(error.message, HTTP_ERRORS[error.code].type, param=error.param, code=error.code.value)


def refusal_body(status: HTTPStatus) -> ErrorBody:
    """The error of a request that no route sees."""
    message, code = REFUSALS.get(status, (f"{status.phrase}.", status.name.lower()))
    is_theirs = status in REFUSALS or status < HTTPStatus.INTERNAL_SERVER_ERROR
    return error_body(message, "invalid_request_error" if is_theirs else "server_error", code=code)


def unknown_url_body(method: str, path: str) -> ErrorBody:
    """The error of a URL that is none of ours, as OpenAI words it: without a code."""
    return error_body(f"Invalid URL ({method} {path[:SHOWN_PATH]})", "invalid_request_error")


def unknown_method_body(method: str, path: str, allowed: str) -> ErrorBody:
    """The error of a URL that is ours, for a method that it does not have."""
    message = f"{method} is not allowed on {path[:SHOWN_PATH]}, which takes {allowed}."
    return error_body(message, "invalid_request_error", code="method_not_allowed")
