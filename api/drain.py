"""Whether this process has been told to stop, and how long its streams may still go on."""

import time
from collections.abc import Callable


class Drain:
    """The time that is left once a process has been told to stop."""

    def __init__(self, grace_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._grace_s = grace_s
        self._monotonic = monotonic
        self._ends_at: float | None = None

    def begin(self) -> None:
        """Note that the process was told to stop. Runs in a signal handler: only assigns."""
        if self._ends_at is None:
            self._ends_at = self._monotonic() + self._grace_s

    def has_begun(self) -> bool:
        """Whether new work should go elsewhere."""
        return self._ends_at is not None

    def is_over(self) -> bool:
        """Whether what still runs has to end now."""
        return self._ends_at is not None and self._monotonic() >= self._ends_at
