"""A wall clock that is wrong, for processes that a test starts."""

import os
from collections.abc import Mapping
from pathlib import Path

SHIFT_VARIABLE = "CLOCK_SHIFT_S"

SITE = f"""
import datetime, os, time

shift = float(os.environ.get("{SHIFT_VARIABLE}") or 0)
real_time, real_datetime = time.time, datetime.datetime


class Shifted(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shift)

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)


if shift:
    time.time = lambda: real_time() + shift
    time.time_ns = lambda: int(time.time() * 1e9)
    datetime.datetime = Shifted
"""


def wrong_by(seconds: float, folder: Path) -> Mapping[str, str]:
    """The environment of a Python process whose clock is wrong by so much."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, SHIFT_VARIABLE: str(seconds)}
