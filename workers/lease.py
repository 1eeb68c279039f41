"""The lease: tells the fleet that this worker lives, and what it is doing; reaps; notices endings.

On a thread of its own, so that neither a long step nor a slow intake can let the lease run out.
"""

import logging
import threading
import time
from collections.abc import Callable

import redis

from shared import keys
from shared.fleet import RENEWALS_PER_LEASE, Fleet, WorkerInfo
from shared.reaper import Reaper
from shared.store import CONNECTION_ERRORS, MisplacedError, replies
from workers.publisher import Publisher

logger = logging.getLogger("tokenmill.worker")


class LeaseKeeper:
    """Renews the lease several times in its length. `describe` gives what to say of the worker."""

    def __init__(
        self,
        client: "redis.Redis",
        fleet: Fleet,
        reaper: Reaper,
        publisher: Publisher,
        describe: Callable[[], WorkerInfo],
        *,
        lease_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._reaper = reaper
        self._publisher = publisher
        self._describe = describe
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._held_until = float("-inf")
        self._stopping = threading.Event()

    def renew(self) -> None:
        """Announce the worker now."""
        asked_at = self._monotonic()
        self._fleet.renew(self._describe(), lease_s=self._lease_s)
        self._held_until = asked_at + self._lease_s

    @property
    def is_held(self) -> bool:
        """Whether Redis took the last renewal, and that one still counts."""
        return self._monotonic() < self._held_until

    def stop(self) -> None:
        """Let `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """The lease's thread."""
        is_away = False
        while not self._stopping.wait(self._lease_s / RENEWALS_PER_LEASE):
            try:
                self._renew_or_mend()
                self._reaper.run_once()
                self._drop_ended()
                is_away = False
            except CONNECTION_ERRORS as error:
                self._held_until = float("-inf")
                if not is_away:
                    logger.warning("cannot renew the lease, Redis is away: %s", error)
                is_away = True

    def _renew_or_mend(self) -> None:
        """Renew; where something else lies in the place of the lease, let the reaper remove it first."""
        try:
            self.renew()
        except MisplacedError:
            self._reaper.run_once()
            raise

    def _drop_ended(self) -> None:
        """Let go of requests that were ended elsewhere and whose message to us was lost."""
        attempts = self._publisher.attempts()
        with self._client.pipeline(transaction=False) as pipeline:
            for attempt in attempts:
                pipeline.hget(keys.request(attempt.request.id), "attempt")
            numbers = replies(pipeline)
        for attempt, number in zip(attempts, numbers, strict=True):
            # Whoever ends a request from outside opens an attempt for it. The state says less: our
            # own last entry may just have been written.
            if number is not None and number != str(attempt.number).encode():
                self._publisher.drop(attempt)
