"""The gate before every route: whose key a request carries, and whether it may come in."""

import math

from flask import Response, g, request

from api.access.keys import ApiKey, KeyRing
from api.access.rates import RateCounter, Rates
from shared.errors import ErrorCode, RequestError
from shared.queue import Owner

API_PREFIX = "/v1/"
METRICS = "/metrics"


class Gate:
    """Lets in who has a key, or everybody where there are no keys."""

    def __init__(self, ring: KeyRing, *, metrics_are_open: bool) -> None:
        self._ring = ring
        self._metrics_are_open = metrics_are_open

    def enter(self) -> None:
        """Note whose the request is, before its route sees it.

        Raises:
            RequestError: `missing_api_key`, `invalid_api_key`.
        """
        g.key = None
        g.rates = Rates()
        if self._ring.is_open or request.method == "OPTIONS" or not self._is_guarded(request.path):
            return
        given = presented_key()
        if given is None:
            raise RequestError(
                ErrorCode.MISSING_API_KEY,
                "You did not give an API key. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            )
        g.key = self._ring.holder(given)
        if g.key is None:
            raise RequestError(ErrorCode.INVALID_API_KEY, "The API key is not known here.")
        g.exchange.is_of(g.key.name)

    def _is_guarded(self, path: str) -> bool:
        return path.startswith(API_PREFIX) or (path == METRICS and not self._metrics_are_open)


def presented_key() -> str | None:
    """The key that a request carries, in either of two headers; `Authorization` counts first."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return request.headers.get("x-api-key", "").strip() or None


def key() -> ApiKey | None:
    """The holder of the request's key; None where no key is needed."""
    found: ApiKey | None = g.key
    return found


def owner() -> Owner | None:
    """Whom what this request asks for belongs to; nobody where no key is needed."""
    holder = key()
    return Owner(holder.name, holder.allowance.concurrent) if holder else None


def admit(counter: RateCounter) -> None:
    """Count the request, which asks for an answer.

    Raises:
        RequestError: `rate_limit_exceeded`, `store_unavailable`.
    """
    holder = key()
    if holder is None:
        return
    g.rates = counter.admit(holder)
    refused_by = g.rates.refused_by
    if refused_by is not None:
        retry_after_s = max(1, math.ceil(refused_by.reset_s))
        raise RequestError(
            ErrorCode.RATE_LIMIT_EXCEEDED,
            f"This key may use {refused_by.limit} {refused_by.what} a minute, and has. Retry in {retry_after_s} s.",
            retry_after_s=retry_after_s,
        )


def tell_rates(response: Response) -> Response:
    """What the key has left, in the headers that OpenAI's clients know."""
    rates: Rates = g.get("rates") or Rates()
    for rate in (rates.requests, rates.tokens):
        if rate is not None:
            response.headers[f"x-ratelimit-limit-{rate.what}"] = str(rate.limit)
            response.headers[f"x-ratelimit-remaining-{rate.what}"] = str(rate.remaining)
            response.headers[f"x-ratelimit-reset-{rate.what}"] = f"{math.ceil(rate.reset_s * 1000) / 1000:g}s"
    return response
