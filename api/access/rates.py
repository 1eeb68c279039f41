"""How much each key has asked for lately, counted in Redis for all front ends together, by the `limits` library.

A request counts when it comes. Tokens count when an answer has ended, by what it really took: so a key that still has
tokens left may go past its limit by what it has running, and then waits.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import redis
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from api.access.keys import ApiKey
from shared import keys
from shared.store import store_errors

MINUTE_S = 60.0


class Rate(NamedTuple):
    """What is left of one limit: how much of how much a minute, and in how many seconds some or all of it is back."""

    what: str
    limit: int
    remaining: int
    reset_s: float


class Rates(NamedTuple):
    """What a key has left, as far as it is limited; and of what it had too little left for this request, if of any."""

    requests: Rate | None = None
    tokens: Rate | None = None
    refused_by: Rate | None = None


class RateCounter:
    """Counts what keys ask for."""

    def __init__(self, client: "redis.Redis", *, now: Callable[[], float] = time.time) -> None:
        storage = RedisStorage(
            # The pool knows where Redis is; the library wants a URL all the same.
            "redis://",
            connection_pool=client.connection_pool,
            key_prefix=keys.RATES_PREFIX,
        )
        self._requests: RateLimiter = MovingWindowRateLimiter(storage)
        # Adds what an answer took even where that is more than was left.
        self._tokens: RateLimiter = FixedWindowRateLimiter(storage)
        self._now = now

    def admit(self, key: ApiKey) -> Rates:
        """Count a request of this key, if it has anything left.

        Raises:
            RequestError: `store_unavailable`.
        """
        with store_errors():
            tokens = self._left(self._tokens, key, "tokens", key.allowance.tokens)
            if tokens is not None and tokens.remaining == 0:
                return Rates(self._left(self._requests, key, "requests", key.allowance.requests), tokens, tokens)
            was_counted = not key.allowance.requests or self._requests.hit(
                RateLimitItemPerMinute(key.allowance.requests), key.name, "requests"
            )
            requests = self._left(self._requests, key, "requests", key.allowance.requests)
        return Rates(requests, tokens, None if was_counted else requests)

    def took(self, key: ApiKey, tokens: int) -> None:
        """Count the tokens of an answer that has ended, or that nobody reads any more.

        Raises:
            RequestError: `store_unavailable`.
        """
        if key.allowance.tokens and tokens:
            with store_errors():
                self._tokens.hit(RateLimitItemPerMinute(key.allowance.tokens), key.name, "tokens", cost=tokens)

    def _left(self, limiter: RateLimiter, key: ApiKey, what: str, limit: int) -> Rate | None:
        if not limit:
            return None
        stats = limiter.get_window_stats(RateLimitItemPerMinute(limit), key.name, what)
        reset_s = min(max(stats.reset_time - self._now(), 0.0), MINUTE_S)
        return Rate(what, limit, max(0, stats.remaining), reset_s)
