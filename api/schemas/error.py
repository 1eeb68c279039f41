"""OpenAI's error object."""

from typing import Literal

import msgspec

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


class Error(msgspec.Struct, frozen=True):
    message: str
    type: ErrorType
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: Error


def error_body(message: str, type: ErrorType, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """An error as every failed answer and every failed stream carries it."""
    return ErrorBody(Error(message, type, param, code))
