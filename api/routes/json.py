"""JSON answers, errors included."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from flask import Response

from api.errors import HTTP_ERRORS, request_error_body
from shared.errors import RequestError


def json_response(payload: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(msgspec.json.encode(payload), status, dict(headers or {}), content_type="application/json")


def error_response(error: RequestError) -> Response:
    """A failed request's answer."""
    http = HTTP_ERRORS[error.code]
    retry_after_s = error.retry_after_s if error.retry_after_s is not None else http.retry_after_s
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s is not None else {}
    if http.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(request_error_body(error), http.status, headers)
