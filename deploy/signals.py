"""Signals as flags, and a wait that any of them, or a child's death, cuts short."""

import contextlib
import select
import signal
import socket
from types import FrameType
from typing import Any, Self


class Signals:
    """Catches SIGINT, SIGTERM and SIGHUP while it is entered. Belongs to the main thread.

    `stop` is set by the first of them. `hurry` is set by a Ctrl-C that comes while the launcher is
    stopping already; a SIGTERM does not hurry, as a supervisor may well send it twice.
    """

    def __init__(self) -> None:
        self.stop = False
        self.hurry = False
        self.stopping = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._catch)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` wants it ignored
            self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._catch)
        # Without a handler in Python, a child's death would not reach the wake-up socket.
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def _catch(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and (self.stop or self.stopping):
            self.hurry = True
        self.stop = True

    def wait(self, seconds: float) -> None:
        """Return when a signal came since the last call, or after `seconds`."""
        select.select([self._reader], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
