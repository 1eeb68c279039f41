"""Reaping in the background of a front-end process."""

import logging
import threading

import redis

from shared.reaper import INTERVAL_S, Reaper

logger = logging.getLogger("tokenmill.reaper")


def start_reaping(reaper: Reaper) -> threading.Event:
    """Reap at intervals in a thread of its own, until the event that is returned is set."""
    stopped = threading.Event()
    threading.Thread(target=_reap, args=(reaper, stopped), name="reaper", daemon=True).start()
    return stopped


def _reap(reaper: Reaper, stopped: threading.Event) -> None:
    while not stopped.wait(INTERVAL_S):
        try:
            reaper.run_once()
        except redis.RedisError as error:
            logger.debug("cannot reap while Redis is away: %s", error)
        except Exception:
            # One bad record must not leave every dead worker's requests hanging.
            logger.exception("reaping failed")
