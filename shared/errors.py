"""The one error tree: what can go wrong with a request or a process, with stable codes.

    TokenmillError
    ├── RequestError            one request failed; carries an ErrorCode
    └── StartupError            a process cannot start; its text is the one line that is printed
        ├── SettingsError       a flag or environment variable has a bad value
        ├── ModelLoadError      a model file, folder, template or device is unusable
        └── StoreError          Redis cannot be reached or is not fit for use

HTTP statuses are not here: `api/errors.py` maps codes to them.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request failed. The values are part of the wire between processes: never rename one."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_UNAVAILABLE = "model_unavailable"
    QUEUE_FULL = "queue_full"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"
    REQUEST_LOST = "request_lost"
    ENGINE_ERROR = "engine_error"
    POISONOUS = "request_poisonous"
    PAYLOAD_VERSION = "payload_version"
    STORE_UNAVAILABLE = "store_unavailable"
    SERVER_STOPPING = "server_stopping"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    STREAM_NOT_FOUND = "stream_not_found"
    STREAM_EXPIRED = "stream_expired"
    STREAM_DAMAGED = "stream_damaged"
    EVENT_NOT_FOUND = "event_not_found"
    MISSING_API_KEY = "missing_api_key"
    INVALID_API_KEY = "invalid_api_key"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"


RETRYABLE = frozenset(
    {
        ErrorCode.MODEL_UNAVAILABLE,
        ErrorCode.QUEUE_FULL,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.CANCELLED,
        ErrorCode.WORKER_LOST,
        ErrorCode.REQUEST_LOST,
        ErrorCode.PAYLOAD_VERSION,
        ErrorCode.STORE_UNAVAILABLE,
        ErrorCode.SERVER_STOPPING,
        ErrorCode.RATE_LIMIT_EXCEEDED,
    }
)
"""Failures that say nothing about the request itself: sent again, it may well succeed."""


class TokenmillError(Exception):
    """Root of everything this project raises on purpose."""


class RequestError(TokenmillError):
    """One request failed.

    `message` is written for the client; `param` names the request field at fault, if one is. `retry_after_s` is set
    where more is known of when to try again than the code says.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class StartupError(TokenmillError):
    """A process cannot start; the text is one line for the person who started it."""


class SettingsError(StartupError):
    """A flag or environment variable has a value that cannot be used."""


class ModelLoadError(StartupError):
    """A model cannot be loaded or served."""


class StoreError(StartupError):
    """Redis cannot be reached or is not fit for use."""


class StoreAwayError(StoreError):
    """Redis does not answer now."""
