"""Headers that keep a browser from making more of an answer than it is."""

from flask import Response

CONTENT_SECURITY_POLICY = "Content-Security-Policy"

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    CONTENT_SECURITY_POLICY: "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Every answer has them. A page that needs more says so itself, under the same names."""


def secure(response: Response) -> Response:
    """Give an answer the headers that it has not set itself."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response
