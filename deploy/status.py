"""What `tokenmill status` shows: the live workers, and what waits for each model."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import redis

from shared import keys
from shared.census import Census, take_census
from shared.domain import Priority
from shared.errors import StoreAwayError
from shared.fleet import RENEWALS_PER_LEASE, WorkerInfo
from shared.store import without_password

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

SILENT_AFTER_BEATS = 2
"""A worker that has missed so many renewals of its lease hangs, is cut off, or is dead."""


class WorkerStatus(WorkerInfo, frozen=True, kw_only=True):
    """What a worker said of itself, and how long ago; None where an older one did not say how long its lease is."""

    renewed_ago_s: float | None
    is_silent: bool


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model: its live workers, their slots, and the requests that no worker has taken yet, by priority."""

    name: str
    workers: int
    slots: int
    running: int
    waiting: int
    waiting_interactive: int
    waiting_background: int
    tokens_per_s: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown.

    `redis` is the URL as it may be shown; `url` is empty if no launcher runs here. With an `error`, nothing could
    be read.
    """

    url: str
    redis: str
    error: str = ""
    workers: list[WorkerStatus] = []
    models: list[ModelStatus] = []


def read_status(client: "redis.Redis", redis_url: str, *, url: str = "") -> Status:
    """Read the fleet and the queues.

    Raises:
        StoreAwayError: Redis cannot be reached, or does not let us read.
    """
    shown = without_password(redis_url)
    try:
        census = take_census(client)
        with client.pipeline(transaction=False) as pipeline:
            for worker in census.workers:
                pipeline.pttl(keys.worker(worker.name))
            lease_left_ms = pipeline.execute()
    except redis.RedisError as error:
        raise StoreAwayError(f"cannot read from Redis at {shown}: {error}") from error
    workers = [_worker_status(*pair) for pair in zip(census.workers, lease_left_ms, strict=True)]
    return Status(url=url, redis=shown, workers=workers, models=[_model_status(name, census) for name in census.models])


def _worker_status(info: WorkerInfo, lease_left_ms: int) -> WorkerStatus:
    said = {name: getattr(info, name) for name in info.__struct_fields__}
    if not info.lease_s:
        return WorkerStatus(**said, renewed_ago_s=None, is_silent=False)
    # A lease that ran out between the two looks has -2.
    ago = max(0.0, info.lease_s - max(0, lease_left_ms) / 1000)
    is_silent = ago > SILENT_AFTER_BEATS * info.lease_s / RENEWALS_PER_LEASE
    return WorkerStatus(**said, renewed_ago_s=ago, is_silent=is_silent)


def _model_status(name: str, census: Census) -> ModelStatus:
    own = [worker for worker in census.workers if worker.model.name == name]
    waiting = {priority: census.waiting.get((name, priority), 0) for priority in Priority}
    return ModelStatus(
        name=name,
        workers=len(own),
        slots=sum(worker.slots for worker in own),
        running=sum(worker.running for worker in own),
        waiting=sum(waiting.values()),
        waiting_interactive=waiting[Priority.INTERACTIVE],
        waiting_background=waiting[Priority.BACKGROUND],
        tokens_per_s=sum(worker.tokens_per_s for worker in own),
    )


def as_json(status: Status) -> str:
    """The status as one JSON object, indented."""
    return msgspec.json.format(msgspec.json.encode(status), indent=2).decode()


class StatusView:
    """The status as tables, as wide as the console at the moment it is drawn."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        from rich.text import Text

        status = self._status
        if status.url:
            yield Text(f"serving  {status.url}", overflow="fold")
        yield Text(f"redis    {status.redis}", overflow="fold")
        yield ""
        if status.error:
            yield Text(status.error, style="red", overflow="fold")
            return
        yield _fitting(MODEL_COLUMNS, [_model_row(model) for model in status.models], console, options)
        yield ""
        yield _fitting(WORKER_COLUMNS, [_worker_row(worker) for worker in status.workers], console, options)


class _Column(NamedTuple):
    """One column. Where the console is too narrow, those with the lowest `worth` are left out first."""

    title: str
    worth: int
    is_number: bool = False


MODEL_COLUMNS = (
    _Column("model", 9),
    _Column("workers", 3, is_number=True),
    _Column("slots used", 4, is_number=True),
    _Column("waiting", 6, is_number=True),
    _Column("waiting, flex", 5, is_number=True),
    _Column("tokens/s", 2, is_number=True),
)
WORKER_COLUMNS = (
    _Column("worker", 9),
    _Column("model", 4),
    _Column("engine", 2),
    _Column("device", 3),
    _Column("state", 8),
    _Column("slots used", 7, is_number=True),
    _Column("tokens/s", 6, is_number=True),
    _Column("first token", 5, is_number=True),
    _Column("token gap", 4, is_number=True),
    _Column("renewed", 1, is_number=True),
    _Column("process", 0),
)


def _model_row(model: ModelStatus) -> tuple[str, ...]:
    return (
        model.name,
        str(model.workers),
        f"{model.running}/{model.slots}",
        str(model.waiting_interactive),
        str(model.waiting_background),
        _rate(model.tokens_per_s),
    )


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    ago = worker.renewed_ago_s
    return (
        worker.name,
        worker.model.name,
        worker.model.backend,
        worker.model.device,
        "silent" if worker.is_silent else worker.state.value,
        f"{worker.running}/{worker.slots}",
        _rate(worker.tokens_per_s),
        _duration(worker.first_token_p50_s),
        _duration(worker.token_gap_p50_s),
        "-" if ago is None else f"{ago:.1f} s ago",
        f"{worker.pid}@{worker.host}",
    )


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s else "-"


def _duration(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _fitting(
    columns: tuple[_Column, ...], rows: list[tuple[str, ...]], console: "Console", options: "ConsoleOptions"
) -> Any:
    """A table with as many of the columns as the console has room for; what is left over is cut."""
    from rich.measure import Measurement

    places = list(range(len(columns)))
    while True:
        table = _table([columns[place] for place in places], [[row[place] for place in places] for row in rows])
        width = Measurement.get(console, options.update_width(10_000), table).maximum
        if width <= options.max_width or len(places) == 1:
            return table
        places.remove(min(places, key=lambda place: columns[place].worth))


def _table(columns: list[_Column], rows: list[list[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Any = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(cell, style="red" if cell == "silent" else "") for cell in row))
    return table
