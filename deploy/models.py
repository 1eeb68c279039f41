"""The models that a launcher is to serve, checked as far as that goes without loading them."""

import subprocess
import sys

from shared.errors import ModelLoadError, SettingsError
from shared.settings import WorkerSettings, source
from workers.models import ModelSpec, engine_of, parse_model, require_backend, require_installed, resolve

GPUS = ("cuda", "mps")
DEVICE_LIMIT_S = 120.0


def parse_models(texts: tuple[str, ...]) -> tuple[ModelSpec, ...]:
    """Read several `NAME=SPEC` values, each under a name of its own.

    Raises:
        SettingsError: a value has the wrong form, or a name is given twice.
    """
    models = tuple(parse_model(text) for text in texts)
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{source('model')}: two models are named {name!r}; use NAME=SPEC")
    return models


def check_models(models: tuple[ModelSpec, ...], settings: WorkerSettings) -> None:
    """See whether the models' files and the device are there; nothing is fetched.

    Raises:
        SettingsError: an engine was chosen that cannot run a model.
        ModelLoadError: something is missing; in one line.
    """
    for model in models:
        require_backend(settings, model.location)
        if not model.location.startswith(("hf:", "fake:")):
            resolve(model.location)
    for engine in sorted({engine_of(model.location) for model in models}):
        require_installed(engine)
        check_device(engine, settings.device)


def check_device(engine: str, device: str) -> None:
    """See whether an engine finds the device that it is told to use, in a process of its own.

    Raises:
        ModelLoadError: it does not.
    """
    if device not in GPUS or engine == "fake":
        return
    command = [sys.executable, "-P", "-m", "workers.devices", engine, device]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEVICE_LIMIT_S, check=False)
    if done.returncode:
        raise ModelLoadError(f"{source('device')}: {engine} finds no {device} on this machine")
