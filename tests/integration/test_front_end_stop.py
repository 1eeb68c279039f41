"""A front end that is told to stop while it still starts."""

import contextlib
import signal
from collections.abc import Iterator

import psutil
import pytest
from servers import FrontEnd, Valkey, wait_until

STOP_LIMIT_S = 10.0
"""Far below the drain time, which a signal that was lost would cost."""


@pytest.fixture
def starting(valkey: Valkey) -> Iterator[FrontEnd]:
    front_end = FrontEnd(valkey.url, drain_timeout=60.0).start()
    yield front_end
    with contextlib.suppress(psutil.NoSuchProcess):
        front_end.kill()


def test_a_worker_that_still_starts_ends_when_it_is_told(starting: FrontEnd) -> None:
    master = psutil.Process(starting.pid)
    wait_until(lambda: master.cmdline()[0].startswith("gunicorn: master"), what="the master")
    wait_until(master.children, what="its worker")

    starting.terminate()

    status, _ = starting.wait(STOP_LIMIT_S)
    assert status in (0, -signal.SIGTERM)
