"""The headers that requests and answers may have, and the parameters of URLs."""

from typing import Any

from api.openapi.examples import REQUEST_ID as EXAMPLE_ID
from api.request_ids import REQUEST_ID_PATTERN
from api.routes.generation import IDEMPOTENCY_KEY_PATTERN
from shared.log import ENTRY_ID_PATTERN
from shared.queue import IDEMPOTENCY_HEADER

Header = dict[str, Any]

REQUEST_ID: Header = {
    "description": "The id that the request had in `x-request-id`, or else one of its own: for logs and questions.",
    "required": True,
    "schema": {"type": "string"},
    "example": EXAMPLE_ID,
}
RETRY_AFTER: Header = {
    "description": "Seconds after which another try makes sense.",
    "required": True,
    "schema": {"type": "integer", "minimum": 0},
    "example": 5,
}
RESUME_URL: Header = {
    "description": "Only of a stream: where it can be had again, from the start or from where it broke off.",
    "schema": {"type": "string", "pattern": f"^/v1/streams/{REQUEST_ID_PATTERN}$"},
    "example": f"/v1/streams/{EXAMPLE_ID}",
}
ALLOW: Header = {
    "description": "The methods that the URL has.",
    "required": True,
    "schema": {"type": "string"},
    "example": "GET, HEAD, OPTIONS",
}
WWW_AUTHENTICATE: Header = {
    "description": "How a key can be sent.",
    "required": True,
    "schema": {"type": "string"},
    "example": "Bearer",
}
_RATES = {
    "limit": ("How many {} a minute the key may use.", "integer"),
    "remaining": ("How many it has left.", "integer"),
    "reset": ("When all of them are back, such as `7.5s`.", "string"),
}
RATE_LIMITS: dict[str, Header] = {
    f"x-ratelimit-{what}-{unit}": {"description": text.format(unit), "schema": {"type": kind}}
    for what, (text, kind) in _RATES.items()
    for unit in ("requests", "tokens")
}
"""Only where the key has such a limit."""

ANSWERED = {"x-request-id": REQUEST_ID}


def _given(name: str, description: str, pattern: str | None = None, place: str = "header") -> dict[str, Any]:
    schema = {"type": "string"} | ({"pattern": f"^{pattern}$"} if pattern else {})
    return {"name": name, "in": place, "description": description, "schema": schema}


PARAMETERS = {
    "RequestId": _given("x-request-id", "Comes back in the answer; it names nothing. For instance `shop-cart-17`."),
    "Traceparent": _given(
        "traceparent",
        "The span that the request belongs to, as W3C Trace Context has it, for instance "
        "`00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`. Anything else counts as none.",
    ),
    "IdempotencyKey": _given(
        IDEMPOTENCY_HEADER,
        "With a key, for instance a new UUID, a request runs once: sent again with the same key and body it is given "
        "the answer of the first.",
        IDEMPOTENCY_KEY_PATTERN,
    ),
    "LastEventId": _given(
        "Last-Event-ID",
        "The last event that the client has, for instance `1-2`; it gets what follows. Goes before `after`.",
        f"(?:{ENTRY_ID_PATTERN})?",
    ),
    "After": _given("after", "The same in the URL.", f"(?:{ENTRY_ID_PATTERN})?", "query"),
}
"""Each is optional. They have their examples in words: a page that offers to send requests would fill them in."""
