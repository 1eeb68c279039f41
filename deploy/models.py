"""The models that a launcher is to serve, checked as far as that goes without loading them."""

from shared.errors import SettingsError
from shared.settings import source
from workers.models import ModelSpec, parse_model, resolve


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


def check_exists(model: ModelSpec) -> None:
    """Raise ModelLoadError if the files are missing; nothing is fetched."""
    if not model.location.startswith(("hf:", "fake:")):
        resolve(model.location)
