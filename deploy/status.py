"""What `tokenmill status` shows: the live workers, and what waits for each model."""

from typing import TYPE_CHECKING, Any

import msgspec

from shared import keys
from shared.fleet import Fleet, WorkerInfo
from shared.queue import RequestQueue
from shared.store import as_text, check, connect, store_errors, without_password

if TYPE_CHECKING:
    import redis
    from rich.console import Console


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model: its live workers, their slots, and the requests that no worker has taken yet."""

    name: str
    workers: int
    slots: int
    running: int
    waiting: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown. `redis` is the URL as it may be shown; `url` is empty if no launcher runs here."""

    url: str
    redis: str
    workers: list[WorkerInfo]
    models: list[ModelStatus]


def read_status(redis_url: str, *, url: str = "") -> Status:
    """Read the fleet and the queues.

    Raises:
        StoreError: Redis cannot be reached.
    """
    client = connect(redis_url)
    check(client, redis_url)
    with store_errors():
        workers = Fleet(client).workers()
        names = sorted({worker.model.name for worker in workers} | set(_lately_served(client)))
        queue = RequestQueue(client)
        models = [_model_status(name, workers, queue.depth(name)) for name in names]
    client.close()
    return Status(url=url, redis=without_password(redis_url), workers=workers, models=models)


def _lately_served(client: "redis.Redis") -> list[str]:
    """Models without a live worker are listed too: that is when somebody looks at the status."""
    prefix = keys.model("")
    return [as_text(key).removeprefix(prefix) for key in client.scan_iter(match=prefix + "*")]


def _model_status(name: str, workers: list[WorkerInfo], waiting: int) -> ModelStatus:
    own = [worker for worker in workers if worker.model.name == name]
    return ModelStatus(
        name=name,
        workers=len(own),
        slots=sum(worker.slots for worker in own),
        running=sum(worker.running for worker in own),
        waiting=waiting,
    )


def as_json(status: Status) -> str:
    """The status as one JSON object, indented."""
    return msgspec.json.format(msgspec.json.encode(status), indent=2).decode()


def show(status: Status, console: "Console") -> None:
    """Print the status as tables."""
    if status.url:
        console.print(f"serving  {status.url}", highlight=False, soft_wrap=True)
    console.print(f"redis    {status.redis}", highlight=False, soft_wrap=True)
    console.print()
    console.print(
        _table(
            ("worker", "model", "backend", "device", "state", "slots used", "process"),
            [
                (
                    worker.name,
                    worker.model.name,
                    worker.model.backend,
                    worker.model.device,
                    worker.state.value,
                    f"{worker.running}/{worker.slots}",
                    f"{worker.pid}@{worker.host}",
                )
                for worker in status.workers
            ],
        )
    )
    console.print()
    console.print(
        _table(
            ("model", "workers", "slots used", "waiting"),
            [
                (model.name, str(model.workers), f"{model.running}/{model.slots}", str(model.waiting))
                for model in status.models
            ],
        )
    )


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    return table
