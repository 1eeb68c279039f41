"""Cross-origin requests: which pages may use the API from a browser (the Fetch standard, "CORS protocol").

What is allowed is what any other client may do, with an API key that the page has: cookies are never asked for.
"""

from flask import Response, current_app, request

from shared.settings import ANY_ORIGIN, origins

PATHS = "/v1/"
"""Metrics and health are for those who run the server, not for pages."""

REQUEST_HEADERS = frozenset(
    {"authorization", "content-type", "idempotency-key", "last-event-id", "traceparent", "tracestate"}
    | {"user-agent", "x-api-key", "x-request-id"}
)
"""What pages may send, in lower case, beside what they always may."""

REQUEST_HEADER_PREFIXES = ("openai-", "x-stainless-")
"""Families of headers that OpenAI's own client sends."""

RESPONSE_HEADERS = frozenset({"retry-after", "x-request-id", "x-resume-url"})
RESPONSE_HEADER_PREFIX = "x-ratelimit-"
"""What pages may read of an answer, beside what they always may."""

PREFLIGHT_LASTS_S = 600


class Cors:
    """Answers the questions that browsers ask before a request, and marks the answers that pages may read."""

    def __init__(self, allowed: str) -> None:
        """`allowed` is a value of the setting `cors_origins`."""
        self._origins = origins(allowed)
        self._is_any = ANY_ORIGIN in self._origins

    def preflight(self) -> Response | None:
        """The answer to a browser that asks whether a page may send a request; None for all other requests.

        It carries no key, so it has to come before keys are looked at.
        """
        wanted = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or wanted is None or request.routing_exception or not self._allows_origin():
            return None
        answer = current_app.make_default_options_response()
        answer.headers["Access-Control-Allow-Methods"] = answer.headers["Allow"]
        answer.headers["Access-Control-Allow-Headers"] = ", ".join(filter(_is_taken, _requested_headers()))
        answer.headers["Access-Control-Max-Age"] = str(PREFLIGHT_LASTS_S)
        return answer

    def mark(self, response: Response) -> Response:
        """Say on an answer that the page which asked may read it."""
        if not self._origins or not request.path.startswith(PATHS):
            return response
        if not self._is_any:
            # Also on what others get: a cache must not give it to a page that may read it.
            response.vary.add("Origin")
        if self._allows_origin():
            origin = ANY_ORIGIN if self._is_any else request.headers["Origin"]
            response.headers["Access-Control-Allow-Origin"] = origin
            readable = [name for name in response.headers.keys() if _is_readable(name)]  # noqa: SIM118 - pairs otherwise
            if readable:
                response.headers["Access-Control-Expose-Headers"] = ", ".join(readable)
        return response

    def _allows_origin(self) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and request.path.startswith(PATHS) and (self._is_any or origin in self._origins)


def _requested_headers() -> list[str]:
    names = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
    return [name.strip() for name in names]


def _is_taken(name: str) -> bool:
    return name in REQUEST_HEADERS or name.startswith(REQUEST_HEADER_PREFIXES)


def _is_readable(name: str) -> bool:
    return name.lower() in RESPONSE_HEADERS or name.lower().startswith(RESPONSE_HEADER_PREFIX)
