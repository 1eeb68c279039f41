"""The watchdog: notices an engine that hangs while every other thread is well."""

import threading
from collections.abc import Callable

from workers.engine import Engine

TICK_S = 1.0
LEAST_LIMIT_S = 10.0
LONGEST_STEPS = 20
FIRST_STEP_LIMIT_S = 120.0
"""For the first step of all, whose length nothing is known of."""


class Watchdog:
    """Calls `give_up` with the seconds that an engine at work has completed no step for, once they are too many.

    `limit_s` 0 goes by the longest step so far. Time is counted in ticks of this thread, not read from a
    clock: a process that was stopped as a whole has not been hanging.
    """

    def __init__(self, engine: Engine, give_up: Callable[[float], None], *, limit_s: float) -> None:
        self._engine = engine
        self._give_up = give_up
        self._limit_s = limit_s
        self._steps = 0
        self._stuck_s = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Look no more: the engine is stopped on purpose."""
        self._stopped.set()

    @property
    def stuck_s(self) -> float:
        """How long the engine has been at work without a step, once that is half of what is too long; else 0."""
        return self._stuck_s if self._stuck_s > self._limit() / 2 else 0.0

    def run(self) -> None:
        """The watchdog's thread."""
        while not self._stopped.wait(TICK_S):
            self.look()

    def look(self) -> None:
        """Note one more tick."""
        steps = self._engine.steps
        if self._engine.in_flight == 0 or steps != self._steps:
            self._steps, self._stuck_s = steps, 0.0
            return
        self._stuck_s += TICK_S
        if self._stuck_s > self._limit():
            self._give_up(self._stuck_s)

    def _limit(self) -> float:
        if self._limit_s:
            return self._limit_s
        if self._steps == 0:
            return FIRST_STEP_LIMIT_S
        return max(LEAST_LIMIT_S, LONGEST_STEPS * self._engine.longest_step_s)
