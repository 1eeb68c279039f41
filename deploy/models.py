"""The `--model` value: `NAME=SPEC` or `SPEC`, understood and checked before anything is started."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shared.errors import ModelLoadError, SettingsError
from shared.settings import source

FORMS = "a .gguf file, a model folder, hf:org/repo[:file.gguf], package:NAME/FILE or fake:"

_SCHEMES = ("hf:", "package:", "fake:")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*", re.ASCII)
_HUB = re.compile(r"hf:[\w.-]+/(?P<repo>[\w.-]+)(:[^:]+\.gguf)?", re.ASCII)
_PACKAGE = re.compile(r"package:(?P<package>[A-Za-z_][\w.]*)/(?P<file>.+)", re.ASCII)


@dataclass(frozen=True)
class ModelChoice:
    """A model to serve: the name that requests use, and where its files are."""

    name: str
    spec: str

    def __str__(self) -> str:
        return f"{self.name}={self.spec}"


def parse_model(text: str) -> ModelChoice:
    """Read `NAME=SPEC`; without a name, the model is named after its file, folder or repository.

    Raises:
        SettingsError: neither the name nor the form of the spec can be used.
    """
    name, spec = _split(text)
    _check_form(spec)
    if not spec.startswith(_SCHEMES):
        spec = str(Path(spec).expanduser())
    name = name or _default_name(spec)
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{source('model')}: {name!r} cannot be a model's name; use NAME=SPEC")
    return ModelChoice(name, spec)


def _split(text: str) -> tuple[str, str]:
    """The name, or an empty one, and the spec. A path may contain `=` itself."""
    name, separator, spec = text.partition("=")
    if not separator or text.startswith((*_SCHEMES, "/", ".", "~")):
        return "", text
    return name, spec


def _default_name(spec: str) -> str:
    if spec.startswith("fake:"):
        return "fake"
    if match := _HUB.fullmatch(spec):
        return match["repo"]
    if match := _PACKAGE.fullmatch(spec):
        return Path(match["file"]).stem
    path = Path(spec)
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _check_form(spec: str) -> None:
    known = spec.startswith("fake:") or _HUB.fullmatch(spec) or _PACKAGE.fullmatch(spec) or _is_path(spec)
    if not known:
        raise SettingsError(f"{source('model')}: {spec!r} is not {FORMS}")


def parse_models(texts: tuple[str, ...]) -> tuple[ModelChoice, ...]:
    """Read several models, each under a name of its own.

    Raises:
        SettingsError: as `parse_model`, or a name is given twice.
    """
    choices = tuple(parse_model(text) for text in texts)
    names = [choice.name for choice in choices]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"{source('model')}: the name {name!r} is given to two models; use NAME=SPEC")
    return choices


def check_exists(choice: ModelChoice) -> None:
    """Raise ModelLoadError if the model's files are certain to be missing.

    Only what can be told without loading: a wrong path is found before anything is started.
    """
    if choice.spec.startswith(("hf:", "fake:")):
        return
    if match := _PACKAGE.fullmatch(choice.spec):
        package = find_spec(match["package"]) if "." not in match["package"] else None
        if package is None or package.origin is None:
            raise ModelLoadError(f"model {choice.name!r}: the Python package {match['package']!r} is not installed")
        path = Path(package.origin).parent / match["file"]
        if not path.exists():
            raise ModelLoadError(f"model {choice.name!r}: the package {match['package']!r} has no {match['file']!r}")
    elif not Path(choice.spec).exists():
        raise ModelLoadError(f"model {choice.name!r}: there is no file or folder {choice.spec!r}")


def _is_path(spec: str) -> bool:
    if spec.startswith(_SCHEMES):
        return False
    return spec.startswith(("/", "./", "../", "~")) or spec.endswith(".gguf") or Path(spec).is_dir()
