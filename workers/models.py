"""Model specs: what `NAME=SPEC` means, and the backend that loads it."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelLoadError, SettingsError
from shared.settings import WorkerSettings, source
from workers.backends.protocol import Backend

OPENMP_SPINS = "1000"
"""Nearly as quick as the default on idle cores, and never a hundred times slower on busy ones."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A served name and where its model comes from."""

    name: str
    location: str


def parse_model(text: str) -> ModelSpec:
    """The spec in a `--model` value; without a name, the last part of the location is the name.

    Raises:
        SettingsError: it is empty or the name has characters that a name cannot have.
    """
    name, separator, location = text.partition("=")
    if not separator or ":" in name:
        # Options of fake: may hold a '=' of their own.
        location, name = text, default_name(text)
    if not location or not MODEL_NAME.fullmatch(name):
        raise SettingsError(f"{source('model')}: {text!r} is not NAME=SPEC with a name of letters, digits and . _ / -")
    return ModelSpec(name, location)


def default_name(location: str) -> str:
    """What a model is called when its spec gives no name."""
    if location.startswith("fake:"):
        return "fake"
    return re.sub(r"\.gguf$", "", location.rstrip("/").rpartition("/")[2])


def load_backend(location: str, settings: WorkerSettings) -> tuple[str, Backend]:
    """Load the model; returns the engine's name with it.

    Raises:
        ModelLoadError: it cannot be found, read, or run with these settings.
    """
    if location.startswith("fake:"):
        from workers.backends.fake import FakeBackend, parse_options

        _require_backend(settings, "fake", location)
        return "fake", FakeBackend(parse_options(location.removeprefix("fake:")), slots=settings.slots)
    path = resolve(location)
    if path.suffix == ".gguf":
        _require_backend(settings, "llama_cpp", location)
        # Read when OpenMP's library is loaded, with llama.cpp. By default its threads spin for milliseconds at
        # each of the hundreds of barriers in a step: with something else on the cores, steps take seconds.
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
        from workers.backends.llama_cpp import load as load_llama_cpp

        return "llama_cpp", load_llama_cpp(
            path,
            slots=settings.slots,
            context=settings.ctx,
            device=settings.device,
            threads=settings.threads,
        )
    _require_backend(settings, "transformers", location)
    try:
        from workers.backends.transformers import load as load_transformers
    except ImportError as error:
        raise ModelLoadError(f"model {location}: PyTorch and transformers are not installed ({error})") from error
    return "transformers", load_transformers(
        path,
        slots=settings.slots,
        context=settings.ctx,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
    )


def resolve(location: str) -> Path:
    """The file or folder that a location names, fetched first if it is on the Hugging Face hub.

    Raises:
        ModelLoadError: there is no such thing.
    """
    if location.startswith("package:"):
        package, _, rest = location.removeprefix("package:").partition("/")
        # The package is looked up, not imported: only its files are wanted.
        found = importlib.util.find_spec(package) if package.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise ModelLoadError(f"model {location}: the Python package {package!r} is not installed")
        path = Path(found.submodule_search_locations[0]) / rest
    elif location.startswith("hf:"):
        path = _from_hub(location)
    else:
        path = Path(location).expanduser()
    if not path.exists():
        raise ModelLoadError(f"model {location}: {path} does not exist")
    if path.is_file() and path.suffix != ".gguf":
        raise ModelLoadError(f"model {location}: {path} is neither a .gguf file nor a model folder")
    return path


def _from_hub(location: str) -> Path:
    repository, _, filename = location.removeprefix("hf:").partition(":")
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ModelLoadError(f"model {location}: huggingface_hub is not installed") from error
    try:
        if filename:
            return Path(hf_hub_download(repository, filename))
        return Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:
        # The hub client raises a dozen unrelated types; each means the model is not to be had.
        raise ModelLoadError(f"model {location}: cannot be fetched from the hub: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _require_backend(settings: WorkerSettings, needed: str, location: str) -> None:
    if settings.backend not in ("auto", needed):
        raise SettingsError(f"{source('backend')}: {settings.backend} cannot run {location}, {needed} can")
