"""The wire of GET /health and /ready."""

from typing import Literal

import msgspec


class Health(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(msgspec.Struct, frozen=True):
    """Whether a request would be answered, the models that are served, and what is missing."""

    ready: bool
    models: list[str]
    missing: list[str]
