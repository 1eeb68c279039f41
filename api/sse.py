"""Server-Sent Events: the only place that writes them."""

from typing import Any

import msgspec

KEEP_ALIVE = b": ping\n"
"""A comment. It ends with one newline: two would end an event, and clients that know ids raise on an empty one."""

END_MARK = "[DONE]"
END = b"data: " + END_MARK.encode()

_encode = msgspec.json.Encoder().encode

_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Characters that JSON may hold as they are and at which some clients end a line."""


def events(payloads: list[Any], *, id: str, done: bool = False) -> bytes:
    """One event for each payload, and the end mark if `done`. Only the last carries the id.

    So a client that was cut off between two of them asks again from before the first.
    """
    lines = [b"data: " + _json(payload) for payload in payloads]
    if done:
        lines.append(END)
    if lines:
        lines[-1] = b"id: " + id.encode() + b"\n" + lines[-1]
    return b"".join(line + b"\n\n" for line in lines)


def event_without_id(payload: Any) -> bytes:
    """An event that is in no log."""
    return b"data: " + _json(payload) + b"\n\n"


def headers(request_id: str) -> dict[str, str]:
    """The headers of a stream; no proxy on the way may hold it back or change it."""
    return {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-store, no-transform",
        "X-Accel-Buffering": "no",
        "X-Resume-Url": f"/v1/streams/{request_id}",
    }


def _json(payload: Any) -> bytes:
    line = _encode(payload)
    for character, escaped in _LINE_BREAKS:
        line = line.replace(character, escaped)
    return line
