"""Whether the models can be loaded here: their files, the engines, the device and the memory."""

import importlib.metadata
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deploy.doctor.finding import Finding, examine, ok, problem, size, warning
from deploy.doctor.limits import available_bytes
from deploy.models import GPUS, check_device
from shared.errors import StartupError
from shared.settings import WorkerSettings, source
from workers.model_files import weight_files
from workers.models import ENGINE_PACKAGES, ModelSpec, engine_of, require_backend, require_installed, resolve

FULL = 0.8
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python"}
"""Where a package is not called what is installed."""

HEADER_LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""


def check_models(
    models: tuple[ModelSpec, ...], settings: WorkerSettings, *, workers_each: int, are_loaded: bool
) -> list[Finding]:
    """All findings about models and engines. `are_loaded`: they run here already, so memory is not asked for."""
    findings: list[Finding] = []
    paths: dict[ModelSpec, Path] = {}
    for model in models:
        findings += examine(f"model {model.name}", partial(_check_model, model, settings, paths))
    for engine in sorted({engine_of(model.location) for model in models} - {"fake"}):
        findings += examine(f"engine {engine}", partial(_check_engine, engine, settings))
    if paths and not are_loaded and settings.device not in GPUS:
        findings += examine("memory", lambda: check_memory(list(paths.values()), settings, workers_each=workers_each))
    return findings


def _check_model(model: ModelSpec, settings: WorkerSettings, paths: dict[ModelSpec, Path]) -> Iterator[Finding]:
    """The files. Where they are is put into `paths`."""
    check = f"model {model.name}"
    try:
        require_backend(settings, model.location)
        if model.location.startswith("fake:"):
            from workers.backends.fake import parse_options

            parse_options(model.location.removeprefix("fake:"))
            yield ok(check, "no model: the fake engine")
        elif model.location.startswith("hf:"):
            yield ok(check, f"{model.location} is fetched when its worker starts; not looked at")
        else:
            paths[model] = resolve(model.location)
            weights = sum(file.stat().st_size for file in weight_files(paths[model]))
            yield ok(check, f"{paths[model]}, {size(weights)}")
    except StartupError as error:
        yield problem(check, str(error), f"mend {source('model')}")


def _check_engine(engine: str, settings: WorkerSettings) -> Iterator[Finding]:
    """The packages and, where a GPU was asked for, whether there is one."""
    check = f"engine {engine}"
    try:
        require_installed(engine)
    except StartupError as error:
        yield problem(check, str(error), "install it; `make setup` installs all engines")
        return
    names = [DISTRIBUTIONS.get(name, name) for name in ENGINE_PACKAGES[engine]]
    yield ok(check, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))
    try:
        check_device(engine, settings.device)
    except StartupError as error:
        advice = f"install a build for it and its driver, or leave {source('device')} at auto"
        yield problem(f"device {settings.device}", str(error), advice)
    else:
        if settings.device in GPUS:
            yield ok(f"device {settings.device}", f"{engine} finds it")


def check_memory(paths: list[Path], settings: WorkerSettings, *, workers_each: int) -> Iterator[Finding]:
    """Whether the weights fit beside what runs here."""
    # Workers of one GGUF file share it: it is mapped, not read.
    needed = sum(
        loaded_bytes(path, settings.dtype) * (workers_each if path.is_dir() else 1) for path in dict.fromkeys(paths)
    )
    available, limiter = available_bytes()
    said = f"weights of {size(needed)}, {size(available)} available to them and their caches by {limiter}"
    advice = f"fewer or smaller models, fewer {source('workers')}, or more memory"
    if needed > available:
        yield problem("memory", said, advice)
    elif needed > FULL * available:
        yield warning("memory", said, advice)
    else:
        yield ok("memory", said)


def loaded_bytes(path: Path, dtype: str) -> int:
    """What the weights take on a CPU: a GGUF file as it is, a folder in float32 unless `dtype` says bfloat16."""
    if path.is_file():
        return path.stat().st_size
    return sum(map(_parameters, weight_files(path))) * (2 if dtype == "bfloat16" else 4)


def _parameters(path: Path) -> int:
    """How many numbers a safetensors file holds.

    It begins with the length of a JSON object that describes each tensor.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        tensors: dict[str, Any] = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
