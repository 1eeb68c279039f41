"""`tokenmill status --watch`: the status again and again, until somebody has seen enough."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from deploy.status import Status, StatusView
from shared.errors import StoreAwayError

if TYPE_CHECKING:
    from rich.console import Console


def statuses(read: Callable[[], Status], interval_s: float) -> Iterator[Status]:
    """A status each `interval_s`. What cannot be read after the first time is a status too, with its error."""
    status = read()
    while True:
        yield status
        time.sleep(interval_s)
        try:
            status = read()
        except StoreAwayError as error:
            status = Status(url=status.url, redis=status.redis, error=str(error))


def watch(read: Callable[[], Status], console: "Console", *, interval_s: float, as_json: bool) -> None:
    """Show the status until Ctrl-C or SIGTERM: in place on a terminal, one after the other anywhere else.

    Raises:
        StoreAwayError: Redis could not be reached the first time.
    """
    with _until_told():
        if as_json:
            for status in statuses(read, interval_s):
                click.echo(msgspec.json.encode(status))
        elif console.is_terminal:
            _live(statuses(read, interval_s), console)
        else:
            for status in statuses(read, interval_s):
                console.print(time.strftime("%Y-%m-%d %H:%M:%S"))
                console.print(StatusView(status))
                console.print()


def _live(found: Iterator[Status], console: "Console") -> None:
    from rich.live import Live

    # On a screen of its own, as a terminal that is made narrower would tear what is drawn in place.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in found:
            live.update(StatusView(status), refresh=True)


@contextmanager
def _until_told() -> Iterator[None]:
    """End what is inside at Ctrl-C or SIGTERM, as something that went well."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)
