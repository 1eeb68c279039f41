"""A child process that is kept running: when it is ready, when it died, when it is started again."""

import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from shared.errors import StartupError

MOST_DEATHS = 5
DEATHS_WITHIN_S = 60.0
FIRST_BACKOFF_S = 0.5


class Startable(Protocol):
    """What a service needs of its child."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def is_dead(self) -> bool:
        """Whether it has ended."""

    def end(self) -> str:
        """How it ended, in words."""

    def terminate(self) -> None:
        """Ask it to stop."""

    def kill(self) -> None:
        """End it, and what it has started, at once."""


class Change(Enum):
    """What a look at a service found."""

    READY = auto()
    BACK = auto()
    DIED = auto()


class Service:
    """Starts a child, sees when it is ready, and starts it again when it dies.

    `is_ready` gets the child's process id. It is asked at each look until it says yes.
    """

    def __init__(
        self,
        title: str,
        start: Callable[[], Startable],
        is_ready: Callable[[int], bool],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.child: Startable | None = None
        self.ready = False
        self.backoff_s = 0.0
        self.last_end = ""
        self._start = start
        self._is_ready = is_ready
        self._monotonic = monotonic
        self._was_ready = False
        self._start_at = float("-inf")
        self._deaths: list[float] = []

    def look(self) -> Change | None:
        """Do what is due.

        Raises:
            StartupError: the child died before it was ever ready, or it dies too often.
        """
        if self.child is None:
            if self._monotonic() >= self._start_at:
                self.child = self._start()
            return None
        if self.child.is_dead():
            return self._died(self.child)
        if self.ready or not self._is_ready(self.child.pid):
            return None
        change = Change.BACK if self._was_ready else Change.READY
        self.ready = self._was_ready = True
        return change

    def wait_s(self) -> float:
        """Seconds until the next start; 0 if there is none to wait for."""
        return max(0.0, self._start_at - self._monotonic()) if self.child is None else 0.0

    def _died(self, child: Startable) -> Change:
        if not self._was_ready:
            raise StartupError(f"{self.title} {child.end()} before it was ready")
        now = self._monotonic()
        self._deaths = [moment for moment in self._deaths if now - moment < DEATHS_WITHIN_S] + [now]
        if len(self._deaths) >= MOST_DEATHS:
            raise StartupError(
                f"{self.title} {child.end()}, the {MOST_DEATHS}th time within {DEATHS_WITHIN_S:g} s; giving up"
            )
        self.backoff_s = FIRST_BACKOFF_S * 2 ** (len(self._deaths) - 1)
        self._start_at = now + self.backoff_s
        self.ready = False
        self.child = None
        self.last_end = child.end()
        return Change.DIED
