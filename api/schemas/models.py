"""The wire of GET /v1/models."""

from typing import Literal

import msgspec

from shared.fleet import WorkerInfo, WorkerState


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's fields, then what this server adds. `slots` counts those of all its workers."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenmill"
    context_length: int
    backend: str
    device: str
    state: WorkerState
    workers: int
    slots: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def models(workers: list[WorkerInfo]) -> list[Model]:
    """The models that live workers serve, by name; `ready` if one of them takes new requests."""
    served: dict[str, list[WorkerInfo]] = {}
    for worker in workers:
        served.setdefault(worker.model.name, []).append(worker)
    return [_model(served[name]) for name in sorted(served)]


def _model(workers: list[WorkerInfo]) -> Model:
    ready = any(worker.state is WorkerState.READY for worker in workers)
    info = workers[0].model
    return Model(
        id=info.name,
        created=min(worker.model.created for worker in workers),
        context_length=info.context,
        backend=info.backend,
        device=info.device,
        state=WorkerState.READY if ready else WorkerState.DRAINING,
        workers=len(workers),
        slots=sum(worker.slots for worker in workers),
    )
