"""The JSON that crosses Redis: requests and events to bytes and back, with a version."""

from typing import Any

import msgspec

from shared.domain import Event, GenerationRequest
from shared.errors import ErrorCode, RequestError

PAYLOAD_VERSION = 1
"""Raised whenever an older process would misread what a newer one writes."""


class _Envelope(msgspec.Struct, frozen=True):
    v: int
    request: GenerationRequest


class _VersionOnly(msgspec.Struct, frozen=True):
    v: int


_event_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def request_to_payload(request: GenerationRequest) -> dict[str, Any]:
    """The request as plain data (dicts, lists, strings, numbers), for an RQ job's argument."""
    payload: dict[str, Any] = msgspec.to_builtins(_Envelope(PAYLOAD_VERSION, request))
    return payload


def request_from_payload(payload: bytes) -> GenerationRequest:
    """The request in a job's argument, which is JSON.

    Raises:
        RequestError: `payload_version` when another version wrote it, `invalid_request` when it
            is not such a payload at all.
    """
    try:
        version = msgspec.json.decode(payload, type=_VersionOnly).v
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, "The queued job is not a request.") from error
    if version != PAYLOAD_VERSION:
        raise RequestError(
            ErrorCode.PAYLOAD_VERSION,
            f"The request was queued by a front end that speaks version {version}; "
            f"this worker speaks {PAYLOAD_VERSION}. Bring both to the same release and retry.",
        )
    try:
        return msgspec.json.decode(payload, type=_Envelope).request
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, "The queued request is malformed.") from error


def encode_event(event: Event) -> bytes:
    """The event as one line of JSON."""
    return _event_encoder.encode(event)


def decode_event(line: bytes) -> Event:
    """The event in a log entry or message.

    Raises:
        RequestError: `request_lost` when the entry cannot be read.
    """
    try:
        return _event_decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(ErrorCode.REQUEST_LOST, "An entry of the request's log cannot be read.") from error
