"""The pulse: how a worker has done over the last minute, for the record that it renews with its lease."""

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

WINDOW_S = 60.0
MOST_SAMPLES = 2048
"""Of each time only so many of the newest are kept: a median needs no more."""


class Beat(NamedTuple):
    """What `WorkerInfo` says of a minute; each 0 when there was nothing to measure."""

    tokens_per_s: float
    first_token_p50_s: float
    token_gap_p50_s: float


class Pulse:
    """Counts and times of the last minute. The engine adds, the lease reads."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._lock = threading.Lock()
        # Each entry begins with its time; the tokens of a step have the same.
        self._tokens: deque[tuple[float, int]] = deque()
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)

    def tokens(self, at: float, count: int) -> None:
        """So many tokens were drawn at this time of the clock."""
        with self._lock:
            if self._tokens and self._tokens[-1][0] == at:
                count += self._tokens.pop()[1]
            self._forget(at)
            self._tokens.append((at, count))

    def first_token(self, at: float, seconds: float) -> None:
        """A request had its first token, so long after its submission."""
        with self._lock:
            self._first_tokens.append((at, seconds))

    def gap(self, at: float, seconds: float) -> None:
        """An answer had its next token, so long after the one before."""
        with self._lock:
            self._gaps.append((at, seconds))

    def read(self) -> Beat:
        """The last minute, or less if the worker is younger."""
        now = self._monotonic()
        with self._lock:
            self._forget(now)
            tokens = sum(count for _, count in self._tokens)
            first_tokens, gaps = list(self._first_tokens), list(self._gaps)
        age_s = min(WINDOW_S, now - self._started_at)
        return Beat(tokens / age_s if age_s > 0 else 0.0, _recent_median(first_tokens, now), _recent_median(gaps, now))

    def _forget(self, now: float) -> None:
        while self._tokens and self._tokens[0][0] <= now - WINDOW_S:
            self._tokens.popleft()


def _recent_median(samples: list[tuple[float, float]], now: float) -> float:
    recent = [seconds for at, seconds in samples if at > now - WINDOW_S]
    return median(recent) if recent else 0.0
