"""Model specs: what `NAME=SPEC` means, and the backend that loads it."""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelLoadError, SettingsError
from shared.logs import one_line
from shared.settings import WorkerSettings, source
from workers.backends.protocol import Backend
from workers.model_files import GGUF_SUFFIX, check_model_files

OPENMP_SPINS = "10000"
"""On two idle cores 1.04 times as fast as 1000 with eight clients; with both taken by others, 1.6 times as slow."""

ENGINE_PACKAGES: dict[str, tuple[str, ...]] = {
    "fake": (),
    "llama_cpp": ("llama_cpp",),
    "transformers": ("torch", "transformers"),
}

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
"""What of a repository is a model."""

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
    require_backend(settings, location)
    if location.startswith("fake:"):
        from workers.backends.fake import FakeBackend, parse_options

        return "fake", FakeBackend(parse_options(location.removeprefix("fake:")), slots=settings.slots)
    path = resolve(location, with_code=settings.trust_remote_code)
    if engine_of(location) == "llama_cpp":
        # Read when OpenMP's library is loaded, with llama.cpp. By default its threads spin for milliseconds at
        # each of the hundreds of barriers in a step: with something else on the cores, steps take seconds.
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
        with _engine_errors("llama_cpp"):
            from workers.backends.llama_cpp import load as load_llama_cpp
            from workers.backends.llama_cpp_trial import try_out
        try_out(path, threads=settings.threads)
        return "llama_cpp", load_llama_cpp(
            path,
            slots=settings.slots,
            context=settings.ctx,
            device=settings.device,
            threads=settings.threads,
        )
    with _engine_errors("transformers"):
        from workers.backends.transformers import load as load_transformers
    return "transformers", load_transformers(
        path,
        slots=settings.slots,
        context=settings.ctx,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        trust_remote_code=settings.trust_remote_code,
    )


def resolve(location: str, *, with_code: bool = False) -> Path:
    """The model's file or folder that a location names, fetched first if it is on the Hugging Face hub.

    Python code that a repository holds is fetched only `with_code`.

    Raises:
        ModelLoadError: there is no such thing, it is no model, or it cannot be read.
    """
    if location.startswith("package:"):
        package, _, rest = location.removeprefix("package:").partition("/")
        # The package is looked up, not imported: only its files are wanted.
        found = importlib.util.find_spec(package) if package.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise ModelLoadError(f"model {location}: the Python package {package!r} is not installed")
        path = Path(found.submodule_search_locations[0]) / rest
    elif location.startswith("hf:"):
        path = _from_hub(location, with_code=with_code)
    else:
        path = Path(os.path.expanduser(location))
    try:
        check_model_files(path)
    except ModelLoadError as error:
        raise ModelLoadError(f"model {location}: {error}") from error
    return path


def _from_hub(location: str, *, with_code: bool) -> Path:
    repository, _, filename = location.removeprefix("hf:").partition(":")
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError as error:
        raise ModelLoadError(f"model {location}: huggingface_hub is not installed") from error
    try:
        if filename:
            return Path(hf_hub_download(repository, filename))
        return Path(snapshot_download(repository, allow_patterns=[*HUB_FILES, *(["*.py"] if with_code else [])]))
    except Exception as error:
        # The hub client raises a dozen unrelated types; each means the model is not to be had.
        raise ModelLoadError(f"model {location}: cannot be fetched from the hub: {one_line(error)}") from error


def engine_of(location: str) -> str:
    """The engine that runs what a location names, be it there or not."""
    if location.startswith("fake:"):
        return "fake"
    return "llama_cpp" if location.endswith(GGUF_SUFFIX) else "transformers"


def require_installed(engine: str) -> None:
    """Raise ModelLoadError if a package that the engine needs is not installed; none is imported."""
    missing = [name for name in ENGINE_PACKAGES[engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"{engine} cannot run: not installed: {', '.join(missing)}")


@contextmanager
def _engine_errors(engine: str) -> Iterator[None]:
    """Turn an engine that is not there, or whose libraries cannot be loaded, into a ModelLoadError."""
    require_installed(engine)
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        raise ModelLoadError(f"{engine} is installed and cannot be loaded: {one_line(error)}") from error


def require_backend(settings: WorkerSettings, location: str) -> None:
    """Raise SettingsError if another engine was asked for than the one that runs this model."""
    needed = engine_of(location)
    if settings.backend not in ("auto", needed):
        raise SettingsError(f"{source('backend')}: {settings.backend} cannot run {location}, {needed} can")
