"""OpenAI's error object."""

import msgspec


class Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: Error


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """An error as every failed answer and every failed stream carries it."""
    return ErrorBody(Error(message, type, param, code))
